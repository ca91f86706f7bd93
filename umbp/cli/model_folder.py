# SPDX-License-Identifier: Apache-2.0
"""Folders of models that the demo makes: in the user's cache, written once and in one piece.

A folder is written under another name, and a manifest of its files goes in last.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from umbp.errors import ConfigError

MANIFEST: Final = "umbp-demo-model.json"
"""Lists the files of a model that the demo made; a folder that has it is ours to replace."""


def cache_directory() -> Path:
    """Returns umbp's folder in the user's cache, as the XDG base directory specification says."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "umbp"


def needs_writing(directory: Path, model_format: str) -> bool:
    """Says whether the folder lacks a model that vLLM can load.

    A folder with a model that did not come from here is taken as it is.

    Args:
        directory: The model's folder; need not exist.
        model_format: What is to be in it: a model, and a version of how it was made.

    Raises:
        ConfigError: The folder holds something that is no model.
    """
    if (directory / MANIFEST).exists():
        return not _is_complete(directory, model_format)
    if (directory / "config.json").exists():
        return False
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"--model-dir is {directory}, which holds no model;"
            " name a folder with a model, or an empty or new one"
        )
    return True


def write_folder(directory: Path, model_format: str, write: Callable[[Path], None]) -> None:
    """Makes the folder of a model; an incomplete or different one of ours there is replaced.

    Args:
        directory: A folder for which ``needs_writing`` is true.
        model_format: As for ``needs_writing``.
        write: Writes the model into an empty folder.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            f"the model's folder {directory} cannot be written ({error.strerror});"
            " name another one with --model-dir"
        ) from error
    try:
        write(scratch)
        _write_manifest(scratch, model_format)
        _move(scratch, directory, model_format)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(directory: Path, model_format: str) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    manifest = {"format": model_format, "file_bytes": sizes}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_complete(directory: Path, model_format: str) -> bool:
    """Says whether the model is the wanted one, with all files of its manifest in full."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != model_format:
            return False
        sizes = manifest["file_bytes"]
        return bool(sizes) and all(
            (directory / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _move(scratch: Path, directory: Path, model_format: str) -> None:
    """Gives the finished folder its name."""
    with contextlib.suppress(OSError):
        scratch.rename(directory)  # succeeds on no folder and on an empty one
        return
    if _is_complete(directory, model_format):
        return  # another process was quicker
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as bin_:
        directory.rename(Path(bin_) / "incomplete")
        scratch.rename(directory)

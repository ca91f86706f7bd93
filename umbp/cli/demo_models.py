# SPDX-License-Identifier: Apache-2.0
"""The models that ``umbp demo`` can show, by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from umbp.cli import engine, model_folder
from umbp.cli.chat_model import ChatModel
from umbp.cli.console import Progress
from umbp.cli.hybrid_model import HybridModel
from umbp.cli.outcome import Outcome


class DemoModel(Protocol):
    """A model of the demo, what it is asked, and how its answers are shown."""

    @property
    def folder(self) -> str:
        """Name of its folder in the user's cache."""

    @property
    def format(self) -> str:
        """Names the model and how it is written; another one has the folder written again."""

    @property
    def preparation(self) -> str:
        """What ``write`` does, for the user who waits for it."""

    @property
    def question(self) -> str | None:
        """The question of the prompt; None when the prompt means nothing."""

    @property
    def engine_arguments(self) -> Mapping[str, Any]:
        """Arguments of vLLM's engine that this model needs."""

    def write(self, directory: Path) -> None:
        """Writes the model into an empty folder.

        Raises:
            ConfigError: Something that this needs is missing.
        """

    def prompt(self, token_count: int, demo_engine: "engine.DemoEngine") -> list[int]:
        """Makes the token ids of a prompt of at most so many tokens.

        Raises:
            ValueError: These are too few; the message says how many it takes.
        """

    def answer_lines(self, outcome: Outcome) -> list[str]:
        """Returns what is printed below the table: the question, and the answers that differ."""


DEFAULT_MODEL: Final = "chat"
MODELS: Final[Mapping[str, DemoModel]] = {DEFAULT_MODEL: ChatModel(), "hybrid": HybridModel()}


def provide(model: DemoModel, directory: Path | None, progress: Progress) -> Path:
    """Returns the folder of a model, written if it has to be.

    Args:
        model: The model.
        directory: The folder; None for one in the user's cache.
        progress: Shows what takes long.

    Raises:
        ConfigError: The model cannot be written there.
    """
    folder = directory or model_folder.cache_directory() / model.folder
    if model_folder.needs_writing(folder, model.format):
        with progress.step(model.preparation):
            model_folder.write_folder(folder, model.format, model.write)
    return folder

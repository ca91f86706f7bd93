# SPDX-License-Identifier: Apache-2.0
"""What an engine writes into report_dir when it starts."""

import json
from pathlib import Path

import pytest

from umbp.connector.config import ConnectorConfig
from umbp.connector.namespace import digest, manifest
from umbp.connector.setup import write_manifest
from umbp.errors import ConfigError
from umbp.explain.manifests import compare, read_manifest
from umbp.explain.meanings import MEANINGS, meaning_of
from umbp.keys import KeySpace

from .namespace_bench import engine
from .test_config import vllm_config

MANIFEST = manifest(*engine(), key_namespace="")
KEYS = KeySpace(digest(MANIFEST))


def test_the_manifest_is_written_for_a_person_to_compare(tmp_path: Path) -> None:
    directory = tmp_path / "reports"
    config = ConnectorConfig.from_vllm(
        vllm_config(report_dir=str(directory), lookup_instance="blue", dp_index=2)
    )
    write_manifest(config, KEYS, MANIFEST)
    name = f"{KEYS.namespace.hex()[:12]}-dp2-blue.manifest.json"
    assert [path.name for path in directory.iterdir()] == [name]
    found = read_manifest(directory / name)
    assert found["manifest"] == json.loads(json.dumps(MANIFEST))
    assert found["namespace"] == KEYS.namespace.hex()
    assert all(row.is_equal for row in compare(found, found))


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_manifest(ConnectorConfig.from_vllm(vllm_config()), KEYS, MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_others_may_enter_stops_the_engine(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    config = ConnectorConfig.from_vllm(vllm_config(report_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="report directory"):
        write_manifest(config, KEYS, MANIFEST)


def test_lookups_need_a_place_to_be_written_to() -> None:
    with pytest.raises(ConfigError, match="explain_lookups is 5 and needs option report_dir"):
        ConnectorConfig.from_vllm(vllm_config(explain_lookups=5))


def test_every_field_has_a_meaning_and_every_meaning_a_field() -> None:
    paths = {row.path for row in compare({"manifest": MANIFEST}, {"manifest": MANIFEST})}
    for path in paths:
        assert meaning_of(path) is not None, path
    for entry in MEANINGS:
        assert any(f"{path}.".startswith(f"{entry}.") for path in paths), entry

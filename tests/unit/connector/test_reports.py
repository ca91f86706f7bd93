# SPDX-License-Identifier: Apache-2.0
"""What an engine writes into report_dir when it starts."""

import json
from pathlib import Path

import pytest

from umbp.connector.config import ConnectorConfig
from umbp.connector.namespace import digest, manifest
from umbp.connector.setup import _lookup_log, write_manifest
from umbp.connector.tracing import core_maker
from umbp.errors import ConfigError
from umbp.explain.manifests import compare, read_manifest
from umbp.explain.meanings import MEANINGS, meaning_of
from umbp.fsm import Core, CoreLimits, LookupAsked
from umbp.keys import KeySpace
from umbp.trace.replay import play

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


@pytest.mark.parametrize("name", ["explain_lookups", "trace_bytes"])
def test_reports_need_a_place_to_be_written_to(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option {name} is 5 and needs option report_dir"):
        ConnectorConfig.from_vllm(vllm_config(**{name: 5}))


def test_only_an_engine_that_traces_has_another_core(tmp_path: Path) -> None:
    limits = CoreLimits(unit_tokens=16)
    directory = str(tmp_path)
    plain = ConnectorConfig.from_vllm(vllm_config(report_dir=directory))
    assert core_maker(plain, KEYS, None) is Core
    tracing = ConnectorConfig.from_vllm(vllm_config(report_dir=directory, trace_bytes=1 << 20))
    core = core_maker(tracing, KEYS, None)(limits, 3)
    core.step(LookupAsked("a", None, 0, 64, 64), 1.0)
    (path,) = tmp_path.iterdir()
    assert path.name == f"{KEYS.namespace.hex()[:12]}-dp0.trace.jsonl"
    (one,) = play(path.read_text().splitlines(), "trace")
    assert (one.difference, one.line["request_id"]) == ("", "a")


def test_only_an_engine_that_is_asked_has_a_log_of_lookups(tmp_path: Path) -> None:
    plain = ConnectorConfig.from_vllm(vllm_config(report_dir=str(tmp_path)))
    assert _lookup_log(plain, KEYS) is None
    asked = ConnectorConfig.from_vllm(vllm_config(report_dir=str(tmp_path), explain_lookups=1))
    assert _lookup_log(asked, KEYS) is not None


def test_every_field_has_a_meaning_and_every_meaning_a_field() -> None:
    paths = {row.path for row in compare({"manifest": MANIFEST}, {"manifest": MANIFEST})}
    for path in paths:
        assert meaning_of(path) is not None, path
    for entry in MEANINGS:
        assert any(f"{path}.".startswith(f"{entry}.") for path in paths), entry

# SPDX-License-Identifier: Apache-2.0
"""What is to be started: the user's configuration, read as far as that goes without an engine."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.backends.base import Backend
from umbp.backends.pool_options import PoolOptions
from umbp.backends.socket_path import private_directory_of
from umbp.connector.config import ConnectorOptions, read_options
from umbp.errors import ConfigError, UsageError

CONNECTOR: Final = "UMBPStoreConnector"
SEVERAL: Final = "MultiConnector"
"""vLLM's connector of connectors; it lists theirs under ``connectors`` in its extra config."""

EXTRA: Final = "kv_connector_extra_config"
_TRANSFER_KEYS: Final = ("kv_connector", EXTRA)


@attrs.frozen
class Checked:
    """Options that can work.

    Attributes:
        options: The connector's.
        backend: The backend's class.
        backend_options: The backend's own.
    """

    options: ConnectorOptions
    backend: type[Backend]
    backend_options: Any


@attrs.frozen(kw_only=True)
class EnginePlan:
    """What is to be started.

    Attributes:
        transfer: The whole of ``--kv-transfer-config``; None: only umbp's options are known.
        raw: umbp's options as the user wrote them.
        ranks: Workers, all on this machine.
        hash_algorithm: vLLM's ``--prefix-caching-hash-algo``.
        checked: The options; None when they cannot work.
        problem: Why they cannot; empty when they can.
    """

    transfer: Mapping[str, Any] | None
    raw: Mapping[str, Any]
    ranks: int
    hash_algorithm: str
    checked: Checked | None
    problem: str

    @property
    def backend_name(self) -> str:
        """Name of the backend, whether it is there or not."""
        return str(self.raw.get("backend", attrs.fields(ConnectorOptions).backend.default))

    @property
    def is_shared(self) -> bool:
        """Whether engines are to find each other's objects."""
        return not self.works.backend.pool_in_worker

    @property
    def works(self) -> Checked:
        """The options, for checks that are made only where they can work."""
        if self.checked is None:
            raise UsageError(f"the options cannot work: {self.problem}")
        return self.checked

    def option(self, name: str) -> Any:
        """Returns an option of the backend; None where it has no such option."""
        return getattr(self.works.backend_options, name, None)

    def socket_directory(self, environment: Mapping[str, str]) -> Path:
        """Returns the private directory of lookup sockets, as the connector chooses it."""
        # Source: VLLM_RPC_BASE_PATH in vllm/envs.py.
        return private_directory_of(
            self.works.options.socket_dir
            or environment.get("VLLM_RPC_BASE_PATH")
            or tempfile.gettempdir()
        )


def read_plan(
    config: Mapping[str, Any], *, ranks: int = 1, hash_algorithm: str = "sha256"
) -> EnginePlan:
    """Reads a configuration.

    Args:
        config: The whole of ``--kv-transfer-config``, or umbp's options alone.
        ranks: Workers.
        hash_algorithm: vLLM's ``--prefix-caching-hash-algo``.

    Raises:
        ConfigError: It names another connector, or none of several is umbp's.
    """
    transfer = _transfer(config) if any(key in config for key in _TRANSFER_KEYS) else None
    raw = config if transfer is None else transfer.get(EXTRA) or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{EXTRA} is {raw!r}, expected an object with option names as keys")
    checked, problem = None, ""
    try:
        checked = Checked(*read_options(raw))
        if isinstance(checked.backend_options, PoolOptions):
            checked.backend_options.share_bytes(ranks)
    except ConfigError as error:
        checked = None
        problem = " ".join(str(error).split())
    return EnginePlan(
        transfer=transfer,
        raw=raw,
        ranks=ranks,
        hash_algorithm=hash_algorithm,
        checked=checked,
        problem=problem,
    )


def _transfer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns umbp's part of a configuration that may name several connectors."""
    name = config.get("kv_connector")
    if name == CONNECTOR:
        return config
    inner = config.get(EXTRA)
    listed = inner.get("connectors") if name == SEVERAL and isinstance(inner, Mapping) else None
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, Mapping) and one.get("kv_connector") == CONNECTOR:
            return one
    raise ConfigError(
        f"kv_connector is {name!r}, and this checks {CONNECTOR}; set kv_connector to that"
    )

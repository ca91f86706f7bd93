# SPDX-License-Identifier: Apache-2.0
"""What the user configured, checked, for both sides of the connector."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from umbp.backends.base import Backend
from umbp.backends.registry import find_backend
from umbp.backends.socket_path import socket_path
from umbp.errors import ConfigError
from umbp.fsm import CoreLimits
from umbp.keys import KeySpace
from umbp.options import option, parse_options


@attrs.frozen
class ConnectorOptions:
    """Options of the connector itself, whatever the backend.

    Raises:
        ConfigError: Something is to be written, and nobody says where.
    """

    backend: str = option(
        "memory", help="Entry-point name of the backend that keeps the objects (`umbp backends`)."
    )
    enable_lookup: bool = option(
        True, help="Look for stored KV. When false, KV is stored but never restored."
    )
    lookup_async: bool = option(
        False,
        help="Let a request wait in vLLM's queue for its lookup. When false, the scheduling step "
        "waits for the answer, at most `lookup_timeout_ms`.",
    )
    lookup_timeout_ms: int = option(
        100, help="A lookup that is not answered by then is a miss.", unit="ms", minimum=1
    )
    load_async: bool = option(
        True,
        help="Load between steps, while other requests run. When false, the step that computes a "
        "request loads it first, and the whole batch waits.",
    )
    save_decode_cache: bool = option(
        False, help="Store blocks that decoding fills, too, not only those of prompts."
    )
    lazy_offload: bool = option(
        False,
        help="Store blocks when vLLM's KV memory is about to reuse them, not when they are "
        "computed: what stays on the GPU is not copied. A block that is reused before its turn is "
        "a miss.",
    )
    timeout_ms: int = option(
        30_000,
        help="A transfer that has not ended by then is cancelled; its blocks stay held until it "
        "has. A native call that runs for longer stops the engine, because its memory can no "
        "longer be called safe; one that waits for a server does not, and its request is computed.",
        unit="ms",
        minimum=1,
    )
    load_failure_quarantine_ms: int | None = option(
        None,
        help="Objects that failed to load are misses for every request for this long; 0 for the "
        "one request only. null: 30000 with backend `distributed`, which lists a dead node's "
        "objects for as long; with the others of umbp 0.",
        unit="ms",
        minimum=0,
    )
    max_pinned_percent: int = option(
        50,
        help="Share of the KV blocks that stores in flight may pin; further stores are put off.",
        unit="%",
        minimum=1,
        maximum=100,
    )
    key_namespace: str = option(
        "",
        help="Added to the namespace: engines with different values never share objects. Change "
        "it when weights change under one path.",
    )
    lookup_instance: str = option(
        "", help="Tells engines of the same model on one host apart; needed for the second one."
    )
    socket_dir: str = option(
        "",
        help="Directory in which umbp makes a private one for its lookup sockets. Default: vLLM's "
        "RPC base path.",
    )
    report_dir: str = option(
        "",
        help="Directory of this user's alone in which the engine writes at start what its "
        "namespace is made of, for `umbp explain`, and what else is asked for. Empty: nothing is "
        "written.",
    )
    explain_lookups: int = option(
        0,
        help="So many of the last lookups, at least, are written to report_dir, with the first "
        "object that each lacked. 0: none.",
        minimum=0,
        maximum=1_000_000,
    )
    trace_bytes: int = option(
        0,
        help="What happens to requests and transfers is written to report_dir, in two files of so "
        "many bytes together at most, for `umbp trace`. 0: nothing is.",
        unit="bytes",
        minimum=0,
    )

    def __attrs_post_init__(self) -> None:
        for name in ("explain_lookups", "trace_bytes"):
            if getattr(self, name) and not self.report_dir:
                raise ConfigError(
                    f"option {name} is {getattr(self, name)} and needs option report_dir; set it "
                    "to a directory"
                )


def read_options(
    raw: Mapping[str, Any], find: Callable[[str], type[Backend]] = find_backend
) -> tuple[ConnectorOptions, type[Backend], Any]:
    """Reads what the user wrote, as far as that can be judged without an engine.

    Args:
        raw: Names and values of options, of the connector and of the backend.
        find: Finds a backend by its name.

    Returns:
        The connector's options, the backend and the backend's options.

    Raises:
        ConfigError: Something in it cannot work.
    """
    name = raw.get("backend", attrs.fields(ConnectorOptions).backend.default)
    if not isinstance(name, str):
        raise ConfigError(f"option backend is {name!r}; give the name of a backend as a string")
    backend = find(name)
    options, backend_options = parse_options(raw, ConnectorOptions, backend.options_type)
    if options.lazy_offload and not options.load_async:
        raise ConfigError(
            "option lazy_offload is true and load_async is false: blocks that a step is still to "
            "load look like blocks to store; remove one of them"
        )
    if not backend.pool_in_worker and not options.load_async:
        raise ConfigError(
            f"option load_async is false, but the pool of backend {name!r} is another process: "
            "if that were stopped, a step of the engine would wait for it; remove load_async"
        )
    return options, backend, backend_options


@attrs.frozen
class ConnectorConfig:
    """Everything that both sides derive from vLLM's configuration, equal in every process.

    Attributes:
        options: The connector's options.
        backend: The backend's class.
        backend_options: The backend's own options.
        rank_count: Workers that hold a part of every block.
        dp_index: Index of this engine among data-parallel engines.
        socket_directory: Where the private directory of lookup sockets is made.
    """

    options: ConnectorOptions
    backend: type[Backend]
    backend_options: Any
    rank_count: int
    dp_index: int
    socket_directory: Path

    @classmethod
    def from_vllm(
        cls, vllm_config: Any, find: Callable[[str], type[Backend]] = find_backend
    ) -> "ConnectorConfig":
        """Reads vLLM's configuration.

        Args:
            vllm_config: vLLM's ``VllmConfig``.
            find: Finds a backend by its name.

        Raises:
            ConfigError: Something in it cannot work.
        """
        raw = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        options, backend, backend_options = read_options(raw, find)
        if options.lazy_offload and wants_kv_events(vllm_config):
            raise ConfigError(
                "option lazy_offload is true and vLLM publishes KV events, which cannot name the "
                "tokens of blocks that nobody uses; remove one of them"
            )
        parallel = vllm_config.parallel_config
        if backend.pool_in_worker and getattr(parallel, "nnodes", 1) > 1:
            raise ConfigError(
                f"option backend is {options.backend!r}, whose pools are asked over Unix sockets, "
                f"and nnodes is {parallel.nnodes}; run this engine on one node, or choose a "
                "backend whose pool is elsewhere"
            )
        return cls(
            options=options,
            backend=backend,
            backend_options=backend_options,
            rank_count=parallel.world_size,
            dp_index=getattr(parallel, "data_parallel_index", None) or 0,
            socket_directory=_socket_directory(options.socket_dir),
        )

    @property
    def quarantine_ms(self) -> int:
        """How long objects that failed to load are misses: as the user says, else the backend."""
        chosen = self.options.load_failure_quarantine_ms
        if chosen is None:
            chosen = getattr(self.backend, "load_failure_quarantine_ms", 0)
        return chosen

    @property
    def hit_source(self) -> str:
        """Where the backend keeps objects, as vLLM names sources of hits."""
        return getattr(self.backend, "hit_source", "host")

    def core_limits(
        self,
        *,
        unit_tokens: int,
        block_count: int,
        blocks_per_unit: float = 1.0,
        spare_blocks: int = 0,
    ) -> CoreLimits:
        """Returns the bounds of the core.

        Args:
            unit_tokens: Tokens in a unit.
            block_count: Blocks of KV memory.
            blocks_per_unit: Blocks, of all groups, that one unit fills on average.
            spare_blocks: Blocks beyond those of the longest request; 0 without lazy offload.
        """
        options = self.options
        return CoreLimits(
            unit_tokens=unit_tokens,
            blocks_per_unit=blocks_per_unit,
            rank_count=self.rank_count,
            lookup_timeout_s=options.lookup_timeout_ms / 1000,
            transfer_timeout_s=options.timeout_ms / 1000,
            quarantine_s=self.quarantine_ms / 1000,
            pinned_blocks_max=max(1, block_count * options.max_pinned_percent // 100),
            lazy_blocks_max=spare_blocks,
        )

    def instance(self, keyspace: KeySpace) -> str:
        """Returns a name of this engine, unique among the live engines of a host."""
        parts = [keyspace.namespace.hex()[:12], f"dp{self.dp_index}", self.options.lookup_instance]
        return "-".join(part for part in parts if part)

    def report_path(self, keyspace: KeySpace, suffix: str) -> Path | None:
        """Returns where a report of this engine goes; None when none is wanted.

        Args:
            keyspace: Keys of the namespace.
            suffix: Which report, such as ``.manifest.json``.
        """
        directory = self.options.report_dir
        return (
            Path(directory).absolute() / (self.instance(keyspace) + suffix) if directory else None
        )

    def socket_paths(self, keyspace: KeySpace) -> list[Path]:
        """Returns the lookup socket of each rank, in order."""
        return [
            socket_path(
                self.socket_directory,
                namespace=keyspace.namespace,
                dp_index=self.dp_index,
                instance=self.options.lookup_instance,
                rank=rank,
            )
            for rank in range(self.rank_count)
        ]


def _socket_directory(socket_dir: str) -> Path:
    if socket_dir:
        return Path(socket_dir)
    from vllm import envs

    return Path(envs.VLLM_RPC_BASE_PATH)


def wants_kv_events(vllm_config: Any) -> bool:
    """Says whether vLLM publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)

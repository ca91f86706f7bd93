# SPDX-License-Identifier: Apache-2.0
"""Chooses the core: an ordinary one, unless somebody wants a trace file or spans."""

import logging
from collections.abc import Callable
from typing import Any, Final

from umbp.connector.config import ConnectorConfig
from umbp.fsm import Core, CoreLimits
from umbp.keys import KeySpace
from umbp.trace import otel
from umbp.trace.recorder import TracedCore, TraceFile
from umbp.trace.spans import SpannedCore

logger = logging.getLogger(__name__)

TRACE_SUFFIX: Final = ".trace.jsonl"

MakeCore = Callable[[CoreLimits, int], Core]


def core_maker(config: ConnectorConfig, keyspace: KeySpace, vllm_config: Any) -> MakeCore:
    """Returns what makes the core."""
    file = _trace_file(config, keyspace)
    spans = open_spans(vllm_config)
    if file is None and spans is None:
        return Core

    def make_core(limits: CoreLimits, epoch: int) -> Core:
        if spans is None:
            core = TracedCore(limits, epoch)
        else:
            core = SpannedCore(limits, epoch)
            core.span_to(spans)
        if file is not None:
            core.trace_to(file)
        return core

    return make_core


def _trace_file(config: ConnectorConfig, keyspace: KeySpace) -> TraceFile | None:
    path, bytes_max = config.report_path(keyspace, TRACE_SUFFIX), config.options.trace_bytes
    return TraceFile(path, bytes_max) if path is not None and bytes_max else None


def open_spans(vllm_config: Any) -> otel.OtelSpans | None:
    """Opens the way of spans out, where vLLM's own tracing is on; None: it is off."""
    observability = getattr(vllm_config, "observability_config", None)
    endpoint = getattr(observability, "otlp_traces_endpoint", None)
    if not endpoint:
        return None
    if not otel.is_available():
        logger.warning("otlp_traces_endpoint is set and OpenTelemetry is not installed: no spans")
        return None
    return otel.OtelSpans(endpoint)

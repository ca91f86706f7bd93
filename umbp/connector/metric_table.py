# SPDX-License-Identifier: Apache-2.0
"""Every metric that umbp shows to Prometheus: the only place where one is defined.

``METRICS`` decides what is registered with vLLM's registry, what docs/metrics.md lists and what
dashboards/umbp.json may ask for. A metric has *samples*: each takes one of the raw values that the
two sides report, and gives it the values of the metric's labels.

Names follow vLLM's other connectors (``vllm:<connector>_...``): vLLM removes what begins so from
the registry when another engine starts in the same process. Units follow Prometheus.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from umbp.fsm import LeaseKind, RequestState

PREFIX: Final = "vllm:umbp_"

BACKEND_LABEL: Final = "backend"
"""On every metric, after vLLM's own labels: the option ``backend``."""

SOURCE_LABEL: Final = "source"
"""On metrics of hits, after ``backend``: where the backend keeps objects, ``host`` or ``p2p``."""

RANK_LABEL: Final = "rank"
"""On gauges that every worker has: its rank."""

BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of every histogram, in seconds: from a lookup in the same host to the deadline that
a transfer has by default."""


LIVE_STATES: Final = tuple(state for state in RequestState if state is not RequestState.FINISHED)
"""States of requests that are still known."""


class Kind(enum.Enum):
    """What Prometheus calls the type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen
class Metric:
    """One metric.

    Attributes:
        name: Full name, as Prometheus shows it.
        kind: Its type.
        help: What it says, as a sentence.
        samples: For each raw value, the values of ``labels``.
        labels: Names of its own labels, beyond those of vLLM and ``backend``.
        has_source: Whether it also has the label ``source``.
        has_rank: Whether it also has the label ``rank``; a gauge only.
    """

    name: str
    kind: Kind
    help: str
    samples: Mapping[str, tuple[str, ...]]
    labels: tuple[str, ...] = ()
    has_source: bool = False
    has_rank: bool = False

    @property
    def own_labels(self) -> tuple[str, ...]:
        """All labels beyond vLLM's."""
        source = (SOURCE_LABEL,) if self.has_source else ()
        rank = (RANK_LABEL,) if self.has_rank else ()
        return (BACKEND_LABEL, *source, *rank, *self.labels)

    @property
    def series(self) -> tuple[str, ...]:
        """Names under which its series are stored."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "count", "sum"))
        return (self.name,)


def _one(kind: Kind, name: str, raw: str, help_: str) -> Metric:
    return Metric(PREFIX + name, kind, help_, {raw: ()})


def _split(kind: Kind, name: str, label: str, help_: str, samples: Mapping[str, str]) -> Metric:
    values = {raw: (value,) for raw, value in samples.items()}
    return Metric(PREFIX + name, kind, help_, values, (label,))


def _by_source(metric: Metric) -> Metric:
    return attrs.evolve(metric, has_source=True)


def _by_rank(metric: Metric) -> Metric:
    return attrs.evolve(metric, has_rank=True)


_COUNTERS: Final = (
    _one(Kind.COUNTER, "lookups_started_total", "lookups", "Lookups that a backend was asked."),
    _by_source(
        _split(
            Kind.COUNTER,
            "lookups_total",
            "result",
            "Lookups that have ended, unless their request went first: a hit has at least one unit "
            "to load; an expired one was not answered within `lookup_timeout_ms`.",
            {"lookup_hits": "hit", "lookup_misses": "miss", "lookups_expired": "expired"},
        )
    ),
    _by_source(
        _one(
            Kind.COUNTER,
            "restored_tokens_total",
            "tokens_restored",
            "Tokens of prompts that loads brought back.",
        )
    ),
    _one(
        Kind.COUNTER,
        "stored_tokens_total",
        "tokens_stored",
        "Tokens whose KV every rank has stored; under lazy offload see `lazy_blocks_total`.",
    ),
    _split(
        Kind.COUNTER,
        "transfers_started_total",
        "kind",
        "Transfers that were planned.",
        {"loads_started": "load", "stores_started": "store"},
    ),
    Metric(
        PREFIX + "transfers_total",
        Kind.COUNTER,
        "Transfers that every rank has answered: settled when all succeeded, else failed.",
        {
            "loads_settled": ("load", "settled"),
            "loads_failed": ("load", "failed"),
            "stores_settled": ("store", "settled"),
            "stores_failed": ("store", "failed"),
        },
        ("kind", "outcome"),
    ),
    _one(
        Kind.COUNTER,
        "loads_not_attempted_total",
        "loads_not_attempted",
        "Failed loads of which no rank had begun its part.",
    ),
    _one(
        Kind.COUNTER,
        "loads_arriving_total",
        "loads_arriving",
        "Loads that vLLM took for ended while their last bytes were on their way: its next step "
        "waited for them on the device.",
    ),
    _split(
        Kind.COUNTER,
        "stalls_total",
        "reason",
        "Transfers that went past their deadline, and loads that a rank gave up while it could "
        "still write.",
        {"leases_stalled": "deadline", "loads_stalled": "unreachable_rank"},
    ),
    _split(
        Kind.COUNTER,
        "transferred_bytes_total",
        "kind",
        "Bytes copied, over all ranks; objects that existed are not stored again.",
        {"bytes_loaded": "load", "bytes_stored": "store"},
    ),
    _split(
        Kind.COUNTER,
        "stores_declined_total",
        "reason",
        "Stores that were put off or given up, by reason; a step that puts the same store off "
        "again counts again.",
        {
            "declined_lease_limit": "lease_limit",
            "declined_pin_limit": "pin_limit",
            "declined_sync_load": "sync_load",
            "declined_boundary": "boundary",
            "declined_stale_epoch": "stale_epoch",
            "declined_barred": "barred",
        },
    ),
    _one(
        Kind.COUNTER,
        "deferred_tokens_total",
        "tokens_deferred",
        "Tokens whose store was put off until KV memory is about to reuse their blocks.",
    ),
    _one(
        Kind.COUNTER,
        "lazy_stores_started_total",
        "lazy_stores_started",
        "Of the stores that were planned, those of blocks that were about to be reused.",
    ),
    _split(
        Kind.COUNTER,
        "lazy_blocks_total",
        "result",
        "Free blocks near their reuse: looked at, stored by every rank, or left to be reused, "
        "because too few would be free or because of a limit; a look that leaves the same block "
        "again counts again.",
        {
            "lazy_blocks_seen": "seen",
            "lazy_blocks_stored": "stored",
            "lazy_blocks_left_no_room": "left_no_room",
            "lazy_blocks_left_limit": "left_limit",
        },
    ),
    _one(
        Kind.COUNTER,
        "admissions_delayed_total",
        "admissions_put_off",
        "Times that a load waited for room, so that requests that have loaded can start.",
    ),
    _one(
        Kind.COUNTER,
        "lookups_delayed_total",
        "lookups_put_off",
        "Times that a question waited because many were open.",
    ),
    _one(
        Kind.COUNTER,
        "preemptions_total",
        "preemptions",
        "Lives of requests that ended by preemption.",
    ),
    _one(Kind.COUNTER, "resets_total", "epochs_raised", "Resets that this engine has followed."),
    _split(
        Kind.COUNTER,
        "lookup_faults_total",
        "fault",
        "What went wrong in lookups: no rank or server could say, replies and messages that were "
        "dropped, connections made anew, times that the breaker opened.",
        {
            "lookups_failed": "failed",
            "lookup_replies_dropped": "reply_dropped",
            "lookup_frames_dropped": "frame_dropped",
            "lookup_connections_rebuilt": "connection_rebuilt",
            "lookup_breaker_opened": "breaker_opened",
        },
    ),
    _split(
        Kind.COUNTER,
        "faults_total",
        "fault",
        "What should not happen: events that the lifecycle refused, answers for transfers that "
        "are closed, requests that vLLM never mentioned again.",
        {
            "events_refused": "event_refused",
            "answers_unknown": "answer_unknown",
            "requests_forgotten": "request_forgotten",
        },
    ),
    _one(
        Kind.COUNTER,
        "evicted_objects_total",
        "objects_evicted",
        "Objects that pools have removed for room, over all ranks; backend `memory` only.",
    ),
    _split(
        Kind.COUNTER,
        "kv_event_blocks_total",
        "type",
        "Blocks in KV events: announced as stored, or withdrawn.",
        {"kv_blocks_stored": "stored", "kv_blocks_removed": "removed"},
    ),
    _one(
        Kind.COUNTER,
        "kv_event_blocks_forgotten_total",
        "kv_blocks_forgotten",
        "Blocks that were withdrawn although they exist, because too many were announced.",
    ),
    _split(
        Kind.COUNTER,
        "samples_dropped_total",
        "kind",
        "Durations missing in the histograms, because too many came between two reports.",
        {
            "lookup_samples_dropped": "lookup",
            "load_samples_dropped": "load",
            "store_samples_dropped": "store",
        },
    ),
)

_GAUGES: Final = (
    _split(
        Kind.GAUGE,
        "requests",
        "state",
        "Requests now, by state of the lifecycle.",
        {f"requests_{state.value}": state.value for state in LIVE_STATES},
    ),
    _split(
        Kind.GAUGE,
        "open_transfers",
        "kind",
        "Transfers now that some rank has not answered.",
        {f"leases_{kind.value}": kind.value for kind in LeaseKind},
    ),
    _one(Kind.GAUGE, "pinned_blocks", "blocks_pinned", "Blocks of KV memory that transfers hold."),
    _one(
        Kind.GAUGE,
        "quarantined_blocks",
        "blocks_quarantined",
        "Block hashes that count as missing, because they failed to load.",
    ),
    _one(
        Kind.GAUGE,
        "lookup_breaker_open",
        "lookup_breaker_open",
        "1 while lookups miss without asking, because the server or master is silent; backends "
        "`standalone` and `distributed` only.",
    ),
    _one(
        Kind.GAUGE,
        "epoch",
        "epoch",
        "The present epoch, which every reset changes; a large number where engines share it.",
    ),
    _one(
        Kind.GAUGE,
        "kv_event_blocks_announced",
        "kv_blocks_announced",
        "Blocks that KV events have announced and not withdrawn.",
    ),
    _by_rank(
        _one(
            Kind.GAUGE,
            "open_jobs",
            "jobs_open",
            "Transfers that the worker has handed to its pool and that have not ended.",
        )
    ),
    _by_rank(
        _one(
            Kind.GAUGE,
            "pool_capacity_bytes",
            "pool_capacity_bytes",
            "What the worker's pool may hold.",
        )
    ),
    _by_rank(
        _one(
            Kind.GAUGE,
            "pool_used_bytes",
            "pool_used_bytes",
            "What it holds; backend `memory` only.",
        )
    ),
    _by_rank(
        _one(
            Kind.GAUGE,
            "pool_objects",
            "pool_objects",
            "Objects that a lookup would find in it; backend `memory` only.",
        )
    ),
)

_HISTOGRAMS: Final = (
    _one(
        Kind.HISTOGRAM,
        "lookup_seconds",
        "lookup",
        "Time from a question to when the scheduler takes its answer.",
    ),
    _one(
        Kind.HISTOGRAM,
        "load_seconds",
        "load",
        "Time from when a rank hands a load to its pool to when it takes the result, which it "
        "looks for once per step.",
    ),
    _one(
        Kind.HISTOGRAM,
        "store_seconds",
        "store",
        "The same for a store; waiting for the device is included in both.",
    ),
)

METRICS: Final = (*_COUNTERS, *_GAUGES, *_HISTOGRAMS)


def samples_of(kind: Kind) -> Iterator[tuple[str, Metric, tuple[str, ...]]]:
    """Yields (raw value, metric, values of its own labels) for every sample of a kind."""
    for metric in METRICS:
        if metric.kind is kind:
            for raw, values in metric.samples.items():
                yield raw, metric, values


COUNTED: Final = frozenset(raw for raw, _, _ in samples_of(Kind.COUNTER))
"""Raw values that only rise."""

MEASURED: Final = frozenset(raw for raw, _, _ in samples_of(Kind.GAUGE))
"""Raw values that say how things are now."""

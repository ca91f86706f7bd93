# SPDX-License-Identifier: Apache-2.0
"""How the conformance checks open a backend, and end its other side."""

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from umbp.backends.base import LookupClient, SchedulerSite, WorkerPool
from umbp.backends.registry import check_available, find_backend
from umbp.errors import ConfigError
from umbp.options import parse_options
from umbp.testing.conformance_rig import MakePool, PoolCase

OPTIONS_FLAG = "--umbp-backend-options"
HARNESS_FLAG = "--umbp-harness"

_CASE_OPTIONS = ("capacity_bytes", "queue_limit", "transfer_threads")
"""Options by which a check says what pool it wants, where the backend has them."""


@attrs.frozen(eq=False)
class Harness:
    """Opens the sides of one backend for the checks.

    Attributes:
        open_pool: Opens the ``WorkerPool`` of a case. For rank 0 it is an empty one of the case's
            capacity, on a new other side if the backend has one; the pools of other ranks join it.
        open_lookup: Opens the ``LookupClient`` of a backend whose pool lives elsewhere, for the
            pools that were opened last. None: the backend has none.
        kill_other_side: Ends, at once and without a word, every process that keeps objects, and
            returns when it has ended. None: objects live in the worker.
        restart_other_side: Starts it anew, empty or not. None: the checks do without.
    """

    open_pool: MakePool
    open_lookup: Callable[[SchedulerSite], LookupClient] | None = None
    kill_other_side: Callable[[], None] | None = None
    restart_other_side: Callable[[], None] | None = None


def harness_by_name(name: str, options_json: str = "{}") -> Harness:
    """Makes the harness of an installed backend whose pool lives in the worker.

    Args:
        name: Name of its entry point.
        options_json: The backend's own options, a JSON object. They go before what a check wants.

    Raises:
        ConfigError: The name or an option is wrong, or the pool lives elsewhere.
        BackendUnavailable: A library that the backend needs is missing.
    """
    raw = _parse_json(options_json)
    backend = find_backend(name)
    if not backend.pool_in_worker:
        raise ConfigError(
            f"backend {name!r} keeps its objects outside of the worker, and only its author knows "
            f"how to start that; name a Harness with {HARNESS_FLAG} MODULE:NAME"
        )
    check_available(backend)
    parse_options(raw, backend.options_type, where=OPTIONS_FLAG)
    known = attrs.fields_dict(backend.options_type)

    def open_pool(case: PoolCase) -> WorkerPool:
        wanted = {option: getattr(case, option) for option in _CASE_OPTIONS if option in known}
        (options,) = parse_options({**wanted, **raw}, backend.options_type, where=OPTIONS_FLAG)
        return backend.open_worker(options, case.site)

    return Harness(open_pool)


def load_harness(target: str) -> Harness:
    """Imports the harness that ``MODULE:NAME`` names.

    Raises:
        ConfigError: There is none.
    """
    module_name, _, name = target.partition(":")
    try:
        harness = getattr(importlib.import_module(module_name), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ConfigError(
            f"{HARNESS_FLAG} is {target!r}, which cannot be imported "
            f"({' '.join(str(error).split())}); name it as MODULE:NAME"
        ) from error
    if not isinstance(harness, Harness):
        raise ConfigError(
            f"{HARNESS_FLAG} is {target!r}, a {type(harness).__name__}; "
            "name an instance of umbp.testing.conformance.Harness"
        )
    return harness


def _parse_json(text: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{OPTIONS_FLAG} is {text!r}, which is no JSON ({error}); write an object in quotes"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{OPTIONS_FLAG} is {text!r}, expected a JSON object")
    return raw

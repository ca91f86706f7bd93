# SPDX-License-Identifier: Apache-2.0
"""Checks of the configuration: options, roles, hashes, and settings of others that umbp needs."""

from collections.abc import Iterator
from typing import Final

from umbp.doctor.finding import Result, fail, ok, skip, warn
from umbp.doctor.host import Host
from umbp.doctor.plan import EnginePlan

HASH_SEED: Final = "PYTHONHASHSEED"
_RANDOM_SEEDED: Final = ("xxhash", "xxhash_cbor")
"""Hashes whose first parent vLLM draws at random in every process, unless PYTHONHASHSEED is set."""

_ALLOCATORS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_POLICY: Final = "kv_load_failure_policy"
_ROLES: Final = {"kv_producer": "loads nothing", "kv_consumer": "stores nothing"}


def options(_: Host, plan: EnginePlan) -> Result:
    """Every option is known, of the right type and in range."""
    if plan.problem:
        return fail(plan.problem)
    shown = ", ".join(f"{name}={value!r}" for name, value in sorted(plan.raw.items()))
    return ok(shown or "none is set: defaults")


def lookups(_: Host, plan: EnginePlan) -> Result:
    """Something is looked up at all."""
    if not plan.works.options.enable_lookup:
        advice = "remove option enable_lookup to restore what is stored"
        return warn("option enable_lookup is false", advice)
    return ok("on")


def role(_: Host, plan: EnginePlan) -> Result:
    """The engine both stores and loads."""
    if plan.transfer is None:
        return skip("not given: pass the whole of --kv-transfer-config")
    given = plan.transfer.get("kv_role")
    if given == "kv_both":
        return ok(given)
    advice = 'set "kv_role": "kv_both"'
    if isinstance(given, str) and given in _ROLES:
        what = f"{given}: this engine {_ROLES[given]}"
        return ok(what) if plan.is_shared else warn(what, advice)
    return fail(f"is {given!r}", advice)


def failure_policy(_: Host, plan: EnginePlan) -> Result:
    """A request whose load fails is computed."""
    if plan.transfer is None:
        return skip("not given: pass the whole of --kv-transfer-config")
    policy = plan.transfer.get(_POLICY, "fail")
    if policy == "recompute":
        return ok(policy)
    return warn(
        f"is {policy!r}: a request whose stored KV cannot be loaded ends with an error",
        f'set "{_POLICY}": "recompute" in --kv-transfer-config',
    )


def block_hashes(host: Host, plan: EnginePlan) -> Result:
    """Engines that share objects hash blocks alike."""
    algorithm, seed = plan.hash_algorithm, host.environment.get(HASH_SEED)
    if not plan.is_shared:
        return ok(f"{algorithm}; this engine shares no objects")
    if algorithm in _RANDOM_SEEDED and seed is None:
        return fail(
            f"{algorithm} without {HASH_SEED}: every engine hashes in its own way, nothing hits",
            f"set {HASH_SEED} to one value in all engines, or --prefix-caching-hash-algo sha256",
        )
    same = f"{HASH_SEED} {seed}" if seed is not None else f"no {HASH_SEED}"
    return ok(f"{algorithm}, {same}: as all engines must have it")


def allocator(host: Host, plan: EnginePlan) -> Result:
    """PyTorch does not remap KV memory that is registered."""
    for name, setting in _settings(host):
        if setting.replace(" ", "").lower() == "expandable_segments:true":
            return fail(
                f"{name} has {setting}: PyTorch may remap KV memory that is registered",
                f"remove {setting} from {name}",
            )
    return ok("expandable_segments is off")


def _settings(host: Host) -> Iterator[tuple[str, str]]:
    """Yields each setting of PyTorch's allocator, and the variable that has it."""
    for name in _ALLOCATORS:
        for setting in host.environment.get(name, "").split(","):
            yield name, setting.strip()

# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused when the engine starts, in one message that says what to do."""

import logging
import os
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from umbp.errors import ConfigError

logger = logging.getLogger(__name__)

_KINDS: Final = frozenset(
    {"FullAttentionSpec", "MLAAttentionSpec", "MambaSpec", "SlidingWindowSpec"}
)
"""By name: the classes move between modules, and a subclass may keep blocks by rules of its own."""

_SEEDED: Final = "xxhash"
"""Begins the names of hashes whose seed vLLM draws at random. Source: vLLM 0.31,
``resolve_none_hash_seed`` in v1/core/kv_cache_utils.py."""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuses configurations in which a restore could not be trusted.

    Raises:
        ConfigError: Names every condition that is not met, and what to set.
    """
    problems = [
        *_parallel_problems(vllm_config.parallel_config),
        *_group_problems(vllm_config, kv_cache_config.kv_cache_groups),
    ]
    if problems:
        raise ConfigError("umbp cannot serve this engine: " + "; ".join(problems))


def warn_of_policy(vllm_config: Any) -> None:
    """Warns when a failed load would end a request instead of being computed again."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a request whose stored KV cannot be loaded ends with an "
            'error; set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            policy,
        )


def refuse_random_hashes(vllm_config: Any, *, is_shared: bool) -> None:
    """Refuses a shared pool where no two engines hash a block alike.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        is_shared: Whether engines are to find each other's objects.

    Raises:
        ConfigError: vLLM would draw the seed of its block hashes at random in every process.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if is_shared and algorithm.startswith(_SEEDED) and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm} and PYTHONHASHSEED is not set, so that every "
            "engine hashes blocks in its own way and finds nothing in a shared pool; set "
            "PYTHONHASHSEED to one value in all engines, or --prefix-caching-hash-algo sha256"
        )


def refuse_sleep_mode(vllm_config: Any, backend_name: str, backend: Any) -> None:
    """Refuses sleep mode where KV memory would be unmapped under a transfer or a registration.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        backend_name: Its name.
        backend: The ``Backend``.

    Raises:
        ConfigError: vLLM does not tell connectors when it sleeps, or the backend cannot follow.
    """
    if not getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        raise ConfigError(
            "enable_sleep_mode is set, and vLLM before 0.33 unmaps KV memory without a word to its "
            "connector; start without --enable-sleep-mode, or use vLLM 0.33"
        )
    if not getattr(backend, "follows_sleep_mode", False):
        raise ConfigError(
            f"enable_sleep_mode is set, and memory registered with backend {backend_name!r} does "
            "not follow when vLLM unmaps it; start without --enable-sleep-mode, or set option "
            'backend to "memory" or "embedded"'
        )


def _parallel_problems(parallel: Any) -> list[str]:
    problems = []
    if parallel.pipeline_parallel_size > 1:
        problems.append(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and KV of pipeline "
            "stages is not supported; set --pipeline-parallel-size 1 (use tensor parallelism)"
        )
    return problems


def why_load_async(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Says why loads have to end before the step that reads them is planned; None: they need not.

    vLLM copies recurrent state to where a step writes it while it prepares the step, before a
    synchronous load would begin: the load would be lost without a word. And what failed of a
    synchronous load can be reported by block only, which says nothing where several groups share
    one space of block ids.

    With asynchronous scheduling the next step is planned, and may have begun, when vLLM hears that
    a load has failed. It computes the request again, and yet takes the next step's token for good.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 or any(_is_state(spec) for group in groups for spec in _specs(group)):
        return "a model with recurrent state or several KV cache groups loads between steps"
    if vllm_config.scheduler_config.async_scheduling:
        return (
            "with asynchronous scheduling vLLM cannot take back what follows a load that failed "
            "within a step; set --no-async-scheduling to load within steps"
        )
    return None


def loads_may_arrive(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Says whether a step may be submitted while what it reads is still coming in.

    The connector has the device wait when vLLM hands it the step. Before that vLLM copies recurrent
    state to where the step writes it, and with microbatches it computes on streams of its own.
    Ranks of data parallelism that compute in step would all wait for the one that loads.
    """
    parallel = vllm_config.parallel_config
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group)]
    return not (
        any(map(_is_state, specs)) or parallel.use_ubatching or parallel.data_parallel_size > 1
    )


def sparse_groups(kv_cache_config: Any) -> frozenset[int]:
    """Returns the groups whose blocks mean something only when they are full.

    Those are groups that keep one state for several tokens, and the index of sparse attention.
    """
    return frozenset(
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if any(_is_sparse(spec) for spec in _specs(group))
    )


def _group_problems(vllm_config: Any, groups: Any) -> list[str]:
    if not groups:
        return ["the model has no KV cache; remove --kv-transfer-config for this model"]
    problems = []
    kinds = {type(spec).__name__ for group in groups for spec in _specs(group)}
    unfit = sorted(kinds - _KINDS)
    if unfit:
        problems.append(
            f"the model has KV cache groups of kind {', '.join(unfit)}, and only those of kind "
            f"{', '.join(sorted(_KINDS))} are supported; remove --kv-transfer-config for this model"
        )
    modes = {
        spec.mamba_cache_mode for group in groups for spec in _specs(group) if _is_state(spec)
    } - {"align"}
    if modes:
        problems.append(
            f"mamba_cache_mode is {', '.join(sorted(modes))}, in which vLLM hands off no recurrent "
            "state; set --mamba-cache-mode align and --enable-prefix-caching"
        )
    if len(groups) > 1 and not vllm_config.cache_config.enable_prefix_caching:
        problems.append(
            "prefix caching is off, and the hits of a model with several KV cache groups follow "
            "its rules; set --enable-prefix-caching"
        )
    parallel = vllm_config.parallel_config
    context = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if len(groups) > 1 and context > 1:
        problems.append(
            "context parallelism is on, and is supported for models with one KV cache group only; "
            "set --decode-context-parallel-size 1 and --prefill-context-parallel-size 1"
        )
    return problems


def _specs(group: Any) -> list[Any]:
    """Returns the specs of a group's layers; none of a group whose blocks are never shared."""
    spec = group.kv_cache_spec
    if not spec.prefix_cacheable:
        return []
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ == "MambaSpec"


def _is_sparse(spec: Any) -> bool:
    if _is_state(spec):
        return False
    role = getattr(getattr(spec, "cache_role", None), "value", None)
    return role == "indexer" or getattr(spec, "tokens_per_state", 1) != 1

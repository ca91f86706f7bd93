# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused when the engine starts, in one message that says what to do."""

import logging
from typing import Any

from umbp.errors import ConfigError

logger = logging.getLogger(__name__)


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuses configurations in which a restore could not be trusted.

    Raises:
        ConfigError: Names every condition that is not met, and what to set.
    """
    problems = [
        *_parallel_problems(vllm_config.parallel_config),
        *_memory_problems(vllm_config.model_config),
        *_group_problems(kv_cache_config.kv_cache_groups),
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


def _parallel_problems(parallel: Any) -> list[str]:
    problems = []
    if parallel.pipeline_parallel_size > 1:
        problems.append(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, and KV of pipeline "
            "stages is not supported; set --pipeline-parallel-size 1 (use tensor parallelism)"
        )
    return problems


def _memory_problems(model: Any) -> list[str]:
    if getattr(model, "enable_sleep_mode", False):
        return [
            "enable_sleep_mode is set, and registered KV memory does not follow when vLLM unmaps "
            "it; start without --enable-sleep-mode"
        ]
    return []


def _group_problems(groups: Any) -> list[str]:
    if len(groups) != 1:
        return [
            f"the model has {len(groups)} KV cache groups, and only models with one are supported; "
            "remove --kv-transfer-config for this model"
        ]
    spec = groups[0].kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    kinds = {type(one) for one in (inner.values() if inner else [spec])}
    unfit = sorted(kind.__name__ for kind in kinds if not _keeps_whole_prefix(kind))
    if unfit:
        return [
            f"its KV cache group is of kind {', '.join(unfit)}, and only full attention is "
            "supported; remove --kv-transfer-config for this model"
        ]
    return []


def _keeps_whole_prefix(kind: type[Any]) -> bool:
    """Says whether blocks of this kind stay in a request's table from the first token to the last.

    By name along the class hierarchy: the classes move between modules from version to version,
    and a subclass of full attention may keep a window (``RSWASpec``) or sink of its own.
    """
    return kind.__name__ in ("FullAttentionSpec", "MLAAttentionSpec")

# SPDX-License-Identifier: Apache-2.0
"""Engines on GPUs for tests: those of ``tests/e2e``, in spawned processes, with captured graphs."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import engine_process
from engine import ENVIRONMENT, EngineSettings
from engine_process import Engines
from hybrids import ALIGNED

_ON_A_GPU: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    # Decode steps are replayed; without torch.compile, which would take minutes.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    # Said, not measured: a test beside this one may give memory back meanwhile.
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 1 << 30,
    "num_gpu_blocks_override": 1024,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
}
HYBRIDS: Final = ("lfm", "qwen_next")
"""Short convolutions; gated delta nets, whose kernels take minutes to be tuned on a new machine."""
_OF_A_HYBRID: Final = {
    name: value for name, value in ALIGNED.items() if name not in ("block_size", "dtype")
} | {
    "block_size": None,
    "num_gpu_blocks_override": 256,
    # Where FlashInfer would be taken, it has to be there.
    "additional_config": {"gdn_prefill_backend": "triton"},
}
_OF_8B: Final = {
    "kv_cache_memory_bytes": 2 << 30,
    "num_gpu_blocks_override": 768,
    "max_model_len": 8704,
    "max_num_batched_tokens": 2048,
}
_ON_TWO: Final = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
_VARIABLES: Final = {
    # Multicast over NVLink needs rights that containers seldom have.
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def on_a_gpu(
    backend: str, model: str = "llama_wide", *, ranks: int = 1, **changes: Any
) -> EngineSettings:
    """Settings of an engine on one GPU, or with a rank on each of two.

    Args:
        backend: Name of the backend.
        model: ``"llama_wide"``, ``"llama_8b"``, or one of ``HYBRIDS``.
        ranks: 1 or 2.
        changes: Further fields of ``EngineSettings``; variables are added to those that all have.
    """
    arguments = dict(_ON_A_GPU)
    if model in HYBRIDS:
        arguments |= _OF_A_HYBRID
    if model == "llama_8b":
        arguments |= _OF_8B
    if ranks == 2:
        arguments |= _ON_TWO
    environment = _VARIABLES | changes.pop("environment", {})
    return EngineSettings(
        model=model, backend=backend, arguments=arguments, environment=environment, **changes
    )


@contextmanager
def spawned_engines(folder: Path) -> Iterator[Engines]:
    """Starts engines, spawned: a process forked from one that knows of CUDA cannot use it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(engine_process, "_context", multiprocessing.get_context("spawn"))
        patch.setattr(engine_process, "_start_fork_server", lambda: None)
        # Graphs are captured and kernels compiled.
        patch.setattr(engine_process, "_CALL_TIMEOUT_S", 4 * engine_process._CALL_TIMEOUT_S)
        engines = Engines(folder)
        try:
            yield engines
        finally:
            engines.close()

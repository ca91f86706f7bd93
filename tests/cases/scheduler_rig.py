# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and umbp's two sides, with a sum of tokens in place of a model.

The KV of a token is a number that all tokens before it decide. A step checks every number that it
would read, and what it samples depends on them: wrong KV is found where it is read, and shows in
the output too.
"""

import functools
import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from held_pool import PATIENCE_S, HeldPool
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from umbp.backends.lookup_server import LookupServer
from umbp.connector.config import ConnectorConfig
from umbp.connector.layout import kv_memory
from umbp.connector.namespace import digest
from umbp.connector.worker import WorkerSide
from umbp.keys import KeySpace

BLOCK_TOKENS = 16
TOKENS_MAX = 512
STEPS_MAX = 400
"""No workload of these tests takes a tenth of it."""

_CONFIG = {
    "architectures": ["UnrunForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": TOKENS_MAX,
}


class UnrunForCausalLM(torch.nn.Module):
    """Has what vLLM looks for in a class of a model that generates text."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return input_ids

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


@functools.cache
def model_config(folder: Path) -> ModelConfig:
    """A model that is never run; vLLM's own would be looked into by a process of its own."""
    ModelRegistry.register_model("UnrunForCausalLM", UnrunForCausalLM)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=TOKENS_MAX
    )


@attrs.frozen
class Engine:
    """What an engine is started with.

    Attributes:
        folder: Where its model and its sockets may lie.
        blocks: KV blocks, vLLM's null block included.
        step_tokens: Most tokens of a step.
        role: Its ``kv_role``.
        asynchronous: Schedule a step before the result of the one before is known.
        counts: Whether vLLM counts what it does.
        traces: Where vLLM sends traces, an OTLP endpoint; None: nowhere.
        options: Options of the connector.
    """

    folder: Path
    blocks: int = 64
    step_tokens: int = 64
    role: str = "kv_both"
    asynchronous: bool = False
    counts: bool = False
    traces: str | None = None
    options: dict[str, Any] = attrs.field(factory=dict)

    def vllm_config(self) -> VllmConfig:
        config = VllmConfig(
            model_config=model_config(self.folder),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=self.step_tokens,
                max_model_len=TOKENS_MAX,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=self.asynchronous,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            observability_config=ObservabilityConfig(otlp_traces_endpoint=self.traces),
            kv_transfer_config=KVTransferConfig(
                kv_connector="UMBPStoreConnector",
                kv_connector_module_path="umbp.connector",
                kv_role=self.role,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "socket_dir": str(self.folder),
                    # An answer that is late on a busy machine would be a miss.
                    "lookup_timeout_ms": 5000,
                    **self.options,
                },
            ),
        )
        config.cache_config.num_gpu_blocks = self.blocks
        return config

    def kv_cache_config(self) -> KVCacheConfig:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        return KVCacheConfig(num_blocks=self.blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    def kv_cache(self) -> torch.Tensor:
        """The KV cache of the only layer."""
        return torch.zeros((self.blocks, 1, BLOCK_TOKENS, 1), dtype=torch.int64)


def _mix(before: int, token: int) -> int:
    return hash((before, token)) >> 1


class Rig:
    """A scheduler, a worker with one rank, and requests on their way through them.

    Attributes:
        pool: The worker's pool.
        scheduler: vLLM's.
        errors: (request, position) of KV that was read and wrong.
        queue: Steps that are scheduled and not executed.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.vllm_config()
        kv_cache_config = engine.kv_cache_config()
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        kind = AsyncScheduler if engine.asynchronous else Scheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=engine.counts,
        )
        self.side = self.scheduler.connector.scheduler_side
        self.pool = HeldPool()
        self._keyspace = KeySpace(digest(self.scheduler.connector.manifest))
        (self._path,) = ConnectorConfig.from_vllm(config).socket_paths(self._keyspace)
        self.kv = engine.kv_cache()
        self._memory = kv_memory({"layer": self.kv}, kv_cache_config)
        self.pool.register(self._memory)
        self.worker = WorkerSide(
            self.pool, keyspace=self._keyspace, rank=0, timeout_ms=int(PATIENCE_S * 1000)
        )
        self.start_lookups()
        self.queue: deque[tuple[Any, dict[str, Any]]] = deque()
        self.errors: list[tuple[str, int]] = []
        self.requests: dict[str, Request] = {}

    # ------------------------------------------------------------ the client

    def add(
        self, name: str, tokens: Sequence[int], *, outputs: int = 1, salt: str | None = None,
        headers: dict[str, str] | None = None, **sampling: Any,
    ) -> Request:  # fmt: skip
        """Adds a request that generates so many tokens."""
        parameters = SamplingParams(
            max_tokens=outputs, ignore_eos=True, temperature=0.0, **sampling
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=parameters,
            pooling_params=None,
            cache_salt=salt,
            trace_headers=headers,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def serve(self, name: str, tokens: Sequence[int], **fields: Any) -> list[int]:
        """Runs one request to its end, and all that it leaves behind; returns its output."""
        request = self.add(name, tokens, **fields)
        self.run()
        return list(request.output_token_ids)

    def forget_local(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def sleep(self) -> None:
        """Does what vLLM does at sleep level 1 or 2; KV memory loses its content."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.worker.fall_asleep()
        self.pool.unregister()
        self.kv.fill_(-1)

    def wake_up(self) -> None:
        self.pool.register(self._memory)
        self.worker.wake_up()

    # ------------------------------------------------------------ the engine

    def run(self) -> int:
        """Steps until nothing is left to do; returns the number of steps."""
        for count in range(STEPS_MAX):
            if not self.scheduler.has_requests() and not self.queue:
                return count
            self.step()
        raise AssertionError("the engine does not come to rest")

    def step(self) -> Any:
        """Schedules and executes one step."""
        output = self.schedule()
        self.execute()
        return output

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        known = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            table = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
            known[name] = (request, end - count, end, list(table), not request.is_prefill_chunk)
        self.queue.append((output, known))
        return output

    def execute(self) -> None:
        """Runs the oldest scheduled step in the worker, in vLLM's order."""
        output, known = self.queue.popleft()
        self.worker.take_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            self.worker.start_loads()
        errors = len(self.errors)
        sampled = [self._forward(*row) for row in known.values()]
        self.worker.start_loads()
        self.worker.start_stores()
        received, failed = self.worker.poll()
        assert failed <= received
        unread = self.worker.take_error_blocks()
        # vLLM throws away what such a request has computed in this step.
        void = {name for name, (_, _, _, table, _) in known.items() if unread & set(table)}
        self.errors[errors:] = [row for row in self.errors[errors:] if row[0] not in void]
        result = KVConnectorOutput(
            finished_recving=received,
            failed_recving=failed,
            invalid_block_ids=unread,
            kv_connector_worker_meta=self.worker.take_answers(),
        )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=list(known),
                req_id_to_index={name: index for index, name in enumerate(known)},
                sampled_token_ids=sampled,
                kv_connector_output=result,
            ),
        )

    def _forward(
        self, request: Request, begin: int, end: int, table: list[int], samples: bool
    ) -> list[int]:
        if request.num_tokens < end:
            # The token before was thrown away while this step was on its way.
            return [0] if samples else []
        numbers = [0]
        for token in request.all_token_ids[:end]:
            numbers.append(_mix(numbers[-1], token))
        flat = self.kv.view(-1)
        places = [table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(end)]
        read = flat[places[:begin]].tolist()
        self.errors += [
            (request.request_id, at) for at in range(begin) if read[at] != numbers[at + 1]
        ]
        flat[places[begin:end]] = torch.tensor(numbers[begin + 1 :])
        return [sum(flat[places].tolist()) % 509] if samples else []

    def check_at_rest(self) -> None:
        """Nothing was read wrong, and nothing is held."""
        assert self.errors == []
        counters = self.side.counters()
        assert counters["leases_open"] == counters["blocks_pinned"] == 0
        assert counters["requests_live"] == counters["events_refused"] == 0
        assert not self.side.has_open_transfers()
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

    def stop_lookups(self) -> None:
        """Ends the server that answers lookups, as when its thread has died."""
        self._lookups.close()

    def start_lookups(self) -> None:
        self._lookups = LookupServer(
            self.pool.contains, keyspace=self._keyspace, rank=0, path=self._path
        )

    def close(self) -> None:
        self.scheduler.shutdown()
        self._lookups.close()
        self.worker.close(PATIENCE_S)


MakeRig = Callable[..., Rig]
"""What the fixture ``make_rig`` gives."""

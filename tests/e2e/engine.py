# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with umbp as its connector, in this process, and what tests want to know of it.

The engine is stepped from here, so that a test decides between which steps something happens. An
engine runs once in a process; ``engine_process`` gives each its own.
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import attrs
import engine_worker
from tiny_models import CONFIGS

from umbp.cli.random_model import make_model

BLOCK_TOKENS: Final = 32
ANSWER_TOKENS: Final = 24

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    # One thread sums in one order, and leaves the second core to the transfers.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles one small function even when eager
    "UMBP_STRICT": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets functions be sent to workers
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a bound, the engines below take a few MiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Read by vLLM and torch when they are imported."""

_ARGUMENTS: Final[dict[str, Any]] = {
    "block_size": BLOCK_TOKENS,
    # Rounding differs with the shape of a batch; in float32 it decides no token.
    "dtype": "float32",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "seed": 0,
    "skip_tokenizer_init": True,
}
_SETTLE_TIMEOUT_S: Final = 60.0
_STEP_PAUSE_S: Final = 0.001


def prompt(token_count: int, seed: int) -> list[int]:
    """Makes a prompt of tokens that no other seed has in that order."""
    random_ = random.Random(seed)
    return [random_.randrange(3, 500) for _ in range(token_count)]


def full_blocks(token_count: int) -> int:
    """Returns the tokens of a prompt that any cache may serve: whole blocks, and never the last."""
    return (token_count - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@attrs.frozen(kw_only=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        model: Name of a model in ``tiny_models``.
        backend: Name of the backend; None for an engine without a connector.
        options: Further ``kv_connector_extra_config``; None takes an option out.
        arguments: Further arguments of vLLM's engine.
        transfer: Further fields of vLLM's ``KVTransferConfig``.
        in_process: Whether the scheduler runs in the process that asks.
        environment: Variables that vLLM reads when an engine starts.
    """

    model: str = "llama"
    backend: str | None = "memory"
    options: dict[str, Any] = attrs.field(factory=dict)
    arguments: dict[str, Any] = attrs.field(factory=dict)
    transfer: dict[str, Any] = attrs.field(factory=dict)
    in_process: bool = True
    environment: dict[str, str] = attrs.field(factory=dict)

    @property
    def identity(self) -> str:
        """Equal for settings that mean the same engine."""
        return json.dumps(attrs.asdict(self), sort_keys=True)

    def transfer_config(self) -> dict[str, Any]:
        """Returns the fields of vLLM's ``KVTransferConfig``."""
        extra = {
            "backend": self.backend,
            "total_capacity_bytes": 1 << 26,
            "lookup_timeout_ms": 10_000,  # the machine may be busy
            **self.options,
        }
        extra = {name: value for name, value in extra.items() if value is not None}
        return {
            "kv_connector": "UMBPStoreConnector",
            "kv_connector_module_path": "umbp.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
            **self.transfer,
        }


@attrs.frozen
class Answer:
    """What came of one request.

    Attributes:
        tokens: The answer.
        local_tokens: Prompt tokens that the engine had in its own prefix cache.
        external_tokens: Prompt tokens that the connector restored.
    """

    tokens: tuple[int, ...]
    local_tokens: int
    external_tokens: int


class Engine:
    """One engine. Every method that steps it is bounded in time.

    Args:
        settings: What to start.
        models: Folder in which models are made.
    """

    def __init__(self, settings: EngineSettings, models: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if settings.in_process else "1"
        os.environ.update(settings.environment)
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVEventsConfig, KVTransferConfig

        self.settings = settings
        if settings.backend == "faulty":
            import faulty_backend

            faulty_backend.install(models)
        transfer = None
        if settings.backend is not None:
            transfer = KVTransferConfig(**settings.transfer_config())
        model = make_model(models / settings.model, CONFIGS[settings.model])
        arguments = {**_ARGUMENTS, **settings.arguments}
        if "kv_events_config" in arguments:
            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(model=str(model), kv_transfer_config=transfer, **arguments)
        )
        self._client: Any = self._engine.engine_core
        self._outputs: dict[str, Any] = {}
        self._prefill: dict[str, Any] = {}
        self._hashes: dict[str, list[bytes]] = {}
        self._internal_ids: dict[str, str] = {}
        self._request_count = 0
        self._watch_prefill()

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = ANSWER_TOKENS,
        salt: str | None = None,
        **sampling: Any,
    ) -> str:
        """Adds a request, greedy and of fixed length, and returns its id."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        self._request_count += 1
        request_id = f"request-{self._request_count}"
        parameters = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling
        )
        internal_id = self._engine.add_request(
            request_id, tokens_input(list(prompt), cache_salt=salt), parameters
        )
        self._internal_ids[request_id] = internal_id
        if self.settings.in_process:
            self._hashes[request_id] = list(self.scheduler.requests[internal_id].block_hashes)
        return request_id

    def step(self, count: int = 1) -> None:
        """Steps the engine, whether or not there is anything to do."""
        for _ in range(count):
            for output in self._engine.step():
                self._outputs[output.request_id] = output

    def step_until(self, condition: "Callable[..., bool]", *arguments: Any) -> None:
        """Steps until ``condition(engine, *arguments)`` holds."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while not condition(self, *arguments):
            assert time.monotonic() < deadline, f"{condition.__name__} never came true"
            self.step()
            time.sleep(_STEP_PAUSE_S)

    def finish(self, *request_ids: str) -> list[Answer]:
        """Steps until requests have ended, and returns their answers."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while not all(self.has_finished(request_id) for request_id in request_ids):
            assert time.monotonic() < deadline, f"{request_ids} never ended"
            self.step()
        return [self._answer(request_id) for request_id in request_ids]

    def has_finished(self, request_id: str) -> bool:
        """Says whether the last token of a request has come."""
        output = self._outputs.get(request_id)
        return output is not None and output.finished

    def abort(self, request_id: str) -> None:
        """Aborts a request, in whatever state it is."""
        self._engine.abort_request([request_id])

    def abort_all(self) -> None:
        """Aborts every request that has not ended."""
        self._engine.abort_request([id_ for id_ in self._hashes if not self.has_finished(id_)])

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Answer]:
        """Answers prompts at the same time, and lets everything come to rest."""
        answers = self.finish(*[self.submit(prompt, **sampling) for prompt in prompts])
        self.settle()
        return answers

    def answer(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Answers one prompt, and lets everything come to rest."""
        return self.generate([prompt], **sampling)[0]

    def settle(self) -> None:
        """Steps until the scheduler owes nothing, neither to a request nor to a transfer.

        vLLM stops stepping with the last token, before the last stores are answered. An engine with
        its own process steps by itself.
        """
        if self.settings.in_process:
            self.step_until(_owes_nothing)

    def _answer(self, request_id: str) -> Answer:
        output = self._outputs[request_id]
        prefill = self._prefill[self._internal_ids[request_id]]
        return Answer(
            tuple(output.outputs[0].token_ids),
            prefill.num_local_cached_tokens,
            prefill.num_external_cached_tokens,
        )

    def _watch_prefill(self) -> None:
        # Where the tokens of each prompt came from reaches the frontend and is only summed there.
        get_output = self._client.get_output

        def get_output_and_note() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._prefill[output.request_id] = output.prefill_stats
            return outputs

        self._client.get_output = get_output_and_note

    # ------------------------------------------------------------ caches

    def reset_local(self) -> bool:
        """Empties vLLM's prefix cache and overwrites all KV memory; False if it could not."""
        emptied = bool(self._engine.reset_prefix_cache())
        if emptied:
            self.workers(engine_worker.overwrite_kv_memory)
        return emptied

    def reset_all(self) -> bool:
        """As ``reset_local``, and resets the connector, too."""
        emptied = bool(self._engine.reset_prefix_cache(reset_connector=True))
        if emptied:
            self.workers(engine_worker.overwrite_kv_memory)
        return emptied

    def reset_with_running(self) -> bool:
        """Resets everything while requests run, which preempts them."""
        return bool(
            self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        )

    def preempt_all(self, *, keep_cache: bool) -> None:
        """Preempts every request that runs; they are resumed in the next step.

        Args:
            keep_cache: Leave what they have computed in vLLM's prefix cache, as it is where room is
                short; without, they find nothing there, and all KV memory is overwritten.
        """
        manager = self.scheduler.kv_cache_manager
        kept = mock.patch.object(manager, "reset_prefix_cache", return_value=True)
        with kept if keep_cache else contextlib.nullcontext():
            assert self._engine.reset_prefix_cache(reset_running_requests=True)
        if not keep_cache:
            self.workers(engine_worker.overwrite_kv_memory)

    # ------------------------------------------------------------ inside

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, which lives here only when ``in_process``."""
        return self._client.engine_core.scheduler

    def workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls ``function(worker, *arguments)`` in every worker."""
        results: list[Any] = self._engine.collective_rpc(function, args=arguments)
        return results

    def counters(self) -> dict[str, int]:
        """Returns the connector's counters."""
        counters: dict[str, int] = self.scheduler.connector.counters()
        return counters

    def set_faults(self, *, rank: int | None = None, **changes: Any) -> None:
        """Has every worker's ``faulty`` pool begin anew, with these faults on one rank or all."""
        self.workers(engine_worker.set_faults, changes, rank)

    def change_faults(self, **changes: Any) -> None:
        """Changes some faults of every worker's pool, and leaves the others and the counts."""
        self.workers(engine_worker.change_faults, changes)

    def faults(self) -> list[dict[str, Any]]:
        """Returns the faults and counts of every worker's pool."""
        return self.workers(engine_worker.read_faults)

    def state(self, request_id: str) -> str:
        """Returns vLLM's status of a request, ``"GONE"`` when its scheduler has none."""
        request = self.scheduler.requests.get(self._internal_ids[request_id])
        return "GONE" if request is None else str(request.status.name)

    def token_count(self, request_id: str) -> int:
        """Returns how many tokens of an answer have come so far."""
        output = self._outputs.get(request_id)
        return 0 if output is None else len(output.outputs[0].token_ids)

    def unrest(self) -> list[str]:
        """Lists what an engine without work still holds or has done wrong."""
        counters = self.counters()
        zero = ("requests_live", "leases_open", "blocks_pinned", "events_refused")
        problems = [f"{name} is {counters[name]}" for name in zero if counters[name]]
        if self.scheduler.has_requests():
            problems.append("the scheduler still has requests")
        pool = self.scheduler.kv_cache_manager.block_pool
        in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if in_use:
            problems.append(f"{in_use} blocks are in use")
        return problems

    def block_ids(self, request_id: str) -> list[int]:
        """Returns where vLLM's prefix cache holds the full blocks of a request's prompt."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return [
            pool.get_cached_block(block_hash, [0])[0].block_id
            for block_hash in self._hashes[request_id]
        ]

    def plant(self, request_id: str, *, blocks: int) -> None:
        """Stores the KV that memory holds for a prompt under the keys of the epoch to come.

        After the next ``reset_all`` a lookup finds these objects as if the engine had stored them.

        Args:
            request_id: A request whose prompt is in vLLM's prefix cache.
            blocks: How many of its blocks to store.
        """
        connector = self.scheduler.connector
        epoch = connector.scheduler_side.core.epoch + 1
        block_ids = self.block_ids(request_id)[:blocks]
        hashes = self._hashes[request_id][:blocks]
        stored = self.workers(engine_worker.store_objects, hashes, block_ids, epoch)
        assert all(stored), stored

    def close(self) -> None:
        """Ends the engine."""
        self._client.shutdown()


def _owes_nothing(engine: Engine) -> bool:
    return not engine.scheduler.has_requests()

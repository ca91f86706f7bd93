# SPDX-License-Identifier: Apache-2.0
"""Restoring a long prompt on a GPU, beside other connectors, engines taking turns in one run.

python benchmarks/gpu_restore [--connectors ...] [--rounds 9] [--json FILE] [--check]

Every engine has the same model of Llama-3.1-8B's shape with dummy weights, and answers the same
prompts: cold, from its prefix cache, and after that was emptied. Then requests decode while long
prompts arrive, from the prefix cache and restored.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import vllm
from _measure import origin
from engine_child import Connector, EngineShape, serve
from restore_report import failures, print_report

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
POOL_BYTES = 8 << 30
WARM_UP_ROUNDS = 2
"""For what is compiled or allocated on first use."""
GAP_WARM_UPS = 1
RUNNING = 16
"""Requests that decode while others arrive."""
ARRIVALS = 4
PATIENCE_S = 600.0


def umbp(backend: str, capacity_bytes: int) -> dict[str, Any]:
    """Returns the connector's configuration for a backend."""
    return {
        "kv_connector": "UMBPStoreConnector",
        "kv_connector_module_path": "umbp.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backend": backend,
            "total_capacity_bytes": capacity_bytes,
            "lookup_instance": f"gpu-restore-{backend}",
        },
    }


def peer(name: str, capacity_bytes: int) -> dict[str, Any]:
    """Returns the configuration of one of vLLM's own connectors."""
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": capacity_bytes},
    }


def connectors(capacity_bytes: int) -> dict[str, Connector]:
    """Returns everything that can be measured, by name."""
    configs = {
        "none": None,
        "umbp memory": umbp("memory", capacity_bytes),
        "umbp embedded": umbp("embedded", capacity_bytes),
        "SimpleCPUOffload": peer("SimpleCPUOffloadConnector", capacity_bytes),
        "Offloading": peer("OffloadingConnector", capacity_bytes),
    }
    return {name: Connector(name, config) for name, config in configs.items()}


class Child:
    """An engine's process.

    Args:
        shape: What every engine has.
        connector: What this one has.
        log_path: Where it prints.
    """

    def __init__(self, shape: EngineShape, connector: Connector, log_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = connector.name
        self.log_path = log_path
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, shape, connector, str(log_path)), daemon=False
        )
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        """Returns the answer to the last call; the first is that the engine has started."""
        if not self._connection.poll(PATIENCE_S):
            raise RuntimeError(f"{self.name} did not answer; see {self.log_path}")
        try:
            failure, result = self._connection.recv()
        except EOFError:
            failure, result = "the process ended", None
        if failure is not None:
            tail = self.log_path.read_text(errors="replace").splitlines()[-15:]
            raise RuntimeError("\n".join([f"{self.name}: {failure}", *tail]))
        return result

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of ``MeasuredEngine``."""
        self._connection.send((method, arguments))
        return self.wait()

    def end(self) -> None:
        """Ends the process."""
        with suppress(RuntimeError, OSError):
            self.call("close")
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


def start(children: ExitStack, shape: EngineShape, chosen: Sequence[Connector]) -> list[Child]:
    """Starts all engines at once and returns those that came up."""
    logs = Path(tempfile.mkdtemp(prefix="gpu-restore-"))
    started = []
    for connector in chosen:
        child = Child(shape, connector, logs / f"{connector.name.replace(' ', '-')}.log")
        children.callback(child.end)
        started.append(child)
    up = []
    for child in started:
        try:
            child.wait()
            up.append(child)
        except RuntimeError as error:
            print(f"left out: {error}", flush=True)
    return up


def take_rounds(children: Sequence[Child], rounds: int) -> dict[str, list[Any]]:
    """Has the engines answer prompts in turn, and returns the samples of each."""
    samples: dict[str, list[Any]] = {child.name: [] for child in children}
    for index in range(WARM_UP_ROUNDS + rounds):
        for child in children:
            sample = child.call("round", 100 + index)
            if index >= WARM_UP_ROUNDS:
                samples[child.name].append(sample)
        print(f"round {index + 1} of {WARM_UP_ROUNDS + rounds}", file=sys.stderr, flush=True)
    return samples


def take_gaps(
    children: Sequence[Child], rounds: int, output_tokens: int
) -> Iterator[dict[str, dict[str, list[list[float]]]]]:
    """Yields the gaps between tokens after each round: alone, beside hits, beside restores.

    They are listed by engine, by what goes on beside, and by round.
    """
    gaps: dict[str, dict[str, list[list[float]]]] = {child.name: {} for child in children}
    seeds = list(range(500, 500 + ARRIVALS))
    for index in range(GAP_WARM_UPS + rounds):
        for child in children:
            child.call("prepare", seeds)
            for name, arriving in (("quiet", []), ("hits", seeds), ("restores", seeds)):
                if name == "restores":
                    child.call("lose_prefix_cache")
                taken = child.call("gaps", arriving, RUNNING, output_tokens)
                if index >= GAP_WARM_UPS:
                    gaps[child.name].setdefault(name, []).append(taken)
            child.call("lose_prefix_cache")
        print(f"gaps {index + 1} of {GAP_WARM_UPS + rounds}", file=sys.stderr, flush=True)
        yield gaps


def rounded(value: Any) -> Any:
    """Rounds seconds to microseconds, in whatever holds them."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Writes what has been measured so far."""
    if path is not None:
        path.write_text(json.dumps(rounded(record)) + "\n", encoding="utf-8")


def main() -> int:
    """Measures, prints, and judges when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = list(connectors(POOL_BYTES))
    parser.add_argument("--connectors", default=",".join(known), help="names, with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=9, help="prompts for each engine")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--gap-rounds", type=int, default=5, help="of requests beside others")
    parser.add_argument("--output-tokens", type=int, default=200, help="of each running request")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--check", action="store_true", help="fail when a ratio is missed")
    arguments = parser.parse_args()
    unknown = set(arguments.connectors.split(",")) - set(known)
    if unknown:
        parser.error(f"--connectors has {sorted(unknown)}, expected some of {known}")
    config = SMALL if arguments.small else LLAMA_8B
    capacity = POOL_BYTES if not arguments.small else POOL_BYTES >> 4
    with tempfile.TemporaryDirectory() as folder, ExitStack() as children:
        (Path(folder) / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
        shape = EngineShape(
            folder,
            arguments.device,
            arguments.tokens,
            6 << 30,
            arguments.tensor_parallel,
        )
        of_all = connectors(capacity)
        chosen = [of_all[name] for name in arguments.connectors.split(",")]
        up = start(children, shape, chosen)
        record: dict[str, Any] = {
            "benchmark": "gpu_restore",
            "origin": origin(["torch", "numpy"], sys.argv[1:]),
            "vllm": vllm.__version__,
            "prompt_tokens": arguments.tokens,
            "tensor_parallel": arguments.tensor_parallel,
            "samples": take_rounds(up, arguments.rounds),
            "gaps": {},
        }
        save(arguments.json, record)
        print_report(record)
        for record["gaps"] in take_gaps(up, arguments.gap_rounds, arguments.output_tokens):
            save(arguments.json, record)
    print_report(record)
    missed = failures(record)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())

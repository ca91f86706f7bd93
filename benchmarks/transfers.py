# SPDX-License-Identifier: Apache-2.0
"""How fast pools move KV, beside one plain copy of the same bytes in the same run.

python benchmarks/transfers.py [--check] [--backends memory,embedded] [--mib 256] [--json FILE]

On a GPU when there is one: the plain copy is then between pinned host memory and the device, the
most that the link can do. On a CPU it is torch's copy between two buffers. Every scenario stores
the objects, drops them from KV memory, loads them into other blocks, and compares the bytes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from _measure import origin
from rich.console import Console
from rich.table import Table

from umbp.backends.base import (
    KVMemory,
    MemoryRegion,
    ObjectLayout,
    TransferJob,
    TransferOutcome,
    TransferPart,
    WorkerSite,
)
from umbp.backends.registry import find_backend
from umbp.errors import UmbpError

SHARE_MIN = 0.9
"""Of the plain copy's rate, that the memory backend reaches on a GPU in the judged scenario."""

PATIENCE_S = 120.0
ROUNDS = 7


@attrs.frozen
class Scenario:
    """KV memory of one shape.

    Attributes:
        name: For people.
        ranges: Ranges of one object.
        range_bytes: Length of each.
        by_layer: Every range is in an allocation of its own; else all are in one.
        judged: ``SHARE_MIN`` is asked of it.
    """

    name: str
    ranges: int
    range_bytes: int
    by_layer: bool
    judged: bool = False

    @property
    def object_bytes(self) -> int:
        """Size of one object."""
        return self.ranges * self.range_bytes


SCENARIOS = (
    Scenario("32 layers, 64 KiB each", 32, 64 << 10, by_layer=True, judged=True),
    Scenario("32 layers, 16 KiB each", 32, 16 << 10, by_layer=True),
    Scenario("64 ranges, 32 KiB, one allocation", 64, 32 << 10, by_layer=False),
    Scenario("one range of 2 MiB", 1, 2 << 20, by_layer=False),
)


class Rig:
    """KV memory of a scenario, and a pool that holds all of it once.

    Args:
        scenario: The shape.
        backend_name: The backend.
        job_bytes: Bytes of one job, about.
        device: Where KV memory is.
    """

    def __init__(
        self, scenario: Scenario, backend_name: str, job_bytes: int, device: torch.device
    ) -> None:
        self.scenario = scenario
        self.count = max(1, job_bytes // scenario.object_bytes)
        self.block_count = 2 * self.count
        self._device = device
        size = self.block_count * scenario.range_bytes
        if scenario.by_layer:
            self._tensors = [_noise(size, device) for _ in range(scenario.ranges)]
            bases = [tensor.data_ptr() for tensor in self._tensors]
        else:
            self._tensors = [_noise(size * scenario.ranges, device)]
            bases = [self._tensors[0].data_ptr() + index * size for index in range(scenario.ranges)]
        lengths = [scenario.range_bytes] * scenario.ranges
        self._layout = ObjectLayout(0, self.block_count, bases, lengths, lengths)
        self._pool = self._open(backend_name)
        order = np.random.default_rng(0).permutation(self.block_count)
        self._sources, self._targets = np.split(order, 2)
        self._next_key = 0

    def _open(self, backend_name: str) -> Any:
        backend = find_backend(backend_name)
        # Room for two rounds: a round's objects evict those of the one before the last.
        capacity = int(3.2 * self.count * self.scenario.object_bytes) + (64 << 20)
        options = backend.options_type(capacity_bytes=capacity)
        index = self._device.index
        site = WorkerSite(
            rank=0,
            rank_count=1,
            device_type=self._device.type,
            device_index=index,
            instance=f"transfers-{time.monotonic_ns()}",
            transfer_timeout_ms=int(PATIENCE_S * 1000),
            physical_device_index=index,
        )
        pool = backend.open_worker(options, site)
        regions = tuple(
            MemoryRegion(tensor, tensor.data_ptr(), tensor.numel(), self._device.type, index)
            for tensor in self._tensors
        )
        pool.register(KVMemory(regions, (self._layout,)))
        return pool

    def round(self) -> tuple[float, float]:
        """Stores all objects under new keys, loads them elsewhere, and compares.

        Returns:
            Bytes per second of the store and of the load.
        """
        keys = [b"%032d" % (self._next_key + index) for index in range(self.count)]
        self._next_key += self.count
        size = self.count * self.scenario.object_bytes
        stored_s = self._run("store", keys, self._sources)
        loaded_s = self._run("load", keys, self._targets)
        self._compare()
        return size / stored_s, size / loaded_s

    def _run(self, kind: str, keys: Sequence[bytes], blocks: Any) -> float:
        job = TransferJob(0, (TransferPart(0, keys, blocks),), time.monotonic() + PATIENCE_S)
        begun_s = time.perf_counter()
        getattr(self._pool, kind)(job)
        while not (results := self._pool.poll()):
            # Asking again and again would take the interpreter from the thread that copies.
            self._pool.wait(PATIENCE_S)
        taken_s = time.perf_counter() - begun_s
        (result,) = results
        if result.outcome is not TransferOutcome.DONE:
            raise UmbpError(f"{kind} of {self.scenario.name}: {result.reason}")
        return taken_s

    def _compare(self) -> None:
        """Compares the blocks that were stored with those that were loaded, and changes these."""
        sources = torch.from_numpy(self._sources).to(self._device)
        targets = torch.from_numpy(self._targets).to(self._device)
        for tensor in self._tensors:
            for rows in tensor.view(-1, self.block_count, self.scenario.range_bytes):
                if not torch.equal(rows[sources], rows[targets]):
                    raise UmbpError(f"{self.scenario.name}: loaded bytes differ from stored ones")
                rows[targets] = rows[targets] ^ 1

    def close(self) -> None:
        """Gives all memory back."""
        self._pool.close(PATIENCE_S)


def _noise(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device=device).random_()


class PlainCopy:
    """One contiguous copy each way, of pinned host memory where there is a device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._on_device = _noise(size, device)
        self._in_host = torch.empty(size, dtype=torch.int8, pin_memory=device.type == "cuda")
        self.round()

    def round(self) -> tuple[float, float]:
        """Returns bytes per second out of the device and into it."""
        return self._rate(self._in_host, self._on_device), self._rate(
            self._on_device, self._in_host
        )

    def _rate(self, target: torch.Tensor, source: torch.Tensor) -> float:
        begun_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return source.numel() / (time.perf_counter() - begun_s)


@contextmanager
def opened(scenario: Scenario, backend_name: str, size: int, device: torch.device) -> Iterator[Rig]:
    """Opens a rig, and closes it."""
    rig = Rig(scenario, backend_name, size, device)
    try:
        yield rig
    finally:
        rig.close()


def measure(
    scenario: Scenario, backend_name: str, size: int, device: torch.device
) -> dict[str, Any]:
    """Runs rounds of a scenario, each beside a plain copy of as many bytes."""
    with opened(scenario, backend_name, size, device) as rig:
        plain = PlainCopy(rig.count * scenario.object_bytes, device)
        rig.round()
        samples = [(rig.round(), plain.round()) for _ in range(ROUNDS)]
    directions = {}
    for index, direction in enumerate(("store", "load")):
        rates = [ours[index] for ours, _ in samples]
        of_plain = [copy[index] for _, copy in samples]
        shares = [rate / copy for rate, copy in zip(rates, of_plain, strict=True)]
        directions[direction] = {
            "bytes_per_second": rates,
            "plain_bytes_per_second": of_plain,
            "share": statistics.median(shares),
            "share_least": min(shares),
            "share_most": max(shares),
        }
    return {
        "scenario": scenario.name,
        "backend": backend_name,
        "objects": rig.count,
        "object_bytes": scenario.object_bytes,
        "judged": scenario.judged and backend_name == "memory" and device.type == "cuda",
        "directions": directions,
    }


def print_report(results: Sequence[dict[str, Any]]) -> None:
    """Prints a row for each scenario, backend and direction."""
    table = Table(title="Bytes moved between KV memory and a pool")
    for name in ("backend", "scenario", "direction", "GB/s", "plain copy", "share", "spread"):
        table.add_column(name, justify="left" if name in ("backend", "scenario") else "right")
    for result in results:
        for direction, of in result["directions"].items():
            table.add_row(
                result["backend"],
                result["scenario"],
                direction,
                f"{statistics.median(of['bytes_per_second']) / 1e9:.1f}",
                f"{statistics.median(of['plain_bytes_per_second']) / 1e9:.1f}",
                f"{of['share']:.2f}",
                f"{of['share_least']:.2f}..{of['share_most']:.2f}",
            )
    Console(width=120).print(table)


def main() -> int:
    """Measures, prints, and judges when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when a share is too low")
    parser.add_argument("--backends", default="memory,embedded", help="names, with commas between")
    parser.add_argument(
        "--mib", type=int, help="bytes of one job (default: 1024 on a GPU, else 64)"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    size = (arguments.mib or (1024 if has_gpu else 64)) << 20
    results = []
    for backend_name in arguments.backends.split(","):
        try:
            for scenario in SCENARIOS:
                results.append(measure(scenario, backend_name, size, device))
        except UmbpError as error:
            print(f"{backend_name} was left out: {error}")
            if arguments.check and backend_name == "memory":
                return 1
    print_report(results)
    if arguments.json:
        record = {
            "benchmark": "transfers",
            "origin": origin(["torch", "numpy"], sys.argv[1:]),
            "device": torch.cuda.get_device_name(device) if has_gpu else "cpu",
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shares = {
        f"{result['scenario']}, {direction}": of["share"]
        for result in results
        if result["judged"]
        for direction, of in result["directions"].items()
    }
    low = {name: share for name, share in shares.items() if share < SHARE_MIN}
    for name, share in low.items():
        print(f"too slow: {name}: {share:.2f} of the plain copy, less than {SHARE_MIN}")
    return 1 if low and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Two engines answer while their server is stopped, killed and started anew; one line per fault.

    make faults
    make faults ARGS="--only standalone --seconds 10"

Exit status 0: no answer was wrong, none was lost, every scheduling step kept its bound, and hits
came back after every fault.
"""

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "e2e"), str(_TESTS / "unit"), str(_TESTS / "faults")]

from engine import EngineSettings, prompt  # noqa: E402
from engine_process import EngineProcess, Engines  # noqa: E402
from fault_load import LoadReport, answer_in_turn  # noqa: E402
from fault_servers import (  # noqa: E402
    LOOKUP_TIMEOUT_MS,
    MasterServer,
    Server,
    StandaloneServer,
)
from test_engine_standalone import give_large_tensors_mappings_of_their_own  # noqa: E402

PROMPTS: Final = [prompt(205 + 16 * index, seed=950 + index) for index in range(4)]
BEFORE_S: Final = 4.0
"""How long engines answer before the fault."""

STEP_BOUND_S: Final = LOOKUP_TIMEOUT_MS / 1000 + 0.25
"""What is documented, ``lookup_timeout_ms`` for a new request, and vLLM's own work."""


@attrs.frozen
class Fault:
    """Something that happens to a server.

    Attributes:
        name: What is printed.
        begin: Does it.
        end: Ends it.
    """

    name: str
    begin: Callable[[Server], None]
    end: Callable[[Server], None]


def _stop(server: Server) -> None:
    server.stop()


def _go_on(server: Server) -> None:
    server.go_on()


def _kill(server: Server) -> None:
    server.kill()


def _start(server: Server) -> None:
    server.start()


def _restart(server: Server) -> None:
    server.kill()
    server.start()


def _nothing(_: Server) -> None:
    pass


FAULTS: Final = (
    Fault("none", _nothing, _nothing),
    Fault("stopped (SIGSTOP), goes on", _stop, _go_on),
    Fault("killed (SIGKILL), started anew", _kill, _start),
    Fault("started anew at once", _restart, _nothing),
)


@attrs.frozen
class Result:
    """What came of a fault.

    Attributes:
        mode: Name of the backend.
        fault: Its name.
        requests: Requests that were sent.
        wrong: Answers that were not those of an engine without umbp.
        lost: Requests that never ended.
        longest_step_s: The longest scheduling step of any engine.
        back_s: From the end of the fault to the first restored prompt; None: there was none.
    """

    mode: str
    fault: str
    requests: int
    wrong: int
    lost: int
    longest_step_s: float
    back_s: float | None

    @property
    def held(self) -> bool:
        """Whether all is as it must be."""
        return (
            self.requests > 0
            and not self.wrong
            and not self.lost
            and self.longest_step_s <= STEP_BOUND_S
            and self.back_s is not None
        )

    def line(self) -> str:
        """Describes it in one line."""
        back = "never" if self.back_s is None else f"{self.back_s:.1f} s"
        return (
            f"faults: {self.mode}, {self.fault}: {self.requests} requests, {self.wrong} wrong "
            f"outputs, {self.lost} lost, longest scheduling step {self.longest_step_s * 1000:.0f} "
            f"ms (bound {STEP_BOUND_S * 1000:.0f} ms), hits back after {back}"
        )


def main() -> int:
    """Runs the faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="modes or faults with this text")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long a fault lasts")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="umbp-") as folder:
        engines = Engines(Path(folder))
        try:
            expected = _expected(engines)
            for make in (StandaloneServer, lambda path: MasterServer(path / "master.log")):
                results += _run_mode(make(Path(folder)), engines, expected, options)
        finally:
            engines.close()
    for result in results:
        print(result.line())
    return 0 if results and all(result.held for result in results) else 1


def _expected(engines: Engines) -> list[tuple[int, ...]]:
    """Returns the answers of an engine without umbp."""
    engine = engines.start(EngineSettings(backend=None))
    answers = [engine.answer(tokens).tokens for tokens in PROMPTS]
    engine.close()
    return answers


def _run_mode(
    server: Server,
    engines: Engines,
    expected: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
) -> list[Result]:
    faults = [fault for fault in FAULTS if options.only in f"{server.mode}, {fault.name}"]
    if not faults:
        return []
    print(f"{server.mode}: starting the server and two engines", flush=True)
    server.start()
    pair: list[EngineProcess] = []
    try:
        for _ in range(2):
            process = engines.process()
            process.run(give_large_tensors_mappings_of_their_own)
            process.start(server.engine_settings(), engines.models)
            pair.append(process)
        results = []
        for fault in faults:
            print(f"{server.mode}: {fault.name}", flush=True)
            results.append(_suffer(server, pair, fault, expected=expected, seconds=options.seconds))
        return results
    finally:
        for process in pair:
            process.kill()
        server.end()


def _suffer(
    server: Server,
    pair: Sequence[EngineProcess],
    fault: Fault,
    *,
    expected: Sequence[tuple[int, ...]],
    seconds: float,
) -> Result:
    """Has two engines answer while a fault begins and ends."""
    begun_s = time.time()
    # Afterwards they have as long again, and what a client takes to connect anew.
    until_s = begun_s + BEFORE_S + 2 * seconds + 15.0
    with concurrent.futures.ThreadPoolExecutor(len(pair)) as pool:
        running = [pool.submit(one.run, answer_in_turn, PROMPTS, until_s) for one in pair]
        time.sleep(BEFORE_S)
        fault.begin(server)
        try:
            time.sleep(seconds)
        finally:
            fault.end(server)
        over_s = time.time()
        reports: list[LoadReport] = [one.result() for one in running]
    served = [one for report in reports for one in report.served]
    restored = [
        one.begun_s - over_s for one in served if one.restored_tokens and one.begun_s >= over_s
    ]
    return Result(
        mode=server.mode,
        fault=fault.name,
        requests=len(served),
        wrong=sum(one.tokens not in (None, expected[one.prompt_index]) for one in served),
        lost=sum(one.tokens is None for one in served),
        longest_step_s=max(report.longest_step_s for report in reports),
        back_s=min(restored, default=None),
    )


if __name__ == "__main__":
    sys.exit(main())

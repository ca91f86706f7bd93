# SPDX-License-Identifier: Apache-2.0
"""The checks of lookup clients and of a killed other side can pass, and can fail.

Each class below is the backend of ``shared_dict`` with one rule broken; the table says which check
must notice, and how it must put it.
"""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shared_dict import Server, SharedClient, SharedPool

from umbp.backends.base import JobResult, LookupAnswer, TransferOutcome
from umbp.backends.job_runner import TransferKind
from umbp.errors import BackendError
from umbp.testing import conformance, conformance_lookup, conformance_other_side
from umbp.testing.conformance import (
    LOOKUP_CHECKS,
    OTHER_SIDE_CHECKS,
    ConformanceError,
    Harness,
    check_backend,
)

# For an answer or a call that never comes. Wherever else, a busy machine may take its time.
PATIENCE_S = 1.0
WAITS = ("no answer", "does not return", "is never called", "blocked while")


def patience_s(message):
    return PATIENCE_S if any(words in message for words in WAITS) else 30.0


@pytest.fixture
def server() -> Iterator[Server]:
    # Not below pytest's own folder: the path of a Unix socket is short.
    with tempfile.TemporaryDirectory() as folder:
        made = Server(Path(folder))
        yield made
        made.kill()


def hang():
    threading.Event().wait()


class HangsWithoutServer(SharedPool):
    def _run(self, kind, job):
        try:
            return super()._run(kind, job)
        except BackendError:
            hang()


class LookupHangs(SharedPool):
    def contains(self, keys):
        try:
            return super().contains(keys)
        except BackendError:
            hang()


class LookupRaises(SharedPool):
    def contains(self, keys):
        try:
            return super().contains(keys)
        except BackendError as error:
            raise OSError("broken pipe") from error


class CloseHangs(SharedPool):
    def close(self, timeout_s):
        super().close(timeout_s)
        try:
            self.contains([])
        except BackendError:
            hang()


class RemembersObjects(SharedPool):
    def contains(self, keys):
        try:
            return super().contains(keys)
        except BackendError:
            return [True] * len(keys)


class CallsStoresDone(SharedPool):
    def _run(self, kind, job):
        try:
            return super()._run(kind, job)
        except BackendError:
            if kind is TransferKind.LOAD:
                raise
            return JobResult(job.job_id, TransferOutcome.DONE)


class CallsLoadsDone(SharedPool):
    def _run(self, kind, job):
        try:
            return super()._run(kind, job)
        except BackendError:
            if kind is TransferKind.STORE:
                raise
            return JobResult(job.job_id, TransferOutcome.DONE)


class LosesRefusedJobs(SharedPool):
    def poll(self):
        return [result for result in super().poll() if result.outcome is TransferOutcome.DONE]


class KeepsItsConnection(SharedPool):
    kept = None

    def __init__(self, case, path):
        super().__init__(case, path)
        if case.site.rank == 0:
            type(self).kept = self._connection
        else:
            self._connection = self.kept


class SaysYes(SharedClient):
    def _found(self, keys):
        return [True] * len(keys)


class IgnoresGroup(SharedClient):
    def _keys(self, hashes, epoch, group_index, rank):
        return super()._keys(hashes, epoch, 0, rank)


class IgnoresEpoch(SharedClient):
    def _keys(self, hashes, epoch, group_index, rank):
        return super()._keys(hashes, 1, group_index, rank)


class IgnoresRank(SharedClient):
    def _keys(self, hashes, epoch, group_index, rank):
        return super()._keys(hashes, epoch, group_index, 0)


class ForgetsNothing(SharedClient):
    def forget(self, question_id):
        pass


class ForgetsAll(SharedClient):
    def forget(self, question_id):
        self._ready = []


class AnswersTwice(SharedClient):
    def answers(self, wait_s=0.0):
        return super().answers(wait_s) * 2


class WaitsForAnAnswer(SharedClient):
    def answers(self, wait_s=0.0):
        return super().answers(wait_s) or hang()


class ClosesOnce(SharedClient):
    def close(self):
        self._connection.fileno()  # Raises when it is closed.
        super().close()


class RemembersAnswers(SharedClient):
    def _answer(self, question):
        answer = super()._answer(question)
        if answer.present is not None:
            return answer
        return LookupAnswer(question.question_id, (np.array([True]),))


class AskHangs(SharedClient):
    def _answer(self, question):
        answer = super()._answer(question)
        return answer if answer.present is not None else hang()


CASES = [
    ("check_lookup_finds_what_is_stored", SaysYes, "nothing is stored: the answer is"),
    ("check_lookup_finds_what_is_stored", IgnoresGroup, "blocks of two groups are stored"),
    ("check_lookup_of_an_epoch", IgnoresEpoch, "is found in epoch 0"),
    ("check_lookup_needs_every_rank", IgnoresRank, "two ranks hold different blocks"),
    ("check_lookup_forgets", ForgetsNothing, "the answers are to"),
    ("check_lookup_forgets", ForgetsAll, "no answer beside"),
    ("check_lookup_forgets", AnswersTwice, "the answers are to"),
    ("check_lookup_waits_no_longer", WaitsForAnAnswer, "answers does not return"),
    ("check_lookup_waits_no_longer", ClosesOnce, "close raised OSError"),
    ("check_kill_while_idle", CallsStoresDone, "a store without its other side ended"),
    ("check_kill_while_idle", CallsLoadsDone, "block 1 of group 0 differs"),
    ("check_kill_while_idle", RemembersObjects, "is found although its other side is gone"),
    ("check_kill_while_idle", LookupHangs, "contains does not return"),
    ("check_kill_while_idle", LookupRaises, "contains raised OSError"),
    ("check_kill_while_busy", HangsWithoutServer, "no answer to jobs|poll raised BackendStalled"),
    ("check_kill_while_busy", CallsStoresDone, "a store that lost its other side"),
    ("check_kill_while_busy", LosesRefusedJobs, "no answer to jobs"),
    ("check_kill_during_transfers", CallsLoadsDone, "of group 0 differs"),
    ("check_close_after_kill", CloseHangs, "close does not return"),
    ("check_lookup_after_kill", RemembersAnswers, "is found although its other side is gone"),
    ("check_lookup_after_kill", AskHangs, "ask does not return"),
    ("check_restart", KeepsItsConnection, "a store with room ended"),
]


def break_server(server: Server, broken: type) -> None:
    if issubclass(broken, SharedPool):
        server.pool_type = broken
    else:
        server.client_type = broken


@pytest.mark.parametrize(
    ("check", "broken", "message"), CASES, ids=lambda part: getattr(part, "__name__", None)
)
def test_a_broken_rule_is_noticed(server: Server, check: str, broken: type, message: str) -> None:
    break_server(server, broken)
    run = {each.__name__: each for each in (*LOOKUP_CHECKS, *OTHER_SIDE_CHECKS)}[check]
    with pytest.raises(ConformanceError, match=message):
        run(server.harness(), patience_s(message))


def test_every_check_has_a_broken_backend() -> None:
    listed = {check.__name__ for check in (*LOOKUP_CHECKS, *OTHER_SIDE_CHECKS)}
    assert {check for check, _, _ in CASES} == listed
    modules = (conformance_lookup, conformance_other_side)
    written = {name for module in modules for name in vars(module) if name.startswith("check_")}
    assert written == listed


def test_a_backend_in_another_process_passes_every_check(server: Server) -> None:
    check_backend(server.harness())


def test_what_the_harness_lacks_is_not_checked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance, "CHECKS", ())
    server.pool_type = CallsLoadsDone
    server.client_type = SaysYes
    check_backend(Harness(server.open_pool))
    with pytest.raises(ConformanceError, match="nothing is stored"):
        check_backend(Harness(server.open_pool, server.open_lookup))
    with pytest.raises(ConformanceError, match="block 1 of group 0 differs"):
        check_backend(Harness(server.open_pool, kill_other_side=server.kill))
    server.pool_type = SharedPool
    check_backend(Harness(server.open_pool, kill_other_side=server.kill))

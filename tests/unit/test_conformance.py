# SPDX-License-Identifier: Apache-2.0
"""Every conformance check fails on a pool that breaks its rule.

The table says which check must notice a pool of ``broken_pools``, and how it must put it.
"""

import pytest
from broken_pools import (
    PATIENCE_S,
    AnnouncesEverything,
    AnnouncesNothing,
    AnnouncesTooEarly,
    AnnouncesTwice,
    AnswersTwice,
    AnswersUnasked,
    Arrives,
    BlocksWhenFull,
    BreaksItsWord,
    Broken,
    CloseLosesJobs,
    CloseRunsJobs,
    CloseWaits,
    CountsExistingObjects,
    CountsNoBytes,
    DoesNotSayWhatIsGone,
    EndlessQueue,
    FailsAllKeys,
    FenceOnCaller,
    FirstInFirstOut,
    GoesOnWithoutMemory,
    HoldsEverything,
    HoldsTooMuch,
    IgnoresCase,
    IgnoresPrefix,
    KeepsOldMemory,
    LoadsTooLong,
    LoadsTooShort,
    LoadsWhatThereIs,
    LookupIsAUse,
    LosesAnAnswer,
    LosesObjects,
    MixesUpPartialStores,
    MixesUpQuestions,
    NamesNoKeys,
    NeverEvicts,
    NoDeadline,
    NoFence,
    NoLoadDeadline,
    Overwrites,
    PublishesEarly,
    RaisesOnUnknownGroup,
    ReadsBeforeFence,
    RefusesExisting,
    ReplacesOtherSize,
    ReportsEvictionsThatDidNotHappen,
    ReportsEvictionsTwice,
    ServesWhatWasEvicted,
    SharesItsBuffer,
    StoresCancelledJobs,
    SwallowsFenceError,
    SwapsBlocks,
    TakesAnId,
    UsesTooMuch,
    WaitsForNothing,
    WaitsTooLong,
    WritesOutside,
    ZeroesOtherBlocks,
)

from umbp.testing import conformance_jobs, conformance_objects, conformance_room
from umbp.testing.conformance import CHECKS, ConformanceError, check_worker_pool

WAITS = ("no answer", "does not return", "did not return", "is never called", "blocked while")


def patience_s(message):
    return PATIENCE_S if any(words in message for words in WAITS) else 30.0


CASES = [
    ("check_round_trip", SwapsBlocks, "block 2 of group 0 differs in"),
    ("check_round_trip", WritesOutside, "wrote outside of its blocks"),
    ("check_round_trip", CountsNoBytes, "bytes stored"),
    ("check_first_bytes_stay", Overwrites, "block 1 of group 0 differs"),
    ("check_first_bytes_stay", RefusesExisting, "storing an existing key ended"),
    ("check_missing_key_fails_load", LoadsWhatThereIs, "a load with a missing object ended"),
    ("check_missing_key_fails_load", NamesNoKeys, "the missing key is not in"),
    ("check_missing_key_fails_load", FailsAllKeys, "a key that exists is in"),
    ("check_visible_when_complete", PublishesEarly, "while its fence is waited for"),
    ("check_visible_when_complete", FenceOnCaller, "blocked while a job was running"),
    ("check_visible_when_complete", NoFence, "is never called"),
    ("check_visible_when_complete", ReadsBeforeFence, "block 1 of group 0 differs"),
    ("check_fence_error", SwallowsFenceError, "a store whose fence raised ended"),
    ("check_capacity", HoldsTooMuch, "objects are found"),
    ("check_capacity", UsesTooMuch, "bytes used"),
    ("check_capacity", ReportsEvictionsTwice, "reported twice"),
    ("check_capacity", ReportsEvictionsThatDidNotHappen, "reported twice|evicted is found"),
    ("check_load_order_evicts", FirstInFirstOut, "loaded after all others"),
    ("check_load_order_evicts", LookupIsAUse, "outlives 64 later ones"),
    ("check_answers_once", AnswersTwice, "an answer nobody waits for"),
    ("check_answers_once", LosesAnAnswer, "no answer to jobs"),
    ("check_cancel", AnswersUnasked, "an answer nobody waits for|a cancelled store ended"),
    ("check_cancel", StoresCancelledJobs, "a cancelled store ended"),
    ("check_deadline", NoDeadline, "a store past its deadline ended"),
    ("check_deadline", NoLoadDeadline, "a load past its deadline ended"),
    # Where two messages are possible, waiting for an answer and holding a job back end together.
    ("check_full_queue", EndlessQueue, "no answer to jobs|found the queue full ended"),
    ("check_full_queue", BlocksWhenFull, "blocked while a job was running"),
    ("check_wait", WaitsTooLong, "wait did not return although"),
    ("check_wait", WaitsForNothing, "wait returned although"),
    ("check_arrival", AnnouncesTooEarly, "block 1 of group 0 differs"),
    ("check_arrival", AnnouncesTwice, "announced twice"),
    ("check_arrival", AnnouncesNothing, "nothing to wait for"),
    ("check_round_trip", AnnouncesEverything, "a job that may not arrive was announced"),
    ("check_arrival", BreaksItsWord, "a load that was announced ended"),
    ("check_close_while_busy", CloseWaits, "blocked while a job was running"),
    ("check_close_while_busy", CloseLosesJobs, "no answer to jobs"),
    ("check_close_while_busy", CloseRunsJobs, "no answer to jobs|found waiting ended"),
    ("check_any_key", IgnoresCase, "key b'A' is found before it was stored"),
    ("check_unknown_group", RaisesOnUnknownGroup, "starting a job raised KeyError"),
    ("check_wrong_size", LoadsTooShort, "a load of an object that is too short ended"),
    ("check_wrong_size", LoadsTooLong, "a load of an object that is too long ended"),
    ("check_wrong_size", ReplacesOtherSize, "a load of a stored object ended"),
    ("check_wrong_size", NamesNoKeys, "the key of that object is not in"),
    ("check_partial_store", MixesUpPartialStores, "of group 0 differs"),
    ("check_partial_store", RefusesExisting, "a store of which a part existed ended"),
    ("check_partial_store", CountsExistingObjects, "new bytes were to store"),
    ("check_partial_load", ZeroesOtherBlocks, "a load changed other bytes"),
    ("check_partial_load", SwapsBlocks, "of group 0 differs in"),
    ("check_reset_by_epoch", IgnoresPrefix, "an object of epoch 1 is found before it is"),
    ("check_reset_by_epoch", NeverEvicts, "a store with room ended"),
    ("check_memory_moves", LosesObjects, "an object is gone with KV memory"),
    ("check_memory_moves", KeepsOldMemory, "of group 0 differs"),
    ("check_memory_moves", GoesOnWithoutMemory, "a load without KV memory ended"),
    ("check_eviction_under_load", ServesWhatWasEvicted, "of group 0 differs"),
    ("check_eviction_under_load", DoesNotSayWhatIsGone, "was to load"),
    ("check_eviction_under_load", HoldsEverything, "outlive a full pool"),
    ("check_many_threads", MixesUpQuestions, "the answer is"),
    ("check_many_threads", SharesItsBuffer, "of group 0 differs"),
    ("check_job_id_in_use", TakesAnId, "was taken although it is in use"),
]


@pytest.mark.parametrize(
    ("check", "broken", "message"), CASES, ids=lambda part: getattr(part, "__name__", None)
)
def test_a_broken_rule_is_noticed(check, broken, message):
    run = {each.__name__: each for each in CHECKS}[check]
    with pytest.raises(ConformanceError, match=message):
        run(broken, patience_s(message))


def test_every_check_is_listed_and_has_a_broken_backend():
    modules = (conformance_jobs, conformance_objects, conformance_room)
    written = {name for module in modules for name in vars(module) if name.startswith("check_")}
    listed = {check.__name__ for check in CHECKS}
    assert written == listed
    assert {check for check, _, _ in CASES} == listed


def test_a_pool_that_announces_its_loads_passes():
    check_worker_pool(Arrives)


def test_all_checks_run_at_once():
    check_worker_pool(Broken)
    with pytest.raises(ConformanceError):
        check_worker_pool(LoadsTooShort)

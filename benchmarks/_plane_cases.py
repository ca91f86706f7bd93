# SPDX-License-Identifier: Apache-2.0
"""What is measured: one request, a decode step, a waiting queue, and the hand-over of a store.

Every function adds samples, in microseconds unless it says otherwise, to a dictionary by name.
"""

import contextlib
import gc
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
from _plane_engine import ADMIT, ANSWER, MATCH, PLAN, Connector, PlaneEngine, Shape
from _plane_umbp import UmbpOnSockets

MISS = "lookup, nothing found"
HIT = "lookup, all found"
AGAIN = "asked again"
ALLOCATED = "after allocation, all found"
STORE = "step that stores the prompt"
ANSWERS = "answers of all ranks"
LOAD = "step that loads the prompt"
LOADED = "end of the load"
REQUEST = "lookup, allocation, store and answers"
PER_BLOCK_BYTES = "metadata, bytes a block"
DECODE = "decode step"
EMPTY_BYTES = "metadata of a decode step, bytes"
WAITING = "each waiting request, in a step"
FIRST_WAITING = "each waiting request, asked first"
SUBMIT = "hand-over of a store"
REFERENCE = "plans and ranges per block"

REQUEST_PARTS = (HIT, ALLOCATED, STORE, ANSWERS)
"""What ``REQUEST`` is the sum of."""
GROWING = (MISS, HIT, ALLOCATED, STORE, ANSWERS, LOAD, LOADED)
"""What may cost more for a longer prompt, and no more than in proportion."""

ASKED_AGAIN = 50
DECODING = 256
DECODE_PROMPT_TOKENS = 400
WAITING_REQUESTS = 1000
STORE_BLOCKS = 512
STORE_LAYERS = 32
_ADDRESS = 1 << 40
_PAGE_BYTES = 1 << 16

Samples: TypeAlias = dict[str, list[float]]


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """Spares the garbage collector what is there already: all of torch and vLLM.

    Going through it takes a second, and leaves no line of ours in the processor's caches.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_requests(
    makers: Sequence[Callable[[], Connector]], shape: Shape, rounds: int
) -> dict[str, Samples]:
    """Measures one request after the other, for each connector in turn; by connector."""
    peers = [make() for make in makers]
    engines = {peer.name: (peer, PlaneEngine(peer, shape)) for peer in peers}
    samples: dict[str, Samples] = {peer.name: defaultdict(list) for peer in peers}
    try:
        for round_ in range(rounds + 1):
            for name, (peer, engine) in engines.items():
                gc.collect()
                # The first round only warms up.
                _one_request(peer, engine, samples[name] if round_ else defaultdict(list))
    finally:
        for _, engine in engines.values():
            engine.close()
    return samples


def _one_request(peer: Connector, engine: PlaneEngine, samples: Samples) -> None:
    """Computes and stores a prompt, and loads it again after vLLM's own cache was emptied."""
    tokens = engine.shape.tokens
    blocks = tokens // 16 * engine.shape.groups
    engine.forget()
    peer.expect(found=False)
    request = engine.add(tokens)
    miss_us, again_us = _asked(engine, request, found=False)
    stored_bytes = 0
    while engine.scheduler.requests:
        output = engine.schedule()
        packed = pickle.dumps(engine.metadata, pickle.HIGHEST_PROTOCOL)
        stored_bytes = max(stored_bytes, len(packed))
        engine.complete(output, *peer.execute(engine.metadata))
    engine.run()
    store_us, answers_us = max(engine.took_us[PLAN]), max(engine.took_us[ANSWER])

    engine.forget()
    peer.expect(found=True)
    first_token = None if peer.finds_any else request.prompt_token_ids[0]
    request = engine.add(tokens, first_token=first_token)
    hit_us, hit_again_us = _asked(engine, request, found=True)
    output = engine.schedule()
    load_us, allocated_us = engine.took_us[PLAN][-1], engine.took_us[ADMIT][0]
    engine.complete(output, *peer.execute(engine.metadata))
    loaded_us = engine.took_us[ANSWER][-1]
    engine.run()

    found = {
        MISS: miss_us,
        HIT: hit_us,
        AGAIN: max(again_us, hit_again_us),
        ALLOCATED: allocated_us,
        STORE: store_us,
        ANSWERS: answers_us,
        LOAD: load_us,
        LOADED: loaded_us,
        PER_BLOCK_BYTES: stored_bytes / blocks,
    }
    for name, value in found.items():
        samples[name].append(value)


def _asked(engine: PlaneEngine, request: Any, *, found: bool) -> tuple[float, float]:
    """Asks as vLLM's scheduler would, once and many times more: microseconds of each."""
    tokens, _ = getattr(engine.connector, MATCH)(request, 0)
    if bool(tokens) is not found:
        raise RuntimeError(f"{tokens} tokens were found of {request.request_id}; expected {found}")
    (first_us,) = engine.took_us[MATCH]
    begin_s = time.thread_time()
    for _ in range(ASKED_AGAIN):
        getattr(engine.connector, MATCH)(request, 0)
    return first_us, (time.thread_time() - begin_s) / ASKED_AGAIN * 1e6


def measure_decode(makers: Sequence[Callable[[], Connector]], rounds: int) -> dict[str, Samples]:
    """Measures steps in which ``DECODING`` requests get a token and nothing is stored."""
    shape = Shape(
        tokens=DECODE_PROMPT_TOKENS,
        requests=DECODING,
        blocks=DECODING * (DECODE_PROMPT_TOKENS + rounds + 64) // 16 + 1024,
    )
    found = {}
    for make in makers:
        peer = make()
        engine = PlaneEngine(peer, shape)
        try:
            for _ in range(DECODING):
                engine.add(DECODE_PROMPT_TOKENS, outputs=rounds + 32)
            # Prompts, their stores, and what else is left of them.
            for _ in range(8):
                engine.step()
            gc.collect()
            engine.took_us.clear()
            for _ in range(rounds):
                if engine.step().total_num_scheduled_tokens != DECODING:
                    raise RuntimeError(f"{peer.name}: not all requests decode")
            empty_bytes = len(pickle.dumps(engine.metadata, pickle.HIGHEST_PROTOCOL))
            found[peer.name] = {
                DECODE: list(engine.took_us[PLAN]),
                EMPTY_BYTES: [float(empty_bytes)],
            }
        finally:
            engine.close()
    return found


def measure_waiting(tokens: int, rounds: int) -> Samples:
    """Measures ``WAITING_REQUESTS`` that wait for a lookup; microseconds of each.

    No rank answers: all requests are asked about in every step, and none leaves the queue.
    """
    peer = UmbpOnSockets(with_workers=False, lookup_async=True)
    engine = PlaneEngine(peer, Shape(tokens=tokens))
    samples: Samples = defaultdict(list)
    try:
        for _ in range(WAITING_REQUESTS):
            engine.add(tokens)
        for round_ in range(rounds + 1):
            engine.took_us.clear()
            engine.complete(engine.schedule(), [], ())
            if len(engine.took_us[MATCH]) != WAITING_REQUESTS:
                raise RuntimeError("not all requests wait")
            name = WAITING if round_ else FIRST_WAITING
            samples[name].append(sum(engine.took_us[MATCH]) / WAITING_REQUESTS)
    finally:
        engine.close()
    return samples


@attrs.frozen
class _Range:
    """One piece of a block: what a plan made per block is made of."""

    address: int
    range_bytes: int


@attrs.frozen
class _BlockPlan:
    key: bytes
    ranges: tuple[_Range, ...]


def plans_per_block(
    keys: Sequence[bytes], block_ids: Sequence[int], bases: Sequence[int]
) -> list[_BlockPlan]:
    """Says where each block lies by an object for each block and each layer."""
    return [
        _BlockPlan(key, tuple(_Range(base + block_id * _PAGE_BYTES, _PAGE_BYTES) for base in bases))
        for key, block_id in zip(keys, block_ids, strict=True)
    ]


def measure_store(rounds: int) -> Samples:
    """Measures how long a store of 512 blocks of 32 layers keeps the forward thread."""
    tokens = STORE_BLOCKS * 16
    peer = UmbpOnSockets()
    engine = PlaneEngine(peer, Shape(tokens=tokens, layers=STORE_LAYERS))
    samples: Samples = defaultdict(list)
    generator = np.random.default_rng(0)
    keys = [index.to_bytes(60, "big") for index in range(STORE_BLOCKS)]
    bases = [_ADDRESS + layer * (_PAGE_BYTES << 16) for layer in range(STORE_LAYERS)]
    try:
        for round_ in range(rounds + 1):
            gc.collect()
            engine.forget()
            engine.add(tokens)
            output = engine.schedule()
            took_us = _submit_us(peer.workers[0], pickle.loads(pickle.dumps(engine.metadata)))
            answer, _ = peer.wait_for(peer.workers[0], len(engine.metadata.stores))
            engine.complete(output, [answer], ())
            engine.run()
            block_ids = generator.permutation(STORE_BLOCKS).tolist()
            begin_s = time.thread_time()
            plans_per_block(keys, block_ids, bases)
            reference_us = (time.thread_time() - begin_s) * 1e6
            if round_:
                samples[SUBMIT].append(took_us)
                samples[REFERENCE].append(reference_us)
    finally:
        engine.close()
    return samples


def _submit_us(worker: Any, metadata: Any) -> float:
    worker.bind_connector_metadata(metadata)
    begin_s = time.thread_time()
    worker.start_load_kv(None)
    worker.wait_for_save()
    took_us = (time.thread_time() - begin_s) * 1e6
    worker.clear_connector_metadata()
    return took_us


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the median of each, and their sum for what is a sum."""
    found = {name: float(np.median(values)) for name, values in samples.items()}
    if HIT in found:
        found[REQUEST] = sum(found[part] for part in REQUEST_PARTS)
    return found

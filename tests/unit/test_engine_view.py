"""The engine's view of itself, held against the block pool, the block tables and the batches run.

The model is checksum_model.py's, which keeps what it was given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from checksum_model import BLOCK_SIZE, ChecksumModel, Guesser, greedy, make_engine, run
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.block_pool import BlockPool
from cuengine.block_table import BlockTable
from cuengine.engine import Engine
from cuengine.engine_view import MAX_QUEUED, NUM_STEPS, EngineView
from cuengine.sampling_params import BeamSearchParams, SamplingParams


def table_of(blocks: bytes) -> list[int]:
    return np.frombuffer(blocks, "<i4").tolist()


def is_cached(view: EngineView, block: int) -> bool:
    return bool(view.cached[block // 8] >> block % 8 & 1)


def faults(view: EngineView, engine: Engine) -> set[str]:
    """Where a view differs from what the engine's parts say."""
    pool, scheduler = engine.pool, engine.scheduler
    found = set()
    blocks = range(pool.num_blocks)
    if [*view.ref_counts] != [pool.ref_count(block) for block in blocks]:
        found.add("ref_counts")
    if [is_cached(view, block) for block in blocks] != [pool.is_cached(b) for b in blocks]:
        found.add("cached")
    tables = [(s.request.request_id, s.index, [*s.table.blocks]) for s in scheduler.running]
    if [(s.request_id, s.index, table_of(s.blocks)) for s in view.running] != tables:
        found.add("tables")
    # Whom a block is claimed by are the tables that it is in.
    holders = Counter(block for s in view.running for block in table_of(s.blocks))
    if {block: count for block, count in enumerate(view.ref_counts) if count} != holders:
        found.add("holders")
    for seen, sequence in zip(view.running, scheduler.running, strict=False):
        counts = (seen.prompt_len, seen.num_tokens, seen.num_computed, seen.num_slots, seen.width)
        if counts != (
            sequence.prompt_len,
            len(sequence.token_ids),
            sequence.num_computed,
            sequence.table.num_tokens,
            sequence.width,
        ):
            found.add("counts")
        if len(table_of(seen.blocks)) != -(-seen.num_slots // view.block_size):
            found.add("slots")
    if sum(view.queued.values()) != len(scheduler.waiting) + len(scheduler.held):
        found.add("queued")
    if view.queued["swapped"] != sum(bool(s.host_blocks) for s in scheduler.waiting):
        found.add("swapped")
    return found


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    priority: int
    arrives: int
    aborted: int | None


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    # Few different tokens and a common start, so that requests share prefixes.
    prompt = [1] * draw(st.integers(0, 24)) + draw(
        st.lists(st.integers(1, 2), min_size=1, max_size=12)
    )
    max_tokens = draw(st.integers(1, 24))
    params: SamplingParams | BeamSearchParams = greedy(
        n=draw(st.sampled_from([1, 1, 2, 3])), seed=draw(st.integers(0, 3)), max_tokens=max_tokens
    )
    if draw(st.integers(0, 3)) == 0:
        params = BeamSearchParams(beam_width=draw(st.integers(2, 3)), max_tokens=max_tokens)
    return Job(
        prompt,
        params,
        priority=draw(st.integers(0, 2)),
        arrives=draw(st.integers(0, 12)),
        aborted=draw(st.none() | st.integers(0, 20)),
    )


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(jobs(), min_size=1, max_size=8),
    num_blocks=st.integers(8, 24),
    budget=st.sampled_from([3, 16, 64]),
    caching=st.booleans(),
    overlaps=st.booleans(),
    num_host_blocks=st.sampled_from([0, 0, 3, 100]),
    guesses=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
def test_after_every_step_a_view_says_what_pool_tables_and_batches_say(
    work: list[Job],
    num_blocks: int,
    budget: int,
    caching: bool,
    overlaps: bool,
    num_host_blocks: int,
    guesses: list[int] | None,
):
    engine, model = make_engine(
        num_blocks=num_blocks,
        max_num_seqs=4,
        budget=budget,
        caching=caching,
        overlaps=overlaps,
        num_host_blocks=num_host_blocks,
        block_cost=0.1,
        proposer=None if guesses is None else Guesser(guesses),
    )
    for now in range(5000):
        for name, job in enumerate(work):
            if job.arrives == now:
                engine.add_request(str(name), job.prompt, job.params, priority=job.priority)
            if job.aborted is not None and job.arrives + job.aborted == now:
                engine.abort(str(name))
        view = engine.view()
        assert not faults(view, engine)
        if now > 40 and not engine.has_unfinished():
            break
        engine.step()
    assert view.steps == engine.view().steps
    assert_steps_are(view, model)
    assert sum(view.ref_counts) == 0
    assert view.speculative == (guesses is not None)


def assert_steps_are(view: EngineView, model: ChecksumModel) -> None:
    """What the batches say that the model was given."""
    got = [(step.prefill + step.decode + step.guessed, step.sequences) for step in view.steps]
    assert got == model.steps[-NUM_STEPS:]
    assert [step.step for step in view.steps] == [
        *range(max(1, len(model.steps) - NUM_STEPS + 1), len(model.steps) + 1)
    ]
    assert view.stats.num_steps == len(model.steps)


def forked() -> Engine:
    """Two requests with a common prefix, one of them with three samples, in their first decodes."""
    engine, _ = make_engine()
    engine.add_request("a", [1] * 20, greedy(n=3, max_tokens=12))
    engine.step()
    engine.add_request("b", [1] * 17 + [2], greedy(max_tokens=12))
    engine.step()
    return engine


def test_shared_blocks_count_their_owners():
    view = forked().view()
    tables = {(s.request_id, s.index): table_of(s.blocks) for s in view.running}
    assert set(tables) == {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
    # Two full blocks of 8 are common to all four; the third one each sample has for itself.
    assert [view.ref_counts[block] for block in tables["a", 0]] == [4, 4, 1]
    assert len({table[2] for table in tables.values()}) == 4
    assert [is_cached(view, block) for block in tables["a", 0]] == [True, True, False]
    assert all(s.num_slots == s.num_computed for s in view.running)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("ref_counts", lambda view: {"ref_counts": b"\1" + view.ref_counts[1:]}),
        ("cached", lambda view: {"cached": bytes([view.cached[0] ^ 4]) + view.cached[1:]}),
        ("tables", lambda view: {"running": view.running[::-1]}),
        ("holders", lambda view: {"running": view.running[1:]}),
        ("holders", lambda view: {"ref_counts": view.ref_counts[:-1] + b"\1"}),
        ("slots", lambda view: {"block_size": view.block_size * 2}),
        ("queued", lambda view: {"queued": view.queued | {"waiting": 1}}),
        ("swapped", lambda view: {"queued": view.queued | {"swapped": 1}}),
    ],
)
def test_a_wrong_view_is_found_out(name: str, plant: Any):
    engine = forked()
    view = engine.view()
    assert not faults(view, engine)
    assert name in faults(msgspec.structs.replace(view, **plant(view)), engine)


def test_a_leaked_block_shows_as_held_by_nobody_known():
    engine = forked()
    lost = engine.pool.allocate()
    view = engine.view()
    assert view.ref_counts[lost] == 1
    assert faults(view, engine) == {"holders"}


def test_prompts_guesses_and_what_is_computed_again_are_told_apart_in_a_steps_batch():
    engine, _ = make_engine(budget=16, num_blocks=8, caching=False, proposer=Guesser([2]))
    engine.add_request("a", [1] * 20, greedy(max_tokens=30))
    engine.step()
    engine.step()
    engine.step()
    first, second, third = engine.view().steps
    assert (first.prefill, first.decode, first.guessed) == (16, 0, 0)
    assert (second.prefill, second.decode, second.guessed) == (4, 0, 0)
    assert (third.prefill, third.decode, third.guessed) == (0, 1, 4)
    engine.add_request("b", [2] * 20, greedy(max_tokens=30))
    while not engine.stats().num_preemptions:
        engine.step()
    steps = len(engine.view().steps)
    run(engine)
    again = engine.view().steps[steps:]
    assert sum(step.prefill for step in again) > 20


def test_the_queue_is_told_by_what_its_sequences_wait_for():
    engine, _ = make_engine(num_blocks=8, max_num_seqs=2, caching=False, num_host_blocks=10)
    for name in ("a", "b", "c"):
        engine.add_request(name, [ord(name) % 7 + 1] * 8, greedy(max_tokens=30))
    engine.step()
    assert engine.view().queued == {"waiting": 1, "preempted": 0, "swapped": 0, "held": 0}
    while not engine.stats().num_preemptions:
        engine.step()
    view = engine.view()
    assert view.queued == {"waiting": 1, "preempted": 0, "swapped": 1, "held": 0}
    assert [(s.request_id, s.state) for s in view.queue] == [("b", "swapped"), ("c", "waiting")]
    assert view.num_host_blocks - view.num_free_host_blocks == view.queue[0].num_tokens // 8

    engine, _ = make_engine(num_blocks=8, caching=False)
    for name in ("a", "b"):
        engine.add_request(name, [ord(name) % 7 + 1] * 8, greedy(max_tokens=30))
    while not engine.stats().num_preemptions:
        engine.step()
    assert engine.view().queued["preempted"] == 1


def test_a_long_queue_is_counted_and_its_head_named():
    engine, _ = make_engine()
    for i in range(MAX_QUEUED + 20):
        engine.add_request(str(i), [1] * 8, greedy())
    view = engine.view()
    assert view.queued["waiting"] == MAX_QUEUED + 20
    assert [s.request_id for s in view.queue] == [str(i) for i in range(MAX_QUEUED)]


def test_counts_of_more_than_a_byte_holds_are_cut():
    pool = BlockPool(3, BLOCK_SIZE)
    table = BlockTable(pool)
    table.grow(BLOCK_SIZE)
    forks = [table.fork() for _ in range(299)]
    assert pool.ref_count(table.blocks[0]) == 300
    assert sorted(pool.ref_counts()) == [0, 0, 255]
    for fork in forks[:45]:
        fork.free()
    assert sorted(pool.ref_counts()) == [0, 0, 255]
    forks[45].free()
    assert sorted(pool.ref_counts()) == [0, 0, 254]


def test_a_view_goes_through_json_and_msgpack_unharmed():
    view = forked().view()
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(view), type=EngineView) == view

"""Preemption by swapping: when it pays, what moves, and that all comes back or is let go.

Tokens of random mixes of requests, with and without swapping, are in test_any_requests.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
from checksum_model import (
    BLOCK_SIZE,
    ChecksumModel,
    Outputs,
    assert_whole,
    expected_output,
    greedy,
    make_engine,
    run,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cuengine.engine import Engine
from cuengine.sampling_params import SamplingParams
from cuengine.swap_space import SwapCosts, SwapSpace

LENGTH = 30
"""Tokens of each of two requests that need five blocks each in the end, where there are eight."""


def two_requests(**fields: object) -> tuple[Engine, ChecksumModel]:
    engine, model = make_engine(num_blocks=8, **{"caching": False, **fields})  # type: ignore[arg-type]
    for name in ("a", "b"):
        engine.add_request(name, prompt_of(name), greedy(max_tokens=LENGTH))
    return engine, model


def prompt_of(name: str) -> list[int]:
    return [ord(name) % 7 + 1] * 8


def until_swapped(engine: Engine) -> None:
    while not engine.stats().num_swaps:
        engine.step()


def moved(model: ChecksumModel) -> tuple[int, int]:
    """Blocks swapped out, and in."""
    outs = sum(len(batch.swap_outs) for batch in model.batches if batch.swap_outs is not None)
    ins = sum(len(batch.swap_ins) for batch in model.batches if batch.swap_ins is not None)
    return outs, ins


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_was_swapped_out_is_not_computed_again(overlaps: bool):
    engine, model = two_requests(num_host_blocks=8, overlaps=overlaps)
    outputs = run(engine)
    stats = engine.stats()
    assert stats.num_swaps == stats.num_preemptions > 0
    assert moved(model)[0] == moved(model)[1] > 0
    assert sum(tokens for tokens, _ in model.steps) == 2 * (8 + LENGTH - 1)
    for name in ("a", "b"):
        expected = expected_output(prompt_of(name), greedy(max_tokens=LENGTH))
        assert outputs.tokens[name, 0] == expected
    assert_whole(engine)


def test_where_computing_again_is_cheaper_nothing_is_swapped():
    engine, model = two_requests(num_host_blocks=8, block_cost=BLOCK_SIZE + 0.1)
    run(engine)
    assert engine.stats().num_preemptions > engine.stats().num_swaps == 0
    assert moved(model) == (0, 0)


def test_blocks_that_another_sample_holds_do_not_count_as_to_be_computed_again():
    # Two samples share four blocks, of eight; alone, half a block's tokens would pay for its move.
    engine, _ = make_engine(num_blocks=8, num_host_blocks=8, block_cost=BLOCK_SIZE / 2)
    engine.add_request("r", [3] * 32, greedy(n=2, max_tokens=30))
    run(engine)
    assert engine.stats().num_preemptions > engine.stats().num_swaps == 0
    assert_whole(engine)


def test_where_host_memory_is_full_the_sequence_is_computed_again():
    engine, _ = two_requests(num_host_blocks=2)
    outputs = run(engine)
    assert engine.stats().num_preemptions > engine.stats().num_swaps == 0
    assert [len(tokens) for tokens in outputs.tokens.values()] == [LENGTH, LENGTH]


def test_blocks_that_the_prefix_cache_still_has_are_not_copied_back():
    engine, model = two_requests(num_host_blocks=8, caching=True)
    until_swapped(engine)
    engine.abort("a")
    outputs = run(engine)
    outs, ins = moved(model)
    # Only the last, partly full block comes from the host.
    assert outs > ins == 1
    expected = expected_output(prompt_of("b"), greedy(max_tokens=LENGTH))
    assert outputs.tokens["b", 0] == expected[-len(outputs.tokens["b", 0]) :]
    assert_whole(engine)


def test_swapped_in_blocks_can_be_found_by_others():
    engine, _ = two_requests(num_host_blocks=8, caching=True)
    run(engine)
    whole = prompt_of("b") + expected_output(prompt_of("b"), greedy(max_tokens=LENGTH))
    engine.add_request("again", whole[:25], greedy(max_tokens=1))
    [output] = engine.step()
    assert output.num_cached_tokens == 24


def test_aborting_a_swapped_out_request_frees_its_host_blocks():
    engine, _ = two_requests(num_host_blocks=8)
    until_swapped(engine)
    [waiting] = engine.scheduler.waiting
    assert waiting.host_blocks
    engine.abort(waiting.request.request_id)
    run(engine)
    assert_whole(engine)


def test_a_swapped_out_request_resumes_before_later_ones_are_admitted():
    engine, _ = two_requests(num_host_blocks=8)
    until_swapped(engine)
    [swapped] = engine.scheduler.waiting
    engine.add_request("later", [1], greedy(max_tokens=1))
    outputs = Outputs()
    while ("later", 0) not in outputs.tokens:
        outputs.add(engine.step())
    assert not swapped.host_blocks
    assert swapped in engine.scheduler.running


def test_a_prompt_swapped_out_half_way_goes_on_where_it_was():
    engine, model = make_engine(num_blocks=8, budget=4, caching=False, num_host_blocks=8)
    engine.add_request("first", [1] * 8, greedy(max_tokens=40))
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 5:
        engine.step()
    prompt = [2 + i % 5 for i in range(40)]
    engine.add_request("second", prompt, greedy(max_tokens=1, prompt_logprobs=0))
    run(engine)
    assert engine.stats().num_swaps > 0
    assert sum(tokens for tokens, _ in model.steps) == 8 + 39 + 40


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_a_failed_step_swapped_out_is_computed_again(overlaps: bool):
    engine, model = two_requests(num_host_blocks=8, overlaps=overlaps)
    failed = False
    outputs = Outputs()
    while engine.has_unfinished():
        engine.runner = _FailsOnSwap(model) if not failed else model
        try:
            outputs.add(engine.step())
        except RuntimeError:
            failed = True
    assert failed
    assert outputs.tokens["b", 0] == expected_output(prompt_of("b"), greedy(max_tokens=LENGTH))
    assert ("a", 0) not in outputs.reasons
    assert_whole(engine)


class _FailsOnSwap:
    """Raises instead of the first step that swaps out."""

    def __init__(self, model: ChecksumModel) -> None:
        self.model, self.overlaps, self.range = model, model.overlaps, model.range

    def run(self, batch: object, sampling: object) -> object:
        if batch.swap_outs is not None:  # type: ignore[attr-defined]
            raise RuntimeError("out of luck")
        return self.model.run(batch, sampling)  # type: ignore[arg-type]


def test_costs_are_seconds_for_both_ways_and_for_a_multiplication_and_an_addition():
    costs = SwapCosts.of(block_bytes=2**20, weights=10**9, swap_rate=2**30, compute_rate=10**12)
    assert costs.block == pytest.approx(2 / 1024)
    assert costs.token == pytest.approx(2e-3)
    space = SwapSpace(4, 16, costs)
    assert space.pays(4, 4)
    assert not space.pays(4, 3)
    assert not space.pays(5, 100)


class TwoPools(RuleBasedStateMachine):
    """Whatever happens, each block belongs to whom it says, on the device and on the host."""

    @initialize(
        overlaps=st.booleans(),
        caching=st.booleans(),
        num_blocks=st.integers(8, 16),
        num_host_blocks=st.sampled_from([3, 8, 40]),
        budget=st.sampled_from([3, 16, 64]),
    )
    def start(
        self, overlaps: bool, caching: bool, num_blocks: int, num_host_blocks: int, budget: int
    ) -> None:
        self.engine, self.model = make_engine(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            overlaps=overlaps,
            caching=caching,
            budget=budget,
        )
        self.outputs = Outputs()
        self.jobs: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ended: set[str] = set()

    @rule(
        length=st.integers(1, 40),
        token=st.integers(1, 3),
        samples=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 24),
        priority=st.integers(0, 1),
    )
    def add(self, length: int, token: int, samples: int, max_tokens: int, priority: int) -> None:
        name, prompt = str(len(self.jobs)), [token] * length
        params = greedy(n=samples, max_tokens=max_tokens, ignore_eos=False)
        self.jobs[name] = (prompt, params)
        self.engine.add_request(name, prompt, params, priority=priority)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.outputs.add(self.engine.step())

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        self.engine.abort(name)
        self.ended.add(name)

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def end_sample(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.engine.scheduler.running))
        self.engine.finish_sequence(sequence.request.request_id, sequence.index)
        self.ended.add(sequence.request.request_id)

    @invariant()
    def every_block_has_the_owners_that_it_counts(self) -> None:
        engine = self.engine
        scheduler = engine.scheduler
        owners = Counter(b for sequence in scheduler.running for b in sequence.table.blocks)
        pool = engine.pool
        assert all(pool.ref_count(b) == owners[b] for b in range(pool.num_blocks))
        assert pool.num_free == pool.num_blocks - len(owners)
        assert scheduler.swap_space is not None
        host = scheduler.swap_space.pool
        held = Counter(b for sequence in scheduler.waiting for b in sequence.host_blocks)
        assert all(host.ref_count(b) == held[b] for b in range(host.num_blocks))
        assert all(not sequence.host_blocks for sequence in scheduler.running)
        assert all(not sequence.table.blocks for sequence in scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        run(self.engine, self.outputs)
        assert_whole(self.engine)
        for name, (prompt, params) in self.jobs.items():
            for sample in range(params.n):
                expected = expected_output(prompt, params, sample)
                got = self.outputs.tokens.get((name, sample), [])
                assert got == (expected[: len(got)] if name in self.ended else expected)


TestTwoPools = TwoPools.TestCase
TestTwoPools.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)

"""What samples of one request share: one prefill, the prompt's blocks, nothing of what they draw.

With the model of checksum_model.py; the same with real models is in
tests/engine/test_parallel_sampling.py.
"""

from __future__ import annotations

from checksum_model import (
    BLOCK_SIZE,
    Outputs,
    assert_whole,
    expected_output,
    greedy,
    make_engine,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cuengine.engine import Engine


def owners(engine: Engine) -> list[list[int]]:
    """Of each running sequence's blocks, how many sequences own them."""
    return [
        [engine.pool.ref_count(block) for block in sequence.table.blocks]
        for sequence in engine.scheduler.running
    ]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 8),
    length=st.integers(1, 40),
    budget=st.sampled_from([8, 16, 64]),
    caching=st.booleans(),
    overlaps=st.booleans(),
)
def test_one_prefill_its_blocks_shared_and_the_last_one_copied_by_all_but_its_last_holder(
    n: int, length: int, budget: int, caching: bool, overlaps: bool
):
    engine, model = make_engine(budget=budget, caching=caching, overlaps=overlaps)
    prompt, params = [3 + i % 5 for i in range(length)], greedy(n=n, max_tokens=6)
    full, partly = divmod(length, BLOCK_SIZE)
    engine.add_request("r", prompt, params)
    outputs = Outputs()
    chunks = -(-length // budget)
    for _ in range(chunks):
        outputs.add(engine.step())
    assert sum(tokens for tokens, _ in model.steps) == length
    assert owners(engine) == [[n] * -(-length // BLOCK_SIZE)] * n
    assert engine.stats().num_used_blocks == -(-length // BLOCK_SIZE)

    outputs.add(engine.step())
    assert model.steps[chunks:] == [(n, n)]
    copies = model.batches[-1].block_copies
    assert len(copies) == (n - 1 if partly else 0)
    assert len({source for source, _ in copies.tolist()}) <= 1
    assert owners(engine) == [[n] * full + [1]] * n
    assert engine.stats().num_used_blocks == full + n

    run(engine, outputs)
    assert sum(len(batch.block_copies) for batch in model.batches) == len(copies)
    for sample in range(n):
        assert outputs.tokens["r", sample] == expected_output(prompt, params, sample)
    assert_whole(engine)


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.integers(1, 8), min_size=2, max_size=5),
    aborted=st.lists(st.none() | st.integers(1, 40), min_size=5, max_size=5),
    num_blocks=st.integers(8, 30),
    overlaps=st.booleans(),
    num_host_blocks=st.sampled_from([0, 30]),
)
def test_sample_i_is_the_same_among_any_number_whatever_else_runs_or_is_aborted(
    widths: list[int],
    aborted: list[int | None],
    num_blocks: int,
    overlaps: bool,
    num_host_blocks: int,
):
    """All requests ask the same with one seed, for different numbers of samples."""
    engine, _ = make_engine(
        num_blocks=num_blocks, overlaps=overlaps, num_host_blocks=num_host_blocks, block_cost=0.5
    )
    prompt = [1, 2, 3] * 4
    for name, n in enumerate(widths):
        engine.add_request(str(name), prompt, greedy(n=n, max_tokens=30))
    outputs = Outputs()
    for now in range(2000):
        for name, when in enumerate(aborted[: len(widths)]):
            if when == now:
                engine.abort(str(name))
        outputs.add(engine.step())
        if not engine.has_unfinished():
            break
    assert_whole(engine)
    for name, n in enumerate(widths):
        for sample in range(n):
            expected = expected_output(prompt, greedy(max_tokens=30), sample)
            got = outputs.tokens.get((str(name), sample), [])
            assert got == (expected if aborted[name] is None else expected[: len(got)])

"""Bytes and operations of each operation, against cases that were computed by hand."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuengine.profiling import work
from cuengine.profiling.work import Work


@pytest.mark.parametrize(
    ("counted", "num_bytes", "operations"),
    [
        # x [3, 4] and w [5, 4] and y [3, 5]: 12 + 20 + 15 numbers of 2 bytes; 15 sums of 4 products
        (work.linear(3, 4, 5, 2, weight_bytes=40, bias=False), 94, 120),
        # 5 numbers more to read, 15 more to add
        (work.linear(3, 4, 5, 2, weight_bytes=40, bias=True), 104, 135),
        # x [2, 4] and w [6, 4] in 2 bytes, y [2, 6] in 4: 16 + 48 + 48
        (work.logits(2, 4, 6, 2, weight_bytes=48), 112, 96),
        # 3 rows of 8 read and written in 4 bytes, 3 indices
        (work.embedding(3, 8, 4), 204, 0),
        # x and y [3, 8], w [8] in 2 bytes
        (work.rms_norm(3, 8, 2), 112, 96),
        # x, residual twice, y [3, 8], w [8] in 2 bytes; a sum more
        (work.add_rms_norm(3, 8, 2), 208, 120),
        # gate, up, y [3, 8] in 4 bytes
        (work.silu_mul(3, 8, 4), 288, 120),
        # 2 tokens, 4 heads and 2 KV heads of 8: qkv is [2, 64], and as much comes out, in 2 bytes;
        # 8 cosines and sines in 4, a position in 4, a slot in 8; 2 * 48 numbers are rotated
        (work.rotary_cache(2, 4, 2, 8, 2), 2 * 2 * 128 + 2 * (32 + 12), 288),
        # One query of 5 tokens, three of 7 (which see 5, 6, 7): 23 pairs, for each of 4 heads of 8.
        # 12 keys and values of 2 heads, 4 queries and results of 4, in 2 bytes; 2 + 2 blocks of 4
        (work.paged_attention([1, 3], [5, 7], 4, 2, 8, 4, 2), 768 + 512 + 16, 4 * 4 * 8 * 23),
        (work.copied_blocks(3, 1000), 6024, 0),
        (work.greedy_sample(2, 50), 408, 0),
    ],
)
def test_work_is_what_a_person_counts(counted: Work, num_bytes: int, operations: int) -> None:
    assert (counted.num_bytes, counted.operations) == (num_bytes, operations)


def test_every_formula_has_such_a_case() -> None:
    formulas = {
        name
        for name, value in vars(work).items()
        if callable(value) and getattr(value, "__module__", "") == work.__name__
    }
    source = inspect.getsource(test_work_is_what_a_person_counts)
    assert formulas - {"Work"}
    assert not [name for name in formulas - {"Work"} if f"work.{name}(" not in source]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=5))
def test_attention_counts_each_query_with_each_key_that_it_sees(
    sequences: list[tuple[int, int]],
) -> None:
    counts = [count for count, _ in sequences]
    lens = [count + before for count, before in sequences]
    pairs = sum(
        key <= length - count + query
        for count, length in zip(counts, lens, strict=True)
        for query in range(count)
        for key in range(length)
    )
    assert work.paged_attention(counts, lens, 1, 1, 1, 16, 4).operations == 4 * pairs


def test_work_adds_up() -> None:
    assert Work(1, 2) + Work(10, 20) == Work(11, 22)

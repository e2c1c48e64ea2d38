"""Paged attention, decode and prefill, on tensor cores and without, against float64.

What errors are allowed is in paged_cases.py. Variants that cost long to translate run in
`make accept` only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from launching import JUNK, ORDERS, Array, Emulator
from paged_cases import Heads, error_in_bounds, make_case, run_decode, run_prefill

from cuengine.device.attention_launch import MAX_DECODE_QUERIES, num_splits, prefill_tiles
from cuengine.device.emulated.runtime import FORWARD, REVERSE, SHUFFLED, KernelFault
from cuengine.device.kernel_variants import HEAD_DIMS

Start = Callable[..., Emulator]

DECODES = [(1, 1), (1, 2), (0, 0), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65), (1, 131)]
"""(queries, tokens in the cache): round block and tile borders, and a sequence of padding."""

CHUNKS = [(9, 9), (16, 16), (17, 40), (33, 33), (64, 65), (1, 70), (130, 150)]
"""Whole prompts and later chunks, shorter and longer than a tile of queries."""

QUICK = [
    Heads("bf16", 4, 4, 16),
    Heads("fp16", 8, 1, 32, 8),
    Heads("bf16", 9, 3, 64, 32),
    Heads("bf16", 4, 1, 128),
    Heads("fp32", 4, 1, 16, 16, tensor_cores=False),
    Heads("fp16", 3, 3, 32, 8, tensor_cores=False),
]
"""One of each kind: types, group sizes 1, 3, 4 and 8, block sizes, both algorithms."""


def name(heads: Heads) -> str:
    kind = "mma" if heads.tensor_cores else "plain"
    ratio = f"{heads.num_heads}of{heads.num_kv_heads}"
    return f"{kind}-{heads.short}-{heads.dim}-{ratio}-block{heads.block_size}"


quick = pytest.mark.parametrize("heads", QUICK, ids=name)

ALL = [
    Heads(short, 2 * group, 2, dim, size, tensor_cores=tensor_cores)
    for tensor_cores in (True, False)
    for short in (("fp16", "bf16") if tensor_cores else ("fp32", "fp16", "bf16"))
    for dim in HEAD_DIMS
    for group, size in ((1, 8), (3, 16), (4, 32), (8, 16))
]


@quick
@pytest.mark.parametrize("order", ORDERS)
def test_decode(emulator: Start, heads: Heads, order: int) -> None:
    gpu = emulator(order)
    case = make_case(gpu, heads, DECODES)
    out = run_decode(gpu, case)
    assert gpu.written(out)
    assert error_in_bounds(out, case) <= 1


@quick
@pytest.mark.parametrize(
    "sequences",
    [
        [(2, 2), (2, 16), (1, 9), (2, 33)],
        [(8, 8), (3, 17), (0, 0), (8, 70), (5, 64)],
        [(MAX_DECODE_QUERIES, 130)],
    ],
)
def test_decode_of_several_queries_is_causal(
    emulator: Start, heads: Heads, sequences: list[tuple[int, int]]
) -> None:
    gpu = emulator(SHUFFLED)
    case = make_case(gpu, heads, sequences, seed=2)
    out = run_decode(gpu, case)
    assert gpu.written(out)
    assert error_in_bounds(out, case) <= 1


@quick
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_decode_with_the_context_split(emulator: Start, heads: Heads, splits: int) -> None:
    """Short sequences leave most splits without keys; the reduce kernel must not read those."""
    gpu = emulator(SHUFFLED, seed=splits)
    case = make_case(gpu, heads, [(1, 300), (1, 1), (0, 0), (3, 129), (8, 64)], seed=3)
    out = run_decode(gpu, case, splits)
    assert gpu.written(out)
    assert error_in_bounds(out, case) <= 1


@quick
def test_decode_leaves_longer_sequences_to_prefill(emulator: Start, heads: Heads) -> None:
    gpu = emulator()
    case = make_case(gpu, heads, [(1, 20), (9, 30), (2, 5)])
    out = run_decode(gpu, case, max_queries=2)
    untouched = out[1:10]
    assert (untouched.view(np.uint8) == JUNK).all()
    untouched[:] = case.expected.out[1:10]
    assert error_in_bounds(out, case) <= 1


@quick
@pytest.mark.parametrize("order", [FORWARD, REVERSE])
def test_prefill(emulator: Start, heads: Heads, order: int) -> None:
    gpu = emulator(order)
    case = make_case(gpu, heads, CHUNKS)
    out = run_prefill(gpu, case)
    assert gpu.written(out)
    assert error_in_bounds(out, case) <= 1


@quick
def test_prefill_of_the_sequences_behind_the_decodes(emulator: Start, heads: Heads) -> None:
    gpu = emulator(SHUFFLED)
    case = make_case(gpu, heads, [(1, 20), (2, 18), (9, 30), (2, 5)])
    out = run_prefill(gpu, case, first_seq=2)
    assert (out[:3].view(np.uint8) == JUNK).all()
    out[:3] = case.expected.out[:3]
    assert error_in_bounds(out, case) <= 1


@quick
def test_scores_far_apart(emulator: Start, heads: Heads) -> None:
    """Scores of some hundred: one key takes all, others vanish, none overflows."""
    gpu = emulator()
    case = make_case(gpu, heads, [(8, 8), (8, 77)], spread=100)
    for out in (run_decode(gpu, case), run_decode(gpu, case, 2), run_prefill(gpu, case)):
        # A score of 2^9 has float32 errors of 2^-13, which its weight gets as relative errors.
        assert error_in_bounds(out, case) <= (1 if heads.short == "bf16" else 32)


@quick
def test_equal_keys_average_the_values(emulator: Start, heads: Heads) -> None:
    """The formula apart from the oracle: q = 0 gives every key the same weight."""
    gpu = emulator()
    case = make_case(gpu, heads, [(1, 37)], spread=0)
    table = case.tables[0, : -(-37 // heads.block_size)]
    values = case.cache[1, table].transpose(1, 0, 2, 3).astype(np.float64)
    mean = values.reshape(heads.num_kv_heads, -1, heads.dim)[:, :37].mean(axis=1)
    for out in (run_decode(gpu, case), run_prefill(gpu, case)):
        expected = np.repeat(mean, heads.group, axis=0)
        np.testing.assert_allclose(out[0].astype(np.float64), expected, atol=2.0**-8, rtol=2.0**-8)


@pytest.mark.parametrize("run", [run_decode, run_prefill])
@pytest.mark.parametrize("heads", [QUICK[0], QUICK[3]], ids=name)
def test_a_block_of_nobody_in_the_table_is_caught(
    emulator: Start, run: Callable[..., Array], heads: Heads
) -> None:
    gpu = emulator()
    case = make_case(gpu, heads, [(3, 40)])
    case.tables[0, 1] = (set(range(case.cache.shape[1])) - set(case.tables[0, :3].tolist())).pop()
    with pytest.raises(KernelFault, match=r"\.cuh:\d+: .*not the kernel's"):
        run(gpu, case)


@pytest.mark.parametrize("run", [run_decode, run_prefill])
@pytest.mark.parametrize("heads", [QUICK[0], QUICK[3]], ids=name)
def test_a_sequence_longer_than_its_tokens_is_caught(
    emulator: Start, run: Callable[..., Array], heads: Heads
) -> None:
    gpu = emulator()
    case = make_case(gpu, heads, [(3, 40)])
    case.lengths[0] += 1
    with pytest.raises(KernelFault, match=r"\.cuh:\d+: .*not the kernel's"):
        run(gpu, case)


@pytest.mark.accept
@pytest.mark.parametrize("heads", ALL, ids=name)
def test_decode_in_every_variant(emulator: Start, heads: Heads) -> None:
    random = np.random.default_rng(heads.dim)
    gpu = emulator(SHUFFLED)
    for splits in (1, 4):
        case = make_case(gpu, heads, [*DECODES, *random_sequences(random, 4, 8)], seed=splits)
        assert error_in_bounds(run_decode(gpu, case, splits), case) <= 1


@pytest.mark.accept
@pytest.mark.parametrize("heads", ALL, ids=name)
def test_prefill_in_every_variant(emulator: Start, heads: Heads) -> None:
    random = np.random.default_rng(heads.dim)
    gpu = emulator(SHUFFLED)
    case = make_case(gpu, heads, [*CHUNKS, *random_sequences(random, 3, 150)])
    assert error_in_bounds(run_prefill(gpu, case), case) <= 1


def random_sequences(
    random: np.random.Generator, number: int, most_queries: int
) -> list[tuple[int, int]]:
    counts = random.integers(1, most_queries + 1, number)
    return [(int(count), int(count + random.integers(0, 200))) for count in counts]


def test_tiles_cover_each_row_once_longest_contexts_first() -> None:
    tiles = prefill_tiles([1, 300, 70], [5, 300, 1000], 128, 1, first_seq=1)
    assert tiles.tolist() == [[2, 0], [1, 256], [1, 128], [1, 0]]


def test_a_context_is_split_only_where_that_fills_the_chip() -> None:
    assert num_splits(8, 4096, 132) == 16, "no part is shorter than 256 keys"
    assert num_splits(8, 1 << 20, 132) == 33, "two blocks of threads for each multiprocessor"
    assert num_splits(264, 4096, 132) == 1
    assert num_splits(8, 100, 132) == 1

"""Norms, activation, rows by index, rope with cache writes and block copies against float64.

Tolerances: these kernels compute in float32 and round once to their type, so a result is wrong by
at most the type's UNIT of it, plus some roundings of float32 (FLOAT32, of the largest term).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracles
import pytest
from launching import NUMPY_TYPES, ORDERS, UNIT, Array, Emulator, random_array

from cuengine.device.emulated.runtime import FORWARD, KernelFault

FLOAT32 = 2.0**-21
"""Eight roundings of float32: sums over a row (by a tree), square root, division, exponential."""

Start = Callable[..., Emulator]
SHORT = ("fp32", "fp16", "bf16")


def vector(short: str) -> int:
    """Elements in 16 bytes."""
    return 16 // np.dtype(NUMPY_TYPES[short]).itemsize


def assert_close(actual: Array, expected: Array, short: str, magnitude: Array | float = 0) -> None:
    """magnitude: largest of the terms that a result is the sum of."""
    # The smallest step of float16 is 2^-24; bfloat16 and float32 reach further down than needed.
    bound = UNIT[short] * np.abs(expected) + FLOAT32 * np.maximum(np.abs(expected), magnitude)
    bound += 2.0**-25
    error = np.abs(actual.astype(np.float64) - expected)
    assert (error <= bound).all(), f"off by up to {(error / bound).max():.3g} times the bound"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize(
    ("num_tokens", "vectors", "threads"), [(3, 1, 32), (2, 37, 32), (4, 64, 64), (2, 300, 256)]
)
def test_rms_norm(
    emulator: Start, order: int, short: str, num_tokens: int, vectors: int, threads: int
) -> None:
    random = np.random.default_rng(vectors)
    hidden = vectors * vector(short)
    x = random_array(random, (num_tokens, hidden), short, 5)
    x[0] = 0  # only eps keeps this from a division by zero
    weight = random_array(random, (hidden,), short)
    gpu = emulator(order)
    y = gpu.result(x.shape, x.dtype)
    gpu.launch(f"rms_norm<{short}>", (num_tokens,), threads, y, x, weight, hidden, 1e-5)
    assert gpu.written(y)
    assert_close(y, oracles.rms_norm(x, weight, np.float32(1e-5)), short)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize(
    ("num_tokens", "vectors", "threads"), [(3, 1, 32), (2, 37, 32), (2, 96, 96)]
)
def test_add_rms_norm_rounds_the_sum_and_normalizes_what_it_rounded(
    emulator: Start, order: int, short: str, num_tokens: int, vectors: int, threads: int
) -> None:
    random = np.random.default_rng(vectors)
    hidden = vectors * vector(short)
    x = random_array(random, (num_tokens, hidden), short)
    residual = random_array(random, (num_tokens, hidden), short, 3)
    weight = random_array(random, (hidden,), short)
    expected = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    gpu = emulator(order)
    y = gpu.result(x.shape, x.dtype)
    gpu.updated(residual, "residual")
    gpu.launch(
        f"add_rms_norm<{short}>", (num_tokens,), threads, y, x, residual, weight, hidden, 1e-6
    )
    np.testing.assert_array_equal(residual, expected)
    assert gpu.written(y)
    assert_close(y, oracles.rms_norm(expected, weight, np.float32(1e-6)), short)


@pytest.mark.parametrize("short", SHORT)
def test_rms_norm_in_place(emulator: Start, short: str) -> None:
    random = np.random.default_rng(0)
    hidden = 5 * vector(short)
    x = random_array(random, (2, hidden), short)
    weight = random_array(random, (hidden,), short)
    expected = oracles.rms_norm(x, weight, np.float32(1e-5))
    gpu = emulator()
    gpu.updated(x, "x")
    gpu.launch(f"rms_norm<{short}>", (2,), 32, x, x, weight, hidden, 1e-5)
    assert_close(x, expected, short)


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize(("num_tokens", "vectors"), [(1, 1), (3, 70), (2, 300)])
def test_silu_mul(emulator: Start, short: str, num_tokens: int, vectors: int) -> None:
    random = np.random.default_rng(vectors)
    width = vectors * vector(short)
    gate_up = random_array(random, (num_tokens, 2 * width), short, 4)
    # exp(-g) overflows, or vanishes.
    gate_up[:, :4] = np.array([-100, 100, 0, -20], np.float32).astype(gate_up.dtype)
    gpu = emulator()
    y = gpu.result((num_tokens, width), gate_up.dtype)
    threads = 64
    grid = (-(-vectors // threads), num_tokens)
    gpu.launch(f"silu_mul<{short}>", grid, threads, y, gate_up, width)
    assert gpu.written(y)
    assert_close(y, oracles.silu_mul(gate_up), short)


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("kernel", ["embedding", "take_rows"])
@pytest.mark.parametrize(("indices", "vectors"), [([4], 1), ([0, 6, 6, 2], 70)])
def test_rows_by_index(
    emulator: Start, short: str, kernel: str, indices: list[int], vectors: int
) -> None:
    width = vectors * vector(short)
    table = random_array(np.random.default_rng(0), (7, width), short)
    rows = np.array(indices, np.int32)
    gpu = emulator()
    for row in set(range(7)) - set(indices):
        gpu.forbid(table[row])
    y = gpu.result((len(rows), width), table.dtype)
    gpu.launch(f"{kernel}<{short}>", (-(-vectors // 32), len(rows)), 32, y, table, rows, width)
    assert gpu.written(y)
    np.testing.assert_array_equal(y, table[rows])


@pytest.mark.parametrize("short", SHORT)
def test_broadcast_row(emulator: Start, short: str) -> None:
    width = 33 * vector(short)
    row = random_array(np.random.default_rng(0), (width,), short)
    gpu = emulator()
    y = gpu.result((3, width), row.dtype)
    gpu.launch(f"broadcast_row<{short}>", (2, 3), 32, y, row, width)
    assert gpu.written(y)
    np.testing.assert_array_equal(y, np.tile(row, (3, 1)))


@pytest.mark.parametrize("num_tokens", [1, 64, 70])
def test_gather_tokens_replaces_those_with_a_source(emulator: Start, num_tokens: int) -> None:
    random = np.random.default_rng(num_tokens)
    tokens = random.integers(0, 1000, num_tokens).astype(np.int32)
    sampled = random.integers(1000, 2000, 9).astype(np.int32)
    sources = random.integers(-1, 9, num_tokens).astype(np.int32)
    expected = np.where(sources >= 0, sampled[sources], tokens)
    gpu = emulator()
    gpu.updated(tokens, "tokens")
    gpu.launch("gather_tokens", (-(-num_tokens // 64),), 64, tokens, sampled, sources, num_tokens)
    np.testing.assert_array_equal(tokens, expected)


def rotate_into_cache(
    gpu: Emulator, short: str, heads: int, kv_heads: int, dim: int, size: int
) -> None:
    """Five tokens in a cache of four blocks; nothing but their slots may be touched."""
    random = np.random.default_rng(dim + size)
    positions = np.array([0, 7, 19, 3, 11], np.int32)
    slots = np.array([2 * size + 1, size - 1, -1, 0, 3 * size + size // 2], np.int64)
    qkv = random_array(random, (5, (heads + 2 * kv_heads) * dim), short)
    angles = random.uniform(0, 2 * np.pi, (20, dim // 2))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    cache = gpu.result((2, 4, kv_heads, size, dim), qkv.dtype, "cache")
    owned = {divmod(int(slot), size) for slot in slots if slot >= 0}
    for part, block, head, offset in np.ndindex(cache.shape[:4]):
        if (block, offset) not in owned:
            gpu.forbid(cache[part, block, head, offset])
    q_out = gpu.result((5, heads * dim), qkv.dtype)
    gpu.launch(
        f"rotary_cache<{short}, {dim}>", (5,), 64,
        q_out, qkv, cos_sin, cache, positions, slots, heads, kv_heads, 4, size,
    )  # fmt: skip
    split = qkv.reshape(5, -1, dim)
    cos, sin = np.split(cos_sin[positions], 2, axis=1)
    turned = oracles.rotate(split[:, : heads + kv_heads], cos, sin)
    assert gpu.written(q_out)
    assert_close(q_out.reshape(5, heads, dim), turned[:, :heads], short, np.abs(split).max())
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        key, value = cache[:, slot // size, :, slot % size]
        assert_close(key, turned[token, heads:], short, np.abs(split).max())
        np.testing.assert_array_equal(value, split[token, heads + kv_heads :])


@pytest.mark.parametrize(
    ("short", "heads", "kv_heads", "dim", "size"),
    [
        ("fp32", 4, 4, 16, 16),
        ("fp16", 3, 1, 32, 8),
        ("bf16", 8, 1, 64, 32),
        ("bf16", 4, 2, 80, 16),
    ],
)
def test_rotary_cache_turns_q_and_k_and_writes_only_its_slots(
    emulator: Start, short: str, heads: int, kv_heads: int, dim: int, size: int
) -> None:
    rotate_into_cache(emulator(), short, heads, kv_heads, dim, size)


@pytest.mark.accept
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_rotary_cache_in_every_variant(emulator: Start, short: str, dim: int, size: int) -> None:
    rotate_into_cache(emulator(), short, 6, 2, dim, size)


def test_rotary_cache_outside_the_cache_is_caught(emulator: Start) -> None:
    gpu = emulator()
    cache = gpu.result((2, 4, 1, 16, 16), np.float32, "cache")
    qkv = np.ones((1, 3 * 16), np.float32)
    slot = np.array([-(4 * 16 + 1)], np.int64) + 2 * 4 * 16 + 2 * 4 * 16
    with pytest.raises(KernelFault, match=r"rotary_cache\.cu|common\.cuh"):
        gpu.launch(
            "rotary_cache<fp32, 16>", (1,), 64, gpu.result((1, 16), np.float32), qkv,
            np.ones((1, 16), np.float32), cache, np.zeros(1, np.int32), slot, 1, 1, 4, 16,
        )  # fmt: skip


def blocks_of_uint4(random: np.random.Generator, layers: int, blocks: int, vectors: int) -> Array:
    return random.integers(0, 2**32, (layers * 2, blocks, vectors, 4), dtype=np.uint32)


@pytest.mark.parametrize("vectors", [2, 64, 300])
def test_copy_blocks_copies_in_all_layers_and_touches_no_other_block(
    emulator: Start, vectors: int
) -> None:
    random = np.random.default_rng(vectors)
    cache = blocks_of_uint4(random, 3, 9, vectors)
    pairs = np.array([[4, 1], [4, 7], [0, 8]], np.int32)
    expected = cache.copy()
    expected[:, pairs[:, 1]] = cache[:, pairs[:, 0]]
    gpu = emulator()
    gpu.updated(cache, "cache")
    for layer in range(6):
        for block in (2, 3, 5, 6):
            gpu.forbid(cache[layer, block])
    gpu.launch("copy_blocks", (3, 6), 64, cache, pairs, 9, vectors)
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("to_host", [True, False])
def test_swap_blocks_between_caches_of_different_size(emulator: Start, to_host: bool) -> None:
    random = np.random.default_rng(0)
    sizes = (9, 4) if to_host else (4, 9)
    source, target = (blocks_of_uint4(random, 2, size, 70) for size in sizes)
    pairs = np.array([[3, 0], [1, 2]], np.int32)
    expected = target.copy()
    expected[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    gpu = emulator()
    gpu.updated(target, "target")
    gpu.launch("swap_blocks", (2, 4), 64, target, source, pairs, sizes[1], sizes[0], 70)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("kernel", ["rms_norm", "add_rms_norm"])
def test_a_row_shorter_than_the_block_of_threads(emulator: Start, kernel: str) -> None:
    """Threads without a vector still take part in the sum."""
    x, weight = np.full((1, 8), 3, np.float32), np.full(8, 2, np.float32)
    gpu = emulator(FORWARD)
    y = gpu.result((1, 8), np.float32)
    residual = [gpu.updated(np.zeros((1, 8), np.float32), "residual")]
    rest = residual if kernel == "add_rms_norm" else []
    gpu.launch(f"{kernel}<fp32>", (1,), 1024, y, x, *rest, weight, 8, 0.0)
    np.testing.assert_allclose(y, 2, rtol=1e-6)

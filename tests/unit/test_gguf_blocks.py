"""Blocks of every format as codes and scales, against the gguf package's dequantizers."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from cuengine.model.gguf_blocks import BLOCK_FORMATS

Type = GGMLQuantizationType
BITS_AND_GROUP = {
    Type.Q4_0: (4, 32),
    Type.Q4_1: (4, 32),
    Type.Q5_0: (8, 32),
    Type.Q5_1: (8, 32),
    Type.Q8_0: (8, 32),
    Type.Q2_K: (4, 16),
    Type.Q3_K: (4, 16),
    Type.Q4_K: (4, 32),
    Type.Q5_K: (8, 32),
    Type.Q6_K: (8, 16),
    Type.IQ4_NL: (8, 32),
    Type.IQ4_XS: (8, 32),
}
# Where a block has its scales in half precision.
HALVES = {
    Type.Q4_1: (0, 2),
    Type.Q5_1: (0, 2),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}
# Zeros, the smallest and largest subnormals, odd mantissas, the largest finite number, both signs.
FINITE = [0.0, -0.0, 6e-8, 6.1e-5, -6.1e-5, 1.999, -1.999, 0.0123, 65504.0, -65504.0]

every_type = pytest.mark.parametrize("kind", BITS_AND_GROUP, ids=lambda kind: kind.name)


def random_rows(
    kind: Type, num_rows: int, num_blocks: int, scales: list[float]
) -> NDArray[np.uint8]:
    """Random codes and group scales, with half-precision scales from a list."""
    random = np.random.default_rng(kind.value)
    size = GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (num_rows * num_blocks, size), np.uint8)
    for start in HALVES.get(kind, (0,)):
        halves = random.choice(np.array(scales, np.float16), len(blocks))
        blocks[:, start : start + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(num_rows, num_blocks * size)


def expected(rows: NDArray[np.uint8], kind: Type) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        numbers: NDArray[np.float32] = dequantize(rows, kind)
    return numbers


def test_the_types_are_those_that_have_a_format() -> None:
    assert {kind.value for kind in BITS_AND_GROUP} == set(BLOCK_FORMATS)


@every_type
def test_numbers_are_those_of_the_gguf_package_to_the_bit(kind: Type) -> None:
    every_half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for scales in (FINITE, every_half[np.isfinite(every_half)].tolist()):
        rows = random_rows(kind, 64, 8, scales)
        matrix = BLOCK_FORMATS[kind].matrix(rows)
        np.testing.assert_array_equal(matrix.dequantize(), expected(rows, kind))


@every_type
def test_a_fused_multiply_add_makes_the_same_numbers(kind: Type) -> None:
    """scale * code is exact in float32: the product in float64, which holds any, is that one."""
    every_half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    rows = random_rows(kind, 64, 8, every_half[np.isfinite(every_half)].tolist())
    matrix = BLOCK_FORMATS[kind].matrix(rows)
    codes = matrix.unpacked_codes().astype(np.float32)
    scales = np.repeat(matrix.scales, matrix.group, axis=1)
    np.testing.assert_array_equal(codes * scales, codes.astype(np.float64) * scales)


@every_type
def test_scales_that_are_no_numbers_give_no_numbers(kind: Type) -> None:
    rows = random_rows(kind, 16, 4, [np.inf, -np.inf, np.nan, 1.0])
    with np.errstate(all="ignore"):
        got = BLOCK_FORMATS[kind].matrix(rows).dequantize()
    numbers = expected(rows, kind)
    finite = np.isfinite(numbers)
    assert 0 < finite.sum() < finite.size
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(got[finite], numbers[finite])


@every_type
def test_a_format_says_how_wide_its_codes_and_groups_are(kind: Type) -> None:
    block = BLOCK_FORMATS[kind]
    items, block_bytes = GGML_QUANT_SIZES[kind]
    assert block.num_bytes == block_bytes
    matrix = block.matrix(random_rows(kind, 3, 2, [0.5]))
    assert (matrix.out_features, matrix.in_features) == (3, 2 * items)
    assert (matrix.bits, matrix.group) == (block.bits, block.group) == BITS_AND_GROUP[kind]
    assert matrix.num_bytes == 6 * items * (block.bits / 8 + 8 / block.group)

"""Weights of 4 and 8 bits: what codes stand for, however they are packed."""

from __future__ import annotations

import numpy as np
import pytest
from quantized_matrices import random_quantized

from cuengine.quantized import Bits

FORMATS: list[tuple[Bits, int]] = [(4, 32), (4, 16), (8, 32), (8, 16)]


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_numbers_are_scale_times_code_plus_offset_rounded_once(bits: Bits, group: int) -> None:
    matrix, expected = random_quantized(7, 64, bits=bits, group=group)
    assert (matrix.bits, matrix.group) == (bits, group)
    assert (matrix.out_features, matrix.in_features) == (7, 64)
    np.testing.assert_array_equal(matrix.dequantize(), expected.astype(np.float32))
    assert matrix.num_bytes == 7 * 64 * bits // 8 + 2 * 4 * 7 * 64 // group


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_rows_are_taken_in_place(bits: Bits, group: int) -> None:
    matrix, expected = random_quantized(9, 32, bits=bits, group=group)
    part = matrix.rows(2, 5)
    assert np.shares_memory(part.codes, matrix.codes)
    np.testing.assert_array_equal(part.dequantize(), expected[2:5].astype(np.float32))


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_widened_matrix_has_the_same_numbers(bits: Bits, group: int) -> None:
    matrix, expected = random_quantized(3, 64, bits=bits, group=group)
    wide = matrix.widened(8, 16)
    assert (wide.bits, wide.group) == (8, 16)
    np.testing.assert_array_equal(wide.dequantize(), expected.astype(np.float32))
    assert matrix.widened(bits, group) is matrix

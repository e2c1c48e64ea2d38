"""Products with packed weights, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from quantized_matrices import random_quantized

from cuengine.quantized import Bits

products = pytest.importorskip("cuengine.device.products", reason="needs numba")
packed = pytest.importorskip("cuengine.device.packed")


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def product(x: np.ndarray, matrix: Any) -> np.ndarray:
    out = np.full((len(x), matrix.out_features), np.nan, np.float32)
    products.linear(x, matrix, out)
    return out


@pytest.mark.parametrize("out_features", [1, 7, packed.PANEL, packed.PANEL + 1, 5 * packed.PANEL])
@pytest.mark.parametrize("in_features", [1, 5, 16, 67])
def test_products_agree_with_float64_for_every_number_of_rows_a_tile_can_have(
    out_features: int, in_features: int
) -> None:
    weight = normal(out_features, in_features)
    matrix = packed.pack(weight, packed.Arena())
    for num_rows in range(2 * products.ROWS + 2):
        x = normal(num_rows, in_features)
        expected = x.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(product(x, matrix), expected, rtol=1e-5, atol=1e-5)


def test_a_row_of_the_result_does_not_depend_on_how_many_others_there_are() -> None:
    matrix, x = packed.pack(normal(96, 64), packed.Arena()), normal(50, 64)
    whole = product(x, matrix)
    for num_rows in (1, 2, 7, 12, 13, 49):
        np.testing.assert_array_equal(product(x[:num_rows], matrix), whole[:num_rows])


def test_an_input_that_is_a_view_is_multiplied_as_what_it_shows() -> None:
    weight, wide = normal(33, 20), normal(9, 40)
    expected = product(np.ascontiguousarray(wide[:, ::2]), packed.pack(weight, packed.Arena()))
    np.testing.assert_array_equal(
        product(wide[:, ::2], packed.pack(weight, packed.Arena())), expected
    )


def test_rows_of_a_packed_weight_are_those_that_were_packed() -> None:
    weight = normal(packed.PANEL + 3, 10)
    ids = np.array([packed.PANEL + 2, 0, packed.PANEL, 0], np.int32)
    np.testing.assert_array_equal(packed.pack(weight, packed.Arena()).rows(ids), weight[ids])


def test_an_arena_gives_aligned_memory_that_nobody_else_has() -> None:
    arena = packed.Arena()
    taken = [arena.floats(size) for size in (1, 17, 20_000_000, 5)] + [arena.bytes(3, 5)]
    for number, array in enumerate(taken):
        assert array.ctypes.data % 64 == 0
        array[:] = number
    assert [(array.min(), array.max()) for array in taken] == [(n, n) for n in range(5)]
    assert taken[-1].shape == (3, 5)


# 4 and 8 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_features", [1, 7, packed.PANEL, packed.PANEL + 1, 5 * packed.PANEL])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 16), (4, 4), (8, 32), (8, 16), (8, 4)])
def test_products_with_codes_are_those_with_their_numbers_to_the_last_bit(
    out_features: int, bits: Bits, group: int
) -> None:
    """However many rows there are: few are multiplied with codes, many with an unpacked panel."""
    weight, numbers = random_quantized(out_features, 96, bits=bits, group=group)
    narrow = packed.pack_narrow(weight, packed.Arena())
    wide = packed.pack(numbers.astype(np.float32), packed.Arena())
    for num_rows in range(3 * products.ROWS + 2):
        x = normal(num_rows, 96)
        np.testing.assert_array_equal(product(x, narrow), product(x, wide))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_and_products_of_codes_without_numba_are_those_of_their_numbers(bits: Bits) -> None:
    weight, numbers = random_quantized(packed.PANEL + 3, 32, bits=bits, group=16)
    narrow, expected = packed.pack_narrow(weight, packed.Arena()), numbers.astype(np.float32)
    ids = np.array([packed.PANEL + 2, 0, packed.PANEL - 1, packed.PANEL, 0, 8], np.int32)
    np.testing.assert_array_equal(narrow.rows(ids), expected[ids])
    x, out = normal(5, 32), np.empty((5, packed.PANEL + 3), np.float32)
    narrow.multiply(x, out)
    np.testing.assert_allclose(out, x.astype(float) @ numbers.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_laid_out_part_by_part(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, numbers = random_quantized(5 * packed.PANEL + 3, 32, bits=bits, group=16)
    monkeypatch.setattr(packed, "_CODES_AT_ONCE", 2 * packed.PANEL * weight.codes.shape[1])
    narrow = packed.pack_narrow(weight, packed.Arena())
    ids = np.arange(weight.out_features, dtype=np.int32)
    np.testing.assert_array_equal(narrow.rows(ids), numbers.astype(np.float32))


def test_codes_take_as_many_bits_as_they_have() -> None:
    weight, _ = random_quantized(2 * packed.PANEL, 64, bits=4, group=32)
    narrow = packed.pack_narrow(weight, packed.Arena())
    assert narrow.nbytes == weight.num_bytes

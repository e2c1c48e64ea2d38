"""Products with packed weights, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    taken = [arena.take(size) for size in (1, 17, 20_000_000, 5)]
    for number, array in enumerate(taken):
        assert array.ctypes.data % 64 == 0
        array[:] = number
    assert [(array.min(), array.max()) for array in taken] == [(n, n) for n in range(4)]

"""Matrix products with packed weights, in Numba: y = x @ w.T for float32 x, w of float32 or codes.

One thread computes whole panels; a panel stays in its L2 cache while tile after tile of rows of x
goes over it, and the next one is fetched meanwhile. A tile, up to ROWS rows of x times one panel,
is written as LLVM IR, so that its sums stay in registers (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, prange, types

from cuengine.batch import Float32
from cuengine.device.llvm import (
    I32,
    I64,
    LANES,
    VECTOR,
    WIDE,
    ZERO,
    at,
    broadcast,
    fma,
    load,
    loop,
    prefetch,
    store,
    switch_rows,
)
from cuengine.device.numba_setup import intrinsic, njit
from cuengine.device.packed import LINE, PANEL, VECTORS, NarrowMatrix, PackedMatrix
from cuengine.quantized import GROUP_MULTIPLE, UInt8

ROWS = 12 if WIDE else 6
"""ROWS * VECTORS sums, VECTORS of w and one of x: 27 of AVX-512's 32 registers, 15 of AVX2's 16."""

_UNROLL = GROUP_MULTIPLE
_FEW_ROWS = ROWS * 2 // 3
"""Up to so many, codes are multiplied as they are read; for more, a panel is unpacked first."""
_LINES_AHEAD = _UNROLL * PANEL * 4 // LINE // 4
"""Cache lines of the next panel fetched per unrolled step: a tile fetches at most a quarter."""


Weights = Callable[[Any, Any], list[Any]]
"""Emits the load of column k of a panel, as VECTORS vectors, from (builder, k)."""


def _panel_weights(panel: Any) -> Weights:
    """Of a panel float32 [depth, PANEL] at that address."""

    def weights(builder: Any, k: Any) -> list[Any]:
        start = at(builder, panel, builder.mul(k, I64(PANEL)))
        return [
            load(builder, at(builder, start, I64(vector * LANES)), align=LINE)
            for vector in range(VECTORS)
        ]

    return weights


def _group_weights(builder: Any, bits: int, groups: Any, index: Any, group: Any) -> Weights:
    """Of a group's columns, k counted from its first. groups: a panel's, as NarrowMatrix has it."""
    group_bytes = builder.add(I64(8 * PANEL), builder.mul(group, I64(PANEL * bits // 8)))
    record = builder.add(groups, builder.mul(index, group_bytes))
    few, wide = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(I32, LANES)
    scales, offsets = (
        [
            load(builder, at(builder, record, I64(first + LANES * vector)), align=4 * LANES)
            for vector in range(VECTORS)
        ]
        for first in (0, PANEL)
    )
    codes = at(builder, record, I64(2 * PANEL))

    def weights(builder: Any, k: Any) -> list[Any]:
        start = builder.add(codes, builder.mul(k, I64(PANEL * bits // 8)))
        loaded = [
            builder.zext(load(builder, builder.add(start, I64(LANES * i)), few, align=LANES), wide)
            for i in range(VECTORS * bits // 8)
        ]
        if bits == 4:
            (both,) = loaded
            loaded = [
                builder.and_(both, ir.Constant(wide, [15] * LANES)),
                builder.lshr(both, ir.Constant(wide, [4] * LANES)),
            ]
        return [
            fma(builder, builder.sitofp(code, VECTOR), scale, offset)
            for code, scale, offset in zip(loaded, scales, offsets, strict=True)
        ]

    return weights


def _add_products(
    builder: Any, x_rows: list[Any], k: Any, column: list[Any], sums: list[Any]
) -> list[Any]:
    """The sums with a column's products, of x at k and the column's vectors."""
    added = []
    for row, x_row in enumerate(x_rows):
        value = broadcast(builder, at(builder, x_row, k))
        for vector in range(VECTORS):
            added.append(fma(builder, value, column[vector], sums[row * VECTORS + vector]))
    return added


def _rows_at(builder: Any, x: Any, depth: Any, count: int) -> list[Any]:
    return [at(builder, x, builder.mul(depth, I64(row))) for row in range(count)]


def _store_sums(builder: Any, sums: list[Any], out: Any, width: Any) -> None:
    for index, total in enumerate(sums):
        row, vector = divmod(index, VECTORS)
        position = builder.add(builder.mul(width, I64(row)), I64(vector * LANES))
        store(builder, total, at(builder, out, position))


@intrinsic
def _tile(
    typing: Any,
    rows: Any,
    x: Any,
    depth: Any,
    panel: Any,
    out: Any,
    width: Any,
    ahead: Any,
    pace: Any,
) -> tuple[Any, Any]:
    """out[r, :PANEL] = sum over k of x[r, k] * panel[k, :PANEL], for r < rows <= ROWS.

    x, panel, out are addresses; x has `depth` floats a row, out `width`. `depth * pace` bytes are
    prefetched from the address `ahead`; pace is at most PANEL.
    """

    def emit_rows(builder: Any, count: int, arguments: list[Any]) -> None:
        x, depth, panel, out, width, ahead, pace = arguments
        x_rows, weights = _rows_at(builder, x, depth, count), _panel_weights(panel)
        unrolled = builder.and_(depth, I64(-_UNROLL))

        def add_products(k: Any, sums: list[Any]) -> list[Any]:
            return _add_products(builder, x_rows, k, weights(builder, k), sums)

        def add_unrolled(k: Any, sums: list[Any]) -> list[Any]:
            line = builder.add(ahead, builder.mul(k, pace))
            for number in range(_LINES_AHEAD):
                prefetch(builder, builder.add(line, I64(number * LINE)))
            for step in range(_UNROLL):
                sums = add_products(builder.add(k, I64(step)), sums)
            return sums

        sums = [ZERO] * (count * VECTORS)
        sums = loop(builder, I64(0), unrolled, _UNROLL, sums, add_unrolled)
        sums = loop(builder, unrolled, depth, 1, sums, add_products)
        _store_sums(builder, sums, out, width)

    return types.void(*[types.intp] * 8), switch_rows(ROWS, emit_rows)


def _narrow_tile(bits: int) -> Any:
    """The same for a panel of codes, which become floats in registers; for few rows."""

    @intrinsic
    def tile(
        typing: Any,
        rows: Any,
        x: Any,
        groups: Any,
        num_groups: Any,
        group: Any,
        out: Any,
        width: Any,
    ) -> tuple[Any, Any]:
        def emit_rows(builder: Any, count: int, arguments: list[Any]) -> None:
            x, groups, num_groups, group, out, width = arguments
            x_rows = _rows_at(builder, x, builder.mul(num_groups, group), count)

            def add_group(index: Any, sums: list[Any]) -> list[Any]:
                weights = _group_weights(builder, bits, groups, index, group)
                first = builder.mul(index, group)

                def add_unrolled(k: Any, sums: list[Any]) -> list[Any]:
                    for step in range(_UNROLL):
                        here = builder.add(k, I64(step))
                        place, column = builder.add(first, here), weights(builder, here)
                        sums = _add_products(builder, x_rows, place, column, sums)
                    return sums

                return loop(builder, I64(0), group, _UNROLL, sums, add_unrolled)

            sums = [ZERO] * (count * VECTORS)
            sums = loop(builder, I64(0), num_groups, 1, sums, add_group)
            _store_sums(builder, sums, out, width)

        return types.void(*[types.intp] * 7), switch_rows(_FEW_ROWS, emit_rows)

    return tile


def _unpack(bits: int) -> Any:
    """(groups, num_groups, group, panel): the panel float32 [depth, PANEL] of codes."""

    @intrinsic
    def unpack(
        typing: Any, groups: Any, num_groups: Any, group: Any, panel: Any
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            groups, num_groups, group, panel = arguments

            def unpack_group(index: Any, none: list[Any]) -> list[Any]:
                weights = _group_weights(builder, bits, groups, index, group)
                first = builder.mul(index, group)

                def unpack_unrolled(k: Any, none: list[Any]) -> list[Any]:
                    for step in range(_UNROLL):
                        here = builder.add(k, I64(step))
                        place = builder.mul(builder.add(first, here), I64(PANEL))
                        for vector, numbers in enumerate(weights(builder, here)):
                            to = builder.add(place, I64(vector * LANES))
                            store(builder, numbers, at(builder, panel, to))
                    return none

                return loop(builder, I64(0), group, _UNROLL, none, unpack_unrolled)

            loop(builder, I64(0), num_groups, 1, [], unpack_group)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), emit

    return unpack


_tile_4, _tile_8 = _narrow_tile(4), _narrow_tile(8)
_unpack_4, _unpack_8 = _unpack(4), _unpack(8)


@njit("void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1])", parallel=True, cache=True)
def _linear(x: Float32, panels: Float32, out: Float32) -> None:
    """out may be wider than the panels, but not narrower: a second call of _tile here, for a part
    of a panel, would make the first one slower by a twentieth."""
    num_rows, depth = x.shape
    width = out.shape[1]
    # Rows are spread evenly over the tiles: 13 rows are 7 and 6, not 12 and 1.
    num_tiles = (num_rows + ROWS - 1) // ROWS
    # The next panel is fetched evenly over the tiles: asked for in a burst, it holds up the others.
    pace = (4 * PANEL + num_tiles - 1) // max(4, num_tiles)
    for panel in prange(panels.shape[0]):
        column = panel * PANEL
        for index in range(num_tiles):
            row = index * num_rows // num_tiles
            rows = (index + 1) * num_rows // num_tiles - row
            x_at = x.ctypes.data + 4 * row * depth
            panel_at = panels.ctypes.data + 4 * column * depth
            ahead = panel_at + (4 * PANEL + index * pace) * depth
            out_at = out.ctypes.data + 4 * (row * width + column)
            _tile(rows, x_at, depth, panel_at, out_at, width, ahead, pace)


@njit(
    "void(float32[:, ::1], uint8[:, :, ::1], int64, int64, float32[:, ::1], int64)",
    parallel=True,
    cache=True,
)
def _linear_narrow(
    x: Float32, groups: UInt8, bits: int, group: int, out: Float32, num_threads: int
) -> None:
    """out may be wider than the panels, but not narrower. Sums are those of `_linear` with the
    numbers that the codes stand for, to the last bit."""
    num_rows, depth = x.shape
    width = out.shape[1]
    num_panels, num_groups, group_bytes = groups.shape
    panel_bytes = num_groups * group_bytes
    num_tiles = (num_rows + ROWS - 1) // ROWS
    pace = (panel_bytes // depth + num_tiles - 1) // max(1, num_tiles)
    for thread in prange(num_threads):
        floats = np.empty(depth * PANEL + LINE, np.float32)
        floats_at = (floats.ctypes.data + LINE - 1) // LINE * LINE
        end = (thread + 1) * num_panels // num_threads
        for panel in range(thread * num_panels // num_threads, end):
            groups_at = groups.ctypes.data + panel * panel_bytes
            out_at = out.ctypes.data + 4 * PANEL * panel
            if num_rows <= _FEW_ROWS:
                if bits == 8:
                    _tile_8(num_rows, x.ctypes.data, groups_at, num_groups, group, out_at, width)
                else:
                    _tile_4(num_rows, x.ctypes.data, groups_at, num_groups, group, out_at, width)
                continue
            if bits == 8:
                _unpack_8(groups_at, num_groups, group, floats_at)
            else:
                _unpack_4(groups_at, num_groups, group, floats_at)
            for index in range(num_tiles):
                row = index * num_rows // num_tiles
                rows = (index + 1) * num_rows // num_tiles - row
                x_at = x.ctypes.data + 4 * row * depth
                ahead = groups_at + panel_bytes + index * pace * depth
                _tile(rows, x_at, depth, floats_at, out_at + 4 * row * width, width, ahead, pace)
        floats[0] = 0  # Numba frees an array behind its last use, and an address is none.


def linear(x: Float32, weight: PackedMatrix | NarrowMatrix, out: Float32) -> None:
    """x float32 [num_rows, in_features] @ weight.T -> out float32 [num_rows, out_features]."""
    x = np.ascontiguousarray(x)
    whole, rest = divmod(weight.out_features, PANEL)
    _panels(x, weight, slice(whole), out)
    if rest:
        last = np.empty((len(x), PANEL), np.float32)
        _panels(x, weight, slice(whole, None), last)
        out[:, whole * PANEL :] = last[:, :rest]


def _panels(x: Float32, weight: PackedMatrix | NarrowMatrix, part: slice, out: Float32) -> None:
    """The product with some of the panels."""
    if isinstance(weight, PackedMatrix):
        _linear(x, weight.panels[part], out)
    else:
        groups = weight.groups[part]
        _linear_narrow(x, groups, weight.bits, weight.group, out, get_num_threads())

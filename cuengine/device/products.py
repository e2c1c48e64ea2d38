"""Matrix products with packed weights, in Numba: y = x @ w.T for float32 x and w.

One thread computes whole panels; a panel stays in its L2 cache while tile after tile of rows of x
goes over it, and the next one is fetched meanwhile. A tile, up to ROWS rows of x times one panel,
is written as LLVM IR, so that its sums stay in registers (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types

from cuengine.batch import Float32
from cuengine.device.llvm import (
    I64,
    LANES,
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
from cuengine.device.packed import LINE, PANEL, VECTORS, PackedMatrix

ROWS = 12 if WIDE else 6
"""ROWS * VECTORS sums, VECTORS of w and one of x: 27 of AVX-512's 32 registers, 15 of AVX2's 16."""

_UNROLL = 4
_LINES_AHEAD = _UNROLL * PANEL * 4 // LINE // 4
"""Cache lines of the next panel fetched per unrolled step: a tile fetches at most a quarter."""


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
        x_rows = [at(builder, x, builder.mul(depth, I64(row))) for row in range(count)]
        unrolled = builder.and_(depth, I64(-_UNROLL))

        def add_products(k: Any, sums: list[Any]) -> list[Any]:
            start = at(builder, panel, builder.mul(k, I64(PANEL)))
            weights = [
                load(builder, at(builder, start, I64(vector * LANES)), align=LINE)
                for vector in range(VECTORS)
            ]
            added = []
            for row in range(count):
                value = broadcast(builder, at(builder, x_rows[row], k))
                for vector in range(VECTORS):
                    total = sums[row * VECTORS + vector]
                    added.append(fma(builder, value, weights[vector], total))
            return added

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
        for index, total in enumerate(sums):
            row, vector = divmod(index, VECTORS)
            position = builder.add(builder.mul(width, I64(row)), I64(vector * LANES))
            store(builder, total, at(builder, out, position))

    return types.void(*[types.intp] * 8), switch_rows(ROWS, emit_rows)


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


def linear(x: Float32, weight: PackedMatrix, out: Float32) -> None:
    """x float32 [num_rows, in_features] @ weight.T -> out float32 [num_rows, out_features]."""
    x = np.ascontiguousarray(x)
    whole, rest = divmod(weight.out_features, PANEL)
    _linear(x, weight.panels[:whole], out)
    if rest:
        last = np.empty((len(x), PANEL), np.float32)
        _linear(x, weight.panels[whole:], last)
        out[:, whole * PANEL :] = last[:, :rest]

"""Matrix products with weights laid out for them, in Numba: y = x @ w.T for float32 x and w.

BLAS repacks its operands in every call, which at the few rows of a decode step costs as much as the
product itself, and it has no good kernel for 2 to 16 rows. Weights don't change, so they are packed
once: PANEL rows of w side by side, as [ceil(out / PANEL), in, PANEL]. One thread computes whole
panels; a panel stays in its L2 cache while tile after tile of rows of x goes over it, and the next
one is fetched meanwhile.

A tile, up to ROWS rows of x times one panel, is written as LLVM IR, so that its sums stay in
registers (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange, types

from cuengine.batch import Float32, Int32
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

ROWS = 12 if WIDE else 6
VECTORS = 2
PANEL = LANES * VECTORS
"""ROWS * VECTORS sums, VECTORS of w and one of x: 27 of AVX-512's 32 registers, 15 of AVX2's 16."""

_UNROLL = 4
_LINE = 64
"""Bytes of a cache line, and the alignment of panels."""
_LINES_AHEAD = _UNROLL * PANEL * 4 // _LINE // 4
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
                load(builder, at(builder, start, I64(vector * LANES)), align=_LINE)
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
                prefetch(builder, builder.add(line, I64(number * _LINE)))
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


@njit("void(float32[:, ::1], float32[:, :, ::1])", parallel=True, cache=True)
def _pack(weight: Float32, panels: Float32) -> None:
    out_features, in_features = weight.shape
    for panel in prange(panels.shape[0]):
        first = panel * PANEL
        used = min(PANEL, out_features - first)
        panels[panel, :, used:] = 0
        # A cache line of each row at a time: LANES floats are one.
        for start in range(0, in_features, LANES):
            for column in range(used):
                for k in range(start, min(start + LANES, in_features)):
                    panels[panel, k, column] = weight[first + column, k]


@njit("void(float32[:, ::1], float32[:, :, ::1], float32[:, ::1])", parallel=True, cache=True)
def _linear(x: Float32, panels: Float32, out: Float32) -> None:
    num_rows, depth = x.shape
    width = out.shape[1]
    # Rows are spread evenly over the tiles: 13 rows are 7 and 6, not 12 and 1.
    num_tiles = (num_rows + ROWS - 1) // ROWS
    # The next panel is fetched evenly over the tiles: asked for in a burst, it holds up the others.
    pace = 4 * PANEL // max(4, num_tiles)
    for panel in prange(panels.shape[0]):
        column = panel * PANEL
        for index in range(num_tiles):
            row = index * num_rows // num_tiles
            rows = (index + 1) * num_rows // num_tiles - row
            x_at = x.ctypes.data + 4 * row * depth
            panel_at = panels.ctypes.data + 4 * column * depth
            ahead = panel_at + (4 * PANEL + index * pace) * depth
            if column + PANEL <= width:
                out_at = out.ctypes.data + 4 * (row * width + column)
                _tile(rows, x_at, depth, panel_at, out_at, width, ahead, pace)
            else:
                part = np.empty((ROWS, PANEL), np.float32)
                _tile(rows, x_at, depth, panel_at, part.ctypes.data, PANEL, ahead, pace)
                out[row : row + rows, column:] = part[:rows, : width - column]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [out_features, in_features].

    panels  float32 [ceil(out_features / PANEL), in_features, PANEL], the last one padded with 0
    """

    panels: Float32
    out_features: int

    def rows(self, ids: Int32) -> Float32:
        """float32 [len(ids), in_features]: rows of the weight, as an embedding takes them."""
        gathered: Float32 = self.panels[ids // PANEL, :, ids % PANEL]
        return gathered


class Arena:
    """Memory for panels, taken from the kernel in large pieces that may lie in huge pages.

    A product reads every weight once; with pages of 4 KB, looking up addresses slows it by a tenth
    at 37 rows and by a third at one.
    """

    _PIECE = 64 << 20

    def __init__(self) -> None:
        self._free: memoryview[int] = memoryview(b"")

    def take(self, num_floats: int) -> Float32:
        """float32 [num_floats], aligned to cache lines."""
        size = -(-4 * num_floats // _LINE) * _LINE
        if size > len(self._free):
            piece = mmap.mmap(-1, max(size, self._PIECE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    piece.madvise(mmap.MADV_HUGEPAGE)
            self._free = memoryview(piece)
        taken, self._free = self._free[:size], self._free[size:]
        return np.frombuffer(taken, np.float32, num_floats)


def pack(weight: Float32, arena: Arena) -> PackedMatrix:
    """Lay out a weight float32 [out_features, in_features]; a copy of the same size."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    panels = arena.take(num_panels * in_features * PANEL).reshape(num_panels, in_features, PANEL)
    _pack(np.ascontiguousarray(weight), panels)
    return PackedMatrix(panels, out_features)


def linear(x: Float32, weight: PackedMatrix, out: Float32) -> None:
    """x float32 [num_rows, in_features] @ weight.T -> out float32 [num_rows, out_features]."""
    _linear(np.ascontiguousarray(x), weight.panels, out)

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
from llvmlite import binding, ir
from numba import prange, types

from cuengine.batch import Float32, Int32
from cuengine.device.numba_setup import declare, intrinsic, njit

_WIDE = binding.get_host_cpu_features().get("avx512f", False)
LANES = 16 if _WIDE else 8
ROWS = 12 if _WIDE else 6
VECTORS = 2
PANEL = LANES * VECTORS
"""ROWS * VECTORS sums, VECTORS of w and one of x: 27 of AVX-512's 32 registers, 15 of AVX2's 16."""

_UNROLL = 4
_LINE = 64
"""Bytes of a cache line, and the alignment of panels."""
_LINES_AHEAD = _UNROLL * PANEL * 4 // _LINE // 4
"""Cache lines of the next panel fetched per unrolled step: a quarter of a panel in every tile."""

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)


@intrinsic
def _tile(
    typing: Any, rows: Any, x: Any, depth: Any, panel: Any, out: Any, width: Any, ahead: Any
) -> tuple[Any, Any]:
    """out[r, :PANEL] = sum over k of x[r, k] * panel[k, :PANEL], for r < rows <= ROWS.

    x, panel, out are addresses; x has `depth` floats a row, out `width`. A quarter of a panel is
    prefetched from the address `ahead`. One loop over k for each number of rows: a switch picks it.
    """
    signature = types.void(*[types.intp] * 7)

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        done = builder.append_basic_block("tile.done")
        switch = builder.switch(rows, done)
        for count in range(1, ROWS + 1):
            block = builder.append_basic_block(f"tile.{count}")
            switch.add_case(ir.Constant(rows.type, count), block)
            builder.position_at_end(block)
            _emit_tile(builder, count, *rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, emit


def _emit_tile(
    builder: Any, rows: int, x: Any, depth: Any, panel: Any, out: Any, width: Any, ahead: Any
) -> None:
    zeros = [ir.Constant(_VECTOR, [0.0] * LANES)] * (rows * VECTORS)
    x_rows = [_offset(builder, x, builder.mul(depth, _I64(row))) for row in range(rows)]
    unrolled = builder.and_(depth, _I64(-_UNROLL))

    def add_products(k: Any, sums: list[Any]) -> list[Any]:
        start = _offset(builder, panel, builder.mul(k, _I64(PANEL)))
        weights = [
            _load(builder, _offset(builder, start, _I64(vector * LANES)), _VECTOR, _LINE)
            for vector in range(VECTORS)
        ]
        fma = declare(builder, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32")
        added = []
        for row in range(rows):
            value = _broadcast(builder, _load(builder, _offset(builder, x_rows[row], k), _F32, 4))
            for vector in range(VECTORS):
                added.append(
                    builder.call(fma, [value, weights[vector], sums[row * VECTORS + vector]])
                )
        return added

    def add_unrolled(k: Any, sums: list[Any]) -> list[Any]:
        floats_ahead = _LINES_AHEAD * _LINE // 4 // _UNROLL
        line = _offset(builder, ahead, builder.mul(k, _I64(floats_ahead)))
        for number in range(_LINES_AHEAD):
            _prefetch(builder, builder.add(line, _I64(number * _LINE)))
        for step in range(_UNROLL):
            sums = add_products(builder.add(k, _I64(step)), sums)
        return sums

    sums = _emit_loop(builder, _I64(0), unrolled, _UNROLL, zeros, add_unrolled)
    sums = _emit_loop(builder, unrolled, depth, 1, sums, add_products)
    for index, total in enumerate(sums):
        row, vector = divmod(index, VECTORS)
        position = builder.add(builder.mul(width, _I64(row)), _I64(vector * LANES))
        address = _offset(builder, out, position)
        builder.store(total, builder.inttoptr(address, _VECTOR.as_pointer()), align=4)


def _emit_loop(
    builder: Any, start: Any, end: Any, step: int, sums: list[Any], body: Any
) -> list[Any]:
    """for k in range(start, end, step): sums = body(k, sums); the sums as they are at the end."""
    before = builder.block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", start, end), loop, after)

    builder.position_at_end(loop)
    k = builder.phi(_I64)
    carried = [builder.phi(_VECTOR) for _ in sums]
    added = body(k, carried)
    following = builder.add(k, _I64(step))
    k.add_incoming(start, before)
    k.add_incoming(following, loop)
    for phi, first, later in zip(carried, sums, added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, after)

    builder.position_at_end(after)
    results = [builder.phi(_VECTOR) for _ in sums]
    for phi, first, later in zip(results, sums, added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    return results


def _offset(builder: Any, address: Any, count: Any) -> Any:
    """The address of the float32 `count` places on."""
    return builder.add(address, builder.mul(count, _I64(4)))


def _load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=alignment)


def _prefetch(builder: Any, address: Any) -> None:
    """Bring a cache line into L2. Addresses past an array are harmless."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    prefetch = declare(
        builder,
        ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32]),
        "llvm.prefetch.p0",
    )
    read, keep_in_l2, data = 0, 2, 1
    builder.call(prefetch, [pointer, _I32(read), _I32(keep_in_l2), _I32(data)])


def _broadcast(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


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
    for panel in prange(panels.shape[0]):
        column = panel * PANEL
        for index in range(num_tiles):
            row = index * num_rows // num_tiles
            rows = (index + 1) * num_rows // num_tiles - row
            x_at = x.ctypes.data + 4 * row * depth
            panel_at = panels.ctypes.data + 4 * column * depth
            ahead = panel_at + (4 + index) * PANEL * depth
            if column + PANEL <= width:
                out_at = out.ctypes.data + 4 * (row * width + column)
                _tile(rows, x_at, depth, panel_at, out_at, width, ahead)
            else:
                part = np.empty((ROWS, PANEL), np.float32)
                _tile(rows, x_at, depth, panel_at, part.ctypes.data, PANEL, ahead)
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


def linear(x: Float32, weight: PackedMatrix) -> Float32:
    """x float32 [num_rows, in_features] @ weight.T -> float32 [num_rows, out_features]."""
    out = np.empty((len(x), weight.out_features), np.float32)
    _linear(np.ascontiguousarray(x), weight.panels, out)
    return out

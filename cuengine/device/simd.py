"""Pieces of kernels that LLVM does not find by itself: tiles whose sums stay in registers, exp, an
atomic counter. Written as LLVM IR and called from Numba code; they take addresses, not arrays.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from cuengine.device.llvm import (
    F32,
    F64,
    I32,
    I64,
    LANES,
    WIDE,
    ZERO,
    at,
    broadcast,
    declare,
    fma,
    load,
    loop,
    prefetch,
    shuffle,
    store,
    switch_rows,
)
from cuengine.device.numba_setup import intrinsic
from cuengine.device.packed import LINE

SCORE_ROWS = 3
SCORE_COLUMNS = 8 if WIDE else 4
MIX_VECTORS = 4
MIX_ROWS = 6 if WIDE else 3
"""Sums that fit the 32 registers of AVX-512 and the 16 of AVX2 beside their operands."""

_LN2_SINGLE = (0.693115234375, 3.1946184945309415e-05)
_LN2_DOUBLE = (0.6931471806019545, -4.2009150726810846e-11)


@intrinsic
def dot_tile(
    typing: Any,
    rows: Any,
    x: Any,
    keys: Any,
    depth: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
) -> tuple[Any, Any]:
    """out[r, c] = sum over k of x[r, k] * keys[c, k], for r < rows, c < SCORE_COLUMNS.

    rows <= SCORE_ROWS. Rows of x and keys are `depth` floats apart; what is behind the last
    multiple of LANES of them is left out. As much as there are keys is prefetched from `ahead`.
    """

    def emit_rows(builder: Any, count: int, arguments: list[Any]) -> None:
        x, keys, depth, out, out_stride, ahead = arguments
        x_rows = [at(builder, x, builder.mul(depth, I64(row))) for row in range(count)]
        key_rows = [at(builder, keys, builder.mul(depth, I64(c))) for c in range(SCORE_COLUMNS)]

        def add_products(k: Any, sums: list[Any]) -> list[Any]:
            _fetch(builder, at(builder, ahead, builder.mul(k, I64(SCORE_COLUMNS))), SCORE_COLUMNS)
            left = [load(builder, at(builder, row, k)) for row in x_rows]
            added = list(sums)
            for column, key_row in enumerate(key_rows):
                right = load(builder, at(builder, key_row, k))
                for row in range(count):
                    index = row * SCORE_COLUMNS + column
                    added[index] = fma(builder, left[row], right, sums[index])
            return added

        end = builder.and_(depth, I64(-LANES))
        sums = loop(builder, I64(0), end, LANES, [ZERO] * (count * SCORE_COLUMNS), add_products)
        for row in range(count):
            total = _sum_lanes(builder, sums[row * SCORE_COLUMNS : (row + 1) * SCORE_COLUMNS])
            store(builder, total, at(builder, out, builder.mul(out_stride, I64(row))))

    return types.void(*[types.intp] * 7), switch_rows(SCORE_ROWS, emit_rows)


def _fetch(builder: Any, address: Any, vectors: int) -> None:
    """Prefetch what that many vectors take; less than a line is left to the hardware."""
    for line in range(vectors * LANES * 4 // LINE):
        prefetch(builder, builder.add(address, I64(line * LINE)))


def _mix_tile(vectors: int) -> Any:
    @intrinsic
    def mix_tile(
        typing: Any,
        rows: Any,
        weights: Any,
        weight_stride: Any,
        count: Any,
        values: Any,
        dim: Any,
        out: Any,
        ahead: Any,
    ) -> tuple[Any, Any]:
        """out[r, :] += sum over t < count of weights[r, t] * values[t, :], for r < rows.

        rows <= MIX_ROWS; `:` stands for `vectors` vectors; rows of values and out are `dim` floats
        apart. count * vectors vectors are prefetched from `ahead`.
        """

        def emit_rows(builder: Any, num_rows: int, arguments: list[Any]) -> None:
            weights, weight_stride, count, values, dim, out, ahead = arguments
            weight_rows = [
                at(builder, weights, builder.mul(weight_stride, I64(row)))
                for row in range(num_rows)
            ]
            out_rows = [
                at(builder, out, builder.add(builder.mul(dim, I64(row)), I64(vector * LANES)))
                for row in range(num_rows)
                for vector in range(vectors)
            ]

            def add_products(t: Any, sums: list[Any]) -> list[Any]:
                _fetch(builder, at(builder, ahead, builder.mul(t, I64(vectors * LANES))), vectors)
                start = at(builder, values, builder.mul(t, dim))
                right = [load(builder, at(builder, start, I64(v * LANES))) for v in range(vectors)]
                added = []
                for row in range(num_rows):
                    left = broadcast(builder, at(builder, weight_rows[row], t))
                    for vector in range(vectors):
                        index = row * vectors + vector
                        added.append(fma(builder, left, right[vector], sums[index]))
                return added

            sums = [load(builder, address) for address in out_rows]
            sums = loop(builder, I64(0), count, 1, sums, add_products)
            for address, total in zip(out_rows, sums, strict=True):
                store(builder, total, address)

        return types.void(*[types.intp] * 8), switch_rows(MIX_ROWS, emit_rows)

    return mix_tile


mix_tile = _mix_tile(MIX_VECTORS)
mix_tile_narrow = _mix_tile(1)


@intrinsic
def exp(typing: Any, x: Any) -> tuple[Any, Any]:
    """exp(x) for float32 or float64 x, in a form that LLVM vectorises; 0 below -87 or -708.

    2^n * exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2, by Taylor's series to r^7 or r^13: its
    remainder is below 6e-9 or 5e-18; with rounding the relative error is below 1.3e-7 or 3e-16.
    x must be below 88 or 709.
    """
    double = x == types.float64
    kind, bits, integer = (F64, 52, I64) if double else (F32, 23, I32)
    bias, lowest, degree = (1023, -708.0, 13) if double else (127, -87.0, 7)
    # ln 2 = high + low, where high has so few bits that n * high is exact.
    high, low = _LN2_DOUBLE if double else _LN2_SINGLE

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        suffix = "f64" if double else "f32"

        def multiply_add(a: Any, b: Any, c: Any) -> Any:
            function = declare(builder, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{suffix}")
            return builder.call(function, [a, b, c])

        rint = declare(builder, ir.FunctionType(kind, [kind]), f"llvm.rint.{suffix}")
        below = builder.fcmp_ordered("<", value, kind(lowest))
        clamped = builder.select(below, kind(lowest), value)
        n = builder.call(rint, [builder.fmul(clamped, kind(1 / math.log(2)))])
        r = multiply_add(n, kind(-low), multiply_add(n, kind(-high), clamped))
        series = kind(1 / math.factorial(degree))
        for power in range(degree - 1, -1, -1):
            series = multiply_add(series, r, kind(1 / math.factorial(power)))
        exponent = builder.add(builder.fptosi(n, integer), integer(bias))
        scale = builder.bitcast(builder.shl(exponent, integer(bits)), kind)
        return builder.select(below, kind(0.0), builder.fmul(series, scale))

    return x(x), emit


@intrinsic
def leading_zeros(typing: Any, word: Any) -> tuple[Any, Any]:
    """Leading zero bits of a uint32; 32 for 0."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint32(types.uint32), emit


@intrinsic
def fetch_add(typing: Any, address: Any, amount: Any) -> tuple[Any, Any]:
    """The int64 at address, which atomically grows by amount."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, amount = arguments
        pointer = builder.inttoptr(address, I64.as_pointer())
        return builder.atomic_rmw("add", pointer, amount, "monotonic")

    return types.int64(types.intp, types.int64), emit


def _sum_lanes(builder: Any, sums: list[Any]) -> Any:
    """The sum over each vector's lanes, as one vector: 4 or 8 of them."""
    by_two = [
        builder.fadd(*(shuffle(builder, a, b, _unpack(offset, 1)) for offset in (0, 2)))
        for a, b in zip(sums[::2], sums[1::2], strict=True)
    ]
    by_four = [
        builder.fadd(*(shuffle(builder, a, b, _unpack(offset, 2)) for offset in (0, 2)))
        for a, b in zip(by_two[::2], by_two[1::2], strict=True)
    ]
    for index, vector in enumerate(by_four):
        folded, lanes = vector, LANES
        while lanes > 4:
            lanes //= 2
            folded = builder.fadd(
                shuffle(builder, folded, folded, list(range(lanes))),
                shuffle(builder, folded, folded, list(range(lanes, 2 * lanes))),
            )
        by_four[index] = folded
    if len(by_four) == 1:
        return by_four[0]
    low, high = by_four
    return shuffle(builder, low, high, list(range(SCORE_COLUMNS)))


def _unpack(offset: int, width: int) -> list[int]:
    """In each 128 bits: x86's unpack of singles (width 1) or doubles (width 2)."""
    lanes = []
    for start in range(0, LANES, 4):
        first = start + offset
        if width == 1:
            lanes += [first, LANES + first, first + 1, LANES + first + 1]
        else:
            lanes += [first, first + 1, LANES + first, LANES + first + 1]
    return lanes

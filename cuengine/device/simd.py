"""Pieces of kernels that LLVM does not find by itself: tiles whose sums stay in registers, exp, an
atomic counter. Written as LLVM IR and called from Numba code; they take addresses, not arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types

from cuengine.device.numba_setup import declare, intrinsic

_WIDE = binding.get_host_cpu_features().get("avx512f", False)
LANES = 16 if _WIDE else 8
SCORE_COLUMNS = 8
SCORE_ROWS = 3 if _WIDE else 1
MIX_VECTORS = 4
MIX_ROWS = 6 if _WIDE else 3
"""Sums that fit the 32 registers of AVX-512 and the 16 of AVX2 beside their operands."""

_LN2_SINGLE = (0.693115234375, 3.1946184945309415e-05)
_LN2_DOUBLE = (0.6931471806019545, -4.2009150726810846e-11)

_I32, _I64, _F32, _F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
_VECTOR = ir.VectorType(_F32, LANES)


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
    values: Any,
) -> tuple[Any, Any]:
    """out[r, c] = sum over k of x[r, k] * keys[c, k], for r < rows, c < SCORE_COLUMNS.

    Meanwhile as many floats are prefetched from the addresses ahead (keys needed next) and values.
    rows <= SCORE_ROWS. Rows of x and keys are `depth` floats apart; what is behind the last
    multiple of LANES of them is left out.
    """

    def emit_rows(builder: Any, count: int, arguments: list[Any]) -> None:
        x, keys, depth, out, out_stride, ahead, values = arguments
        x_rows = [_at(builder, x, builder.mul(depth, _I64(row))) for row in range(count)]
        key_rows = [_at(builder, keys, builder.mul(depth, _I64(c))) for c in range(SCORE_COLUMNS)]

        def add_products(k: Any, sums: list[Any]) -> list[Any]:
            left = [_load(builder, _at(builder, row, k)) for row in x_rows]
            added = list(sums)
            for column, key_row in enumerate(key_rows):
                address = _at(builder, key_row, k)
                right = _load(builder, address)
                offset = builder.sub(address, keys)
                _prefetch(builder, builder.add(ahead, offset))
                _prefetch(builder, builder.add(values, offset))
                for row in range(count):
                    index = row * SCORE_COLUMNS + column
                    added[index] = _fma(builder, left[row], right, sums[index])
            return added

        end = builder.and_(depth, _I64(-LANES))
        zeros = [ir.Constant(_VECTOR, [0.0] * LANES)] * (count * SCORE_COLUMNS)
        sums = _loop(builder, end, LANES, zeros, add_products)
        for row in range(count):
            total = _sum_lanes(builder, sums[row * SCORE_COLUMNS : (row + 1) * SCORE_COLUMNS])
            address = _at(builder, out, builder.mul(out_stride, _I64(row)))
            builder.store(total, builder.inttoptr(address, total.type.as_pointer()), align=4)

    return types.void(*[types.intp] * 8), _switch_rows(SCORE_ROWS, emit_rows)


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
    ) -> tuple[Any, Any]:
        """out[r, :] += sum over t < count of weights[r, t] * values[t, :], for r < rows.

        rows <= MIX_ROWS; `:` stands for `vectors` vectors; rows of values and out are `dim` floats
        apart.
        """

        def emit_rows(builder: Any, num_rows: int, arguments: list[Any]) -> None:
            weights, weight_stride, count, values, dim, out = arguments
            weight_rows = [
                _at(builder, weights, builder.mul(weight_stride, _I64(row)))
                for row in range(num_rows)
            ]
            out_rows = [
                _at(builder, out, builder.add(builder.mul(dim, _I64(row)), _I64(vector * LANES)))
                for row in range(num_rows)
                for vector in range(vectors)
            ]

            def add_products(t: Any, sums: list[Any]) -> list[Any]:
                start = _at(builder, values, builder.mul(t, dim))
                right = [
                    _load(builder, _at(builder, start, _I64(v * LANES))) for v in range(vectors)
                ]
                added = []
                for row in range(num_rows):
                    left = _broadcast(builder, _at(builder, weight_rows[row], t))
                    for vector in range(vectors):
                        index = row * vectors + vector
                        added.append(_fma(builder, left, right[vector], sums[index]))
                return added

            sums = [_load(builder, address) for address in out_rows]
            for address, total in zip(
                out_rows, _loop(builder, count, 1, sums, add_products), strict=True
            ):
                builder.store(total, builder.inttoptr(address, _VECTOR.as_pointer()), align=4)

        return types.void(*[types.intp] * 7), _switch_rows(MIX_ROWS, emit_rows)

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
    kind, bits, integer = (_F64, 52, _I64) if double else (_F32, 23, _I32)
    bias, lowest, degree = (1023, -708.0, 13) if double else (127, -87.0, 7)
    # ln 2 = high + low, where high has so few bits that n * high is exact.
    high, low = _LN2_DOUBLE if double else _LN2_SINGLE

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        suffix = "f64" if double else "f32"

        def fma(a: Any, b: Any, c: Any) -> Any:
            function = declare(builder, ir.FunctionType(kind, [kind] * 3), f"llvm.fma.{suffix}")
            return builder.call(function, [a, b, c])

        rint = declare(builder, ir.FunctionType(kind, [kind]), f"llvm.rint.{suffix}")
        below = builder.fcmp_ordered("<", value, kind(lowest))
        clamped = builder.select(below, kind(lowest), value)
        n = builder.call(rint, [builder.fmul(clamped, kind(1 / math.log(2)))])
        r = fma(n, kind(-low), fma(n, kind(-high), clamped))
        series = kind(1 / math.factorial(degree))
        for power in range(degree - 1, -1, -1):
            series = fma(series, r, kind(1 / math.factorial(power)))
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
        pointer = builder.inttoptr(address, _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, amount, "monotonic")

    return types.int64(types.intp, types.int64), emit


def _prefetch(builder: Any, address: Any) -> None:
    """Ask for a cache line to be read soon; one that is not mapped is ignored."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    function = declare(
        builder,
        ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32]),
        "llvm.prefetch.p0",
    )
    read, keep, data = _I32(0), _I32(2), _I32(1)
    builder.call(function, [pointer, read, keep, data])


def _switch_rows(limit: int, emit_rows: Callable[[Any, int, list[Any]], None]) -> Any:
    """Code generation with one copy of a tile for each number of rows, the first argument."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, *rest = arguments
        done = builder.append_basic_block("tile.done")
        switch = builder.switch(rows, done)
        for count in range(1, limit + 1):
            block = builder.append_basic_block(f"tile.{count}")
            switch.add_case(ir.Constant(rows.type, count), block)
            builder.position_at_end(block)
            emit_rows(builder, count, rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return emit


def _loop(
    builder: Any, end: Any, step: int, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """for k in range(0, end, step): sums = body(k, sums); the sums as they are at the end."""
    before = builder.block
    head, inner, after = (builder.append_basic_block(name) for name in ("head", "inner", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    k = builder.phi(_I64)
    carried = [builder.phi(total.type) for total in sums]
    builder.cbranch(builder.icmp_signed("<", k, end), inner, after)
    builder.position_at_end(inner)
    added = body(k, carried)
    following = builder.add(k, _I64(step))
    builder.branch(head)
    k.add_incoming(_I64(0), before)
    k.add_incoming(following, inner)
    for phi, first, later in zip(carried, sums, added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, inner)
    builder.position_at_end(after)
    return carried


def _sum_lanes(builder: Any, sums: list[Any]) -> Any:
    """The sum over each vector's lanes, as one vector: 4 or 8 of them."""
    by_two = [
        builder.fadd(*(_shuffle(builder, a, b, _unpack(offset, 1)) for offset in (0, 2)))
        for a, b in zip(sums[::2], sums[1::2], strict=True)
    ]
    by_four = [
        builder.fadd(*(_shuffle(builder, a, b, _unpack(offset, 2)) for offset in (0, 2)))
        for a, b in zip(by_two[::2], by_two[1::2], strict=True)
    ]
    for index, vector in enumerate(by_four):
        folded, lanes = vector, LANES
        while lanes > 4:
            lanes //= 2
            folded = builder.fadd(
                _shuffle(builder, folded, folded, list(range(lanes))),
                _shuffle(builder, folded, folded, list(range(lanes, 2 * lanes))),
            )
        by_four[index] = folded
    low, high = by_four
    return _shuffle(builder, low, high, list(range(SCORE_COLUMNS)))


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


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _at(builder: Any, address: Any, count: Any) -> Any:
    """The address of the float32 `count` places on."""
    return builder.add(address, builder.mul(count, _I64(4)))


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=4)


def _broadcast(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _F32.as_pointer()), align=4)
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return _shuffle(builder, first, undefined, [0] * LANES)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = declare(
        builder, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    return builder.call(function, [a, b, c])

"""Words for writing LLVM IR: vectors, memory by address, loops that carry sums in registers.

simd.py and products.py make their tiles of these; nothing here knows what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cuengine.device.cpu_target import features

WIDE = "avx512f" in features()
LANES = 16 if WIDE else 8
"""Floats of a vector register."""

I32, I64, F32, F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
VECTOR = ir.VectorType(F32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)


def at(builder: Any, address: Any, count: Any) -> Any:
    """The address of the float32 `count` places on."""
    return builder.add(address, builder.mul(count, I64(4)))


def load(builder: Any, address: Any, kind: Any = VECTOR, *, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def declare(builder: Any, kind: Any, name: str) -> Any:
    """The function of LLVM's with that type and name, such as llvm.fmuladd.v16f32."""
    known = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if known is None else known


def prefetch(builder: Any, address: Any) -> None:
    """Ask for a cache line, into L2; one that is not mapped is ignored."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    function = declare(
        builder,
        ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32]),
        "llvm.prefetch.p0",
    )
    read, keep, data = I32(0), I32(2), I32(1)
    builder.call(function, [pointer, read, keep, data])


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def broadcast(builder: Any, address: Any) -> Any:
    """The float32 at address in every lane."""
    undefined = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, load(builder, address, F32), I32(0))
    return shuffle(builder, first, undefined, [0] * LANES)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(declare(builder, kind, f"llvm.fmuladd.v{LANES}f32"), [a, b, c])


def loop(
    builder: Any,
    start: Any,
    end: Any,
    step: int,
    sums: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """for k in range(start, end, step): sums = body(k, sums); the sums as they are at the end."""
    before = builder.block
    inner, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", start, end), inner, after)

    builder.position_at_end(inner)
    k = builder.phi(I64)
    carried = [builder.phi(total.type) for total in sums]
    added = body(k, carried)
    last = builder.block  # not the one it began with, where body has loops of its own
    following = builder.add(k, I64(step))
    k.add_incoming(start, before)
    k.add_incoming(following, last)
    for phi, first, later in zip(carried, sums, added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, last)
    builder.cbranch(builder.icmp_signed("<", following, end), inner, after)

    builder.position_at_end(after)
    results = [builder.phi(total.type) for total in sums]
    for phi, first, later in zip(results, sums, added, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, last)
    return results


def switch_rows(limit: int, emit_rows: Callable[[Any, int, list[Any]], None]) -> Any:
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

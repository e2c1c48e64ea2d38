"""Every instruction that the emulator knows, against ptx_oracle.py or a few lines of NumPy.

Arithmetic: all opcodes of the table, over pairs of edge values. Each runs twice, the second time
under a guard that some lanes fail. What touches memory or other lanes has a test of its own below.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_oracle import (
    FORMATS,
    NAN,
    PackedHalves,
    approximated,
    as_value,
    bits_of,
    encode,
    expected,
    infinity,
    is_nan,
    sign_bit,
)

from cuengine.device.emulated import instructions
from cuengine.device.emulated.runtime import (
    UNDEFINED,
    KernelFault,
    Memory,
    Module,
    PtxError,
)

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")

Array = np.ndarray[Any, Any]
HEADER = ".version 8.7\n.target sm_90\n.address_size 64\n"


def run(body: str, *arrays: Array, threads: int = 32, shared: int = 0, registers: str = "",
        blocks: int = 1, before: str = "", sanitize: bool = False) -> None:  # fmt: skip
    """One kernel whose parameters are the arrays' addresses, in %p0, %p1, ...; %i is the thread."""
    params = ", ".join(f".param .u64 q{n}" for n in range(len(arrays)))
    loads = "".join(f"ld.param.u64 %p{n}, [q{n}];\n" for n in range(len(arrays)))
    text = f"""{HEADER}{before}
.visible .entry k({params}) {{
.reg .b64 %p<{len(arrays) + 1}>;
.reg .u32 %i, %cta;
.reg .u64 %at2, %at4, %at8, %here, %i64;
{registers}
{loads}mov.u32 %i, %tid.x;
mov.u32 %cta, %ctaid.x;
mad.lo.u32 %i, %cta, {threads}, %i;
cvt.u64.u32 %i64, %i;
shl.b64 %at2, %i64, 1;
shl.b64 %at4, %i64, 2;
shl.b64 %at8, %i64, 3;
{body}
ret;
}}"""
    memory = Memory()
    addresses = [memory.add(array, f"array {n}") for n, array in enumerate(arrays)]
    function = Module.from_ptx(text, memory).function("k", sanitize=sanitize)
    function.launch((blocks, 1, 1), (threads, 1, 1), addresses, shared_bytes=shared)


# ---- arithmetic ----

INTEGERS = {
    16: [0, 1, 2, 7, 15, 16, 31, 255, 256, 0x5555, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF],
    32: [0, 1, 2, 31, 32, 33, 255, 0x00FF8000, 0x01020304, 0x55555555, 0x7FFFFFFE, 0x7FFFFFFF,
         0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFF80, 0xFFFFFFFE, 0xFFFFFFFF],
    64: [0, 1, 2, 63, 64, 65, 0xFFFFFFFF, 0x100000000, (1 << 53) + 1, (1 << 60) + (1 << 36) + 1,
         0x0123456789ABCDEF, (1 << 63) - 513, (1 << 63) - 1, 1 << 63, (1 << 63) + 1,
         (1 << 64) - 1025, (1 << 64) - 2, (1 << 64) - 1],
}  # fmt: skip


def edges(kind: str) -> list[int]:
    """Operands of a type, as bits."""
    if kind == "pred":
        return [0, 1]
    if kind.endswith("x2"):
        halves = edges(kind.removesuffix("x2"))
        return [a << 16 | b for a, b in zip(halves, halves[5:] + halves[:5], strict=True)]
    if kind not in FORMATS:
        width = bits_of(kind)
        if width == 8:
            return [0, 1, 2, 0x55, 0x7F, 0x80, 0x81, 0xFF]
        return INTEGERS[width]
    _, fraction = FORMATS[kind]
    one, top, sign = encode(1.0, kind), infinity(kind), sign_bit(kind)
    third = one - (1 << fraction) - (1 << fraction) // 3
    positive = [0, 1, (1 << fraction) - 1, 1 << fraction, (1 << fraction) + 1, one, one + 1, third,
                encode(0.5, kind), encode(1.5, kind), encode(2.5, kind), encode(3.0, kind),
                encode(100.5, kind), top - 1, top, top | 1 << (fraction - 1)]  # fmt: skip
    if kind in ("f32", "f64"):  # ties and overflows of narrower formats, limits of integers
        positive += [encode(x, kind) for x in (65504.0, 65520.0, 65519.0, 2.0**-25, 2.0**31,
                                               2.0**63,
                                               2.0**-14 * (1 + 2.0**-11), 1 + 2.0**-8, 2147483520.0,
                                               3 * 2.0**-9 + 1, 300.0)]  # fmt: skip
    if kind == "f64":
        positive += [encode(x, kind) for x in (3.4028235677973366e38, 1e-40, 2147483647.5)]
    return positive + [p | sign for p in positive]


def samples(kinds: Sequence[str], most: int) -> list[tuple[int, ...]]:
    """Combinations of edge values: all, or as many as these drawn from them."""
    choices = [edges(kind) for kind in kinds]
    count = math.prod(map(len, choices))
    if count <= most:
        return list(itertools.product(*choices))
    random = np.random.default_rng(5)
    return [tuple(c[random.integers(len(c))] for c in choices) for _ in range(most)]


def register(kind: str) -> str:
    return "pred" if kind == "pred" else f"b{max(16, bits_of(kind))}"


def carries(opcode: str) -> bool:
    return ".cc" in opcode or opcode.split(".", maxsplit=1)[0] in ("addc", "subc", "madc")


def known_arithmetic() -> dict[str, list[str]]:
    """Opcodes by the word that they begin with."""
    found = defaultdict(list)
    for opcode in instructions.opcodes():
        if instructions.arithmetic(opcode) and not carries(opcode):
            found[opcode.split(".")[0]].append(opcode)
    return found


ARITHMETIC = known_arithmetic()


def compute(opcodes: Sequence[str], result: str, kinds: Sequence[str],
            inputs: list[tuple[int, ...]]) -> Array:  # fmt: skip
    """uint64 [2, opcodes, inputs]: without and with a guard; where the guard fails, a mark."""
    count = len(inputs)
    threads = 96
    blocks = -(-count // threads)
    given = np.zeros((len(kinds), blocks * threads), np.uint64)
    given[:, :count] = np.array(inputs, np.uint64).T
    out = np.zeros((2, len(opcodes), blocks * threads), np.uint64)
    body = ["setp.ge.u32 %skip, %i, %last;", "@%skip ret;", "and.b32 %odd, %i, 5;",
            "setp.ne.u32 %some, %odd, 1;"]  # fmt: skip
    body.insert(0, f"mov.u32 %last, {count};")
    names = []
    for n, kind in enumerate(kinds):
        width = max(16, bits_of(kind)) if kind != "pred" else 32
        body += [f"add.u64 %here, %p0, {n * blocks * threads * 8};",
                 "add.u64 %here, %here, %at8;",
                 f"ld.global.b{width} %x{n}_{width}, [%here];"]  # fmt: skip
        if kind == "pred":
            body.append(f"setp.ne.u32 %x{n}_pred, %x{n}_32, 0;")
        names.append(f"%x{n}_{'pred' if kind == 'pred' else width}")
    kept = register(result)
    for n, opcode in enumerate(opcodes):
        combination = re.search(r"^setp\.\w+\.(and|or|xor)\.", opcode)
        source = ", ".join([*names, *(["!%some"] if combination else [])])
        for guard in (0, 1):
            target = "%r" if kept == "pred" else f"%r_{kept}"
            if kept == "pred":
                body.append("setp.eq.u32 %r, %i, 0xffffffff;")
            else:
                body.append(f"mov.{kept} %r_{kept}, 77;")
            body.append(f"{'@%some ' if guard else ''}{opcode} {target}, {source};")
            if kept == "pred":
                body += ["selp.u32 %r_b32, 1, 0, %r;", "cvt.u64.u32 %wide, %r_b32;"]
            elif kept != "b64":
                body.append(f"cvt.u64.u{kept[1:]} %wide, %r_{kept};")
            else:
                body.append("mov.b64 %wide, %r_b64;")
            place = (guard * len(opcodes) + n) * blocks * threads * 8
            body += [f"add.u64 %here, %p1, {place};", "add.u64 %here, %here, %at8;",
                     "st.global.u64 [%here], %wide;"]  # fmt: skip
    registers = ".reg .pred %skip, %some, %r;\n.reg .u32 %last, %odd;\n.reg .b64 %wide, %r_b64;\n"
    registers += ".reg .b32 %r_b32;\n.reg .b16 %r_b16;\n"
    registers += "".join(
        f".reg .b16 %x{n}_16;\n.reg .b32 %x{n}_32;\n.reg .b64 %x{n}_64;\n.reg .pred %x{n}_pred;\n"
        for n in range(4)
    )
    run("\n".join(body), given, out, threads=threads, blocks=blocks, registers=registers)
    return out[:, :, :count]


def agrees(got: int, want: Any, opcode: str, kind: str) -> bool:
    if isinstance(want, PackedHalves):
        half = kind.removesuffix("x2")
        plain = opcode.replace(kind, half)
        return all(agrees(got >> s & 0xFFFF, w, plain, half) for w, s in want.halves)
    if approximated(opcode):
        return close(as_value(got, kind), want, opcode, kind)
    if want == NAN and (kind in FORMATS or "tf32" in opcode):
        return is_nan(got, kind if kind in FORMATS else "f32")
    width = 1 if kind == "pred" else max(16, bits_of(kind))
    return got == want & ((1 << width) - 1)


def close(got: float, want: float, opcode: str, kind: str) -> bool:
    """The manual's bounds are about 2**-22 relative; sin and cos 2**-20.5 in [-pi, pi] only."""
    least = 2.0 ** -(14 if kind == "f16" else 126 if kind != "f64" else 1022)
    most = value_of_largest(kind)
    if math.isnan(want):
        return math.isnan(got)
    if abs(want) > most:
        return abs(got) >= most and (got > 0) == (want > 0)
    if abs(want) < least:
        return abs(got) <= 2 * least
    if opcode.startswith(("sin", "cos")):
        return abs(got - want) < 2**-20
    tolerance = {"f16": 2.0**-10, "bf16": 2.0**-7, "f64": 2.0**-19}.get(kind, 2.0**-21)
    return got == want or abs(got - want) <= tolerance * abs(want)


def value_of_largest(kind: str) -> float:
    return as_value(infinity(kind) - 1, kind)


@pytest.mark.parametrize("name", sorted(ARITHMETIC))
def test_arithmetic(name: str) -> None:
    alike: dict[tuple[str, tuple[str, ...], bool], list[str]] = defaultdict(list)
    for opcode in ARITHMETIC[name]:
        known = instructions.arithmetic(opcode)
        assert known
        # setp.how.and and the like compare as setp.how does, of which all pairs are tried.
        few = name == "setp" and opcode.split(".")[2] in instructions.COMBINATIONS
        alike[known.result, known.arguments, few].append(opcode)
    wrong = []
    for (result, kinds, few), opcodes in alike.items():
        inputs = samples(kinds, 40 if few else 400)
        out = compute(opcodes, result, kinds, inputs)
        for n, opcode in enumerate(opcodes):
            combination = re.search(r"^setp\.\w+\.(and|or|xor)\.", opcode)
            plain = opcode.replace(f".{combination[1]}", "", 1) if combination else opcode
            for k, operands in enumerate(inputs):
                want = expected(plain, kinds, operands)
                runs = k & 5 != 1
                if combination:
                    want = {"and": int(want) & (not runs), "or": int(want) | (not runs),
                            "xor": int(want) ^ (not runs)}[combination[1]]  # fmt: skip
                got, guarded = (int(out[guard, n, k]) for guard in (0, 1))
                mark = 0 if result == "pred" else 77
                if not agrees(got, want, plain, result) or guarded != (got if runs else mark):
                    given = ", ".join(f"{o:#x}" for o in operands)
                    wrong.append(f"{opcode}({given}): {got:#x}, {guarded:#x}, not {want}")
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:20])


@pytest.mark.parametrize("bits", [32, 64])
def test_carries_reach_the_next_word(bits: int) -> None:
    """(a + b), (a - b), a * b + c of four words each, in words."""
    words, mask = 4, (1 << bits) - 1
    random = np.random.default_rng(1)
    numbers = [[0] * words, [mask] * words, [1, 0, 0, 0], [0, mask, mask, 0], [mask, 0, 0, 1]]
    numbers += [[int(x) & mask for x in random.integers(0, 2**64, words, dtype=np.uint64)]
                for _ in range(3)]  # fmt: skip
    pairs = list(itertools.product(numbers, numbers))
    given = np.array(pairs, np.uint64).reshape(len(pairs), 2 * words)
    out = np.zeros((len(pairs), 3 * words), np.uint64)
    u = f"u{bits}"
    body = ["mad.lo.u64 %here, %i64, 64, %p0;"]
    for n in range(2 * words):
        body.append(f"ld.global.{u} %w{n}, [%here+{8 * n}];")
    body += ["mad.lo.u64 %here, %i64, 96, %p1;", f"mov.{u} %zero, 0;"]
    for row, name in enumerate(("add", "sub")):
        for n in range(words):
            opcode = f"{name}.cc" if n == 0 else f"{name}c" if n == words - 1 else f"{name}c.cc"
            body += [f"{opcode}.{u} %r, %w{n}, %w{words + n};", f"mov.b{bits} %s{n}, %r;"]
        for n in range(words):
            body += [f"cvt.u64.{u} %wide, %s{n};",
                     f"st.global.u64 [%here+{8 * (row * words + n)}], %wide;"]  # fmt: skip
    # w0 * w4 + (w3:w2:w1), the product's two words by mad.lo and mad.hi with carries.
    body += [f"mad.lo.cc.{u} %s0, %w0, %w4, %w1;", f"madc.hi.cc.{u} %s1, %w0, %w4, %w2;",
             f"addc.{u} %s2, %w3, %zero;", f"mov.{u} %s3, 0;"]  # fmt: skip
    # madc.lo: 0 * 0 + 0 and the carry of mask + w5.
    body += [f"add.cc.{u} %r, %w5, {mask};", f"madc.lo.{u} %s3, %zero, %zero, %zero;"]
    for n in range(words):
        body += [
            f"cvt.u64.{u} %wide, %s{n};",
            f"st.global.u64 [%here+{8 * (2 * words + n)}], %wide;",
        ]
    registers = f".reg .b64 %wide;\n.reg .b{bits} %w<8>, %s<4>, %r, %zero;\n"
    text = "\n".join(["setp.ge.u32 %skip, %i, %last;", "@%skip ret;", *body])
    run(f"mov.u32 %last, {len(pairs)};\n{text}", given, out, threads=64,
        registers=f"{registers}.reg .pred %skip;\n.reg .u32 %last;")  # fmt: skip

    def whole(values: Iterable[int]) -> int:
        return sum(int(v) << bits * n for n, v in enumerate(values))

    modulus = 1 << words * bits
    for row, (a, b) in zip(out, pairs, strict=True):
        assert whole(row[:words]) == (whole(a) + whole(b)) % modulus
        assert whole(row[words : 2 * words]) == (whole(a) - whole(b)) % modulus
        product = a[0] * b[0] + whole(a[1:])
        assert whole(row[2 * words : 3 * words - 1]) == product % (1 << 3 * bits)
        assert row[-1] == (b[1] + mask) >> bits


def test_setp_gives_the_contrary_as_well_and_takes_negated_predicates() -> None:
    out = np.zeros((3, 32), np.uint32)
    run(
        """setp.lt.u32 %a|%b, %i, 10;
        setp.ge.and.u32 %c|%d, %i, 5, !%b;
        and.b32 %m, %i, 1;
        setp.eq.u32 %e, %m, 0;
        setp.lt.xor.u32 %e, %i, 16, %e;
        selp.u32 %x, 1, 0, %a; selp.u32 %y, 2, 0, %b; or.b32 %x, %x, %y;
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %x;
        selp.u32 %x, 1, 0, %c; selp.u32 %y, 2, 0, %d; or.b32 %x, %x, %y;
        st.global.u32 [%here+128], %x;
        selp.u32 %x, 1, 0, %e; st.global.u32 [%here+256], %x;""",
        out,
        registers=".reg .pred %a, %b, %c, %d, %e;\n.reg .u32 %x, %y, %m;",
    )
    i = np.arange(32)
    np.testing.assert_array_equal(out[0], np.where(i < 10, 1, 2))
    np.testing.assert_array_equal(out[1], ((i >= 5) & (i < 10)) + 2 * ((i < 5) & (i < 10)))
    np.testing.assert_array_equal(out[2], (i < 16) ^ (i % 2 == 0))


def test_predicate_logic() -> None:
    out = np.zeros((6, 32), np.uint32)
    ops = ["and.pred %r, %a, %b;", "or.pred %r, %a, %b;", "xor.pred %r, %a, %b;",
           "not.pred %r, %a;", "mov.pred %r, %b;", "@%a mov.pred %r, 0;"]  # fmt: skip
    body = ["and.b32 %x, %i, 1;", "setp.ne.u32 %a, %x, 0;", "and.b32 %x, %i, 2;",
            "setp.ne.u32 %b, %x, 0;", "add.u64 %here, %p0, %at4;"]  # fmt: skip
    for n, op in enumerate(ops):
        body += ["mov.pred %r, -1;", op, "selp.u32 %x, 1, 0, %r;",
                 f"st.global.u32 [%here+{128 * n}], %x;"]  # fmt: skip
    run("\n".join(body), out, registers=".reg .pred %a, %b, %r;\n.reg .u32 %x;")
    a, b = (np.arange(32) & 1) > 0, (np.arange(32) & 2) > 0
    np.testing.assert_array_equal(out > 0, [a & b, a | b, a ^ b, ~a, b, ~a])


# ---- moves ----


def test_parts_of_a_register() -> None:
    given = np.random.default_rng(0).integers(0, 2**64, 32, dtype=np.uint64)
    out = np.zeros((4, 32), np.uint64)
    run(
        """add.u64 %here, %p0, %at8; ld.global.u64 %w, [%here];
        add.u64 %here, %p1, %at8;
        mov.b64 {%a, %b}, %w; mov.b64 %r, {%b, %a}; st.global.u64 [%here], %r;
        mov.b64 {%h0, %h1, %h2, %h3}, %w; mov.b64 %r, {%h3, %h2, %h1, %h0};
        st.global.u64 [%here+256], %r;
        mov.b32 {%h0, %h1}, %a; mov.b32 %b, {%h1, %h0}; cvt.u64.u32 %r, %b;
        st.global.u64 [%here+512], %r;
        mov.b64 {_, %b}, %w; cvt.u64.u32 %r, %b; st.global.u64 [%here+768], %r;""",
        given,
        out,
        registers=".reg .b64 %w, %r;\n.reg .b32 %a, %b;\n.reg .b16 %h<4>;",
    )
    low, high = given & 0xFFFFFFFF, given >> np.uint64(32)
    np.testing.assert_array_equal(out[0], low << np.uint64(32) | high)
    halves = given.view(np.uint16).reshape(32, 4)
    np.testing.assert_array_equal(out[1], halves[:, ::-1].copy().view(np.uint64)[:, 0])
    np.testing.assert_array_equal(out[2], (low & 0xFFFF) << np.uint64(16) | low >> np.uint64(16))
    np.testing.assert_array_equal(out[3], high)


def test_special_registers() -> None:
    names = [f"%{base}.{axis}" for base in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    names += ["%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le",
              "%lanemask_gt", "%lanemask_ge", "%dynamic_smem_size", "%total_smem_size"]  # fmt: skip
    grid, block, shared = (2, 3, 2), (5, 4, 3), 48
    out = np.zeros((12, 60, len(names)), np.uint32)
    text = f"""{HEADER}.visible .entry k(.param .u64 q) {{
    .shared .align 16 .b8 s[16];
    .reg .u64 %p, %o; .reg .u32 %x, %y, %z, %n;
    ld.param.u64 %p, [q];
    mov.u32 %x, s;
    mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z;
    mad.lo.u32 %y, %z, 3, %y; mad.lo.u32 %x, %y, 2, %x; mul.lo.u32 %x, %x, 60;
    mov.u32 %y, %tid.y; mov.u32 %z, %tid.z; mov.u32 %n, %tid.x;
    mad.lo.u32 %y, %z, 4, %y; mad.lo.u32 %n, %y, 5, %n; add.u32 %x, %x, %n;
    mul.wide.u32 %o, %x, {4 * len(names)}; add.u64 %p, %p, %o;
    """
    text += "".join(
        f"mov.u32 %x, {name}; st.global.u32 [%p+{4 * n}], %x;\n" for n, name in enumerate(names)
    )
    memory = Memory()
    function = Module.from_ptx(text + "ret;\n}", memory).function("k")
    function.launch(grid, block, [memory.add(out, "out")], shared_bytes=shared)
    for index, (z, y, x) in enumerate(np.ndindex(*grid[::-1])):
        for t, (tz, ty, tx) in enumerate(np.ndindex(*block[::-1])):
            lane, warp = t % 32, t // 32
            want = [tx, ty, tz, *block, x, y, z, *grid, lane, warp, 2, 1 << lane,
                    (1 << lane) - 1, (2 << lane) - 1, 2**32 - (2 << lane), 2**32 - (1 << lane),
                    shared, shared + 16]  # fmt: skip
            assert out[index, t].tolist() == want


# ---- memory ----

TYPES = {"b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "b32": "u4",
         "u32": "u4", "s32": "i4", "b64": "u8", "u64": "u8", "s64": "i8", "f32": "f4",
         "f64": "f8"}  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("space", ["global", "shared", "local", ""])
def test_loads_and_stores_of_every_type(space: str, count: int) -> None:
    """Copies from global memory through the space, widened to 64 bits where it is an integer."""
    random = np.random.default_rng(count)
    for kind, code in TYPES.items():
        item = np.dtype(code).itemsize
        if item * count > 16:
            continue
        given = random.integers(0, 256, (64, count * item), dtype=np.uint8).view(code)
        out = np.zeros_like(given)
        wide = np.zeros((64, count), np.int64)
        vector = f".v{count}" if count > 1 else ""
        float_ = kind[0] == "f"
        size = f"{kind[0]}{8 * item}" if float_ else f"b{max(16, 8 * item)}"
        names = [f"%v{n}" for n in range(count)]
        group = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        wides = [f"%w{n}" for n in range(count)]
        wide_group = f"{{{', '.join(wides)}}}" if count > 1 else wides[0]
        at = f"mad.lo.u64 %here, %i64, {item * count}, "
        lines = [f"{at} %p0;", f"ld.global{vector}.{kind} {group}, [%here];"]
        base, dot = "%p1", ".global"
        if space == "shared":
            base, dot = "%base", ".shared"
            lines += ["mov.u64 %base, s;"]
        elif space == "local":
            base, dot = "%base", ".local"
            lines += ["mov.u64 %base, depot;", "mul.lo.u64 %i64, %i64, 0;"]
        elif space == "":
            dot = ""
        lines += [f"{at} {base};", f"st{dot}{vector}.{kind} [%here], {group};",
                  *(f"mov.{size} {name}, 0{'f00000000' if kind == 'f32' else ''};" for name in names
                    if kind != "f64"),
                  f"ld{dot}{vector}.{kind} {group}, [%here];"]  # fmt: skip
        if not float_:
            lines.append(f"ld{dot}{vector}.{kind} {wide_group}, [%here];")
        lines += [
            "cvt.u64.u32 %i64, %i;",
            f"{at} %p1;",
            f"st.global{vector}.{kind} [%here], {group};",
        ]
        if not float_:
            lines += [f"mad.lo.u64 %here, %i64, {8 * count}, %p2;",
                      *(f"st.global.b64 [%here+{8 * n}], {w};"
                        for n, w in enumerate(wides))]  # fmt: skip
        run(
            "\n".join(lines), given, out, wide, threads=64, registers=(
                f".reg .{size} %v<4>;\n.reg .b64 %w<4>, %base;\n.local .align 16 .b8 depot[16];\n"
                ".shared .align 16 .b8 s[1024];"
            ),
        )  # fmt: skip
        np.testing.assert_array_equal(out.view(np.uint8), given.view(np.uint8), err_msg=kind)
        if not float_:
            np.testing.assert_array_equal(wide, given.astype(np.int64), err_msg=kind)


def test_qualifiers_of_loads_and_stores_change_nothing_here() -> None:
    loads = ["ld.volatile.global.u32", "ld.weak.global.u32", "ld.relaxed.gpu.global.u32",
             "ld.acquire.sys.global.u32", "ld.global.nc.u32", "ld.global.cg.u32",
             "ld.global.L1::no_allocate.L2::128B.u32", "ld.global.nc.L1::evict_last.u32",
             "ldu.global.u32", "ld.u32"]  # fmt: skip
    stores = ["st.volatile.global.u32", "st.weak.global.u32", "st.relaxed.cta.global.u32",
              "st.release.gpu.global.u32", "st.global.wt.u32", "st.global.L1::evict_first.u32",
              "st.u32", "st.global.cs.u32", "st.global.wb.u32", "st.global.cg.u32"]  # fmt: skip
    given = np.arange(32, dtype=np.uint32)
    out = np.zeros((len(loads), 32), np.uint32)
    body = ["add.u64 %from, %p0, %at4;", "add.u64 %here, %p1, %at4;", "prefetch.global.L2 [%from];"]
    for n, (load, store) in enumerate(zip(loads, stores, strict=True)):
        body += [f"{load} %x, [%from];", f"{store} [%here+{128 * n}], %x;", "membar.gl;"]
    body += ["fence.acq_rel.gpu;", "nanosleep.u32 20;"]
    run("\n".join(body), given, out, registers=".reg .u32 %x;\n.reg .u64 %from;")
    assert (out == given).all()


def test_constants_and_variables_of_the_module() -> None:
    out = np.zeros((2, 32), np.uint32)
    run(
        """mov.u64 %a, table; add.u64 %a, %a, %at4; ld.const.u32 %x, [%a];
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %x;
        atom.global.add.u32 %x, [counter], 2;
        ld.global.u32 %x, [counter]; st.global.u32 [%here+128], %x;""",
        out,
        before=f".const .align 4 .u32 table[32] = {{{', '.join(str(n * n) for n in range(32))}}};\n"
        ".global .align 4 .u32 counter = 5;",
        registers=".reg .u64 %a;\n.reg .u32 %x;",
    )
    np.testing.assert_array_equal(out[0], np.arange(32) ** 2)
    assert (out[1] == 5 + 64).all()


def test_generic_addresses_of_shared_and_local_memory() -> None:
    out = np.zeros((4, 32), np.uint32)
    run(
        """mov.u64 %s, s; cvta.shared.u64 %g, %s; add.u64 %g, %g, %at4;
        st.u32 [%g], %i; cvta.to.shared.u64 %s, %g; ld.shared.u32 %x, [%s];
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %x;
        mov.u64 %s, depot; cvta.local.u64 %h, %s; add.u32 %x, %i, 7; st.u32 [%h+4], %x;
        cvta.to.local.u64 %s, %h; ld.local.u32 %x, [%s+4]; st.global.u32 [%here+128], %x;
        isspacep.shared %a, %g; isspacep.local %b, %g; isspacep.global %c, %g;
        selp.u32 %x, 1, 0, %a; @%b add.u32 %x, %x, 2; @%c add.u32 %x, %x, 4;
        isspacep.local %a, %h; isspacep.global %b, %p0;
        @%a add.u32 %x, %x, 8; @%b add.u32 %x, %x, 16; st.global.u32 [%here+256], %x;
        cvta.global.u64 %s, %here; cvta.to.global.u64 %s, %s; ld.global.u32 %x, [%s];
        st.global.u32 [%here+384], %x;""",
        out,
        registers=".reg .u64 %s, %g, %h;\n.reg .u32 %x;\n.reg .pred %a, %b, %c;\n"
        ".shared .align 4 .b8 s[128];\n.local .align 4 .b8 depot[8];",
    )
    np.testing.assert_array_equal(out[0], np.arange(32))
    np.testing.assert_array_equal(out[1], np.arange(32) + 7)
    assert (out[2] == 1 + 8 + 16).all()
    np.testing.assert_array_equal(out[3], out[0])


ATOMIC: dict[str, Any] = {
    "add": lambda old, a, b: old + a, "min": lambda old, a, b: min(old, a),
    "max": lambda old, a, b: max(old, a), "and": lambda old, a, b: old & a,
    "or": lambda old, a, b: old | a, "xor": lambda old, a, b: old ^ a,
    "exch": lambda old, a, b: a, "cas": lambda old, a, b: b if old == a else old,
    "inc": lambda old, a, b: 0 if old >= a else old + 1,
    "dec": lambda old, a, b: a if old == 0 or old > a else old - 1,
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize("how", ATOMIC)
def test_atomics_of_every_type(how: str, space: str) -> None:
    """All lanes on one place, in the order of the lanes; and a reduction on another."""
    kinds = {"add": "u32 s32 u64 f32 f64", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64",
             "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64", "exch": "b32 b64",
             "cas": "b16 b32 b64", "inc": "u32", "dec": "u32"}[how]  # fmt: skip
    for kind in kinds.split():
        dtype = np.dtype(TYPES[kind])
        bits = 8 * dtype.itemsize
        given = np.array([[(n * 37 + 11) % 100 - 40 * (dtype.kind != "u") for n in range(32)],
                          [(n * 29) % 90 for n in range(32)]])  # fmt: skip
        if how in ("inc", "dec"):
            given[0] = 7
        if how == "cas":
            given[0] = np.arange(32) // 2 + 30
            given[1] = np.arange(32) // 2 + 31
        values = given.astype(dtype)
        start = np.array([30, 30], dtype)
        old = np.zeros(32, dtype)
        moved = "%place" if space != "shared" else "%s"
        dot = f".{space}" if space else ""
        lines = [f"mul.lo.u64 %here, %i64, {dtype.itemsize};", "add.u64 %from, %p0, %here;",
                 f"ld.global.b{bits} %a, [%from];",
                 f"ld.global.b{bits} %b, [%from+{32 * dtype.itemsize}];",
                 "mov.u64 %place, %p1;", "mov.u64 %s, s;"]  # fmt: skip
        if space == "shared":
            lines += ["setp.eq.u32 %first, %i, 0;", f"ld.global.v2.b{bits} {{%x, %y}}, [%p1];",
                      f"@%first st.shared.v2.b{bits} [s], {{%x, %y}};", "bar.sync 0;"]  # fmt: skip
        operands = "%a, %b" if how == "cas" else "%a"
        lines.append(f"atom{dot}.{how}.{kind} %x, [{moved}], {operands};")
        if how not in ("exch", "cas"):
            lines.append(
                f"red.relaxed.gpu{dot}.{how}.{kind} [{moved}+{dtype.itemsize}], {operands};"
            )
        lines += ["add.u64 %from, %p2, %here;", f"st.global.b{bits} [%from], %x;"]
        if space == "shared":
            lines += ["bar.sync 0;", f"ld.shared.v2.b{bits} {{%x, %y}}, [s];",
                      f"@%first st.global.v2.b{bits} [%p1], {{%x, %y}};"]  # fmt: skip
        register_ = kind if kind[0] == "f" else f"b{bits}"
        run("\n".join(lines), values, start, old, registers=(
            f".reg .{register_} %a, %b, %x, %y;\n.reg .u64 %from, %place, %s;\n.reg .pred %first;\n"
            ".shared .align 16 .b8 s[16];"))  # fmt: skip
        now: Any = dtype.type(30)
        for lane in range(32):
            assert old[lane] == now, (kind, lane)
            now = dtype.type(ATOMIC[how](now, values[0, lane], values[1, lane]))
        assert start[0] == now, kind
        assert start[1] == (now if how not in ("exch", "cas") else 30), kind


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_atomic_sums_of_halves(kind: str, dtype: Any) -> None:
    one, two = np.array([1.5, 0], dtype), np.array([2, 3], dtype)
    run(
        f"""mov.b32 %pair, {{%h, %h}};
        cvt.rn.{kind}.f32 %h, 0f3F000000; mov.b32 %pair, {{%h, %h}};
        atom.global.add.noftz.{kind} %r, [%p0], %h;
        red.global.add.noftz.{kind}x2 [%p1], %pair;""".replace("mov.b32 %pair, {%h, %h};\n", "", 1),
        one,
        two,
        registers=".reg .b16 %h, %r;\n.reg .b32 %pair;",
    )
    assert one.tolist() == [17.5, 0]
    assert two.tolist() == [18, 19]


@pytest.mark.parametrize(("how", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_asynchronous_copies_land_when_waited_for(how: str, size: int) -> None:
    """Two groups; the first is read while the second may be on its way; the rest are zeros."""
    given = np.random.default_rng(size).integers(0, 256, (2, 32, size), dtype=np.uint8)
    out = np.full_like(given, 99)
    part = size // 2
    run(
        f"""mov.u32 %s, s; mad.lo.u32 %s, %i, {size}, %s;
        mad.lo.u64 %from, %i64, {size}, %p0; mad.lo.u64 %here, %i64, {size}, %p1;
        cp.async.{how}.shared.global [%s], [%from], {size}; cp.async.commit_group;
        cp.async.{how}.shared.global.L2::128B [%s+{32 * size}], [%from+{32 * size}], {size}, {part};
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.b32 %x, [%s]; st.global.b32 [%here], %x;
        ld.shared.b32 %x, [%s+{size - 4}]; st.global.b32 [%here+{size - 4}], %x;
        cp.async.wait_all;
        ld.shared.b32 %x, [%s+{32 * size}]; st.global.b32 [%here+{32 * size}], %x;
        ld.shared.b32 %x, [%s+{33 * size - 4}]; st.global.b32 [%here+{33 * size - 4}], %x;""",
        given,
        out,
        registers=f".reg .u32 %s, %x;\n.reg .u64 %from;\n.shared .align 16 .b8 s[{64 * size}];",
    )
    want = given.copy()
    want[1, :, part:] = 0
    for word in (slice(0, 4), slice(size - 4, size)):
        np.testing.assert_array_equal(out[..., word], want[..., word])


def test_a_copy_that_nobody_waited_for_is_not_there() -> None:
    with pytest.raises(KernelFault, match=r"on its way.*\(ld\.shared\.b32\)"):
        run(
            """mov.u32 %s, s; cp.async.ca.shared.global [%s], [%p0], 4; cp.async.commit_group;
            cp.async.wait_group 1; ld.shared.b32 %x, [%s];""",
            np.zeros(4, np.uint32),
            threads=1,
            registers=".reg .u32 %s, %x;\n.shared .align 16 .b8 s[16];",
        )


# ---- other lanes ----


def shuffled(kind: str, value: Array, b: int, clamp: int, segment: int) -> tuple[Array, Array]:
    """The manual's pseudo code."""
    out, valid = value.copy(), np.zeros(32, bool)
    for lane in range(32):
        high = (lane & segment) | (clamp & ~segment)
        low = lane & segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b,
                  "idx": low | (b & ~segment & 31)}[kind]  # fmt: skip
        valid[lane] = source >= high if kind == "up" else source <= high
        out[lane] = value[source if valid[lane] else lane]
    return out, valid


@pytest.mark.parametrize("kind", ["up", "down", "bfly", "idx"])
def test_shuffles(kind: str) -> None:
    cases = list(itertools.product((0, 1, 5, 16, 31), (32, 16, 8, 1)))
    value = np.random.default_rng(1).integers(0, 2**32, 32, dtype=np.uint32)
    out = np.zeros((len(cases), 2, 32), np.uint32)
    body = ["add.u64 %here, %p0, %at4;", "ld.global.u32 %x, [%here];", "add.u64 %here, %p1, %at4;"]
    for n, (b, width) in enumerate(cases):
        c = ((32 - width) << 8) | (0 if kind == "up" else 31)
        body += [f"shfl.sync.{kind}.b32 %y|%q, %x, {b}, {c}, -1;", "selp.u32 %z, 1, 0, %q;",
                 f"st.global.u32 [%here+{256 * n}], %y;",
                 f"st.global.u32 [%here+{256 * n + 128}], %z;"]  # fmt: skip
    run("\n".join(body), value, out, registers=".reg .u32 %x, %y, %z;\n.reg .pred %q;")
    for (b, width), got in zip(cases, out, strict=True):
        want, valid = shuffled(kind, value, b, 0 if kind == "up" else 31, 32 - width)
        np.testing.assert_array_equal(got[0], want)
        np.testing.assert_array_equal(got[1], valid)


def test_lanes_of_two_branches_shuffle_among_themselves() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """setp.lt.u32 %q, %i, 12; mov.u32 %m, 0xfff; @!%q mov.u32 %m, 0xfffff000;
        @%q bra FIRST;
        shfl.sync.down.b32 %x, %i, 1, 31, %m;
        bra STORE;
        FIRST:
        add.u32 %x, %i, 100;
        shfl.sync.up.b32 %x, %x, 1, 0, %m;
        STORE:
        bar.warp.sync -1;
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %x;""",
        out,
        registers=".reg .u32 %x, %m;\n.reg .pred %q;",
    )
    lanes = np.arange(32)
    first = np.maximum(lanes - 1, 0) + 100
    np.testing.assert_array_equal(out, np.where(lanes < 12, first, np.minimum(lanes + 1, 31)))


def test_votes_matches_reductions_and_elections() -> None:
    value = (np.arange(32) * 7 % 5).astype(np.uint32)
    value[3] = 0x80000000
    out = np.zeros((20, 32), np.uint32)
    lines = [
        "setp.gt.u32 %q, %x, 2;",
        "vote.sync.all.pred %r, %q, -1; selp.u32 %y, 1, 0, %r;",
        "vote.sync.any.pred %r, %q, -1; selp.u32 %y, 1, 0, %r;",
        "vote.sync.uni.pred %r, %q, -1; selp.u32 %y, 1, 0, %r;",
        "vote.sync.all.pred %r, !%false, -1; selp.u32 %y, 1, 0, %r;",
        "vote.sync.ballot.b32 %y, %q, -1;",
        "vote.sync.ballot.b32 %y, !%q, -1;",
        "match.any.sync.b32 %y, %x, -1;",
        "match.all.sync.b32 %y|%r, %x, -1; @%r mov.u32 %y, 7;",
        "cvt.u64.u32 %w, %x; shl.b64 %w, %w, 32; match.any.sync.b64 %y, %w, -1;",
        "match.all.sync.b64 %y|%r, 5, -1; @!%r mov.u32 %y, 7;",
        *(f"redux.sync.{how}.{kind} %y, %x, -1;" for how, kind in
          [("add", "u32"), ("min", "u32"), ("max", "u32"), ("min", "s32"), ("max", "s32"),
           ("and", "b32"), ("or", "b32"), ("xor", "b32")]),
        "elect.sync %y|%r, -1; @%r add.u32 %y, %y, 9;",
        "activemask.b32 %y;",
    ]  # fmt: skip
    body = [lines[0]]
    for n, line in enumerate(lines[1:]):
        body += [line, f"st.global.u32 [%here+{128 * n}], %y;"]
    run(
        "add.u64 %from, %p0, %at4; ld.global.u32 %x, [%from]; setp.gt.u32 %false, %i, 99;\n"
        "add.u64 %here, %p1, %at4;\n" + "\n".join(body),
        value,
        out,
        registers=".reg .u32 %x, %y;\n.reg .u64 %w, %from;\n.reg .pred %q, %r, %false;",
    )
    yes = value > 2
    ballot = sum(1 << lane for lane in range(32) if yes[lane])
    same = [sum(1 << k for k in range(32) if value[k] == value[lane]) for lane in range(32)]
    s = value.view(np.int32)
    full = 0xFFFFFFFF
    want: list[Any] = [0, 1, 0, 1, ballot, ballot ^ full, same, 0, same, full]
    want += [value.sum(dtype=np.uint32), value.min(), value.max(), s.min().view(np.uint32),
             s.max().view(np.uint32), np.bitwise_and.reduce(value), np.bitwise_or.reduce(value),
             np.bitwise_xor.reduce(value), [9] + [0] * 31, full]  # fmt: skip
    assert len(want) == len(lines) - 1
    for n, row in enumerate(want):
        np.testing.assert_array_equal(out[n], row, err_msg=lines[n + 1])


def test_barriers_that_count() -> None:
    out = np.zeros((3, 96), np.uint32)
    run(
        """and.b32 %x, %i, 3; setp.eq.u32 %q, %x, 0;
        add.u64 %here, %p0, %at4;
        bar.red.popc.u32 %y, 0, %q; st.global.u32 [%here], %y;
        barrier.red.or.aligned.pred %r, 1, 96, %q; selp.u32 %y, 1, 0, %r;
        st.global.u32 [%here+384], %y;
        bar.red.and.pred %r, 0, !%q; selp.u32 %y, 1, 0, %r; st.global.u32 [%here+768], %y;""",
        out,
        threads=96,
        registers=".reg .u32 %x, %y;\n.reg .pred %q, %r;",
    )
    assert (out == [[24], [1], [0]]).all()


def test_branches_by_index() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """rem.u32 %x, %i, 3;
        $TARGETS: .branchtargets ZERO, ONE, TWO;
        brx.idx %x, $TARGETS;
        ZERO: mov.u32 %y, 10; bra.uni DONE;
        ONE: mov.u32 %y, 11; bra DONE;
        TWO: mov.u32 %y, 12;
        DONE:
        activemask.b32 %x; setp.ne.u32 %q, %x, -1; @%q trap;
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %y;""",
        out,
        registers=".reg .u32 %x, %y;\n.reg .pred %q;",
    )
    np.testing.assert_array_equal(out, 10 + np.arange(32) % 3)


def test_a_loop_that_lanes_leave_at_different_times() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """mov.u32 %x, 0; mov.u32 %n, 0;
        LOOP:
        setp.ge.u32 %q, %n, %i; @%q bra OUT;
        add.u32 %x, %x, %n; add.u32 %n, %n, 1; bra LOOP;
        OUT:
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %x;""",
        out,
        registers=".reg .u32 %x, %n;\n.reg .pred %q;",
    )
    np.testing.assert_array_equal(out, [n * (n - 1) // 2 for n in range(32)])


# ---- matrices ----


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_go_to_and_from_shared_memory(count: int, transposed: str) -> None:
    """Lane 4 g + t gets row g, elements 2 t and 2 t + 1, or column g; stmatrix is the contrary."""
    given = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    out = np.zeros((32, count, 2), np.uint16)
    back = np.zeros((8 * count, 8), np.uint16)
    names = [f"%m{n}" for n in range(count)]
    group = f"{{{', '.join(names)}}}"
    width = 4 * count
    run(
        f"""mov.u32 %s, s; mad.lo.u32 %s, %i, 16, %s;
        mad.lo.u64 %from, %i64, 16, %p0; ld.global.v4.b32 {{%a, %b, %c, %d}}, [%from];
        st.shared.v4.b32 [%s], {{%a, %b, %c, %d}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {group}, [%s];
        mad.lo.u64 %here, %i64, {width}, %p1;
        {"".join(f"st.global.b32 [%here+{4 * n}], {name};" for n, name in enumerate(names))}
        stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%s+512], {group};
        bar.warp.sync -1; setp.ge.u32 %q, %i, {8 * count}; @%q ret;
        ld.shared.v4.b32 {{%a, %b, %c, %d}}, [%s+512];
        mad.lo.u64 %here, %i64, 16, %p2; st.global.v4.b32 [%here], {{%a, %b, %c, %d}};""",
        given,
        out,
        back,
        registers=".reg .u32 %s, %a, %b, %c, %d, %m<4>;\n.reg .u64 %from;\n.reg .pred %q;\n"
        ".shared .align 16 .b8 s[1024];",
    )
    for m in range(count):
        tile = given[8 * m : 8 * m + 8]
        want = (tile.T if transposed else tile).reshape(32, 2)
        np.testing.assert_array_equal(out[:, m], want)
    np.testing.assert_array_equal(back, given[: 8 * count])


def test_movmatrix_transposes() -> None:
    given = np.arange(64, dtype=np.uint16)
    out = np.zeros(64, np.uint16)
    run(
        """add.u64 %here, %p0, %at4; ld.global.b32 %x, [%here];
        movmatrix.sync.aligned.m8n8.trans.b16 %x, %x;
        add.u64 %here, %p1, %at4; st.global.b32 [%here], %x;""",
        given,
        out,
        registers=".reg .b32 %x;",
    )
    np.testing.assert_array_equal(out.reshape(8, 8), given.reshape(8, 8).T)


@pytest.mark.parametrize(
    ("kind", "depth"),
    [("bf16", 16), ("f16", 16), ("bf16", 8), ("f16", 8), ("tf32", 8), ("tf32", 4)],
)
def test_tensor_cores(kind: str, depth: int) -> None:
    """Fragments as the manual draws them: an element of A at (g, k), (g + 8, k); of B at (k, g)."""
    random = np.random.default_rng(depth)
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32}[kind]
    a = random.integers(-8, 9, (16, depth)).astype(dtype)
    b = random.integers(-8, 9, (depth, 8)).astype(dtype)
    c = random.integers(-100, 100, (16, 8)).astype(np.float32)
    per_word = 1 if kind == "tf32" else 2
    half = depth // (4 * per_word)
    a_words, b_words = [], []
    for part in range(half):
        for row in (0, 8):
            a_words.append([[a[lane // 4 + row, part * 4 * per_word + lane % 4 * per_word + e]
                             for e in range(per_word)] for lane in range(32)])  # fmt: skip
        b_words.append([[b[part * 4 * per_word + lane % 4 * per_word + e, lane // 4]
                         for e in range(per_word)] for lane in range(32)])  # fmt: skip
    c_words = [[[c[lane // 4 + r // 2 * 8, lane % 4 * 2 + r % 2]] for lane in range(32)]
               for r in range(4)]  # fmt: skip
    given = np.concatenate([
        np.array(words, kind_).view(np.uint32).reshape(-1, 32)
        for words, kind_ in ((a_words + b_words, dtype), (c_words, np.float32))
    ])  # fmt: skip
    out = np.zeros((4, 32), np.float32)
    loads = "".join(f"ld.global.b32 %w{n}, [%here+{128 * n}];\n" for n in range(len(given)))
    names = [f"%w{n}" for n in range(len(given))]
    parts = [names[: 2 * half], names[2 * half : 3 * half], names[3 * half :]]
    groups = [f"{{{', '.join(p)}}}" for p in parts]
    moves = "".join(f"mov.b32 %f{n}, {name};\n" for n, name in enumerate(parts[2]))
    run(
        f"""add.u64 %here, %p0, %at4; {loads} {moves}
        mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32
            {{%d0, %d1, %d2, %d3}}, {groups[0]}, {groups[1]}, {{%f0, %f1, %f2, %f3}};
        add.u64 %here, %p1, %at4;
        st.global.f32 [%here], %d0; st.global.f32 [%here+128], %d1;
        st.global.f32 [%here+256], %d2; st.global.f32 [%here+384], %d3;""",
        given,
        out,
        registers=f".reg .b32 %w<{len(given)}>;\n.reg .f32 %f<4>, %d<4>;",
    )
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    got = np.zeros((16, 8))
    for r in range(4):
        for lane in range(32):
            got[lane // 4 + r // 2 * 8, lane % 4 * 2 + r % 2] = out[r, lane]
    np.testing.assert_array_equal(got, want)


# ---- what is not known ----

REGISTERS = ".reg .u32 %x, %y;\n.reg .f32 %f;\n.reg .b64 %w;\n.reg .b16 %h;\n.reg .pred %q;"


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rn.u32 %x, %y, 1;",
        "add.ftz.f64 %w, %w, %w;",
        "mul.sat.u32 %x, %y, 1;",
        "mad.wide.hi.u32 %w, %x, %y, %w;",
        "min.relu.u32 %x, %x, %y;",
        "cvt.f32.u32 %f, %x;",
        "cvt.rn.satfinite.e4m3x2.f32 %h, %f, %f;",
        "setp.lo.s32 %q, %x, %y;",
        "setp.ltu.u32 %q, %x, %y;",
        "ld.global.L3.u32 %x, [%w];",
        "ld.global.v8.f32 %f, [%w];",
        "st.const.u32 [%w], %x;",
        "atom.global.add.s64 %w, [%w], %w;",
        "atom.global.mul.u32 %x, [%w], %x;",
        "shfl.up.b32 %x, %y, 1, 0;",
        "vote.all.pred %q, %q;",
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {%f,%f,%f,%f},{%x,%x,%x,%x},{%x,%x},"
        "{%f,%f,%f,%f};",
        "cp.async.bulk.commit_group;",
        "cp.async.cg.shared.global [%x], [%w], 8;",
        "call foo;",
        "tex.2d.v4.f32.f32 %f, [t, {%f,%f}];",
        "mov.u32 %x, %clock;",
        "mov.u32 %x, %w2;",
        "add.u32 %x, %y;",
        "add.u32 %x, %y, 1, 2;",
        "add.f32 %f, %q, %f;",
        "add.f32 %f, %f, 0d3FF0000000000000;",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%x, %y}, [%x];",
        "bar.arrive 0, 64;",
        "wgmma.fence.sync.aligned;",
    ],
)  # fmt: skip
def test_what_is_not_known_is_an_error_with_its_line(instruction: str) -> None:
    name = instruction.split(None, 1)[0].rstrip(";")
    with pytest.raises(PtxError, match=rf"PTX line \d+: not known: {re.escape(name)}"):
        run(instruction, registers=REGISTERS)


def test_registers_of_another_width_are_cut_or_widened() -> None:
    """As the manual lets cvt, ld and st have wider registers than their type."""
    out = np.zeros((3, 32), np.int64)
    run(
        """add.u64 %here, %p0, %at8;
        sub.s32 %x, %i, 200; cvt.s8.s32 %x, %x; cvt.s64.s32 %w, %x; st.global.b64 [%here], %w;
        cvt.u64.u32 %w, %i; add.u64 %w, %w, 250; cvt.u32.u8 %x, %w; cvt.s64.s32 %w, %x;
        st.global.b64 [%here+256], %w;
        st.global.b8 [%here+512], %i;""",
        out,
        registers=".reg .s32 %x;\n.reg .b64 %w;",
    )
    i = np.arange(32)
    np.testing.assert_array_equal(out[0], (i - 200).astype(np.int8))
    np.testing.assert_array_equal(out[1], (i + 250) % 256)
    np.testing.assert_array_equal(out[2], i)


def test_what_is_undefined_may_be_written_and_then_read() -> None:
    out = np.zeros(32, np.uint32)
    memory = Memory()
    address = memory.add(out, "out")
    memory.poison(out, UNDEFINED)
    text = f"""{HEADER}.visible .entry k(.param .u64 q) {{ .reg .u64 %p; .reg .u32 %x;
    ld.param.u64 %p, [q]; st.global.u32 [%p], 5; ld.global.u32 %x, [%p];
    st.global.u32 [%p+4], %x; ret; }}"""
    Module.from_ptx(text, memory).function("k").launch((1, 1, 1), (1, 1, 1), [address])
    assert out[:2].tolist() == [5, 5]
    memory.require_written(out[:2])
    with pytest.raises(KernelFault, match=r"out: 30 of 32 elements were never written.*\(2,\)"):
        memory.require_written(out)


def test_the_machine_runs_under_the_sanitizer(capfd: pytest.CaptureFixture[str]) -> None:
    out = np.zeros(32, np.uint32)
    run(
        """add.s32 %x, %i, 0x7fffffff; shl.b32 %y, %x, 40; div.s32 %x, 0x80000000, -1;
        neg.s32 %x, %x; mad.lo.s32 %x, %x, %x, %y;
        add.u64 %here, %p0, %at4; st.global.u32 [%here], %x;""",
        out,
        registers=".reg .s32 %x, %y;",
        sanitize=True,
    )
    assert not out.any()
    assert "runtime error" not in capfd.readouterr().err

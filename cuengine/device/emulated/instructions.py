"""Which PTX instructions there are, with which modifiers and types, and what each computes.

Two tables. `_arithmetic` has what works lane by lane: a pattern of opcodes and a C expression, of
which `c_source` makes one C function each ("handler"). `_FAMILIES` has what touches memory, other
lanes or the flow of control; their handlers are in runtime.c, and program.py reads their operands.
Every other instruction, type or modifier is an error.

A pattern is an opcode with choices as the PTX manual has them: `add(.u32|.s32)`, `mul[.ftz].f32`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "16x2": 4}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A handler's group and name, and the PTX types of its result and its arguments."""

    handler: tuple[str, str]
    result: str
    arguments: tuple[str, ...]


def width(kind: str) -> int:
    """Bytes of a PTX type in memory: 4 for f32, 2 for bf16."""
    return WIDTHS[kind.lstrip("abcdefghijklmnopqrstuvwxyz")]


def register_width(kind: str) -> int:
    """Bytes of the register for it: none is narrower than 16 bits."""
    return max(2, width(kind))


# ---- C of a type ----

_ROUNDINGS = {"rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
_WHOLE = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_NARROW = {"rn": "NEAREST", "rna": "NEAREST_AWAY", "rz": "TO_ZERO", "rp": "UP", "rm": "DOWN"}
_HALVES = ("f16", "bf16")
_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _value_type(kind: str) -> str:
    """C type that lanes are computed in. Halves: double, then rounded once."""
    if kind in _HALVES:
        return "double"
    if kind in ("f32", "f64", "pred"):
        return {"f32": "float", "f64": "double", "pred": "int"}[kind]
    return f"{'int' if kind[0] == 's' else 'uint'}{8 * width(kind)}_t"


def _storage_type(kind: str) -> str:
    if kind in ("f32", "f64"):
        return _value_type(kind)
    return f"uint{8 * register_width(kind)}_t"


def _fetch(kind: str, name: str) -> str:
    if kind == "pred":
        return f"{name} >> l & 1"
    if kind in _HALVES:
        return f"{kind}_of({name}[l])"
    return f"({_value_type(kind)}){name}[l]"


def _handler(
    name: str,
    result: str,
    arguments: tuple[str, ...],
    expression: str,
    *,
    prepare: str = "",
    rounding: str = "",
    lanes: int = 32,
) -> str:
    """C of one handler. The expression has a value for each argument: a, b, ..."""
    letters = "abcdefgh"[: len(arguments)]
    head, body = [], []
    for n, (letter, kind) in enumerate(zip(letters, arguments, strict=True), 1):
        big = letter.upper()
        if kind == "pred":
            head.append(f"const uint32_t {big} = *predicate(w, i->o[{n}]);")
        else:
            head.append(f"const {_storage_type(kind)} *{big} = place(w, i->o[{n}]);")
        body.append(f"{_value_type(kind)} {letter} = {_fetch(kind, big)};")
    body.append(prepare)
    after = []
    if result == "pred":
        head.append("uint8_t truths[32];")
        body.append(f"truths[l] = ({expression}) != 0;")
        after.append("set_predicates(w, i, mask, bits_of(truths));")
    else:
        storage = _storage_type(result)
        head.append(f"{storage} *R = target(w, i->o[0], mask);")
        if result in _HALVES and not expression.startswith("(uint16_t)"):
            expression = f"bits_{result}({expression})"
        cast = "" if result in _HALVES else f"({_value_type(result)})"
        body.append(f"R[l] = ({storage}){cast}({expression});")
        size = 4 if lanes == 64 else register_width(result)
        after.append(f"keep(w, i->o[0], mask, {size});")
    if rounding:
        head.append(f"begin_rounding({rounding});")
        after.insert(0, "end_rounding();")
    return (
        f"void {name}(Warp *w, const Instruction *i, uint32_t mask) {{\n    "
        + "\n    ".join(head)
        + f"\n    LANES({lanes}) {{ {' '.join(filter(None, body))} }}\n    "
        + "\n    ".join(after)
        + "\n}\n"
    )


def _named(expression: str, names: dict[str, str]) -> str:
    """With C types in the place of their short names."""
    return re.sub(r"_T\b|\b[TUSWNM]\b", lambda m: names[m[0]], expression)


# ---- patterns ----


def expand(pattern: str) -> Iterator[str]:
    """All opcodes of a pattern: (.x|.y) one of these, [.x|.y] one or none."""
    parts = re.split(r"(\([^)]*\)|\[[^\]]*\])", pattern)
    choices = []
    for part in parts:
        options = part[1:-1].split("|") if part[:1] in ("(", "[") else [part]
        choices.append(["", *options] if part.startswith("[") else options)
    return ("".join(chosen) for chosen in itertools.product(*choices))


class _Table:
    """Opcodes to what they are; handlers with the same C are one."""

    def __init__(self) -> None:
        self.operations: dict[str, Arithmetic] = {}
        self.handlers: dict[str, dict[str, str]] = {}
        """By group: their C by name."""
        self.group = ""
        self._by_body: dict[str, tuple[str, str]] = {}

    def begin(self, group: str) -> _Table:
        """What comes is compiled together, when the first of it is wanted."""
        self.group = group
        return self

    def handler(self, opcode: str, made: str) -> tuple[str, str]:
        """Group and name of what has this C, in which NAME stands for the name."""
        name = "do_" + re.sub(r"\W", "_", opcode)
        found = self._by_body.setdefault(made, (self.group, name))
        if found[1] == name:
            self.handlers.setdefault(self.group, {})[name] = made.replace("NAME", name)
        return found

    def add(
        self,
        opcode: str,
        result: str,
        arguments: tuple[str, ...],
        expression: str,
        *,
        prepare: str = "",
        rounding: str = "",
        lanes: int = 32,
    ) -> None:
        # Of two in a register each is an element of its own: twice as many.
        types = [kind.removesuffix("x2") if lanes == 64 else kind for kind in (result, *arguments)]
        made = _handler("NAME", types[0], tuple(types[1:]), expression,
                        prepare=prepare, rounding=rounding, lanes=lanes)  # fmt: skip
        self.operations[opcode] = Arithmetic(self.handler(opcode, made), result, arguments)

    def rows(
        self, pattern: str, expression: str, result: str = "T", arguments: tuple[str, ...] = ()
    ) -> None:
        """Opcodes whose last part is their type, T.

        In the expression: a, b, c, d are the arguments; T is the type in C, U and S the unsigned
        and the signed one of its size, W the one of twice its size, N its bits, _T its name at the
        end of a C function's. Where arguments is not given they are all of type T.
        """
        count = max(ord(x) - 96 for x in re.findall(r"\b[a-d]\b", expression))
        for opcode in expand(pattern):
            parts = opcode.split(".")
            kind = parts[-1]
            lanes = 64 if kind.endswith("x2") else 32
            element = kind.removesuffix("x2")
            types = {"T": kind}
            names = {"_T": f"_{element}"}
            if kind == "pred":
                names["T"] = "uint32_t"
            else:
                bits = 8 * width(element)
                types["W"] = f"{kind[0]}{2 * bits}"
                sign = "" if kind[0] == "s" else "u"
                names |= {"T": _value_type(element), "U": f"uint{bits}_t", "S": f"int{bits}_t",
                          "W": f"{sign}int{2 * bits}_t", "N": str(bits)}  # fmt: skip
            text = _named(expression, names)
            given = [types.get(a, a) for a in arguments or ("T",) * count]
            prepare, rounding = "", ""
            if element in _FLOATS:
                text, prepare = _modified(text, element, set(parts), len(given))
                rounding = next((_ROUNDINGS[p] for p in parts if p in _ROUNDINGS), "")
            self.add(opcode, types.get(result, result), tuple(given), text,
                     prepare=prepare, rounding=rounding, lanes=lanes)  # fmt: skip


def _modified(expression: str, kind: str, modifiers: set[str], count: int) -> tuple[str, str]:
    """.ftz, .sat and .relu put round a floating-point expression; what comes before it."""
    flushes = "ftz" in modifiers and kind == "f32"
    prepare = " ".join(f"{x} = flush({x});" for x in "abcd"[:count]) if flushes else ""
    if "relu" in modifiers:
        expression = f"relu({expression})"
    if "sat" in modifiers:
        expression = f"saturate({expression})"
    return (f"flush({expression})" if flushes else expression), prepare


# ---- lane by lane ----

_ANY = "(.u16|.s16|.u32|.s32|.u64|.s64)"
_BITS = "(.b16|.b32|.b64)"
_WIDE = "(.u32|.s32|.u64|.s64)"
_HALF = "(.f16|.f16x2|.bf16|.bf16x2)"
_APPROXIMATE = {"ex2": "exp2f(a)", "lg2": "log2f(a)", "sin": "sinf(a)", "cos": "cosf(a)",
                "rsqrt": "1 / sqrtf(a)", "rcp": "1 / a", "sqrt": "sqrtf(a)"}  # fmt: skip


def _integers(t: _Table) -> None:
    t.begin("integers")
    t.rows(f"add{_ANY}", "(U)a + (U)b")
    t.rows(f"sub{_ANY}", "(U)a - (U)b")
    t.rows(f"mul.lo{_ANY}", "(W)a * (W)b")
    t.rows(f"mul.hi{_ANY}", "((W)a * (W)b) >> N")
    t.rows("mul.wide(.u16|.s16|.u32|.s32)", "(W)a * (W)b", "W")
    t.rows(f"mad.lo{_ANY}", "(U)((W)a * (W)b) + (U)c")
    # The sum wraps: in unsigned arithmetic of 64 bits, of which the result's are the lower.
    t.rows("mad.wide(.u16|.s16|.u32|.s32)", "(uint64_t)((W)a * (W)b) + (uint64_t)c", "W",
           ("T", "T", "W"))  # fmt: skip
    # Division by zero gives all ones, as GPUs do; the least by -1 wraps.
    t.rows("div(.u16|.u32|.u64)", "b ? a / b : (T)-1")
    t.rows("div(.s16|.s32|.s64)", "b == 0 ? (T)-1 : b == -1 ? (T)(0 - (U)a) : (T)(a / b)")
    t.rows("rem(.u16|.u32|.u64)", "b ? a % b : a")
    t.rows("rem(.s16|.s32|.s64)", "b == 0 ? a : b == -1 ? 0 : (T)(a % b)")
    t.rows("abs(.s16|.s32|.s64)", "a < 0 ? 0 - (U)a : (U)a")
    t.rows("neg(.s16|.s32|.s64)", "0 - (U)a")
    t.rows(f"min{_ANY}", "a < b ? a : b")
    t.rows(f"max{_ANY}", "a > b ? a : b")
    t.begin("rare_integers")
    t.rows("add(.u16x2|.s16x2)", "(U)a + (U)b")
    for name, sign in {"min": "<", "max": ">"}.items():
        t.rows(f"{name}(.u16x2|.s16x2)", f"a {sign} b ? a : b")
        t.rows(f"{name}.relu(.s32|.s16x2)", f"(a {sign} b ? a : b) > 0 ? (a {sign} b ? a : b) : 0")
    t.rows("add.sat.s32", "clamp_s32((int64_t)a + b)")
    t.rows("sub.sat.s32", "clamp_s32((int64_t)a - b)")
    t.rows(f"mad.hi{_ANY}", "(U)(((W)a * (W)b) >> N) + (U)c")
    t.rows("mul24.lo.u32", "(a & 0xffffff) * (b & 0xffffff)")
    t.rows("mul24.lo.s32", "(U)((S)((U)a << 8) >> 8) * (U)((S)((U)b << 8) >> 8)")
    t.rows(f"sad{_ANY}", "(U)c + (a < b ? (U)b - (U)a : (U)a - (U)b)")
    for carry in ("add", "sub"):
        sign = "+" if carry == "add" else "-"
        for opcode in expand(f"{carry}[c](.cc){_WIDE}"):
            _with_carry(t, opcode, f"(W)a {sign} (W)b")
        for opcode in expand(f"{carry}c{_WIDE}"):
            _with_carry(t, opcode, f"(W)a {sign} (W)b")
    for opcode in [*expand(f"mad[c](.lo|.hi).cc{_WIDE}"), *expand(f"madc(.lo|.hi){_WIDE}")]:
        part = "(U)((M)a * (M)b)" if ".lo" in opcode else "(U)(((M)a * (M)b) >> N)"
        _with_carry(t, opcode, f"(W){part} + (W)(U)c")


def _with_carry(t: _Table, opcode: str, expression: str) -> None:
    """W: unsigned, twice as wide; M: the same with the type's sign. A carry is bit N."""
    kind = opcode.rsplit(".", 1)[1]
    bits = 8 * width(kind)
    takes, sign = opcode.split(".", maxsplit=1)[0].endswith("c"), "-" if "sub" in opcode else "+"
    names = {"U": f"uint{bits}_t", "W": f"uint{2 * bits}_t", "N": str(bits),
             "M": ("" if kind[0] == "s" else "u") + f"int{2 * bits}_t"}  # fmt: skip
    unsigned = f"u{bits}"
    arguments = (kind,) * (3 if "mad" in opcode else 2) if "mad" in opcode else (unsigned,) * 2
    text = _named(expression, names)
    total = f"{text} {sign} (w->carry >> l & 1)" if takes else text
    prepare = f"uint{2 * bits}_t x = {total};"
    if ".cc" in opcode:
        prepare += f" carries |= (uint32_t)(x >> {bits} & 1) << l;"
    made = _handler("NAME", unsigned, arguments, "x", prepare=prepare)
    if ".cc" in opcode:
        made = made.replace("    LANES", "    uint32_t carries = 0;\n    LANES")
        made = made.replace("keep(", "w->carry = (w->carry & ~mask) | (carries & mask);\n    keep(")
    t.operations[opcode] = Arithmetic(t.handler(opcode, made), unsigned, arguments)


def _bits(t: _Table) -> None:
    t.begin("bits")
    for name, sign in {"and": "&", "or": "|", "xor": "^"}.items():
        t.rows(f"{name}{_BITS}", f"a {sign} b")
    t.rows(f"not{_BITS}", "~a")
    t.rows(f"cnot{_BITS}", "a == 0")
    t.rows(f"shl{_BITS}", "shift_left(a, b, N)", arguments=("T", "u32"))
    t.rows("shr(.b16|.b32|.b64|.u16|.u32|.u64)", "shift_right(a, b, N)", arguments=("T", "u32"))
    t.rows("shr(.s16|.s32|.s64)", "shift_sign(a, b, N)", arguments=("T", "u32"))
    kinds = "(.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64|.f32|.f64)"
    t.rows(f"mov{kinds}", "a")
    t.rows(f"selp{kinds}", "c ? a : b", arguments=("T", "T", "pred"))
    t.begin("rare_bits")
    t.rows("lop3.b32", "logic3(a, b, c, d)")
    for side, function in {"l": "funnel_left", "r": "funnel_right"}.items():
        t.rows(f"shf.{side}.wrap.b32", f"{function}(a, b, c & 31)")
    t.rows("shf.l.clamp.b32", "c > 31 ? a : funnel_left(a, b, c)")
    t.rows("shf.r.clamp.b32", "c > 31 ? b : funnel_right(a, b, c)")
    t.rows("prmt.b32", "permute(a, b, c)")
    t.rows("popc(.b32|.b64)", "__builtin_popcountll(a)", "u32")
    t.rows("clz(.b32|.b64)", "a ? __builtin_clzll(a) - (64 - N) : N", "u32")
    t.rows("brev(.b32|.b64)", "reverse_bits(a, N)")
    t.rows("bfi(.b32|.b64)", "bit_insert(a, b, c, d, N)", arguments=("T", "T", "u32", "u32"))
    t.rows("bfe(.u32|.u64)", "bit_extract(a, b, c, N, 0)", arguments=("T", "u32", "u32"))
    t.rows("bfe(.s32|.s64)", "bit_extract((U)a, b, c, N, 1)", arguments=("T", "u32", "u32"))
    for shift in ("", ".shiftamt"):
        t.rows(f"bfind{shift}(.u32|.u64)", f"find_top(a, N, {int(bool(shift))})", "u32")
        t.rows(f"bfind{shift}(.s32|.s64)",
               f"find_top(a < 0 ? (U)~a : (U)a, N, {int(bool(shift))})", "u32")  # fmt: skip


def _floats(t: _Table) -> None:
    exact = "[.rn|.rz|.rm|.rp]"
    wanted = "(.rn|.rz|.rm|.rp)"
    for kind, sat in (("[.ftz].f32", "[.ftz][.sat].f32"), (".f64", ".f64")):
        t.begin(f"float_{kind[-2:]}")
        t.rows(f"add{exact}{sat}", "a + b")
        t.rows(f"sub{exact}{sat}", "a - b")
        t.rows(f"mul{exact}{sat}", "a * b")
        t.rows(f"(fma|mad){wanted}{sat}", "fma_T(a, b, c)")
        f = "f" if "32" in kind else ""
        t.rows(f"div{wanted}{kind}", "a / b")
        t.rows(f"rcp{wanted}{kind}", "1 / a")
        t.rows(f"sqrt{wanted}{kind}", f"__builtin_sqrt{f}(a)")
        t.rows(f"abs{kind}", f"fabs{f}(a)")
        t.rows(f"neg{kind}", "-a")
        t.rows(f"copysign{kind.removeprefix('[.ftz]')}", f"copysign{f}(b, a)")
        t.rows(f"min{kind}", "min_T(a, b)")
        t.rows(f"max{kind}", "max_T(a, b)")
    t.begin("approximate")
    # From 2**126 on the manual lets 1 / b be 0.
    t.rows("div.approx[.ftz].f32", "div_approximate(a, b)")
    t.rows("div.full[.ftz].f32", "a / b")
    for name, expression in _APPROXIMATE.items():
        t.rows(f"{name}.approx[.ftz].f32", expression)
    t.rows("tanh.approx.f32", "tanhf(a)")
    t.rows("rcp.approx.ftz.f64", "high_word(1 / flush_f64(a))")
    t.rows("rsqrt.approx.f64", "1 / sqrt(a)")
    t.rows("rsqrt.approx.ftz.f64", "high_word(1 / sqrt(flush_f64(a)))")
    t.begin("rare_floats")
    for name in ("min", "max"):
        t.rows(f"{name}[.ftz].NaN.f32", f"{name}_nan_f32(a, b)")
        t.rows(f"{name}[.ftz].xorsign.abs.f32", f"xor_sign({name}_f32(fabsf(a), fabsf(b)), a, b)")
    tests = {"finite": "isfinite(a)", "infinite": "isinf(a)", "number": "a == a",
             "notanumber": "a != a", "normal": "isnormal(a)",
             "subnormal": "fpclassify(a) == FP_SUBNORMAL"}  # fmt: skip
    for name, expression in tests.items():
        t.rows(f"testp.{name}(.f32|.f64)", expression, "pred")
    t.begin("halves")
    for name, expression in {
        "add": "add_odd(a, b)",
        "sub": "add_odd(a, -b)",
        "mul": "a * b",
    }.items():
        t.rows(f"{name}[.rn][.ftz][.sat](.f16|.f16x2)", expression)
        t.rows(f"{name}[.rn](.bf16|.bf16x2)", expression)
    t.rows("fma.rn[.ftz][.sat|.relu](.f16|.f16x2)", "add_odd(a * b, c)")
    t.rows("fma.rn[.relu](.bf16|.bf16x2)", "add_odd(a * b, c)")
    for name in ("min", "max"):
        t.rows(f"{name}[.ftz]{_HALF}", f"{name}_f64(a, b)")
        t.rows(f"{name}[.ftz].NaN{_HALF}", f"{name}_nan_f64(a, b)")
    t.rows(f"abs[.ftz]{_HALF}", "fabs(a)")
    t.rows(f"neg[.ftz]{_HALF}", "-a")
    t.rows(f"tanh.approx{_HALF}", "tanh(a)")
    t.rows("ex2.approx(.f16|.f16x2)", "exp2(a)")
    t.rows("ex2.approx.ftz(.bf16|.bf16x2)", "exp2(a)")


_COMPARE = {"eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b",
            "ge": "a >= b"}  # fmt: skip
_UNSIGNED_NAMES = {"lo": "a < b", "ls": "a <= b", "hi": "a > b", "hs": "a >= b"}
_FLOAT_COMPARE = _COMPARE | {
    "ne": "a < b || a > b", "num": "a == a && b == b", "nan": "a != a || b != b",
    "equ": "!(a < b || a > b)", "neu": "a != b", "ltu": "!(a >= b)", "leu": "!(a > b)",
    "gtu": "!(a <= b)", "geu": "!(a < b)",
}  # fmt: skip
COMBINATIONS = ("and", "or", "xor")


def _comparisons(t: _Table) -> None:
    """setp.how and setp.how.and, .or, .xor, whose handlers are the same."""
    combined = f"[{'|'.join('.' + c for c in COMBINATIONS)}]"
    t.begin("compare_integers")
    for how, expression in _COMPARE.items():
        kinds = "(.b16|.b32|.b64|.u16|.s16|.u32|.s32|.u64|.s64)" if how in ("eq", "ne") else _ANY
        t.rows(f"setp.{how}{combined}{kinds}", expression, "pred")
    for how, expression in _UNSIGNED_NAMES.items():
        t.rows(f"setp.{how}{combined}(.u16|.u32|.u64)", expression, "pred")
    for kind in ("[.ftz].f32", ".f64", ".f16", ".bf16"):
        t.begin(f"compare{kind.removeprefix('[.ftz]').replace('.', '_')}")
        for how, expression in _FLOAT_COMPARE.items():
            t.rows(f"setp.{how}{combined}{kind}", expression, "pred")


def _limits(kind: str) -> tuple[str, str]:
    name = f"{'INT' if kind[0] == 's' else 'UINT'}{8 * width(kind)}"
    return (f"{name}_MIN" if kind[0] == "s" else "0"), f"{name}_MAX"


def _conversions(t: _Table) -> None:
    t.begin("convert_integers")
    for to, of in itertools.product(_INTEGERS, _INTEGERS):
        t.add(f"cvt.{to}.{of}", to, (of,), "a")
    t.begin("saturate_integers")
    for to, of in itertools.product(_INTEGERS, _INTEGERS):
        low, high = _limits(to)
        clamped = f"(int128_t)a < {low} ? {low} : (int128_t)a > {high} ? {high} : a"
        t.add(f"cvt.sat.{to}.{of}", to, (of,), clamped)
    for of, (how, function), to in itertools.product(_FLOATS, _WHOLE.items(), _INTEGERS):
        t.begin(f"{of}_{how}")
        for sat in ("", ".sat"):  # integers are saturated anyway
            t.add(f"cvt.{how}{sat}.{to}.{of}", to, (of,), f"to_{to}({function}((double)a))")
            if of == "f32":
                expression = f"to_{to}({function}((double)flush(a)))"
                t.add(f"cvt.{how}.ftz{sat}.{to}.{of}", to, (of,), expression)
    for how, to, of in itertools.product(("rn", "rz", "rm", "rp"), _FLOATS, _INTEGERS):
        t.begin(f"integer_to_{to}" if how == "rn" else "directed_conversions")
        if to in _HALVES:
            value = f"odd_of_{of[0]}64(a)"
            t.add(f"cvt.{how}.{to}.{of}", to, (of,), _narrowed(to, value, how))
        else:
            t.add(f"cvt.{how}.{to}.{of}", to, (of,), f"({_value_type(to)})a",
                  rounding=_ROUNDINGS.get(how, ""))  # fmt: skip
    _float_conversions(t)


def _narrowed(kind: str, value: str, how: str, finite: bool = False) -> str:
    exponent, fraction = {"f16": (5, 10), "bf16": (8, 7)}[kind]
    return f"(uint16_t)narrow({value}, {exponent}, {fraction}, {_NARROW[how]}, {int(finite)})"


def _float_conversions(t: _Table) -> None:
    # Wider, and as wide: nothing is rounded, but to whole numbers where that is asked for.
    for of, to in (("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"),
                   ("f32", "f64"), ("f32", "f32"), ("f64", "f64"), ("f16", "f16"),
                   ("bf16", "bf16")):  # fmt: skip
        t.begin("widen" if of != to else "round_floats")
        wholes = {"": "{a}"}
        if of == to:
            wholes |= {f".{how}": f"{function}({{a}})" for how, function in _WHOLE.items()}
        for (how, value), sat in itertools.product(wholes.items(), ("", ".sat")):
            text = f"saturate({value})" if sat else value
            t.add(f"cvt{how}{sat}.{to}.{of}", to, (of,), text.format(a="a"))
            if "f32" in (of, to):
                text = text.format(a="flush(a)" if of == "f32" else "a")
                text = f"flush({text})" if to == "f32" else text
                t.add(f"cvt{how}.ftz{sat}.{to}.{of}", to, (of,), text)
    for how, sat in itertools.product(("rn", "rz", "rm", "rp"), ("", ".sat")):
        text = "saturate(a)" if sat else "a"
        mode = _ROUNDINGS.get(how, "")
        t.begin("narrow" if how == "rn" else "directed_conversions")
        t.add(f"cvt.{how}{sat}.f32.f64", "f32", ("f64",), text, rounding=mode)
        t.add(f"cvt.{how}.ftz{sat}.f32.f64", "f32", ("f64",), f"flush({text})", rounding=mode)
        for of, to in itertools.product(("f32", "f64"), _HALVES):
            quick = (how, sat, of) == ("rn", "", "f32")
            value = f"(uint16_t)bits_{to}_of_f32(a)" if quick else _narrowed(to, text, how)
            t.add(f"cvt.{how}{sat}.{to}.{of}", to, (of,), value)
    for how, to, relu, finite in itertools.product(
        ("rn", "rz"), _HALVES, ("", ".relu"), ("", ".satfinite")
    ):
        quick = (how, relu, finite) == ("rn", "", "")
        t.begin("narrow" if quick else "directed_conversions")
        pair = [
            f"bits_{to}_of_f32({x})" if quick
            else _narrowed(to, f"relu({x})" if relu else x, how, bool(finite))
            for x in "ab"
        ]  # fmt: skip
        t.add(f"cvt.{how}{relu}{finite}.{to}x2.f32", f"{to}x2", ("f32", "f32"),
              f"(uint32_t){pair[0]} << 16 | {pair[1]}")  # fmt: skip
        if relu or finite:
            t.add(f"cvt.{how}{relu}{finite}.{to}.f32", to, ("f32",), pair[0])
    for how in ("rn", "rna", "rz"):
        t.add(f"cvt.{how}.tf32.f32", "b32", ("f32",),
              f"narrow(a, 8, 10, {_NARROW[how]}, 0) << 13")  # fmt: skip


# ---- memory, lanes, control: the pattern, and the function in program.py that reads the operands

_SCOPE = "(.cta|.cluster|.gpu|.sys)"
_VALUE_TYPES = "(.b8|.u8|.s8|.b16|.u16|.s16|.b32|.u32|.s32|.b64|.u64|.s64|.f32|.f64)"
_SPACES = "[.global|.shared|.shared::cta|.local]"
_L2 = "[.L2::64B|.L2::128B|.L2::256B]"
_L1 = "[.L1::evict_normal|.L1::evict_first|.L1::evict_last|.L1::no_allocate|.L1::evict_unchanged]"
_SEMANTICS = "[.relaxed|.acquire|.release|.acq_rel]"
_ATOMIC_TYPES = {"add": "u32 s32 u64 f32 f64", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64",
                 "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64", "exch": "b32 b64",
                 "cas": "b16 b32 b64", "inc": "u32", "dec": "u32"}  # fmt: skip
_ATOMIC_HALVES = "(.f16|.f16x2|.bf16|.bf16x2)"

_FAMILIES: tuple[tuple[str, str], ...] = (
    (f"ld.param[.v2|.v4]{_VALUE_TYPES}", "load_param"),
    (f"ld[.weak|.volatile]{_SPACES}[.ca|.cg|.cs|.lu|.cv]{_L1}{_L2}[.v2|.v4]{_VALUE_TYPES}", "load"),
    (f"ld.global[.ca|.cg|.cs].nc{_L1}{_L2}[.v2|.v4]{_VALUE_TYPES}", "load"),
    (f"ld.const[.v2|.v4]{_VALUE_TYPES}", "load"),
    (f"ld(.relaxed|.acquire){_SCOPE}{_SPACES}{_L1}{_L2}[.v2|.v4]{_VALUE_TYPES}", "load"),
    (f"ldu[.global][.v2|.v4]{_VALUE_TYPES}", "load"),
    (f"st[.weak|.volatile]{_SPACES}[.wb|.cg|.cs|.wt]{_L1}[.v2|.v4]{_VALUE_TYPES}", "store"),
    (f"st(.relaxed|.release){_SCOPE}{_SPACES}{_L1}[.v2|.v4]{_VALUE_TYPES}", "store"),
    *(
        (f"{name}{_SEMANTICS}[{_SCOPE[1:-1]}]{_SPACES.replace('|.local', '')}.{how}"
         f"({'|'.join('.' + kind for kind in kinds.split())})", "atomic")
        for name in ("atom", "red")
        for how, kinds in _ATOMIC_TYPES.items()
        if name == "atom" or how not in ("exch", "cas")
    ),
    *(
        (f"{name}{_SEMANTICS}[{_SCOPE[1:-1]}]{_SPACES.replace('|.local', '')}"
         f".add.noftz{_ATOMIC_HALVES}", "atomic")
        for name in ("atom", "red")
    ),
    (f"cp.async.ca(.shared|.shared::cta).global{_L2}", "copy_async"),
    (f"cp.async.cg(.shared|.shared::cta).global{_L2}", "copy_async"),
    ("cp.async.commit_group", "plain"),
    ("cp.async.wait_group", "wait_group"),
    ("cp.async.wait_all", "plain"),
    ("cvta[.to](.global|.const|.shared|.shared::cta|.local|.param).u64", "convert_address"),
    ("isspacep(.global|.shared|.shared::cta|.local)", "which_space"),
    ("mov(.b16|.b32|.b64)", "pack"),
    ("(mov|and|or|xor|not).pred", "predicate"),
    ("bra[.uni]", "branch"),
    ("brx.idx[.uni]", "branch_by_index"),
    ("(ret|exit)[.uni]", "leave"),
    ("(trap|brkpt)", "trap"),
    ("membar(.cta|.gl|.sys)", "nothing"),
    (f"fence[.sc|.acq_rel]{_SCOPE}", "nothing"),
    ("griddepcontrol(.wait|.launch_dependents)", "nothing"),
    ("nanosleep.u32", "nothing"),
    ("prefetch[.global](.L1|.L2)", "nothing"),
    ("(bar|barrier|bar.cta|barrier.cta).sync[.aligned]", "barrier"),
    ("(bar|barrier|bar.cta|barrier.cta).red(.popc)[.aligned].u32", "barrier"),
    ("(bar|barrier|bar.cta|barrier.cta).red(.and|.or)[.aligned].pred", "barrier"),
    ("bar.warp.sync", "warp_sync"),
    ("shfl.sync(.up|.down|.bfly|.idx).b32", "shuffle"),
    ("vote.sync(.all|.any|.uni).pred", "vote"),
    ("vote.sync.ballot.b32", "vote"),
    ("match(.any|.all).sync(.b32|.b64)", "match"),
    ("redux.sync(.add|.min|.max)(.u32|.s32)", "reduce"),
    ("redux.sync(.and|.or|.xor).b32", "reduce"),
    ("elect.sync", "elect"),
    ("activemask.b32", "active_mask"),
    ("ldmatrix.sync.aligned.m8n8(.x1|.x2|.x4)[.trans](.shared|.shared::cta).b16", "matrices"),
    ("stmatrix.sync.aligned.m8n8(.x1|.x2|.x4)[.trans](.shared|.shared::cta).b16", "matrices"),
    ("movmatrix.sync.aligned.m8n8.trans.b16", "move_matrix"),
    ("mma.sync.aligned(.m16n8k16|.m16n8k8).row.col.f32.bf16.bf16.f32", "multiply"),
    ("mma.sync.aligned(.m16n8k16|.m16n8k8).row.col.f32.f16.f16.f32", "multiply"),
    ("mma.sync.aligned(.m16n8k8|.m16n8k4).row.col.f32.tf32.tf32.f32", "multiply"),
)  # fmt: skip

# ---- handlers between the two: made here, with operands of their own

_ATOMIC = {"add": "old + a", "min": "old < a ? old : a", "max": "old > a ? old : a",
           "and": "old & a", "or": "old | a", "xor": "old ^ a", "exch": "a",
           "cas": "old == a ? b : old", "inc": "old >= a ? 0 : old + 1",
           "dec": "old == 0 || old > a ? a : old - 1"}  # fmt: skip


def atomic_handler(how: str, kind: str) -> str:
    return f"atomic_{how}_{kind}"


def _atomic(how: str, kind: str) -> str:
    """o: result, values, and the address at o[8] (kind: bit 0, it has 8 bytes; size: its space)."""
    packed = kind in ("f16x2", "bf16x2")
    element = kind.removesuffix("x2")
    storage, value = _storage_type(element), _value_type(element)
    count = 2 if packed else 1
    new = "add_odd(old, a)" if element in _HALVES else _ATOMIC[how]
    result = f"bits_{element}({new})" if element in _HALVES else new
    old, a, b = (_fetch(element, name).replace("[l]", "[at]") for name in ("OLD", "A", "B"))
    old = old.replace("[at]", "[n]")
    return f"""void {atomic_handler(how, kind)}(Warp *w, const Instruction *i, uint32_t mask) {{
    uint64_t address[32];
    const {storage} *A = place(w, i->o[1]), *B = place(w, i->o[2]);
    {storage} *R = place(w, i->o[0]);
    get_addresses(w, i->o[8], i->kind & 1, i->immediate, address);
    EACH(mask) {{
        uint8_t *p = atomic_at(w, i, (int)l, address[l], {width(kind)});
        {storage} OLD[{count}], NEW[{count}];
        memcpy(OLD, p, sizeof OLD);
        for (uint32_t n = 0; n < {count}; n++) {{
            uint32_t at = l * {count} + n;
            {value} old = {old}, a = {a}, b = {b};
            (void)old, (void)b;
            NEW[n] = ({storage})({result});
            R[at] = OLD[n];
        }}
        memcpy(p, NEW, sizeof NEW);
    }}
}}
"""


def resize_handler(kind: str, to: int) -> str:
    """Copies a register into one of another width: value kept, by the sign of `kind`."""
    return f"resize_{kind}_{8 * to}"


def _between() -> dict[str, str]:
    """What is made here and belongs to runtime.c, by name."""
    made: dict[str, str] = {}
    for how, kinds in _ATOMIC_TYPES.items():
        for kind in kinds.split():
            made[atomic_handler(how, kind)] = _atomic(how, kind)
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        made[atomic_handler("add", kind)] = _atomic("add", kind)
    for sign, of, to in itertools.product("us", (2, 4, 8), (2, 4, 8)):
        if of != to:
            name = resize_handler(f"{sign}{8 * of}", to)
            made[name] = _handler(name, f"{sign}{8 * to}", (f"{sign}{8 * of}",), "a")
    for name, expression in {"mov": "a", "and": "a & b", "or": "a | b", "xor": "a ^ b",
                             "not": "~a"}.items():  # fmt: skip
        handler = f"{name}_pred"
        made[handler] = (
            f"void {handler}(Warp *w, const Instruction *i, uint32_t mask) {{\n"
            "    uint32_t a = *predicate(w, i->o[1]) ^ i->size;\n"
            "    uint32_t b = *predicate(w, i->o[2]) ^ i->width;\n"
            f"    (void)b;\n    put_predicate(w, i->o[0], mask, {expression});\n}}\n"
        )
    # mov between a register and its parts, the lowest first.
    for whole, part in ((8, 4), (8, 2), (4, 2)):
        count, big, small = whole // part, f"uint{8 * whole}_t", f"uint{8 * part}_t"
        parts = ", ".join(f"*p{n} = place(w, i->o[{n + 1}])" for n in range(count))
        value = " | ".join(f"({big})p{n}[l] << {8 * part * n}" for n in range(count))
        made[f"pack_{whole}_{part}"] = (
            f"void pack_{whole}_{part}(Warp *w, const Instruction *i, uint32_t mask) {{\n"
            f"    const {small} {parts};\n    {big} *R = target(w, i->o[0], mask);\n"
            f"    LANES(32) R[l] = {value};\n    keep(w, i->o[0], mask, {whole});\n}}\n"
        )
        moves = " ".join(f"p{n}[l] = ({small})(x >> {8 * part * n});" for n in range(count))
        made[f"unpack_{whole}_{part}"] = (
            f"void unpack_{whole}_{part}(Warp *w, const Instruction *i, uint32_t mask) {{\n"
            f"    {small} {parts};\n    const {big} *A = place(w, i->o[0]);\n"
            f"    if (mask == EVERY) LANES(32) {{ {big} x = A[l]; {moves} }}\n"
            f"    else EACH(mask) {{ {big} x = A[l]; {moves} }}\n}}\n"
        )
    return made


@cache
def _table() -> _Table:
    t = _Table()
    for part in (_integers, _bits, _floats, _comparisons, _conversions):
        part(t)
    return t


@cache
def _families() -> dict[str, list[tuple[re.Pattern[str], str]]]:
    """By the part of the opcode before its first dot."""
    found: dict[str, list[tuple[re.Pattern[str], str]]] = {}
    for pattern, reader in _FAMILIES:
        text = pattern.replace(".", r"\.").replace("[", "(?:").replace("]", ")?")
        compiled = re.compile(text)
        for first in {opcode.split(".")[0] for opcode in expand(re.sub(r"\[.*", "", pattern))}:
            found.setdefault(first, []).append((compiled, reader))
    return found


def arithmetic(opcode: str) -> Arithmetic | None:
    """What works lane by lane."""
    return _table().operations.get(opcode)


@cache
def family(opcode: str) -> str | None:
    """The reader of an instruction's operands in program.py."""
    for pattern, reader in _families().get(opcode.split(".", maxsplit=1)[0], ()):
        if pattern.fullmatch(opcode):
            return reader
    return None


def opcodes() -> Iterator[str]:
    """All that are known."""
    yield from _table().operations
    for pattern, _ in _FAMILIES:
        yield from expand(pattern)


RUNTIME = "runtime"
"""The group of what is not arithmetic."""


def c_source(group: str) -> str:
    """C of a group's handlers, a function each with its name."""
    if group == RUNTIME:
        return '#include "runtime.c"\n' + "".join(_between().values())
    return '#include "warp.h"\n' + "".join(_table().handlers[group].values())


def groups() -> tuple[str, ...]:
    return (RUNTIME, *_table().handlers)

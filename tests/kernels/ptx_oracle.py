"""What PTX instructions compute, from the manual's words: integers wrap, floats are rationals that
are rounded once. Everything is bits: an operand and a result are the integer that a register holds.

`expected(opcode, kinds, operands)` is the oracle of test_emulator_instructions.py. NaN is any NaN.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "tf32": (8, 10)}
"""Bits of exponent and of fraction."""

NAN = -1
"""The result is a NaN, whichever."""


def bits_of(kind: str) -> int:
    return int(re.sub(r"^\D+", "", kind.removesuffix("x2"))) * (2 if kind.endswith("x2") else 1)


# ---- floats ----


def infinity(kind: str) -> int:
    exponent, fraction = FORMATS[kind]
    return ((1 << exponent) - 1) << fraction


def sign_bit(kind: str) -> int:
    return 1 << sum(FORMATS[kind])


def is_nan(bits: int, kind: str) -> bool:
    return bits == NAN or (bits & (sign_bit(kind) - 1)) > infinity(kind)


@cache
def value(bits: int, kind: str) -> float:
    """As a double, which holds all of these; NaN and infinities too."""
    if is_nan(bits, kind):
        return math.nan
    sign = -1.0 if bits & sign_bit(kind) else 1.0
    magnitude = bits & (sign_bit(kind) - 1)
    if magnitude == infinity(kind):
        return sign * math.inf
    exponent, fraction = FORMATS[kind]
    bias = (1 << (exponent - 1)) - 1
    scale, kept = magnitude >> fraction, magnitude & ((1 << fraction) - 1)
    if scale:
        kept |= 1 << fraction
    return sign * math.ldexp(kept, max(scale, 1) - bias - fraction)


def rounded(x: Fraction, kind: str, mode: str = "rn", negative_zero: bool = False) -> int:
    """Bits of the nearest number of this kind, or the next one in the direction of the mode."""
    exponent, fraction = FORMATS[kind]
    bias = (1 << (exponent - 1)) - 1
    negative = x < 0 if x else negative_zero
    sign = sign_bit(kind) if negative else 0
    x = abs(x)
    if not x:
        return sign
    scale = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** scale > x:
        scale -= 1
    scale = max(scale, 1 - bias)
    quotient = x / Fraction(2) ** (scale - fraction)
    whole = math.floor(quotient)
    rest, half = quotient - whole, Fraction(1, 2)
    if mode == "rn":
        whole += rest > half or (rest == half and whole % 2 == 1)
    elif mode == "rna":
        whole += rest >= half
    elif mode in ("rp", "rm"):
        whole += rest > 0 and negative == (mode == "rm")
    magnitude = whole + ((scale + bias - 1) << fraction) if whole >= 1 << fraction else whole
    if magnitude >= infinity(kind):
        outward = mode in ("rn", "rna") or (mode == "rm" if negative else mode == "rp")
        magnitude = infinity(kind) - (not outward)
    return sign | magnitude


def encode(x: float, kind: str) -> int:
    """Of what is exact in this kind, infinite or NaN."""
    if math.isnan(x):
        return NAN
    if math.isinf(x):
        return infinity(kind) | (sign_bit(kind) if x < 0 else 0)
    return rounded(Fraction(x), kind, "rn", math.copysign(1, x) < 0)


def flushed(bits: int, kind: str) -> int:
    """Denormals become zeros, as .ftz has it."""
    magnitude = bits & (sign_bit(kind) - 1)
    return bits & sign_bit(kind) if 0 < magnitude < 1 << FORMATS[kind][1] else bits


def _divide(a: float, b: float) -> float:
    if b == 0:
        if a == 0 or math.isnan(a):
            return math.nan
        return math.copysign(math.inf, a) * math.copysign(1, b)
    return a / b


def _root(x: Fraction) -> Fraction:
    """Of a positive rational; where it is not one, something as good between two of its digits."""
    shift = 400
    scaled = x.numerator * x.denominator << 2 * shift
    whole = math.isqrt(scaled)
    exact = whole * whole == scaled
    return Fraction(2 * whole + (not exact), 2 * x.denominator << shift)


@cache
def arithmetic(name: str, kind: str, mode: str, *operands: int) -> int:
    """add, sub, mul, fma, div, rcp, sqrt."""
    x = [value(o, kind) for o in operands]
    if name == "rcp":
        name, x = "div", [1.0, *x]
    if name == "sub":
        name, x = "add", [x[0], -x[1]]
    if name == "sqrt":
        if x[0] > 0 and math.isfinite(x[0]):
            return rounded(_root(Fraction(x[0])), kind, mode)
        return encode(x[0] if x[0] == 0 or x[0] > 0 else math.nan, kind)
    if not all(map(math.isfinite, x)) or (name == "div" and x[1] == 0):
        plain = {"add": lambda: x[0] + x[1], "mul": lambda: x[0] * x[1],
                 "div": lambda: _divide(x[0], x[1]), "fma": lambda: _fma_special(*x)}  # fmt: skip
        return encode(plain[name](), kind)
    f = [Fraction(v) for v in x]
    minus = [math.copysign(1, v) < 0 for v in x]
    if name in ("mul", "div"):
        exact = f[0] * f[1] if name == "mul" else f[0] / f[1]
        return rounded(exact, kind, mode, minus[0] != minus[1])
    if name == "fma":
        first, first_minus = f[0] * f[1], minus[0] != minus[1]
    else:
        first, first_minus = f[0], minus[0]
    # An exact zero: the sign of both, or the one that the mode rounds to.
    zero_minus = first_minus if first_minus == minus[-1] else mode == "rm"
    if first or f[-1]:
        zero_minus = mode == "rm"
    return rounded(first + f[-1], kind, mode, zero_minus)


def _fma_special(a: float, b: float, c: float) -> float:
    if all(map(math.isfinite, (a, b))):
        return c
    return a * b + c


def _extreme(name: str, kind: str, parts: set[str], a: int, b: int) -> int:
    if is_nan(a, kind) or is_nan(b, kind):
        if "NaN" in parts or (is_nan(a, kind) and is_nan(b, kind)):
            return NAN
        return b if is_nan(a, kind) else a

    def order(x: int) -> tuple[float, int]:
        return value(x, kind), -(x & sign_bit(kind))

    return (min if name == "min" else max)(a, b, key=order)


# ---- integers ----


def signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) & 1 else bits


def _shifted(name: str, a: int, n: int, width: int, sign: bool) -> int:
    if name == "shl":
        return a << n if n < width else 0
    return (signed(a, width) if sign else a) >> min(n, width)


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _field(kind: str, a: int, start: int, length: int) -> int:
    width, start, length = bits_of(kind), start & 255, length & 255
    if not length:
        return 0
    top = min(start + length - 1, width - 1)
    fill = kind[0] == "s" and a >> top & 1
    found = -1 << length if fill else 0
    for n in range(min(length, width)):
        found |= (a >> (start + n) & 1 if start + n < width else fill) << n
    return found


def _insert(a: int, b: int, start: int, length: int, width: int) -> int:
    start, length = start & 255, length & 255
    for n in range(length):
        if start + n < width:
            b = b & ~(1 << (start + n)) | (a >> n & 1) << (start + n)
    return b


def _find(kind: str, a: int, as_shift: bool) -> int:
    width = bits_of(kind)
    if kind[0] == "s" and a >> (width - 1):
        a = ~a & ((1 << width) - 1)
    if not a:
        return 0xFFFFFFFF
    return width - a.bit_length() if as_shift else a.bit_length() - 1


def _permute(a: int, b: int, selector: int) -> int:
    table, result = (b << 32 | a).to_bytes(8, "little"), []
    for n in range(4):
        s = selector >> 4 * n & 15
        byte = table[s & 7]
        result.append((255 if byte & 128 else 0) if s & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def _integer(name: str, parts: list[str], kind: str, o: Sequence[int]) -> int:
    width = bits_of(kind)
    mask = (1 << width) - 1
    x = [signed(v & mask, width) if kind[0] == "s" else v & mask for v in o]
    match name:
        case "add" | "sub":
            total = x[0] + x[1] if name == "add" else x[0] - x[1]
            return min(max(total, -(1 << 31)), (1 << 31) - 1) if "sat" in parts else total
        case "mul" | "mad":
            product = x[0] * x[1]
            product = product >> width if "hi" in parts else product
            if name == "mad" and "wide" in parts:
                return product + o[2]
            return product + (x[2] if name == "mad" else 0)
        case "mul24":
            low = [signed(v & 0xFFFFFF, 24) if kind[0] == "s" else v & 0xFFFFFF for v in o]
            return low[0] * low[1]
        case "sad":
            return x[2] + abs(x[0] - x[1])
        case "div":
            return _quotient(x[0], x[1]) if x[1] else -1
        case "rem":
            return x[0] - x[1] * _quotient(x[0], x[1]) if x[1] else x[0]
        case "min" | "max":
            best = (min if name == "min" else max)(x[0], x[1])
            return max(best, 0) if "relu" in parts else best
        case "abs":
            return abs(x[0])
        case "neg":
            return -x[0]
        case "and":
            return x[0] & x[1]
        case "or":
            return x[0] | x[1]
        case "xor":
            return x[0] ^ x[1]
        case "not":
            return ~x[0]
        case "cnot":
            return int(x[0] == 0)
        case "shl" | "shr":
            return _shifted(name, o[0], o[1], width, kind[0] == "s")
        case "shf":
            n = o[2] & 31 if "wrap" in parts else min(o[2], 32)
            both = o[1] << 32 | o[0]
            return both << n >> 32 if "l" in parts else both >> n
        case "popc":
            return x[0].bit_count()
        case "clz":
            return width - x[0].bit_length()
        case "brev":
            return int(f"{x[0]:0{width}b}"[::-1], 2)
        case "bfi":
            return _insert(o[0], o[1], o[2], o[3], width)
        case "bfe":
            return _field(kind, o[0], o[1], o[2])
        case "bfind":
            return _find(kind, o[0], "shiftamt" in parts)
        case "prmt":
            return _permute(*o)
        case "lop3":
            chosen = [
                (o[0] >> n & 1) << 2 | (o[1] >> n & 1) << 1 | o[2] >> n & 1 for n in range(32)
            ]
            return sum((o[3] >> row & 1) << n for n, row in enumerate(chosen))
    raise KeyError(name)


# ---- all of them ----

_APPROXIMATIONS: dict[str, Callable[[float], float]] = {
    "ex2": lambda x: 2.0**x if x < 1100 else math.inf,
    "lg2": lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan,
    "sin": lambda x: math.sin(x) if math.isfinite(x) else math.nan,
    "cos": lambda x: math.cos(x) if math.isfinite(x) else math.nan,
    "tanh": math.tanh,
    "rcp": lambda x: _divide(1.0, x),
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "rsqrt": lambda x: _divide(1.0, math.sqrt(x)) if x > 0 or x == 0 else math.nan,
}


def approximated(opcode: str) -> bool:
    """Whether only a bound on the error is known."""
    parts = opcode.split(".")
    return "approx" in parts or "full" in parts


def expected(opcode: str, kinds: Sequence[str], operands: Sequence[int]) -> int | float:
    """Bits of the result, not yet cut to its width; for approximations its value.

    kinds: PTX types of the operands. Raises KeyError for what it does not know.
    """
    parts = opcode.split(".")
    name, kind = parts[0], parts[-1]
    if name in ("mov", "selp"):
        return operands[0] if name == "mov" or operands[2] else operands[1]
    if kind.endswith("x2"):
        half, low = kind.removesuffix("x2"), 0xFFFF
        both = []
        for shift in (0, 16):
            one = expected(
                f"{opcode[:-2]}", [half] * len(kinds), [o >> shift & low for o in operands]
            )
            both.append((one, shift))
        return PackedHalves(both)  # type: ignore[return-value]
    if name == "cvt":
        return _converted(parts, operands)
    if name == "setp":
        return _compared(parts, operands)
    if kind not in FORMATS:
        return _integer(name, parts, kind, operands)
    modifiers = set(parts)
    flush = "ftz" in modifiers and kind == "f32"
    x = [flushed(o, kind) if flush else o for o in operands]
    if name == "testp":
        return _tested(parts[1], x[0], kind)
    if approximated(opcode):
        if kind == "f64" and flush is False and "ftz" in modifiers:
            x = [flushed(o, kind) for o in x]
        v = [value(o, kind) for o in x]
        if any(map(math.isnan, v)):
            return math.nan
        if name == "div" and "approx" in modifiers and 2.0**126 < abs(v[1]) < math.inf:
            return math.nan if math.isinf(v[0]) else 0.0
        return _divide(v[0], v[1]) if name == "div" else _APPROXIMATIONS[name](v[0])
    if name in ("min", "max"):
        if "xorsign" in modifiers:
            sign = (x[0] ^ x[1]) & sign_bit(kind)
            magnitude = _extreme(name, kind, modifiers, *(o & ~sign_bit(kind) for o in x))
            return magnitude if magnitude == NAN else magnitude | sign
        return _extreme(name, kind, modifiers, x[0], x[1])
    if name in ("abs", "neg", "copysign"):
        if is_nan(x[1] if name == "copysign" else x[0], kind):
            return NAN
        return {"abs": lambda: x[0] & ~sign_bit(kind), "neg": lambda: x[0] ^ sign_bit(kind),
                "copysign": lambda: x[1] & ~sign_bit(kind) | x[0] & sign_bit(kind),
                }[name]()  # fmt: skip
    mode = next((p for p in parts if p in ("rn", "rz", "rm", "rp")), "rn")
    result = arithmetic("fma" if name == "mad" else name, kind, mode, *x)
    return _limited(result, kind, modifiers)


class PackedHalves:
    """Two results in one register: (bits, shift) each."""

    def __init__(self, halves: list[tuple[int | float, int]]) -> None:
        self.halves = halves


def _limited(bits: int, kind: str, modifiers: set[str]) -> int:
    """.sat, .relu and .ftz of a result."""
    if "relu" in modifiers and not is_nan(bits, kind) and value(bits, kind) <= 0:
        bits = 0
    if "sat" in modifiers:
        v = 0.0 if is_nan(bits, kind) else min(max(value(bits, kind), 0.0), 1.0)
        bits = 0 if v == 0 else bits if v < 1 else encode(1.0, kind)
    return flushed(bits, kind) if "ftz" in modifiers and kind == "f32" and bits != NAN else bits


def _tested(what: str, bits: int, kind: str) -> int:
    magnitude = bits & (sign_bit(kind) - 1)
    top = infinity(kind)
    least = 1 << FORMATS[kind][1]
    return int({"finite": magnitude < top, "infinite": magnitude == top, "number": magnitude <= top,
                "notanumber": magnitude > top, "normal": least <= magnitude < top,
                "subnormal": 0 < magnitude < least}[what])  # fmt: skip


def _compared(parts: list[str], operands: Sequence[int]) -> int:
    """How two operands compare; what .and, .or and .xor do with it is for the test to say."""
    how, kind = parts[1], parts[-1]
    if kind in FORMATS:
        x = [flushed(o, kind) if "ftz" in parts else o for o in operands[:2]]
        a, b = (value(o, kind) for o in x)
        unordered = math.isnan(a) or math.isnan(b)
        if how in ("num", "nan"):
            return int(unordered == (how == "nan"))
        if how.endswith("u"):
            return int(unordered or _order(how[:-1], a, b))
        return int(not unordered and _order(how, a, b))
    width = bits_of(kind)
    a, b = (signed(o, width) if kind[0] == "s" else o for o in operands[:2])
    return int(_order({"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how), a, b))


def _order(how: str, a: float, b: float) -> bool:
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[how]


def _converted(parts: list[str], operands: Sequence[int]) -> int:
    to, of = parts[-2], parts[-1]
    modifiers = set(parts)
    mode = next((p for p in parts if p in ("rn", "rna", "rz", "rm", "rp")), "rn")
    if to.endswith("x2"):
        halves = [_to_float(o, of, to.removesuffix("x2"), mode, modifiers) for o in operands]
        return PackedHalves([(halves[0], 16), (halves[1], 0)])  # type: ignore[return-value]
    if to == "tf32":
        result = _to_float(operands[0], of, to, mode, modifiers)
        return result if result == NAN else result << 13
    if to in FORMATS:
        return _to_float(operands[0], of, to, mode, modifiers)
    width, sign = bits_of(to), to[0] == "s"
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if sign else (0, (1 << width) - 1)
    if of in FORMATS:
        bits = flushed(operands[0], of) if "ftz" in modifiers else operands[0]
        v = value(bits, of)
        if math.isnan(v):
            return 0
        if math.isinf(v):
            return high if v > 0 else low
        whole: dict[str, Callable[[Fraction], int]] = {
            "rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}  # fmt: skip
        return min(max(whole[next(p for p in parts if p in whole)](Fraction(v)), low), high)
    x = operands[0] & ((1 << bits_of(of)) - 1)
    x = signed(x, bits_of(of)) if of[0] == "s" else x
    # A narrower result keeps its sign in a wider register.
    x = min(max(x, low), high) if "sat" in modifiers else x & ((1 << width) - 1)
    return signed(x, width) if sign and x >= 0 else x


def _to_float(bits: int, of: str, to: str, mode: str, modifiers: set[str]) -> int:
    if of not in FORMATS:
        x = signed(bits, bits_of(of)) if of[0] == "s" else bits & ((1 << bits_of(of)) - 1)
        return rounded(Fraction(x), to, mode)
    if "ftz" in modifiers and of == "f32":
        bits = flushed(bits, of)
    v = value(bits, of)
    if "relu" in modifiers and v <= 0:
        v = 0.0
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    how = next((p for p in modifiers if p in whole), "")
    if how and math.isfinite(v):
        v = math.copysign(float(whole[how](Fraction(v))), v)
    if "sat" in modifiers:
        v = 0.0 if math.isnan(v) or v <= 0 else min(v, 1.0)
    if not math.isfinite(v):
        result = encode(v, to)
        finite = "satfinite" in modifiers and result != NAN
        return result - 1 if finite else result
    result = rounded(Fraction(v), to, mode, math.copysign(1, v) < 0)
    if "satfinite" in modifiers and result & (sign_bit(to) - 1) == infinity(to):
        result -= 1
    return flushed(result, to) if "ftz" in modifiers and to == "f32" else result


def as_value(bits: int, kind: str) -> float:
    """Of a result that an approximation gave."""
    if kind == "f64":
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    return value(bits, kind)

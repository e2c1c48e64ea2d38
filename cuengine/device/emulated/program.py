"""A kernel as the machine in runtime.c runs it: records of handlers and places of registers.

What instructions exist and compute is in instructions.py. Here operands are read and checked, and
registers get places in a warp's file: those that never live at once share one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cuengine.device.emulated import instructions
from cuengine.device.emulated.instructions import RUNTIME, register_width, width
from cuengine.device.emulated.ptx import Instruction, Kernel, PtxError

MAX_OPERANDS = 16
ADDRESS = 8
"""Number of the operand that is an address, where there is one."""

RECORD = np.dtype([
    ("run", "u8"), ("guard", "u4"), ("negated", "u4"), ("size", "u4"), ("width", "u4"),
    ("count", "u4"), ("kind", "u4"), ("line", "u4"), ("_", "u4"), ("immediate", "i8"),
    ("o", "u4", MAX_OPERANDS),
])  # fmt: skip
"""Instruction of warp.h."""

_LANE_BYTES = 128  # of 32 lanes of 4 bytes
_SPECIALS = {
    name: n * _LANE_BYTES
    for n, name in enumerate([
        *(f"%{base}.{axis}" for base in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"),
        "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le",
        "%lanemask_gt", "%lanemask_ge", "%dynamic_smem_size", "%total_smem_size",
    ])
}  # fmt: skip
"""Special registers and their places, as in warp.h."""

_SPACES = {"": 3, "global": 0, "const": 0, "shared": 1, "shared::cta": 1, "local": 2}
_NO_RESULT = ("st", "red", "bra", "brx", "cp", "stmatrix", "bar", "barrier", "ret", "exit", "trap",
              "brkpt", "membar", "fence", "griddepcontrol", "nanosleep", "prefetch")  # fmt: skip
_REGISTER = re.compile(r"\br_\w+")
_EVERY = 0xFFFFFFFF


@dataclass(slots=True)
class Program:
    """handlers: (group, name) of each record. lines: of the kernel's instructions, by record."""

    records: npt.NDArray[Any]
    handlers: list[tuple[str, str]]
    instructions: list[Instruction]
    constants: npt.NDArray[np.uint8]
    file_bytes: int


@dataclass(slots=True)
class _Record:
    handler: tuple[str, str]
    o: dict[int, int]
    guard: tuple[int, int]
    instruction: Instruction
    values: dict[str, int] = field(default_factory=dict)


def assemble(kernel: Kernel, symbols: Mapping[str, int]) -> Program:
    """symbols: addresses of variables, each in its space. Raises PtxError."""
    return _Assembler(kernel, symbols).assemble()


# ---- which registers live where ----


def _defined_and_used(i: Instruction) -> tuple[set[str], set[str]]:
    name = i.opcode.split(".")[0]
    has_result = name not in _NO_RESULT or (name.startswith("bar") and ".red" in i.opcode)
    defined: set[str] = set()
    sources = [*i.operands, i.guard]
    if has_result and i.operands:
        defined = set(_REGISTER.findall(i.operands[0]))
        sources = [*i.operands[1:], i.guard]
    used = set(_REGISTER.findall(" ".join(sources)))
    # Where the guard is false the register keeps what it had.
    return defined, used | defined if i.guard else used


def _lifetimes(code: list[Instruction]) -> dict[str, tuple[int, int]]:
    """First and last instruction at which a register must keep its value."""
    starts = sorted({0} | {n for n, i in enumerate(code) if i.label} | {
        n + 1 for n, i in enumerate(code)
        if i.opcode.split(".")[0] in ("bra", "brx", "ret", "exit") and n + 1 < len(code)
    })  # fmt: skip
    blocks = list(zip(starts, [*starts[1:], len(code)], strict=True))
    block_of = {start: n for n, (start, _) in enumerate(blocks)}
    labels = {i.label: block_of[n] for n, i in enumerate(code) if i.label}
    events = [_defined_and_used(i) for i in code]
    numbers: dict[str, int] = {}
    uses, kills, following = [], [], []
    for n, (start, end) in enumerate(blocks):
        use = kill = 0
        for defined, used in events[start:end]:
            for register in used:
                bit = 1 << numbers.setdefault(register, len(numbers))
                use |= bit & ~kill
            for register in defined:
                kill |= 1 << numbers.setdefault(register, len(numbers))
        uses.append(use)
        kills.append(kill)
        last = code[end - 1]
        name = last.opcode.split(".")[0]
        after = [n + 1] if n + 1 < len(blocks) else []
        if name in ("bra", "brx", "ret", "exit") and not last.guard:
            after = []
        if name == "bra":
            after.append(labels[last.operands[0]])
        if name == "brx":
            after += [labels[target] for target in last.targets]
        following.append(after)
    entering = uses[:]
    changed = True
    while changed:
        changed = False
        for n in range(len(blocks) - 1, -1, -1):
            leaving = 0
            for f in following[n]:
                leaving |= entering[f]
            now = uses[n] | (leaving & ~kills[n])
            if now != entering[n]:
                entering[n], changed = now, True
    first, last_ = dict.fromkeys(numbers, len(code)), dict.fromkeys(numbers, -1)
    for n, (defined, used) in enumerate(events):
        for register in defined | used:
            first[register] = min(first[register], n)
            last_[register] = max(last_[register], n)
    names = list(numbers)
    for n, (start, end) in enumerate(blocks):
        leaving = 0
        for f in following[n]:
            leaving |= entering[f]
        for alive, place in ((entering[n], start), (leaving, end)):
            rest = alive
            while rest:
                name = names[(rest & -rest).bit_length() - 1]
                first[name] = min(first[name], place)
                last_[name] = max(last_[name], place)
                rest &= rest - 1
    return {name: (first[name], last_[name]) for name in names}


class _Assembler:
    def __init__(self, kernel: Kernel, symbols: Mapping[str, int]) -> None:
        self.kernel, self.symbols = kernel, symbols
        self.params = {p.name: p.offset for p in kernel.params}
        self.records: list[_Record] = []
        self.labels: dict[str, int] = {}
        self.branches: list[tuple[_Record, str]] = []
        self.tables: list[tuple[int, tuple[str, ...]]] = []
        self.constants = bytearray()
        self._constant_places: dict[tuple[int, int], int] = {}
        self.file_bytes = len(_SPECIALS) * _LANE_BYTES
        self.sink = self._reserve(2 * _LANE_BYTES)
        self.predicate_sink = self._reserve(64)
        self._scratch: dict[tuple[int, int], int] = {}
        self._scratch_used = 0
        self.true = self.constant("pred", 1)
        self.false = self.constant("pred", 0)
        self.places = self._place_registers()
        self.current = Instruction("", (), "", 0, (0, 0))
        self.guard = (self.true, 0)

    def assemble(self) -> Program:
        for i in self.kernel.instructions:
            if i.label:
                self.labels[i.label] = len(self.records)
                continue
            self.current, self._scratch_used = i, 0
            try:
                self.guard = self._guard(i.guard)
                self._read(i)
            except (KeyError, IndexError, ValueError) as error:
                text = f"{i.opcode} {', '.join(i.operands)}"
                why = f" ({error})" if type(error) is ValueError else ""
                raise PtxError(f"PTX line {i.line}: not known: {text}{why}") from None
        self.guard = (self.true, 0)
        self.emit("exit_")
        for record, label in self.branches:
            record.values["immediate"] = self.labels[label]
        for place, targets in self.tables:
            words = np.array([self.labels[t] for t in targets], np.uint32).tobytes()
            self.constants[place : place + len(words)] = words
        made = np.zeros(len(self.records), RECORD)
        for row, record in zip(made, self.records, strict=True):
            row["guard"], row["negated"] = record.guard
            row["line"] = record.instruction.line
            for name, value in record.values.items():
                row[name] = value
            for n, place in record.o.items():
                row["o"][n] = place
        return Program(
            made,
            [r.handler for r in self.records],
            [r.instruction for r in self.records],
            np.frombuffer(bytes(self.constants), np.uint8).copy(),
            self.file_bytes,
        )

    # ---- places ----

    def _reserve(self, size: int) -> int:
        place = self.file_bytes
        self.file_bytes += -(-size // 64) * 64
        return place

    def _place_registers(self) -> dict[str, int]:
        """By linear scan: a place is free when the register in it was used for the last time."""
        lifetimes = _lifetimes(self.kernel.instructions)
        free: dict[int, list[int]] = {}
        busy: list[tuple[int, int, int]] = []  # a heap: last use, size, place
        places = {}
        for name, (start, end) in sorted(lifetimes.items(), key=lambda item: item[1]):
            kind = self.kernel.registers[name]
            size = 4 if kind == "pred" else 32 * register_width(kind)
            while busy and busy[0][0] < start:
                _, its_size, place = heapq.heappop(busy)
                free.setdefault(its_size, []).append(place)
            if not free.get(size):
                if size == 4:  # a line of predicates
                    line = self._reserve(64)
                    free[size] = list(range(line + 60, line - 4, -4))
                else:
                    free[size] = [self._reserve(size)]
            place = free[size].pop()
            places[name] = place
            heapq.heappush(busy, (end, size, place))
        return places

    def constant(self, kind: str, value: int) -> int:
        """A place that has this value in all lanes. Bit 0 says that it is among the constants."""
        size = 0 if kind == "pred" else register_width(kind)
        value = (_EVERY if value else 0) if kind == "pred" else value % (1 << 8 * size)
        if (size, value) not in self._constant_places:
            data = value.to_bytes(size or 4, "little") * (32 if size else 16)
            self._constant_places[size, value] = len(self.constants) | 1
            self.constants += data
        return self._constant_places[size, value]

    def scratch(self, size: int) -> int:
        key = (size, self._scratch_used)
        self._scratch_used += 1
        if key not in self._scratch:
            self._scratch[key] = self._reserve(32 * size)
        return self._scratch[key]

    def register_kind(self, name: str) -> str:
        return self.kernel.registers[name]

    # ---- operands ----

    def _guard(self, guard: str) -> tuple[int, int]:
        if not guard:
            return self.true, 0
        return self.places[guard.lstrip("!")], _EVERY if guard.startswith("!") else 0

    def source(self, operand: str, kind: str) -> int:
        """The place of a value of this type; of a register of another width, a resized copy."""
        if not operand.startswith("r_"):
            return self._immediate(operand, kind)
        have = self.register_kind(operand)
        if "pred" in (kind, have):
            if have != kind:
                raise ValueError(f"{operand} is not .{kind}")
            return self.places[operand]
        want = register_width(kind)
        if register_width(have) == want:
            return self.places[operand]
        place = self.scratch(want)
        self._resize(kind, register_width(have), want, place, self.places[operand])
        return place

    def _resize(self, kind: str, of: int, to: int, target: int, source: int) -> None:
        sign = "s" if kind[0] == "s" else "u"
        self.emit(instructions.resize_handler(f"{sign}{8 * of}", to), {0: target, 1: source})

    def _immediate(self, operand: str, kind: str) -> int:
        if operand in _SPECIALS:
            if kind != "pred" and register_width(kind) == 4:
                return _SPECIALS[operand]
            raise ValueError(f"{operand} has 32 bits")
        if operand in self.symbols:
            return self.constant(kind, self.symbols[operand])
        if operand == "WARP_SZ":
            return self.constant(kind, 32)
        head = operand[:2].lower()
        if head in ("0f", "0d"):
            bits = int(operand[2:], 16)
            if kind[0] not in "fb" or register_width(kind) != (4 if head == "0f" else 8):
                raise ValueError(f"{operand} is not .{kind}")
            return self.constant(kind, bits)
        return self.constant(kind, int(operand.rstrip("U"), 0))

    def target(self, operand: str, kind: str) -> int:
        """The place of a result of this type; `finish` brings it to registers that are wider."""
        if operand == "_":
            return self.predicate_sink if kind == "pred" else self.sink
        have = self.register_kind(operand)
        if "pred" in (kind, have):
            if have != kind:
                raise ValueError(f"{operand} is not .{kind}")
            return self.places[operand]
        if register_width(have) == register_width(kind):
            return self.places[operand]
        return self.scratch(register_width(kind))

    def finish(self, operand: str, kind: str, place: int) -> None:
        """Behind an instruction with `target`."""
        if operand != "_" and place != self.places[operand]:
            have = register_width(self.register_kind(operand))
            self._resize(kind, register_width(kind), have, self.places[operand], place)

    def address(self, operand: str) -> tuple[int, bool, int]:
        """[base+displacement]: the base's place, whether it has 8 bytes, the displacement."""
        match = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if not match:
            raise ValueError("an address that is not understood")
        base, plus = match[1], int(match[2] or "0", 0)
        if base.startswith("r_"):
            return self.places[base], register_width(self.register_kind(base)) == 8, plus
        return self._immediate(base, "u64"), True, plus

    @staticmethod
    def group(operand: str) -> list[str]:
        """{a, b}, or a alone."""
        return [part.strip() for part in operand.strip("{} ").split(",")]

    def emit(self, handler: str | tuple[str, str], o: dict[int, int] | None = None,
             **values: int) -> _Record:  # fmt: skip
        name = (RUNTIME, handler) if isinstance(handler, str) else handler
        record = _Record(name, o or {}, self.guard, self.current, values)
        self.records.append(record)
        return record

    # ---- instructions ----

    def _read(self, i: Instruction) -> None:
        known = instructions.arithmetic(i.opcode)
        if known and not (i.opcode.startswith("mov.") and "{" in "".join(i.operands)):
            self._arithmetic(i, known)
            return
        reader = instructions.family(i.opcode)
        if reader is None:
            raise ValueError("no such instruction, modifier or type here")
        read: Callable[[list[str], list[str]], None] = getattr(self, f"_{reader}")
        read(i.opcode.split("."), list(i.operands))

    def _arithmetic(self, i: Instruction, known: instructions.Arithmetic) -> None:
        results, arguments = i.operands[0].split("|"), list(i.operands[1:])
        values, o = {}, {}
        if i.opcode.startswith("setp."):
            how = i.opcode.split(".")[2]
            combined = how in instructions.COMBINATIONS
            o[3] = self.true
            if combined:
                values["kind"] = instructions.COMBINATIONS.index(how)
                other = arguments.pop()
                values["immediate"] = _EVERY if other.startswith("!") else 0
                o[3] = self.source(other.lstrip("!"), "pred")
            o[4] = self.target(results[1] if len(results) > 1 else "_", "pred")
        elif known.result == "pred":  # testp: combined with nothing
            o[3], o[4] = self.true, self.predicate_sink
        if len(arguments) != len(known.arguments):
            raise ValueError(f"{len(known.arguments)} operands expected")
        for n, (operand, kind) in enumerate(zip(arguments, known.arguments, strict=True), 1):
            o[n] = self.source(operand, kind)
        o[0] = self.target(results[0], known.result)
        self.emit(known.handler, o, **values)
        self.finish(results[0], known.result, o[0])

    def _load_param(self, parts: list[str], ops: list[str]) -> None:
        name, _, plus = ops[1].strip("[] ").partition("+")
        self._load_with("ld_param", parts, ops[0], {}, immediate=self.params[name] + int(plus or 0))

    def _load(self, parts: list[str], ops: list[str]) -> None:
        space = next((p for p in parts if p in _SPACES), "")
        place, wide, plus = self.address(ops[1])
        name = {0: "global", 1: "shared", 2: "local", 3: "generic"}[_SPACES[space]]
        self._load_with(
            f"ld_{name}", parts, ops[0], {ADDRESS: place}, immediate=plus, kind=int(wide)
        )

    def _load_with(self, handler: str, parts: list[str], targets: str, o: dict[int, int],
                   immediate: int, kind: int = 0) -> None:  # fmt: skip
        names, value = self.group(targets), parts[-1]
        if len(names) != self._count(parts):
            raise ValueError("as many registers as the vector has elements expected")
        widths = {register_width(self.register_kind(n)) for n in names if n != "_"}
        if len(widths) > 1 or min(widths, default=8) < width(value):
            raise ValueError("registers of one width that fits expected")
        for n, name in enumerate(names):
            o[n] = self.sink if name == "_" else self.places[name]
        self.emit(handler, o, size=width(value), width=max(widths, default=8), count=len(names),
                  kind=kind | 2 * (value[0] == "s"), immediate=immediate)  # fmt: skip

    def _store(self, parts: list[str], ops: list[str]) -> None:
        space = next((p for p in parts if p in _SPACES), "")
        place, wide, plus = self.address(ops[0])
        names, value = self.group(ops[1]), parts[-1]
        if len(names) != self._count(parts):
            raise ValueError("as many registers as the vector has elements expected")
        widths = {register_width(self.register_kind(n)) for n in names if n.startswith("r_")}
        have = widths.pop() if widths else register_width(value)
        if widths or have < width(value):
            raise ValueError("registers of one width that fits expected")
        o = {n: self.places[name] if name.startswith("r_") else self._immediate(name, value)
             for n, name in enumerate(names)}  # fmt: skip
        if have != register_width(value) and len([n for n in names if n.startswith("r_")]) < len(
            names
        ):
            raise ValueError("numbers beside wider registers")
        name = {0: "global", 1: "shared", 2: "local", 3: "generic"}[_SPACES[space]]
        self.emit(f"st_{name}", {**o, ADDRESS: place}, size=width(value), width=have,
                  count=len(names), kind=int(wide), immediate=plus)  # fmt: skip

    @staticmethod
    def _count(parts: list[str]) -> int:
        return next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)

    def _atomic(self, parts: list[str], ops: list[str]) -> None:
        result = ops.pop(0) if parts[0] == "atom" else "_"
        how = next(p for p in parts if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas",
                                             "inc", "dec"))  # fmt: skip
        space = next((p for p in parts if p in _SPACES), "")
        kind = parts[-1]
        if len(ops) != (3 if how == "cas" else 2):
            raise ValueError("an operand more or less")
        place, wide, plus = self.address(ops[0])
        values = [self.source(v, kind) for v in ops[1:]]
        target = self.target(result, kind)
        self.emit(instructions.atomic_handler(how, kind),
                  {0: target, 1: values[0], 2: values[-1], ADDRESS: place},
                  size=_SPACES[space], kind=int(wide), immediate=plus)  # fmt: skip
        self.finish(result, kind, target)

    def _copy_async(self, parts: list[str], ops: list[str]) -> None:
        size = int(ops[2], 0)
        if size not in ((16,) if "cg" in parts else (4, 8, 16)) or len(ops) > 4:
            raise ValueError("a size that it does not copy")
        to, wide, plus = self.address(ops[0])
        source, source_wide, source_plus = self.address(ops[1])
        if not source_wide:
            raise ValueError("a source of 64 bits expected")
        taken = self.source(ops[3], "u32") if len(ops) > 3 else self.constant("u32", size)
        self.emit("cp_async", {0: to, 1: source, 2: taken}, size=size, kind=int(wide),
                  immediate=plus, count=source_plus % (1 << 32))  # fmt: skip

    def _plain(self, parts: list[str], ops: list[str]) -> None:
        if ops:
            raise ValueError("no operand expected")
        self.emit("_".join(parts))

    def _wait_group(self, parts: list[str], ops: list[str]) -> None:
        self.emit("cp_async_wait_group", immediate=int(ops[0], 0))

    def _convert_address(self, parts: list[str], ops: list[str]) -> None:
        space = next(p for p in parts if p in ("global", "const", "param", "local") or "sh" in p)
        target, source = self.target(ops[0], "u64"), self.source(ops[1], "u64")
        if space == "param":
            raise ValueError("parameters have no address here")
        if space in ("global", "const"):
            move = instructions.arithmetic("mov.b64")
            assert move
            self.emit(move.handler, {0: target, 1: source})
            return
        back = -1 if "to" in parts else 1
        handler = "cvta_local" if space == "local" else "cvta_shared"
        self.emit(handler, {0: target, 1: source}, immediate=back)

    def _which_space(self, parts: list[str], ops: list[str]) -> None:
        self.emit("isspacep", {0: self.target(ops[0], "pred"), 1: self.source(ops[1], "u64")},
                  kind=_SPACES[parts[1]])  # fmt: skip

    def _pack(self, parts: list[str], ops: list[str]) -> None:
        """mov between a register and the parts of one in braces."""
        whole, spread = width(parts[1]), ops[0].startswith("{")
        names = self.group(ops[0 if spread else 1])
        if len(names) not in (2, 4) or whole // len(names) < 2:
            raise ValueError("parts that are not understood")
        kind, bits = f"b{8 * whole // len(names)}", f"b{8 * whole}"
        if spread:
            places = [self.target(n, kind) for n in names]
            one = self.source(ops[1], bits)
        else:
            places = [self.source(n, kind) for n in names]
            one = self.target(ops[0], bits)
        self.emit(f"{'un' if spread else ''}pack_{whole}_{whole // len(names)}",
                  {0: one, **dict(enumerate(places, 1))})  # fmt: skip
        if spread:
            for name, place in zip(names, places, strict=True):
                self.finish(name, kind, place)

    def _predicate(self, parts: list[str], ops: list[str]) -> None:
        if len(ops) != (2 if parts[0] in ("mov", "not") else 3):
            raise ValueError("an operand more or less")
        negated = [_EVERY if o.startswith("!") else 0 for o in ops[1:]]
        places = [self.source(o.lstrip("!"), "pred") for o in ops[1:]]
        self.emit(f"{parts[0]}_pred",
                  {0: self.target(ops[0], "pred"), 1: places[0], 2: places[-1]},
                  size=negated[0], width=negated[-1])  # fmt: skip

    def _branch(self, parts: list[str], ops: list[str]) -> None:
        self.branches.append((self.emit("bra"), ops[0]))

    def _branch_by_index(self, parts: list[str], ops: list[str]) -> None:
        targets = self.current.targets
        place = len(self.constants)
        self.constants += bytes(-(-len(targets) * 4 // 64) * 64)
        self.tables.append((place, targets))
        self.emit("brx_idx", {0: self.source(ops[0], "u32"), 1: place | 1}, count=len(targets))

    def _leave(self, parts: list[str], ops: list[str]) -> None:
        self.emit("exit_")

    def _trap(self, parts: list[str], ops: list[str]) -> None:
        self.emit("trap")

    def _nothing(self, parts: list[str], ops: list[str]) -> None:
        self.emit("nop")

    def _barrier(self, parts: list[str], ops: list[str]) -> None:
        how = next((p for p in parts if p in ("popc", "and", "or")), "sync")
        kind = ("sync", "popc", "and", "or").index(how)
        o, negated = {0: self.sink, 3: self.false}, 0
        if kind:
            o[0] = self.target(ops.pop(0), "u32" if how == "popc" else "pred")
            value = ops.pop()
            negated = _EVERY if value.startswith("!") else 0
            o[3] = self.source(value.lstrip("!"), "pred")
        if len(ops) not in (1, 2):
            raise ValueError("a barrier and a count of threads expected")
        o[1] = self.source(ops[0], "u32")
        o[2] = self.source(ops[1], "u32") if len(ops) > 1 else self.constant("u32", 0)
        self.emit("bar", o, kind=kind, immediate=negated)

    def _warp_sync(self, parts: list[str], ops: list[str]) -> None:
        self.emit("bar_warp_sync", {0: self.source(ops[0], "u32")})

    def _shuffle(self, parts: list[str], ops: list[str]) -> None:
        result, _, in_range = ops[0].partition("|")
        o = {n: self.source(operand, "b32") for n, operand in enumerate(ops[1:5], 1)}
        o[0], o[5] = self.target(result, "b32"), self.target(in_range or "_", "pred")
        if len(ops) != 5:
            raise ValueError("five operands expected")
        self.emit("shfl", o, kind=("up", "down", "bfly", "idx").index(parts[2]))

    def _vote(self, parts: list[str], ops: list[str]) -> None:
        target = self.target(ops[0], parts[-1])
        self.emit("vote", {0: target, 1: self.source(ops[1].lstrip("!"), "pred"),
                           2: self.source(ops[2], "u32")},
                  kind=("all", "any", "uni", "ballot").index(parts[2]),
                  immediate=_EVERY if ops[1].startswith("!") else 0)  # fmt: skip

    def _match(self, parts: list[str], ops: list[str]) -> None:
        result, _, same = ops[0].partition("|")
        self.emit("match", {0: self.target(result, "u32"), 1: self.source(ops[1], parts[-1]),
                            2: self.source(ops[2], "u32"), 3: self.target(same or "_", "pred")},
                  size=width(parts[-1]), kind=int(parts[1] == "all"))  # fmt: skip

    def _reduce(self, parts: list[str], ops: list[str]) -> None:
        how = parts[2] if parts[2] not in ("min", "max") else f"{parts[2]}_{parts[3][0]}"
        kinds = ("add", "and", "or", "xor", "min_u", "max_u", "min_s", "max_s")
        self.emit("redux", {0: self.target(ops[0], "u32"), 1: self.source(ops[1], "u32"),
                            2: self.source(ops[2], "u32")}, kind=kinds.index(how))  # fmt: skip

    def _elect(self, parts: list[str], ops: list[str]) -> None:
        result, _, elected = ops[0].partition("|")
        self.emit("elect", {0: self.target(result, "u32"), 1: self.target(elected, "pred"),
                            2: self.source(ops[1], "u32")})  # fmt: skip

    def _active_mask(self, parts: list[str], ops: list[str]) -> None:
        self.emit("activemask", {0: self.target(ops[0], "b32")})

    def _matrices(self, parts: list[str], ops: list[str]) -> None:
        """ldmatrix and stmatrix."""
        loads = parts[0] == "ldmatrix"
        names = self.group(ops[0 if loads else 1])
        if len(names) != int(parts[4][1:]):
            raise ValueError("as many registers as matrices expected")
        o = {n: self.target(name, "b32") if loads else self.source(name, "b32")
             for n, name in enumerate(names)}  # fmt: skip
        o[ADDRESS], wide, plus = self.address(ops[1 if loads else 0])
        self.emit(parts[0], o, count=len(names), kind=int(wide) | 2 * ("trans" in parts),
                  immediate=plus)  # fmt: skip

    def _move_matrix(self, parts: list[str], ops: list[str]) -> None:
        self.emit("movmatrix", {0: self.target(ops[0], "b32"), 1: self.source(ops[1], "b32")})

    def _multiply(self, parts: list[str], ops: list[str]) -> None:
        depth, kind = int(parts[3].rsplit("k", 1)[1]), parts[7]
        size = 4 if kind == "tf32" else 2
        half = depth * size // 16
        d, a, b, c = (self.group(o) for o in ops)
        if [len(x) for x in (d, a, b, c)] != [4, 2 * half, half, 4]:
            raise ValueError("registers of another shape")
        sources = [self.source(x, "b32") for x in (*a, *b)] + [self.source(x, "f32") for x in c]
        o = {n: self.target(x, "f32") for n, x in enumerate(d)}
        self.emit("mma", {**o, **dict(enumerate(sources, 4))}, size=size, width=depth,
                  kind=("bf16", "f16", "tf32").index(kind))  # fmt: skip

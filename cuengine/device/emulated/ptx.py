"""Reads the PTX that NVRTC and nvcc write, into kernels of flat instructions.

Which of them are known, and what they compute: instructions.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cuengine.errors import CuengineError


class PtxError(CuengineError):
    """PTX that is not known here; names the instruction and its line."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, or a label (opcode ""). line: in the PTX; source: (file number, line).

    targets: labels that `brx.idx` chooses from.
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str
    line: int
    source: tuple[int, int]
    label: str = ""
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """data: initial bytes; empty for memory that a launch or a block brings."""

    space: str
    name: str
    size: int
    align: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Param:
    """kind: its PTX type, as u64; of a struct, b8. offset and size in bytes."""

    name: str
    kind: str
    offset: int
    size: int


@dataclass(slots=True)
class Kernel:
    """registers: name to type, as b32 or pred."""

    name: str
    params: list[Param]
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class PtxModule:
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    files: dict[int, str] = field(default_factory=dict)


_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.[a-z]+(\d+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z])(\d+)[^,]*?([\w$]+)(?:\[(\d+)\])?$")


def parse(text: str) -> PtxModule:
    """Raises PtxError."""
    module = PtxModule()
    text = _TOKEN.sub(lambda m: "\n" * m[0].count("\n"), text)
    kernel: Kernel | None = None
    scopes: list[dict[str, str]] = []
    source = (0, 0)
    depth_skipped = 0
    targets: dict[str, tuple[str, ...]] = {}
    for piece, line in _split_lines(text):
        if piece.startswith(".file"):
            number, name = piece.split(None, 2)[1:3]
            module.files[int(number)] = name.split('"')[1]
        elif re.match(r"\.loc\s", piece):
            source = (int(piece.split()[1]), int(piece.split()[2]))
        elif depth_skipped or piece.startswith(".section"):
            depth_skipped += (piece.endswith("{")) - (piece == "}")
        elif ".entry" in piece:
            kernel = _entry(piece, line)
            module.kernels[kernel.name] = kernel
            scopes = [{}]
        elif ".func" in piece:
            raise PtxError(f"PTX line {line}: device functions are not translated: {piece[:80]}")
        elif piece == "{" and kernel:
            scopes.append({})
        elif piece == "}" and kernel:
            scopes.pop()
            if not scopes:
                kernel = None
        elif match := _VARIABLE.match(piece):
            (kernel.variables if kernel else module.variables).append(_variable(match, line))
        elif kernel is None:
            continue
        elif piece.startswith(".reg"):
            _registers(kernel, scopes, piece)
        elif piece.startswith(".pragma"):
            continue
        elif piece.startswith(".branchtargets"):
            # Its label came before it, as if it were one of code.
            name = kernel.instructions.pop().label
            targets[name] = tuple(t.strip() for t in piece.split(None, 1)[1].split(","))
        else:
            kernel.instructions.append(_instruction(piece, line, source, scopes, targets))
    return module


_SEVERAL = re.compile(r"[{}:]|;.")


def _split_lines(text: str) -> list[tuple[str, int]]:
    """Statements with their lines: directives of one line, labels, braces that open a scope."""
    found: list[tuple[str, int]] = []
    piece, start, inside = "", 1, False
    for number, row in enumerate(text.split("\n"), 1):
        stripped = row.strip()
        if not piece and stripped.endswith(";") and not _SEVERAL.search(stripped):
            found.append((stripped[:-1].rstrip(), number))  # what nearly all lines are
            continue
        if not piece and re.match(r"\.(file|loc|version|target|address_size)\b", stripped):
            found.append((stripped, number))
            continue
        if not piece and stripped.startswith(".section"):
            found.append((stripped, number))
            continue
        for char in row + "\n":
            if not piece and char.isspace():
                continue
            if not piece:
                start = number
            if char == "{" and piece and ".entry" not in piece and ".func" not in piece:
                inside = True
            if char == ";" or (char in "{}" and not inside):
                head = piece.strip()
                if head:
                    found.append((head, start))
                # The entry's own brace goes with it: its scope is open from there.
                if char != ";" and ".entry" not in head:
                    found.append((char, number))
                piece = ""
                continue
            if char == "}":
                inside = False
            if char == ":" and re.fullmatch(r"[\w$]+", piece):
                found.append((piece + ":", start))
                piece = ""
                continue
            piece += char
    return found


def _entry(piece: str, line: int) -> Kernel:
    match = re.search(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?", piece, re.S)
    if not match:
        raise PtxError(f"PTX line {line}: not understood: {piece[:80]}")
    kernel, offset = Kernel(match[1], []), 0
    for text in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        param = _PARAM.match(text)
        if not param:
            raise PtxError(f"PTX line {line}: parameter not understood: {text}")
        size = int(param[3]) // 8
        align = int(param[1] or size)
        offset = -(-offset // align) * align
        size *= int(param[5] or 1)
        kernel.params.append(Param(param[4], param[2] + param[3], offset, size))
        offset += size
    return kernel


def _variable(match: re.Match[str], line: int) -> Variable:
    space, align, bits, name, dims, init = match.groups()
    item = int(bits) // 8
    size = item
    for dim in re.findall(r"\[(\d*)\]", dims):
        size *= int(dim or 0)
    data = b""
    if init:
        values = init.strip().strip("{}").split(",")
        try:
            data = b"".join(_number(v.strip(), item) for v in values).ljust(size, b"\0")
        except ValueError:
            raise PtxError(f"PTX line {line}: initial value of {name} not understood") from None
    return Variable(space, name, size, int(align or item), data)


def _number(text: str, size: int) -> bytes:
    value = int(text[2:], 16) if text[:2] in ("0f", "0d", "0F", "0D") else int(text.rstrip("U"), 0)
    return (value % (1 << 8 * size)).to_bytes(size, "little")


def _registers(kernel: Kernel, scopes: list[dict[str, str]], piece: str) -> None:
    _, kind, names = piece.replace("\t", " ").split(None, 2)
    for text in names.split(","):
        base = text.strip()
        many = re.fullmatch(r"(.*)<(\d+)>", base)
        for name in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [base]:
            unique = "r_" + name.strip("%").replace("$", "_")
            if unique in kernel.registers:
                unique += f"_{len(kernel.registers)}"
            scopes[-1][name] = unique
            kernel.registers[unique] = kind[1:]


def _instruction(
    piece: str,
    line: int,
    source: tuple[int, int],
    scopes: list[dict[str, str]],
    targets: dict[str, tuple[str, ...]],
) -> Instruction:
    if piece.endswith(":"):
        return Instruction("", (), "", line, source, piece[:-1])

    def resolve(match: re.Match[str]) -> str:
        for scope in reversed(scopes):
            if match[0] in scope:
                return scope[match[0]]
        return match[0]

    guard = ""
    if piece.startswith("@"):
        guard, piece = piece[1:].split(None, 1)
    opcode, *rest_ = piece.split(None, 1)
    rest = re.sub(r"%?[A-Za-z_$][\w$]*(?:\.[xyz]\b)?", resolve, rest_[0] if rest_ else "")
    guard = re.sub(r"%?[A-Za-z_$][\w$]*", resolve, guard)
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    operands = [o.strip() for o in operands]
    chosen = targets.get(operands[1], ()) if opcode.startswith("brx.idx") else ()
    return Instruction(opcode, tuple(operands), guard, line, source, targets=chosen)

"""Runs the kernels of a PTX module on host memory, and says where one of them went wrong.

    memory = Memory()                                     see memory.py
    function = Module.from_ptx(text, memory).function(name)
    function.launch(grid, block, args, shared_bytes=0, order=REVERSE)

Arguments are pointers (int), NumPy scalars, int (as the parameter is wide) or float; or bytes, as
they lie in memory, which is quickest. How a kernel is run: program.py and runtime.c.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cuengine.device.emulated import machine
from cuengine.device.emulated.instructions import width
from cuengine.device.emulated.memory import (
    NO_ACCESS,
    UNDEFINED,
    Array,
    KernelFault,
    Memory,
    address_of,
)
from cuengine.device.emulated.program import Program, assemble
from cuengine.device.emulated.ptx import Param, PtxError, Variable, parse

__all__ = ["FORWARD", "NO_ACCESS", "REVERSE", "SHUFFLED", "UNDEFINED", "Array", "Function",
           "KernelFault", "Memory", "Module", "PtxError"]  # fmt: skip

FORWARD, REVERSE, SHUFFLED = 0, 1, 2
"""Orders of blocks, and of the warps of a block."""

_FAULTS = {
    1: "access outside every allocation", 2: "access to memory that is not the kernel's",
    3: "read of memory never written", 4: "misaligned access",
    5: "access outside the shared memory of the launch", 6: "read of shared memory never written",
    7: "shared memory touched while cp.async is on its way there: wait for its group first",
    8: "race: another thread wrote this shared memory since the last barrier",
    9: "race: another thread read this shared memory since the last barrier",
    10: "barrier that not all threads reach", 11: "warp instruction that not all its lanes reach",
    12: "lane outside the mask of the warp instruction", 13: "trap",
    14: "access outside the thread's local memory", 15: "the host is out of memory",
}  # fmt: skip

_one_launch = threading.Lock()  # the machine's state is static


class Module:
    """The kernels of one PTX text, and its variables, in one memory."""

    def __init__(self, text: str, memory: Memory) -> None:
        self.text, self.ptx, self.memory = text, _parse(text), memory
        self.variables: dict[str, Array] = {}
        self.symbols: dict[str, int] = {}
        """Addresses of variables in global and constant memory."""
        for v in self.ptx.variables:
            if v.space in ("global", "const"):
                array = np.zeros(max(v.size, 1) + v.align, np.uint8)
                skip = -address_of(array) % v.align
                array = array[skip : skip + max(v.size, 1)]
                array[: len(v.data)] = np.frombuffer(v.data, np.uint8)
                self.variables[v.name] = array
                self.symbols[v.name] = memory.add(array, v.name)

    @classmethod
    def from_ptx(cls, text: str, memory: Memory) -> Module:
        """Raises PtxError."""
        return cls(text, memory)

    def function(self, name: str, *, sanitize: bool = False) -> Function:
        """sanitize: on a machine built with -fsanitize=undefined and -g.

        Raises KeyError where the module has no such kernel; PtxError for an instruction that is
        not known; CuengineError where gcc is missing.
        """
        return Function(self, name, sanitize)


# A process makes the same modules and functions again and again, in memories of their own.
_parse = lru_cache(maxsize=128)(parse)


@dataclass(frozen=True, slots=True)
class _Code:
    """What does not depend on a memory: the program, the machine it is for, bytes that it needs."""

    program: Program
    launch: Callable[..., int]
    static_bytes: int
    local_bytes: int
    packer: struct.Struct


@lru_cache(maxsize=512)
def _code(text: str, name: str, symbols: tuple[tuple[str, int], ...], sanitize: bool) -> _Code:
    module = _parse(text)
    kernel = module.kernels[name]
    variables = [*module.variables, *kernel.variables]
    used = {o.strip("[]{} ").split("+")[0] for i in kernel.instructions for o in i.operands}
    shared = [v for v in variables if v.space == "shared" and v.name in used]
    shared_offsets, static_bytes = _lay_out([v for v in shared if v.size])
    dynamic = {v.name: static_bytes for v in shared if not v.size}
    local_offsets, local_bytes = _lay_out([v for v in variables if v.space == "local"])
    program = assemble(kernel, {**dict(symbols), **shared_offsets, **dynamic, **local_offsets})
    launch = machine.load(program, sanitize)
    return _Code(program, launch, static_bytes, local_bytes, _packer(kernel.params))


def _lay_out(variables: Sequence[Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables one behind the other, and bytes of them all, a multiple of 16."""
    offsets, end = {}, 0
    for v in variables:
        end = -(-end // v.align) * v.align
        offsets[v.name] = end
        end += v.size
    return offsets, -(-end // 16) * 16


class Function:
    """A kernel that can be launched. static_bytes: of shared memory, before the launch's own."""

    def __init__(self, module: Module, name: str, sanitize: bool) -> None:
        self.module, self.kernel = module, module.ptx.kernels[name]
        code = _code(module.text, name, tuple(sorted(module.symbols.items())), sanitize)
        self.static_bytes = code.static_bytes
        self._program, self._launch, self._packer = code.program, code.launch, code.packer
        self._what = what = machine.Launch()
        what.static_bytes, what.local_bytes = code.static_bytes, code.local_bytes
        what.file_bytes = self._program.file_bytes
        what.code = address_of(self._program.records)
        what.constants = address_of(self._program.constants)
        self._fault = machine.Fault()

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any] | bytes,
        shared_bytes: int = 0,
        order: int = FORWARD,
        seed: int = 1,
    ) -> None:
        """Runs to the end. Raises KernelFault; ValueError for arguments that don't fit."""
        what, params = self._what, self._pack(args)
        with _one_launch:
            table, address = self.module.memory.table()
            what.grid, what.block = grid, block
            what.params = params
            what.dynamic_bytes, what.order, what.seed = shared_bytes, order, seed
            what.allocations, what.num_allocations = address, len(table)
            if self._launch(ctypes.byref(what), ctypes.byref(self._fault)):
                raise KernelFault(self._describe(self._fault, block))

    def _pack(self, args: Sequence[Any] | bytes) -> bytes:
        if isinstance(args, bytes):
            if len(args) != self._packer.size:
                raise ValueError(
                    f"{self.kernel.name} takes {self._packer.size} bytes of arguments, "
                    f"not {len(args)}"
                )
            return args
        params = self.kernel.params
        if len(args) != len(params):
            raise ValueError(f"{self.kernel.name} takes {len(params)} arguments, not {len(args)}")
        return self._packer.pack(*map(_fit, args, params))

    def _describe(self, fault: machine.Fault, block: tuple[int, int, int]) -> str:
        instruction = self._program.instructions[fault.pc]
        number, line = instruction.source
        file = Path(self.module.ptx.files.get(number, "PTX")).name
        t = fault.thread
        thread = (t % block[0], t // block[0] % block[1], t // (block[0] * block[1]))
        text = (
            f"{self.kernel.name}: {file}:{line}: {_FAULTS[fault.code]}; block "
            f"{tuple(fault.block)}, thread {thread}, PTX line {instruction.line} "
            f"({instruction.opcode})"
        )
        address = int(fault.address)
        if fault.code <= 3 or (fault.code == 4 and ".shared" not in instruction.opcode):
            text += f", address {address:#x}: {self.module.memory.describe(address)}"
        elif fault.code in (8, 9):
            text += f", shared byte {address}, other thread {fault.other}"
        elif fault.code <= 7:
            text += f", shared byte {address}"
        elif fault.code in (11, 12):
            text += f", mask {address:#010x}, other thread {fault.other}"
        elif fault.code == 10:
            text += f", thread {fault.other} is not there"
        return text


_CODES = {"b8": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "b16": "H", "b32": "I",
          "b64": "Q", "s8": "B", "s16": "H", "s32": "I", "s64": "Q", "f32": "f",
          "f64": "d"}  # fmt: skip


def _packer(params: Sequence[Param]) -> struct.Struct:
    """Arguments as they lie in memory; a struct passed by value is bytes."""
    code, end = "<", 0
    for p in params:
        alone = p.size == width(p.kind)
        code += "x" * (p.offset - end) + (_CODES[p.kind] if alone else f"{p.size}s")
        end = p.offset + p.size
    return struct.Struct(code)


def _fit(value: Any, param: Param) -> Any:
    """An argument as struct takes it: integers wrapped to the parameter's width."""
    if param.kind[0] == "f":
        return value
    if isinstance(value, (np.generic, bytes)):
        raw = value if isinstance(value, bytes) else value.tobytes()
        if len(raw) > param.size:
            raise ValueError(f"{param.name} has {param.size} bytes, its argument {len(raw)}")
        if param.size != width(param.kind):
            return raw
        value = int.from_bytes(raw, "little")
    return int(value) & ((1 << 8 * param.size) - 1)

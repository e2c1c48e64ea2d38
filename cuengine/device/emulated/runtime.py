"""Launches translated kernels on host memory, and says where one of them went wrong.

    memory = Memory()
    pointer = memory.add(array, "out")        address of a NumPy array kernels may touch
    memory.poison(array[3:], UNDEFINED)       an error to read it before it is written
    memory.poison(array[5], NO_ACCESS)        an error to touch it
    function = Module.from_ptx(text, memory).function(name)
    function.launch(grid, block, args, shared_bytes=0, order=REVERSE)

Arguments are pointers (int), NumPy scalars, int (as the parameter is wide) or float; or bytes, as
they lie in memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuengine.device.emulated.ptx import Kernel, PtxModule, parse
from cuengine.device.emulated.translate import Translation
from cuengine.errors import CuengineError
from cuengine.paths import cache_dir

NO_ACCESS, UNDEFINED = 1, 2
FORWARD, REVERSE, SHUFFLED = 0, 1, 2
Array = npt.NDArray[Any]

_FAULTS = {
    1: "access outside every allocation", 2: "access to memory that is not the kernel's",
    3: "read of memory never written", 4: "misaligned access",
    5: "access outside the shared memory of the launch", 6: "read of shared memory never written",
    7: "shared memory touched while cp.async is on its way there: wait for its group first",
    8: "race: another warp wrote this shared memory since the last barrier",
    9: "race: another warp read this shared memory since the last barrier",
    10: "barrier that not all threads reach", 11: "warp instruction that not all its lanes reach",
    12: "lane outside the mask of the warp instruction", 13: "trap",
    14: "access outside the thread's local memory", 15: "the host is out of memory",
}  # fmt: skip


class KernelFault(CuengineError):
    """A kernel did what a GPU may hide: where, which thread, which address."""


class _Allocation(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("shadow", ctypes.c_void_p)]


class _Launch(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
                ("shared_bytes", ctypes.c_uint32), ("dynamic_offset", ctypes.c_uint32),
                ("order", ctypes.c_uint32), ("seed", ctypes.c_uint32),
                ("allocations", ctypes.c_void_p), ("num_allocations", ctypes.c_uint64),
                ("params", ctypes.c_char_p)]  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("pc", ctypes.c_int32), ("block", ctypes.c_uint32 * 3),
                ("thread", ctypes.c_uint32), ("other", ctypes.c_uint32),
                ("address", ctypes.c_uint64), ("size", ctypes.c_uint64)]  # fmt: skip


class Memory:
    """What kernels may touch: NumPy arrays, each with one byte of shadow per byte."""

    def __init__(self) -> None:
        self.allocations: dict[int, tuple[Array | None, npt.NDArray[np.uint8], str]] = {}

    def add(self, array: Array, name: str = "array") -> int:
        """Its address. The array is kept until `remove`."""
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous: kernels see addresses, not strides")
        address = int(array.ctypes.data)
        self.allocations[address] = (array, np.zeros(array.nbytes, np.uint8), name)
        return address

    def remove(self, address: int) -> None:
        del self.allocations[address]

    def poison(self, view: Array, how: int = UNDEFINED) -> None:
        """Marks the bytes of a contiguous view of an array that was added; 0 lifts it."""
        start = int(view.ctypes.data)
        for base, (_, shadow, _) in self.allocations.items():
            if base <= start and start + view.nbytes <= base + len(shadow):
                shadow[start - base : start - base + view.nbytes] = how
                return
        raise ValueError("not in an allocation")

    def add_bytes(self, address: int, size: int, name: str) -> None:
        self.allocations[address] = (None, np.zeros(size, np.uint8), name)

    def table(self) -> ctypes.Array[_Allocation]:
        rows = [(b, len(s), s.ctypes.data) for b, (_, s, _) in sorted(self.allocations.items())]
        return (_Allocation * max(1, len(rows)))(*(_Allocation(*row) for row in rows))

    def describe(self, address: int) -> str:
        """Which allocation an address is in, or follows."""
        below = [base for base in self.allocations if base <= address]
        if not below:
            return "below every allocation"
        base = max(below)
        _, shadow, name = self.allocations[base]
        return f"byte {address - base} of {name}, which has {len(shadow)}"


class Module:
    def __init__(self, ptx: PtxModule, memory: Memory) -> None:
        self.ptx, self.memory = ptx, memory

    @classmethod
    def from_ptx(cls, text: str, memory: Memory) -> Module:
        """Raises PtxError."""
        return cls(parse(text), memory)

    def function(self, name: str, *, sanitize: bool = False) -> Function:
        """Translated and compiled, or from the cache. sanitize: with -fsanitize=undefined and -g.

        Raises PtxError for an instruction that is not known; CuengineError where gcc is missing.
        """
        return Function(self, self.ptx.kernels[name], sanitize)


class Function:
    def __init__(self, module: Module, kernel: Kernel, sanitize: bool) -> None:
        self.module, self.kernel = module, kernel
        translation = Translation(module.ptx, kernel)
        self.static_bytes = translation.static_bytes
        self._library = ctypes.CDLL(str(_compile(translation.code, sanitize)))
        self._lock = threading.Lock()
        for variable in translation.globals:
            symbol = f"v_{variable.name.replace('$', '_')}"
            place = (ctypes.c_uint8 * variable.size).in_dll(self._library, symbol)
            module.memory.add_bytes(ctypes.addressof(place), variable.size, variable.name)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any] | bytes,
        shared_bytes: int = 0,
        order: int = FORWARD,
        seed: int = 1,
    ) -> None:
        """Runs to the end. Raises KernelFault."""
        table = self.module.memory.table()
        what = _Launch(
            grid, block, self.static_bytes + shared_bytes, self.static_bytes, order, seed,
            ctypes.addressof(table), len(self.module.memory.allocations), self._params(args),
        )  # fmt: skip
        fault = _Fault()
        with self._lock:
            failed = self._library.launch(ctypes.byref(what), ctypes.byref(fault))
        if failed:
            raise KernelFault(self._describe(fault, block))

    def _params(self, args: Sequence[Any] | bytes) -> bytes:
        if isinstance(args, bytes):
            size = sum(self.kernel.params[-1][1:]) if self.kernel.params else 0
            if len(args) != size:
                raise ValueError(
                    f"{self.kernel.name} takes {size} bytes of arguments, not {len(args)}"
                )
            return args
        if len(args) != len(self.kernel.params):
            raise ValueError(
                f"{self.kernel.name} takes {len(self.kernel.params)} arguments, not {len(args)}"
            )
        last = self.kernel.params[-1] if args else ("", 0, 0)
        data = bytearray(last[1] + last[2])
        for value, (_, offset, size) in zip(args, self.kernel.params, strict=True):
            if isinstance(value, np.generic):
                raw = value.tobytes()
            elif isinstance(value, float):
                raw = struct.pack("<f" if size == 4 else "<d", value)
            else:
                raw = (int(value) % (1 << 8 * size)).to_bytes(size, "little")
            data[offset : offset + size] = raw
        return bytes(data)

    def _describe(self, fault: _Fault, block: tuple[int, int, int]) -> str:
        instruction = self.kernel.instructions[fault.pc]
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
        elif fault.code <= 9:
            text += f", shared byte {address}"
        elif fault.code in (11, 12):
            text += f", mask {address:#010x}, other thread {fault.other}"
        elif fault.code == 10:
            text += f", thread {fault.other} is not there"
        return text


def _compile(code: str, sanitize: bool) -> Path:
    """The shared library of this C, compiled unless it lies in the cache."""
    flags = ["-O2", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
    cpu = Path("/proc/cpuinfo")
    features = cpu.read_text() if cpu.is_file() else ""
    flags += [f"-m{name}" for name in ("fma", "f16c") if f" {name} " in features]
    if sanitize:
        flags += ["-g", "-fsanitize=undefined"]
    try:
        version = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, check=True)
    except FileNotFoundError:
        raise CuengineError("the emulated device needs gcc: install it, or take cpu") from None
    key = hashlib.sha256(code.encode() + version.stdout + " ".join(flags).encode()).hexdigest()
    path = cache_dir() / "emulated" / f"{key[:24]}.so"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, made = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
        source.write_text(code)
        done = subprocess.run(
            ["gcc", *flags, "-o", made, source, "-lm"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CuengineError(f"gcc failed on translated PTX: {done.stderr[:2000]}")
        os.replace(made, path)
    return path

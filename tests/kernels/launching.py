"""Kernels as NVRTC compiles them, launched on NumPy arrays by the emulator.

An array given to a launch is the kernel's to read, and must come back as it was, unless it was made
by `result` (undefined until written) or named to `updated`.
"""

from __future__ import annotations

import functools
import re
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cuengine.device.emulated.memory import NO_ACCESS, UNDEFINED, Memory, address_of
from cuengine.device.emulated.runtime import FORWARD, REVERSE, SHUFFLED, Function, Module
from cuengine.device.kernel_cache import get_kernels
from cuengine.device.kernel_variants import DTYPES, Program, programs
from cuengine.device.nvrtc import NvrtcError

Array = NDArray[Any]

ORDERS = (FORWARD, REVERSE, SHUFFLED)

NUMPY_TYPES: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}

UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half a unit in the last place of 1: what rounding to the type changes at most, relatively.
bfloat16 has 8 bits of precision, float16 11, float32 24."""

JUNK = 0xAB
"""Bytes of a result that no kernel has written."""

MEMORY = Memory()
"""Of all tests in the process, so that a translated kernel is loaded once."""


class Emulator:
    """One test's arrays and launches, the warps of a block running in one order."""

    def __init__(self, order: int = FORWARD, seed: int = 1) -> None:
        self.order = order
        self.seed = seed
        self._writable: set[int] = set()
        self._launches = 0

    def result(self, shape: tuple[int, ...], dtype: Any, name: str = "out") -> Array:
        """An array that a kernel writes; to read an element of it before is an error."""
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = JUNK
        self.updated(array, name)
        MEMORY.poison(array, UNDEFINED)
        return array

    def updated(self, array: Array, name: str) -> Array:
        """The array itself: kernels may write to it."""
        self._writable.add(self._address(array, name))
        return array

    def forbid(self, view: Array) -> None:
        """No kernel may touch this part of an array."""
        if view.size:
            base = view
            while base.base is not None:
                base = base.base
            self._address(base, "an input")
            MEMORY.poison(view, NO_ACCESS)

    def written(self, array: Array) -> bool:
        """Whether kernels have written all of a result."""
        return not MEMORY.shadow(array).any()

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        threads: int,
        *args: Array | float | None,
        shared_bytes: int = 0,
    ) -> None:
        """kernel: as `rms_norm<bf16>`. None is a null pointer. Raises KernelFault."""
        function = get_function(kernel)
        self._launches += 1
        addresses = [self._argument(arg, f"argument {i}") for i, arg in enumerate(args)]
        inputs = {
            index: arg.tobytes()
            for index, arg in enumerate(args)
            if isinstance(arg, np.ndarray) and addresses[index] not in self._writable
        }
        function.launch(
            (*grid, *(1,) * (3 - len(grid))),  # type: ignore[arg-type]
            (threads, 1, 1),
            addresses,
            shared_bytes=shared_bytes,
            order=self.order,
            seed=self.seed + self._launches,
        )
        for index, before in inputs.items():
            array = args[index]
            assert isinstance(array, np.ndarray)
            assert array.tobytes() == before, f"{kernel} wrote to its argument {index}"

    def _argument(self, value: Array | float | None, name: str) -> Any:
        if value is None:
            return 0
        return self._address(value, name) if isinstance(value, np.ndarray) else value

    def _address(self, array: Array, name: str) -> int:
        """Of an array as a whole, which is added unless it is known."""
        known = MEMORY.allocations.get(address_of(array))
        return MEMORY.add(array, name) if known is None else address_of(array)


@functools.cache
def get_function(kernel: str) -> Function:
    """The kernel for sm_80, or for sm_75 where only older chips use it."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    program, architecture = _program(kernel)
    try:
        kernels = get_kernels(program, architecture)
    except NvrtcError:
        pytest.skip("needs NVRTC: the wheel nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc")
    module = Module.from_ptx(kernels.ptx.read_text(), MEMORY)
    return module.function(kernels.names.get(kernel, kernel))


def _program(kernel: str) -> tuple[Program, int]:
    head_dim = int(found[1]) if (found := re.search(r", (\d+)>", kernel)) else 16
    for architecture in (80, 75):
        for dtype, short in DTYPES.items():
            if "<" in kernel and f"<{short}" not in kernel:
                continue
            for program in programs(dtype, head_dim, architecture):
                if kernel in (*program.expressions, *program.plain_kernels):
                    return program, architecture
    raise ValueError(f"{kernel}: no such kernel in kernel_variants.py")


def random_array(
    random: np.random.Generator, shape: tuple[int, ...], short: str, scale: float = 1.0
) -> Array:
    """Normal numbers in a kernel's type."""
    return (random.standard_normal(shape) * scale).astype(NUMPY_TYPES[short])

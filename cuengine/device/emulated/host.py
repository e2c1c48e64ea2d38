"""The emulated runtime: what cuda/runtime.py asks for, on the host, with every access checked.

Device arrays are opaque (`HostedArray`), so that nothing but the copy calls moves data in or out.
Every byte has a shadow: never written, or not to be touched; kernels, copies and products heed it.
Kernels are the PTX of the same programs that a GPU is given, read by program.py and run by
runtime.py. What the KV cache may be used for in a step is kept in cache_guard.py.
"""

from __future__ import annotations

import ctypes
import math
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuengine.device.cuda.runtime import Dim
from cuengine.device.emulated import runtime as emulator
from cuengine.device.emulated.cache_guard import CacheGuard
from cuengine.device.emulated.runtime import FORWARD, NO_ACCESS, UNDEFINED, Memory
from cuengine.errors import CuengineError, DeviceMemoryError

_ALIGNMENT = 256
_STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory that a block gets without asking first."""

_MAX_GRID: Dim = (2**31 - 1, 65535, 65535)
_MAX_THREADS = 1024
_NO_RANGE = nullcontext()


class AccessError(CuengineError):
    """A copy or a matrix product touched device memory that it must not."""


class _Owner:
    """The memory of a device array goes when the last view of it does."""

    __slots__ = ("__weakref__",)


class HostedArray:
    """An array in emulated device memory: values and their shadow, and nothing of NumPy's.

    shadow  uint8 [*shape, itemsize]; runtime.py says what its values mean
    """

    __slots__ = ("__weakref__", "owner", "shadow", "values")

    def __init__(
        self, values: NDArray[Any], shadow: NDArray[np.uint8], owner: _Owner | None
    ) -> None:
        self.values = values
        self.shadow = shadow.reshape(*values.shape, values.itemsize)
        self.owner = owner

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice) -> HostedArray:
        if isinstance(index, int):
            if not 0 <= index < len(self):
                raise IndexError(f"{index} is not in an array of {len(self)}")
        elif not isinstance(index, slice) or index.step not in (None, 1):
            raise TypeError(f"{index!r}: only an int or a plain slice gives a view")
        return HostedArray(self.values[index, ...], self.shadow[index], self.owner)

    def reshape(self, *shape: Any) -> HostedArray:
        return HostedArray(self.values.reshape(*shape), self.shadow, self.owner)

    def view(self, dtype: np.dtype[Any]) -> HostedArray:
        return HostedArray(self.values.view(dtype), self.shadow, self.owner)

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError("an array in device memory: the host sees it through Runtime.copy_out")


class EmulatedRuntime:
    """Implements `Runtime`.

    architecture  whose PTX runs: 75, 80, 90 ...
    memory_bytes  device memory that there is
    order, seed   in which warps of a block run: FORWARD, REVERSE or SHUFFLED
    delayed       queued work runs only when somebody waits for it, as a GPU that is as slow as can
                  be: what the host changes too early, or reads too early, is then wrong
    """

    name = "emulated"

    def __init__(
        self,
        *,
        architecture: int = 80,
        multiprocessors: int = 4,
        memory_bytes: int = 2**30,
        order: int = FORWARD,
        seed: int = 1,
        delayed: bool = False,
    ) -> None:
        self.architecture = architecture
        self.multiprocessors = multiprocessors
        self.memory = Memory()
        self.order, self.seed = order, seed
        self._delayed = delayed
        self._total, self._used = memory_bytes, 0
        self._recorded: list[Callable[[], None]] | None = None
        self._queue: deque[Callable[[], None]] = deque()
        self._num_queued = self._num_done = 0
        self._guards: weakref.WeakKeyDictionary[HostedArray, CacheGuard] = (
            weakref.WeakKeyDictionary()
        )

    # The stream

    def _submit(self, work: Callable[[], None]) -> None:
        if self._recorded is not None:
            self._recorded.append(work)
            return
        self._num_queued += 1
        self._queue.append(work)
        if not self._delayed:
            self._run_until(self._num_queued)

    def _run_until(self, count: int) -> None:
        """Do what was queued, up to the count-th piece of work in all."""
        while self._num_done < count:
            self._num_done += 1
            self._queue.popleft()()

    def synchronize(self) -> None:
        if self._recorded is not None:
            raise RuntimeError("waited for the stream during a capture")
        self._run_until(self._num_queued)

    def event(self, *, timing: bool = False) -> EmulatedEvent:
        return EmulatedEvent(self)

    def begin_capture(self) -> None:
        if self._recorded is not None:
            raise RuntimeError("a capture began during a capture")
        self._recorded = []

    def end_capture(self) -> EmulatedGraph:
        if self._recorded is None:
            raise RuntimeError("a capture ended that had not begun")
        graph = EmulatedGraph(self, self._recorded)
        self._recorded = None
        return graph

    def range(self, name: str) -> AbstractContextManager[None]:
        return _NO_RANGE

    # Memory

    def memory_info(self) -> tuple[int, int]:
        return self._total - self._used, self._total

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostedArray:
        size = math.prod(shape) * dtype.itemsize
        if self._recorded is not None:
            raise RuntimeError(f"{size} bytes of device memory were allocated during a capture")
        if size > self._total - self._used:
            raise DeviceMemoryError(
                f"{size} bytes of device memory were asked for, and "
                f"{self._total - self._used} of {self._total} are free"
            )
        raw = _aligned_bytes(size)
        address, owner = int(raw.ctypes.data), _Owner()
        self.memory.add_bytes(address, size, f"device array {shape} of {dtype}")
        shadow = self.memory.allocations[address][1]
        shadow[:] = UNDEFINED
        self._used += size
        weakref.finalize(owner, self._free, raw).atexit = False
        return HostedArray(raw.view(dtype).reshape(shape), shadow, owner)

    def _free(self, raw: NDArray[np.uint8]) -> None:
        """In the order of the stream: what is queued may still need it."""
        self._used -= raw.nbytes
        address = int(raw.ctypes.data)
        queued, self._recorded = self._recorded, None
        self._submit(lambda: _forget(self.memory, address, raw))
        self._recorded = queued

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        raw = _aligned_bytes(math.prod(shape) * dtype.itemsize)
        address = int(raw.ctypes.data)
        self.memory.add_bytes(address, raw.nbytes, f"pinned array {shape} of {dtype}")
        owner = raw if raw.base is None else raw.base
        weakref.finalize(owner, self.memory.remove, address).atexit = False
        return raw.view(dtype).reshape(shape)

    def address(self, array: HostedArray | NDArray[Any]) -> int:
        values = array.values if isinstance(array, HostedArray) else array
        return int(values.ctypes.data)

    def discard(self, array: HostedArray) -> None:
        self._submit(lambda: array.shadow.fill(UNDEFINED))

    # Copies and products

    def copy_in(self, target: HostedArray, source: NDArray[Any]) -> None:
        if not isinstance(target, HostedArray) or isinstance(source, HostedArray):
            raise TypeError("copy_in takes a device array and one of the host")
        self._check_sizes(target, source)

        def copy() -> None:
            _bytes_of(target.values)[:] = _bytes_of(source)
            target.shadow[...] = 0

        self._submit(copy)

    def copy_out(self, target: NDArray[Any], source: HostedArray) -> None:
        if not isinstance(source, HostedArray) or isinstance(target, HostedArray):
            raise TypeError("copy_out takes an array of the host and a device array")
        self._check_sizes(source, target)

        def copy() -> None:
            self._require(source, "copy_out")
            _bytes_of(target)[:] = _bytes_of(source.values)

        self._submit(copy)

    def _check_sizes(self, device: HostedArray, host: NDArray[Any]) -> None:
        if device.nbytes != host.nbytes:
            raise ValueError(f"{host.nbytes} bytes of the host and {device.nbytes} of the device")
        # That a copy from elsewhere would wait is easily overlooked.
        self._place(self.address(host), host.nbytes, "host memory that is not pinned")

    def _place(self, address: int, size: int, what: str) -> tuple[int, NDArray[np.uint8]]:
        """Base and shadow of the allocation that these bytes lie in. AccessError."""
        found = self.memory.find(address, size)
        if found is None:
            raise AccessError(f"{what}: {self.memory.describe(address)}")
        base, allocation = found
        return base, allocation.shadow

    def _require(self, array: HostedArray, what: str) -> None:
        bad = np.flatnonzero(array.shadow)
        if len(bad):
            first = int(bad[0])
            kind = "not to be touched" if array.shadow.flat[first] == NO_ACCESS else "never written"
            where = self.memory.describe(self.address(array) + first)
            raise AccessError(f"{what} reads memory that is {kind}: {where}")

    def gemm(
        self, out: HostedArray, x: HostedArray, weight: HostedArray, *, accumulate: bool = False
    ) -> None:
        (rows, depth), (columns, weight_depth) = x.shape, weight.shape
        if weight_depth != depth or out.shape != (rows, columns):
            raise ValueError(f"gemm: {x.shape} by {weight.shape} transposed into {out.shape}")
        if weight.dtype != x.dtype or out.dtype not in (x.dtype, np.dtype(np.float32)):
            raise ValueError(f"gemm: {x.dtype} by {weight.dtype} into {out.dtype}")
        places = [(self.address(a), a.shape, a.dtype) for a in (out, x, weight)]

        def multiply() -> None:
            # Found again by address, as a graph would: what was freed meanwhile is an error.
            result, left, right = (self._at(*place) for place in places)
            self._require(left, "gemm, x,")
            self._require(right, "gemm, weight,")
            product = left.values.astype(np.float32) @ right.values.astype(np.float32).T
            if accumulate:
                self._require(result, "gemm, out,")
                product += result.values.astype(np.float32)
            result.values[...] = product.astype(result.dtype)
            result.shadow[...] = 0

        self._submit(multiply)

    def _at(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostedArray:
        size = math.prod(shape) * dtype.itemsize
        base, shadow = self._place(address, size, "gemm: memory that was freed")
        values = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return HostedArray(
            values.view(dtype).reshape(shape), shadow[address - base : address - base + size], None
        )

    # Kernels

    def load_module(self, cubin: Path, ptx: Path) -> EmulatedModule:
        try:
            text = ptx.read_text(encoding="utf-8")
        except OSError as error:
            raise CuengineError(
                f"{ptx}: {error.strerror}: the emulated device runs PTX, which kernels that were "
                "built ahead may come without. Unset CUENGINE_KERNELS, or take another device"
            ) from error
        return EmulatedModule(self, emulator.Module.from_ptx(text, self.memory))

    def launch(
        self,
        function: emulator.Function,
        grid: Dim,
        block: Dim,
        params: bytes,
        shared_bytes: int,
    ) -> None:
        self._submit(
            lambda: function.launch(grid, block, params, shared_bytes, self.order, self.seed)
        )

    # The KV cache

    def guard(
        self,
        cache: HostedArray,
        tables: HostedArray,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
    ) -> None:
        guard = self._guard_of(cache)
        copies = block_tables.copy(), seq_lens.copy(), slot_mapping.copy()

        def apply() -> None:
            guard.allow(*copies)
            behind = np.arange(block_tables.shape[1]) >= -(-copies[1][:, None] // guard.block_size)
            tables.shadow[behind] = NO_ACCESS

        self._submit(apply)

    def unguard(
        self, cache: HostedArray, sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None:
        guard = self._guard_of(cache)
        copies = sources.copy(), targets.copy()
        self._submit(lambda: guard.allow_copies(*copies))

    def _guard_of(self, cache: HostedArray) -> CacheGuard:
        guard = self._guards.get(cache)
        if guard is None:
            guard = CacheGuard(cache.shadow)
            self._guards[cache] = guard
        return guard


class EmulatedEvent:
    def __init__(self, runtime: EmulatedRuntime) -> None:
        self._runtime = runtime
        self._count = 0
        self._time = 0.0

    def record(self) -> None:
        self._runtime._submit(self._reached)
        self._count = self._runtime._num_queued

    def _reached(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        self._runtime._run_until(self._count)

    def elapsed_ms(self, since: EmulatedEvent) -> float:
        return (self._time - since._time) * 1e3


class EmulatedGraph:
    """Work that was recorded, done again in one go."""

    def __init__(self, runtime: EmulatedRuntime, work: list[Callable[[], None]]) -> None:
        self._runtime = runtime
        self._work = work

    def launch(self) -> None:
        for work in self._work:
            self._runtime._submit(work)


class EmulatedModule:
    def __init__(self, runtime: EmulatedRuntime, module: emulator.Module) -> None:
        self._runtime = runtime
        self._module = module

    def function(self, symbol: str, max_shared_bytes: int = 0) -> EmulatedFunction:
        return EmulatedFunction(
            self._runtime, symbol, self._module.function(symbol), max_shared_bytes
        )


class EmulatedFunction:
    """Refuses what a driver would refuse, then leaves the launch to the stream."""

    def __init__(
        self,
        runtime: EmulatedRuntime,
        symbol: str,
        function: emulator.Function,
        max_shared_bytes: int,
    ) -> None:
        self._runtime = runtime
        self._symbol = symbol
        self._function = function
        self._max_shared_bytes = max(max_shared_bytes, _STATIC_SHARED_LIMIT)

    def launch(self, grid: Dim, block: Dim, params: bytes, shared_bytes: int = 0) -> None:
        if not all(1 <= n <= most for n, most in zip(grid, _MAX_GRID, strict=True)):
            raise ValueError(f"{self._symbol}: a grid of {grid}; from 1 to {_MAX_GRID}")
        if min(block) < 1 or math.prod(block) > _MAX_THREADS:
            raise ValueError(f"{self._symbol}: a block of {block}; at most {_MAX_THREADS} threads")
        if shared_bytes > self._max_shared_bytes:
            raise ValueError(
                f"{self._symbol}: {shared_bytes} bytes of shared memory; it was loaded for at most "
                f"{self._max_shared_bytes}"
            )
        self._runtime.launch(self._function, grid, block, params, shared_bytes)


def _aligned_bytes(size: int) -> NDArray[np.uint8]:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -int(raw.ctypes.data) % _ALIGNMENT
    return raw[start : start + size]


def _bytes_of(values: NDArray[Any]) -> NDArray[np.uint8]:
    return values.reshape(-1).view(np.uint8)


def _forget(memory: Memory, address: int, raw: NDArray[np.uint8]) -> None:
    """raw: kept until now, so that nothing else got this address."""
    memory.remove(address)
    del raw

"""A CuPy for the host: what cupy_runtime.py may use of it, and nothing else.

Whatever is not defined here raises AttributeError, so code that would have CuPy compile a kernel
of its own (any arithmetic, `zeros`, `asarray`, ...) fails. Kernels are the PTX beside the cubin,
run by the emulator; memory is the host's, one emulator allocation each; a stream that captures
keeps what it is given for later. Names, arguments and results as in CuPy 14.2.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from cuengine.device.emulated.runtime import Memory as Emulated
from cuengine.device.emulated.runtime import Module

PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE = 1, 2
INVALID_CONTEXT = 201


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class CUDADriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR {status}")
        self.status = status


class Gpu:
    """The machine behind one fake CuPy.

    free, total    bytes of device memory
    has_context    whether launches find one; any call of the runtime makes one
    calls          names of what was called, in order
    """

    def __init__(self, total: int = 2**30, architecture: int = 80) -> None:
        self.memory = Emulated()
        self.free = self.total = total
        self.architecture = architecture
        self.has_context = False
        self.functions: dict[int, Any] = {}
        self.symbols: dict[int, str] = {}
        self.shared_limits: dict[int, int] = {}
        self.captured: list[Callable[[], None]] | None = None
        self.calls: list[str] = []
        self.ranges: list[str] = []
        self.kept: list[Any] = []

    def run(self, action: Callable[[], None]) -> None:
        if self.captured is None:
            action()
        else:
            self.captured.append(action)

    def allocate(self, size: int, name: str) -> tuple[Any, int]:
        """Host bytes at an address that is a multiple of 256, known to the emulator."""
        flat = np.empty(size + 256, np.uint8)
        start = -flat.ctypes.data % 256
        array = flat[start : start + size]
        return array, self.memory.add(array, name)


def make_cupy(gpu: Gpu) -> ModuleType:
    """The module to be found as `cupy`."""

    class Memory:
        def __init__(self, size: int) -> None:
            gpu.calls.append("malloc")
            if size > gpu.free:
                raise CUDARuntimeError(2)
            self.size = size
            gpu.free -= size
            self.bytes, self.ptr = gpu.allocate(size, "device memory")

        def __del__(self) -> None:
            if hasattr(self, "ptr"):
                gpu.free += self.size
                gpu.memory.remove(self.ptr)

    class MemoryPointer:
        def __init__(self, mem: Memory, offset: int) -> None:
            self.mem, self.ptr = mem, mem.ptr + offset

    class PinnedMemory:
        def __init__(self, size: int, flags: int = 0) -> None:
            assert flags == runtime.hostAllocPortable
            self.bytes, self.ptr = gpu.allocate(size, "pinned memory")

    def pinned_memory_pointer(mem: PinnedMemory, offset: int) -> Any:
        assert offset == 0
        gpu.kept.append(mem)
        return (ctypes.c_char * mem.bytes.size).from_buffer(mem.bytes)

    class ndarray:
        """Knows its shape and where it is, and how to make views; has no operators."""

        def __init__(self, shape: Any, dtype: Any, memptr: MemoryPointer) -> None:
            self.data = memptr
            self._like(np.empty(0, np.dtype(dtype)), tuple(shape))

        def _like(self, array: Any, shape: tuple[int, ...]) -> None:
            self.dtype, self.shape = array.dtype, shape
            self.nbytes = math.prod(shape) * self.dtype.itemsize

        def _view(self, array: Any, offset: int) -> ndarray:
            view = ndarray.__new__(ndarray)
            view.data = MemoryPointer(self.data.mem, self.data.ptr - self.data.mem.ptr + offset)
            view._like(array, array.shape)
            return view

        def _host(self) -> Any:
            start = self.data.ptr - self.data.mem.ptr
            flat = self.data.mem.bytes[start : start + self.nbytes]
            return flat.view(self.dtype).reshape(self.shape)

        def __len__(self) -> int:
            return self.shape[0]

        def __getitem__(self, index: int | slice) -> ndarray:
            assert isinstance(index, int | slice)
            host = self._host()
            part = host[index, ...]
            assert part.flags.c_contiguous
            return self._view(part, part.ctypes.data - host.ctypes.data)

        def reshape(self, *shape: Any) -> ndarray:
            return self._view(self._host().reshape(*shape), 0)

        def view(self, dtype: Any) -> ndarray:
            return self._view(self._host().view(dtype), 0)

    class Stream:
        def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
            assert non_blocking
            assert not null
            self.ptr = 0x57AE

        def begin_capture(self) -> None:
            assert gpu.captured is None
            gpu.captured = []

        def end_capture(self) -> Graph:
            assert gpu.captured is not None
            actions, gpu.captured = gpu.captured, None
            return Graph(actions)

    class Graph:
        def __init__(self, actions: list[Callable[[], None]]) -> None:
            self.actions = actions

        def launch(self, stream: Stream) -> None:
            assert stream.ptr == 0x57AE
            gpu.calls.append("graphLaunch")
            for action in self.actions:
                action()

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            self.timed, self.recorded = not disable_timing, 0.0

        def record(self, stream: Stream) -> None:
            assert stream.ptr == 0x57AE
            gpu.calls.append("eventRecord")
            self.recorded = len(gpu.calls)

        def synchronize(self) -> None:
            gpu.calls.append("eventSynchronize")

    def get_elapsed_time(start: Event, end: Event) -> float:
        if not (start.timed and end.timed and start.recorded and end.recorded):
            raise CUDARuntimeError(400)
        return end.recorded - start.recorded

    class Kernel:
        def __init__(self, pointer: int) -> None:
            self.kernel = SimpleNamespace(ptr=pointer)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "max_dynamic_shared_size_bytes":
                gpu.shared_limits[self.kernel.ptr] = value
            else:
                assert name == "kernel"
                object.__setattr__(self, name, value)

    class RawModule:
        def __init__(self, *, path: str) -> None:
            assert isinstance(path, str)
            self.path = Path(path)

        def compile(self) -> None:
            if self.path.read_bytes()[:4] != b"\x7fELF":
                raise CUDADriverError(200)
            self.module = Module.from_ptx(self.path.with_suffix(".ptx").read_text(), gpu.memory)

        def get_function(self, symbol: str) -> Kernel:
            pointer = 0xF0000 + len(gpu.functions)
            gpu.functions[pointer] = self.module.function(symbol)
            gpu.symbols[pointer] = symbol
            return Kernel(pointer)

    def launch_kernel(
        f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared_bytes: int,
        stream: int, kernel_params: int, extra: int,
    ) -> None:  # fmt: skip
        assert (stream, kernel_params) == (0x57AE, 0)
        if not gpu.has_context:
            raise CUDADriverError(INVALID_CONTEXT)
        if shared_bytes > max(48 * 1024, gpu.shared_limits.get(f, 0)) or 0 in (gx, gy, gz):
            raise CUDADriverError(1)
        words = (ctypes.c_void_p * 5).from_address(extra)
        assert (words[0], words[2], words[4]) == (PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE, None)
        size = ctypes.c_size_t.from_address(words[3]).value
        arguments = ctypes.string_at(words[1], size)
        gpu.calls.append(gpu.symbols[f])
        function = gpu.functions[f]
        gpu.run(
            lambda: function.launch(
                (gx, gy, gz), (bx, by, bz), arguments, shared_bytes=shared_bytes
            )
        )

    def memcpy_async(target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind in (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)
        assert stream == 0x57AE
        gpu.calls.append("memcpyAsync")
        gpu.has_context = True
        gpu.run(lambda: ctypes.memmove(target, source, size))

    def mem_get_info() -> tuple[int, int]:
        gpu.has_context = True
        return gpu.free, gpu.total

    def get_device_properties(device: int) -> dict[str, Any]:
        assert device == 0
        major, minor = divmod(gpu.architecture, 10)
        return {"name": b"Fake GPU", "major": major, "minor": minor, "multiProcessorCount": 4}

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        hostAllocPortable=1,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        getDeviceProperties=get_device_properties,
        memGetInfo=mem_get_info,
        memcpyAsync=memcpy_async,
        runtimeGetVersion=lambda: 12090,
        streamSynchronize=lambda stream: gpu.calls.append("streamSynchronize"),
    )
    cupy: Any = ModuleType("cupy")
    cupy.ndarray = ndarray
    cupy.RawModule = RawModule
    cupy.cuda = SimpleNamespace(
        Event=Event,
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=pinned_memory_pointer,
        Stream=Stream,
        driver=SimpleNamespace(CUDADriverError=CUDADriverError, launchKernel=launch_kernel),
        get_elapsed_time=get_elapsed_time,
        nvtx=SimpleNamespace(
            RangePush=gpu.ranges.append, RangePop=lambda: gpu.ranges.append("pop")
        ),
        runtime=runtime,
    )
    return cupy

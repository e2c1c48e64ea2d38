"""The runtime on a GPU: memory, streams, graphs and launches by CuPy, matrix products by cuBLAS.

The only file that imports CuPy, and it does so when a runtime is made. CuPy's arrays are containers
here and nothing more: an operation on one would be a kernel that CuPy compiles with NVRTC, which an
image with kernels built ahead need not have. What the calls promise is in runtime.py.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuengine.device.cuda.cublas import WORKSPACE_BYTES, Cublas, find_cublas
from cuengine.device.cuda.find import INSTALL, usable_gpu
from cuengine.device.cuda.runtime import DeviceArray, Dim, HostArray
from cuengine.errors import ConfigError, DeviceMemoryError

_ARGUMENT_BYTES = 4096
"""What cuLaunchKernel takes on every GPU."""

_MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation: CuPy gives it no name that Python sees."""

_INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: this thread has none yet."""

_PARAM_END, _PARAM_BUFFER_POINTER, _PARAM_BUFFER_SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_*."""

_NAMES = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
}


class CupyRuntime:
    """The first GPU that is visible ($CUDA_VISIBLE_DEVICES chooses), and one stream on it.

    Made in one thread and used in another, if need be, but by one at a time.
    """

    def __init__(self) -> None:
        """Raises ConfigError where there is no GPU that can be used, and says what is missing;
        CublasError without cuBLAS, DeviceMemoryError where its workspace does not fit."""
        usable, why = usable_gpu()
        if not usable:
            raise ConfigError(f"device='cuda' cannot be had: {why}")
        self._cupy = cupy = _import_cupy()
        self._cuda = cupy.cuda.runtime
        self._driver = cupy.cuda.driver
        properties = self._cuda.getDeviceProperties(0)
        self.name: str = properties["name"].decode()
        self.architecture: int = properties["major"] * 10 + properties["minor"]
        self.multiprocessors: int = properties["multiProcessorCount"]
        self.ensure_context()  # for cuBLAS and launches, which take the one there is
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.stream_pointer: int = self._stream.ptr
        self._capturing = False
        self.cublas = Cublas(find_cublas(self._cuda.runtimeGetVersion() // 1000))
        weakref.finalize(self, self.cublas.close)
        self._workspace = self.empty((WORKSPACE_BYTES,), np.dtype(np.uint8))
        self.cublas.use(self.stream_pointer, self._workspace.data.ptr, WORKSPACE_BYTES)

    def memory_info(self) -> tuple[int, int]:
        free, total = self._cuda.memGetInfo()
        return free, total

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        # Straight from the driver: no pool keeps what is freed, and none knows our stream.
        if self._capturing:
            raise RuntimeError(f"device memory {shape} asked for while a graph is captured")
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            memory = self._cupy.cuda.Memory(max(1, size))
        except self._cuda.CUDARuntimeError as error:
            if error.status != _MEMORY_ALLOCATION:
                raise
            free, total = self.memory_info()
            raise DeviceMemoryError(
                f"{self.name}: {_mib(size)} of device memory asked for; {_mib(free)} of "
                f"{_mib(total)} are free"
            ) from error
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        # Not from CuPy's pool, which rounds up to a power of two and keeps what is freed.
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            memory = self._cupy.cuda.PinnedMemory(max(1, size), self._cuda.hostAllocPortable)
        except self._cuda.CUDARuntimeError as error:
            if error.status != _MEMORY_ALLOCATION:
                raise
            raise DeviceMemoryError(
                f"{_mib(size)} of page-locked host memory asked for: not to be had"
            ) from error
        whole = np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, size)
        return whole.view(dtype).reshape(shape)

    def address(self, array: DeviceArray | HostArray) -> int:
        # Under unified addressing page-locked memory has the same address on the GPU.
        if isinstance(array, np.ndarray):
            return int(array.ctypes.data)
        return int(array.data.ptr)

    def copy_in(self, target: DeviceArray, source: HostArray) -> None:
        self._cuda.memcpyAsync(
            target.data.ptr,
            source.ctypes.data,
            source.nbytes,
            self._cuda.memcpyHostToDevice,
            self.stream_pointer,
        )

    def copy_out(self, target: HostArray, source: DeviceArray) -> None:
        self._cuda.memcpyAsync(
            target.ctypes.data,
            source.data.ptr,
            target.nbytes,
            self._cuda.memcpyDeviceToHost,
            self.stream_pointer,
        )

    def synchronize(self) -> None:
        self._cuda.streamSynchronize(self.stream_pointer)

    def event(self, *, timing: bool = False) -> CupyEvent:
        return CupyEvent(self._cupy, self._stream, timing)

    def load_module(self, cubin: Path, ptx: Path) -> CupyModule:
        return CupyModule(self, cubin)

    def gemm(
        self, out: DeviceArray, x: DeviceArray, weight: DeviceArray, *, accumulate: bool = False
    ) -> None:
        num_tokens, in_features = x.shape
        self.cublas.linear(
            out.data.ptr,
            x.data.ptr,
            weight.data.ptr,
            num_tokens=num_tokens,
            in_features=in_features,
            out_features=weight.shape[0],
            dtype=_NAMES[x.dtype],
            out_dtype=_NAMES[out.dtype],
            accumulate=accumulate,
        )

    def begin_capture(self) -> None:
        # CuPy's default mode is relaxed: an array that happens to be freed, or a library that
        # happens to load a kernel, meanwhile does not spoil the capture.
        self._stream.begin_capture()
        self._capturing = True

    def end_capture(self) -> CupyGraph:
        self._capturing = False
        return CupyGraph(self._stream.end_capture(), self._stream)

    def range(self, name: str) -> AbstractContextManager[None]:
        return _Range(self._cupy.cuda.nvtx, name)

    def discard(self, array: DeviceArray) -> None:
        """For the stand-in: a GPU has nothing to do."""

    def guard(
        self,
        cache: DeviceArray,
        tables: DeviceArray,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
    ) -> None:
        """For the stand-in: a GPU has nothing to do."""

    def unguard(
        self, cache: DeviceArray, sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None:
        """For the stand-in: a GPU has nothing to do."""

    def ensure_context(self) -> None:
        """Give this thread the GPU's context, as every call of CUDA's runtime does by the way."""
        self._cuda.memGetInfo()


class CupyModule:
    """A cubin on the GPU, for as long as the process lives: CuPy keeps it."""

    def __init__(self, runtime: CupyRuntime, cubin: Path) -> None:
        self._runtime = runtime
        self._module = runtime._cupy.RawModule(path=str(cubin))
        try:
            self._module.compile()  # which for a cubin is to load it
        except runtime._driver.CUDADriverError as error:
            raise ConfigError(
                f"{cubin}: the driver does not load it ({error}). Code made by NVRTC of CUDA 13 "
                "needs a driver for CUDA 13: is the right NVRTC installed, is this the right file?"
            ) from error

    def function(self, symbol: str, max_shared_bytes: int = 0) -> CupyFunction:
        kernel = self._module.get_function(symbol)
        # Above 48 KiB only for those who ask beforehand, and that includes static shared memory.
        if max_shared_bytes:
            kernel.max_dynamic_shared_size_bytes = max_shared_bytes
        return CupyFunction(self._runtime, self._module, kernel.kernel.ptr)


class CupyFunction:
    """A kernel, and the place where a launch finds its arguments.

    CuPy's own call wraps each argument in an object of its own; this is one call of the driver.
    """

    def __init__(self, runtime: CupyRuntime, module: object, pointer: int) -> None:
        self._runtime, self._module = runtime, module
        self._driver = runtime._driver
        self._launch = self._driver.launchKernel
        self._pointer, self._stream = pointer, runtime.stream_pointer
        self._buffer = ctypes.create_string_buffer(_ARGUMENT_BYTES)
        self._arguments = memoryview(self._buffer).cast("B")
        self._size = ctypes.c_size_t()
        self._extra = (ctypes.c_void_p * 5)(
            *(_PARAM_BUFFER_POINTER, ctypes.addressof(self._buffer)),
            *(_PARAM_BUFFER_SIZE, ctypes.addressof(self._size)),
            _PARAM_END,
        )
        self._extra_pointer = ctypes.addressof(self._extra)

    def launch(self, grid: Dim, block: Dim, params: bytes, shared_bytes: int = 0) -> None:
        # The driver has read them when the call returns, so the next launch may overwrite them.
        size = len(params)
        self._arguments[:size] = params
        self._size.value = size
        try:
            self._queue(grid, block, shared_bytes)
        except self._driver.CUDADriverError as error:
            if error.status != _INVALID_CONTEXT:
                raise
            self._runtime.ensure_context()
            self._queue(grid, block, shared_bytes)

    def _queue(self, grid: Dim, block: Dim, shared_bytes: int) -> None:
        x, y, z = grid
        width, height, depth = block
        stream, extra = self._stream, self._extra_pointer
        self._launch(
            self._pointer, x, y, z, width, height, depth, shared_bytes, stream, 0, extra
        )  # fmt: skip


class CupyEvent:
    def __init__(self, cupy: Any, stream: Any, timing: bool) -> None:
        self._event = cupy.cuda.Event(disable_timing=not timing)
        self._elapsed = cupy.cuda.get_elapsed_time
        self._stream = stream

    def record(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()

    def elapsed_ms(self, since: CupyEvent) -> float:
        return float(self._elapsed(since._event, self._event))


class CupyGraph:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def launch(self) -> None:
        self._graph.launch(self._stream)


class _Range:
    """A range in the profiler's timeline."""

    __slots__ = ("_name", "_nvtx")

    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx, self._name = nvtx, name

    def __enter__(self) -> None:
        self._nvtx.RangePush(self._name)

    def __exit__(self, *exception: object) -> None:
        self._nvtx.RangePop()


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(f"CuPy cannot be imported ({reason}): {INSTALL}") from error
    return cupy


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"

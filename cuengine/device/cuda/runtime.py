"""What the CUDA device asks of its runtime, and all that it asks: a GPU through CuPy, or the host.

cupy_runtime.py and emulated/host.py implement it; the device class works with either and never
asks which. Everything that takes time is queued on one stream, in order, and returns at once. What
the stand-in needs to check a kernel (`discard`, `guard`) costs a GPU nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

DeviceArray = Any
"""A C-contiguous array in device memory, as cupy.ndarray is one.

It has shape, dtype (numpy's, ml_dtypes.bfloat16 among them), nbytes, reshape, view(dtype), and
indexing by an int or a slice along its first axis; all of these give views and launch nothing.
"""

HostArray = NDArray[Any]
"""A C-contiguous numpy.ndarray in page-locked memory, made by `Runtime.pinned`."""

Dim = tuple[int, int, int]


class Function(Protocol):
    """A kernel, ready to launch."""

    def launch(self, grid: Dim, block: Dim, params: bytes, shared_bytes: int = 0) -> None:
        """params: the arguments as they lie in memory, each aligned to its size (struct's "@").

        That is what cuLaunchKernel takes as CU_LAUNCH_PARAM_BUFFER_POINTER: packed by one call
        that is written in C, whatever their number.
        """
        ...


class Module(Protocol):
    """A loaded cubin."""

    def function(self, symbol: str, max_shared_bytes: int = 0) -> Function:
        """max_shared_bytes: the most dynamic shared memory that any launch will ask for."""
        ...


class Event(Protocol):
    """A point in the stream."""

    def record(self) -> None:
        """From now on it stands for all that was queued before this call."""
        ...

    def wait(self) -> None:
        """Return when that is done; at once if it was never recorded."""
        ...

    def elapsed_ms(self, since: Any) -> float:
        """Milliseconds from `since`, an event of the same runtime, to this; both were made with
        timing, recorded, and are done."""
        ...


class Graph(Protocol):
    """Launches that were captured, with their arguments' values and addresses."""

    def launch(self) -> None: ...


class Runtime(Protocol):
    """One GPU, one non-blocking stream.

    architecture     compute capability: 90 for sm_90
    """

    name: str
    architecture: int
    multiprocessors: int

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes; what an allocator keeps for itself counts as free."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Device memory, aligned to 256 bytes, content undefined. Freed with its last view.

        Raises DeviceMemoryError where there is not enough, and RuntimeError while capturing.
        """
        ...

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
        """Page-locked host memory, which kernels can reach too: by `address`. Undefined content.

        Raises DeviceMemoryError where there is not enough.
        """
        ...

    def address(self, array: DeviceArray | HostArray) -> int:
        """Where kernels find its first byte."""
        ...

    def copy_in(self, target: DeviceArray, source: HostArray) -> None:
        """Host to device: equal numbers of bytes. The source stays as it is until that is done."""
        ...

    def copy_out(self, target: HostArray, source: DeviceArray) -> None:
        """Device to host: equal numbers of bytes. The target is valid when that is done."""
        ...

    def synchronize(self) -> None:
        """Return when all that was queued is done. Raises what went wrong in it."""
        ...

    def event(self, *, timing: bool = False) -> Event: ...

    def load_module(self, cubin: Path, ptx: Path) -> Module:
        """The same program twice: machine code for a GPU, PTX for what runs that."""
        ...

    def gemm(
        self, out: DeviceArray, x: DeviceArray, weight: DeviceArray, *, accumulate: bool = False
    ) -> None:
        """out [rows, n] = x [rows, k] @ weight [n, k].T, plus what is in out where accumulate.

        Row-major. x and weight have one dtype: float32 (no TF32), float16 or bfloat16; out has
        that dtype or float32. Products are summed in float32 and rounded once.
        """
        ...

    def begin_capture(self) -> None:
        """From here on launches, gemm and copies are recorded, and not run."""
        ...

    def end_capture(self) -> Graph:
        """Also called where the capture failed; then it may raise."""
        ...

    def range(self, name: str) -> AbstractContextManager[None]:
        """What a profiler shows as `name` (NVTX); nothing where none is listening."""
        ...

    def discard(self, array: DeviceArray) -> None:
        """What is in the array will be written before it is read again. Recorded by a capture."""
        ...

    def guard(
        self,
        cache: DeviceArray,
        tables: DeviceArray,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        slot_mapping: NDArray[np.int64],
    ) -> None:
        """Until the next `guard`, nothing touches the KV cache but where these say it may.

        cache         [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
        tables        int32 [num_seqs, width] on the device; what lies behind a sequence's last
                      block there is not to be touched either
        block_tables  [num_seqs, width] the same on the host; of each, the first seq_lens[i] tokens
        seq_lens      [num_seqs]
        slot_mapping  [num_tokens] slots that are written before they are read
        """
        ...

    def unguard(
        self, cache: DeviceArray, sources: NDArray[np.int32], targets: NDArray[np.int32]
    ) -> None:
        """Until the next `guard`, these blocks of the KV cache may be copied, as a whole.

        Targets [n] come to hold what the sources [n] hold; one of the two is empty where the other
        side of the copies lies in host memory.
        """
        ...

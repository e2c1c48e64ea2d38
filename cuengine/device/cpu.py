"""The `cpu` device: NumPy arrays in float32, kernels in Numba, or in NumPy where there is none.

What the operations compute is in products.py, numba_kernels.py and numba_sampler.py, or else in
numpy_kernels.py and sampler.py; this module owns memory and threads.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch, Float32, Int32, SamplerOutput, SamplingBatch
from cuengine.beside import Beside
from cuengine.device import numba_environment, numpy_kernels, sampler
from cuengine.device.container import available_memory, cpu_quota
from cuengine.device.interface import AttentionShape
from cuengine.errors import CuengineError
from cuengine.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from cuengine.device.packed import Arena, NarrowMatrix, PackedMatrix

logger = logging.getLogger(__name__)

FREE_MEMORY_SHARE = 0.5
"""Part of the free memory that the KV cache may take where nothing else is said."""

MAX_DEFAULT_CACHE = 4 * 2**30
"""Bytes; more than a default on a shared machine should claim."""


_WEIGHT_TOKENS, _WEIGHT_TOKENS_QUANTIZED = 16, 4
"""See `Device.weight_tokens`: of float32, and of 4 and 8 bits, which are read that much faster."""


class Kernels(Protocol):
    """What numpy_kernels.py and numba_kernels.py have in common; results go to `out`."""

    def rms_norm(self, x: Float32, weight: Float32, eps: float, out: Float32) -> None: ...

    def add_rms_norm(
        self, x: Float32, residual: Float32, weight: Float32, eps: float, out: Float32
    ) -> None: ...

    def silu_mul(self, gate_up: Float32, out: Float32) -> None: ...

    def rotary_cache(
        self,
        qkv: Float32,
        cos_sin: Float32,
        kv_layer: Float32,
        batch: Batch,
        shape: AttentionShape,
        out: Float32,
    ) -> None: ...

    def paged_attention(
        self, q: Float32, kv_layer: Float32, batch: Batch, shape: AttentionShape, out: Float32
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Operations:
    """What is done by Numba where it is there, and by NumPy where not."""

    kernels: Kernels
    linear: Callable[[Float32, Any, Float32], None]
    draw_rows: sampler.DrawRows


def _numba_operations() -> _Operations:
    """Raises ImportError where Numba is not, or not one that works with this NumPy, and ConfigError
    for variables with which it cannot work."""
    numba_environment.check_threads()
    quota = cpu_quota()
    if quota is not None:
        # It stays there: whenever Numba compiles, it looks whether its settings still hold.
        threads = max(1, min(quota, len(os.sched_getaffinity(0))))
        os.environ.setdefault("NUMBA_NUM_THREADS", str(threads))
    try:
        from cuengine.device import numba_setup

        numba_setup.start_threads()  # before kernels are compiled, which would start them, too
        from cuengine.device import numba_kernels, numba_sampler, products
    except (ImportError, CuengineError):
        raise
    except Exception as error:
        raise numba_environment.refused(error) or error from None
    return _Operations(numba_kernels, products.linear, numba_sampler.draw_rows)


class _Results:
    """Arrays for results, used again by the next call of the same operation.

    Allocated anew each time, results of some megabytes would be mapped and unmapped, or leave holes
    that let the process grow.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, int], Float32] = {}

    def take(self, operation: str, num_rows: int, width: int) -> Float32:
        """float32 [num_rows, width], with whatever was in it."""
        array = self._arrays.get((operation, width))
        if array is None or len(array) < num_rows:
            # Powers of two: batches that grow row by row allocate seldom.
            array = np.empty((1 << (num_rows - 1).bit_length(), width), np.float32)
            self._arrays[operation, width] = array
        return array[:num_rows]


class CpuDevice:
    """Implements `Device`. Arrays are C-contiguous float32 numpy.ndarrays; a step is its Batch.

    Every call returns with its work done; `overlaps` may be set all the same, to test the engine.

    use_numba: None takes it where it is installed.
    """

    name = "cpu"
    dtype = "float32"
    overlaps = False
    measures_memory = False
    keeps_quantized = False
    compute_rate = 100e9
    weight_tokens = _WEIGHT_TOKENS
    swap_rate = 5e9

    def __init__(self, *, use_numba: bool | None = None) -> None:
        self._operations = _Operations(numpy_kernels, numpy_kernels.linear, sampler.draw_rows)
        self._loading: Beside[_Operations] | None = None
        self._arena: Arena | None = None
        self._last_tokens: Int32 = np.empty(0, np.int32)
        self._results = _Results()
        self._no_range = nullcontext()
        if use_numba is None:
            use_numba = importlib.util.find_spec("numba") is not None
            if use_numba and numba_environment.jit_disabled():
                logger.warning("NUMBA_DISABLE_JIT is set: kernels are NumPy's, which are slower")
                use_numba = False
        if use_numba:
            from cuengine.device.packed import Arena

            self._arena = Arena()
            self.keeps_quantized = True
            # Importing Numba takes a third of a second, loading kernels from their cache more than
            # that, compiling them, where it is cold, half a minute. Meanwhile, other cores load
            # weights.
            self._loading = Beside(_numba_operations)

    @property
    def _ready(self) -> _Operations:
        if self._loading is not None:
            try:
                self._operations = self._loading.result()
            except ImportError as error:
                logger.warning("Numba is installed but cannot be imported: %s", error)
            self._loading = None
        return self._operations

    @property
    def kernels(self) -> str:
        """Which kernels are in use: "Numba" or "NumPy"."""
        numba = self._loading is not None or self._operations.kernels is not numpy_kernels
        return "Numba" if numba else "NumPy"

    def free_memory(self) -> int:
        return available_memory()

    def kv_cache_budget(self, gpu_memory_utilization: float) -> int:
        return min(int(self.free_memory() * FREE_MEMORY_SHARE), MAX_DEFAULT_CACHE)

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
            return np.ascontiguousarray(array)
        return np.ascontiguousarray(array, dtype=np.float32)

    def upload_matrix(self, weight: NDArray[Any] | QuantizedMatrix) -> Any:
        if self._arena is None:
            assert not isinstance(weight, QuantizedMatrix)
            return self.upload(weight)
        from cuengine.device.packed import pack, pack_narrow

        if isinstance(weight, QuantizedMatrix):
            self.weight_tokens = _WEIGHT_TOKENS_QUANTIZED
            return pack_narrow(weight, self._arena)
        return pack(self.upload(weight), self._arena)

    def download(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def prepare(self, shape: AttentionShape, *, progress: bool = False) -> None:
        return

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Float32:
        # Zero pages of the kernel's: memory is taken as blocks are first written.
        cache: Float32 = np.zeros(
            (num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim), np.float32
        )
        # Those of the first blocks now: they may be huge, and make the first request wait.
        cache[:, :, :1] = 0
        return cache

    def allocate_host_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> Float32:
        return self.allocate_kv_cache(num_layers, num_blocks, block_size, shape)

    def range(self, name: str) -> AbstractContextManager[None]:
        return self._no_range

    def stage(self, batch: Batch) -> Batch:
        sources = batch.token_sources
        if sources is None:
            return batch
        token_ids = batch.token_ids.copy()
        token_ids[sources >= 0] = self._last_tokens[sources[sources >= 0]]
        return replace(batch, token_ids=token_ids, token_sources=None)

    def replay(self, staged: Batch, body: Callable[[], Float32]) -> Float32:
        return body()

    def embedding(self, weight: Float32 | PackedMatrix | NarrowMatrix, staged: Batch) -> Float32:
        ids = staged.token_ids
        return weight[ids] if isinstance(weight, np.ndarray) else weight.rows(ids)

    def linear(
        self, x: Float32, weight: Float32 | PackedMatrix | NarrowMatrix, bias: Float32 | None = None
    ) -> Float32:
        width = len(weight) if isinstance(weight, np.ndarray) else weight.out_features
        out = self._results.take("linear", len(x), width)
        self._ready.linear(x, weight, out)
        if bias is not None:
            out += bias
        return out

    def logits(self, hidden: Float32, weight: Any) -> Float32:
        return self.linear(hidden, weight)

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        out = self._results.take("norm", *x.shape)
        self._ready.kernels.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Float32, residual: Float32, weight: Float32, eps: float) -> Float32:
        out = self._results.take("norm", *x.shape)
        self._ready.kernels.add_rms_norm(x, residual, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Float32) -> Float32:
        out = self._results.take("silu", len(gate_up), gate_up.shape[1] // 2)
        self._ready.kernels.silu_mul(gate_up, out)
        return out

    def rotary_cache(
        self,
        qkv: Float32,
        cos_sin: Float32,
        kv_layer: Float32,
        staged: Batch,
        shape: AttentionShape,
    ) -> Float32:
        out = self._results.take("rotary", len(qkv), shape.num_heads * shape.head_dim)
        self._ready.kernels.rotary_cache(qkv, cos_sin, kv_layer, staged, shape, out)
        return out

    def paged_attention(
        self, q: Float32, kv_layer: Float32, staged: Batch, shape: AttentionShape
    ) -> Float32:
        out = self._results.take("attention", *q.shape)
        self._ready.kernels.paged_attention(q, kv_layer, staged, shape, out)
        return out

    def take_rows(self, x: Float32, staged: Batch) -> Float32:
        return x[staged.logits_indices]

    def copy_blocks(self, kv_cache: Float32, staged: Batch) -> None:
        if len(staged.block_copies):
            source, target = staged.block_copies.T
            kv_cache[:, :, target] = kv_cache[:, :, source]

    def swap_out(self, kv_cache: Float32, host_cache: Float32, staged: Batch) -> None:
        if staged.swap_outs is not None:
            source, target = staged.swap_outs.T
            host_cache[:, :, target] = kv_cache[:, :, source]

    def swap_in(self, kv_cache: Float32, host_cache: Float32, staged: Batch) -> None:
        if staged.swap_ins is not None:
            source, target = staged.swap_ins.T
            kv_cache[:, :, target] = host_cache[:, :, source]

    def sample(
        self, logits: Float32, sampling: SamplingBatch, *, first_row: int = 0
    ) -> SamplerOutput:
        output = sampler.sample(logits, sampling, self._ready.draw_rows)
        earlier = self._last_tokens[:first_row]
        self._last_tokens = np.concatenate([earlier, output.token_ids])
        return output

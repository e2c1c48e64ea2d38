"""The `cuda` device: the model's operations as kernels, matrix products and copies on one stream.

The class does not know what runs them (runtime.py). Nothing here waits for the GPU but `download`
and the first use of a buffer that is still on its way; results are fetched by who needs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch, Int32, PendingOutput, SamplingBatch
from cuengine.device.cuda.attention import CacheLayout, PagedAttention
from cuengine.device.cuda.buffers import Buffers
from cuengine.device.cuda.graphs import Graphs
from cuengine.device.cuda.inputs import StagedStep, StepInputs
from cuengine.device.cuda.kernels import (
    GEMM,
    Kernel,
    KernelSet,
    Watcher,
    announced,
    load_kernels,
)
from cuengine.device.cuda.runtime import DeviceArray, Dim, HostArray, Runtime
from cuengine.device.cuda.sampling import Sampler
from cuengine.device.cuda.staging import Staging, Uploader, aligned
from cuengine.device.interface import LOGITS_ROWS, AttentionShape, StepLimits
from cuengine.device.kernel_variants import HEAD_DIMS
from cuengine.errors import ConfigError, ModelError
from cuengine.quantized import QuantizedMatrix

logger = logging.getLogger(__name__)

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_FLOAT = np.dtype(np.float32)
_VECTOR_BYTES = 16
_MAX_GRID_Y = 65535
_SWAP_RATE = 20e9
"""Bytes a second over PCIe 4.0 x16, in practice."""

_WEIGHT_TOKENS, _WEIGHT_TOKENS_FLOAT32 = 100, 16
"""From T4 to H100 the rate of `_compute_rate` over memory bandwidth comes to 96 to 134 operations,
two a weight, in 16 bits, and to about 15 in float32."""

_NONE = np.empty(0, np.int32)


class CudaDevice:
    """Implements `Device`. Arrays are the runtime's.

    dtype   "float32", "float16" or "bfloat16": of weights, activations and the KV cache
    limits  the largest step; buffers are made for it
    """

    overlaps = True
    keeps_quantized = False
    measures_memory = True
    swap_rate = _SWAP_RATE

    def __init__(
        self, runtime: Runtime, dtype: str, limits: StepLimits, *, use_graphs: bool = True
    ) -> None:
        """Raises ConfigError for limits that kernels cannot be launched with."""
        if limits.max_tokens > _MAX_GRID_Y:
            raise ConfigError(
                f"max_num_batched_tokens={limits.max_tokens} is more than one step can have on a "
                f"GPU: at most {_MAX_GRID_Y}"
            )
        self.runtime = runtime
        self.name = runtime.name
        self.dtype = dtype
        self.compute_rate = _compute_rate(runtime, dtype)
        self.weight_tokens = _WEIGHT_TOKENS if dtype != "float32" else _WEIGHT_TOKENS_FLOAT32
        self._dtype = _DTYPES[dtype]
        self._vector = _VECTOR_BYTES // self._dtype.itemsize
        self._limits = limits
        self._use_graphs = use_graphs
        self._buffers = Buffers(runtime)
        self._graphs = Graphs(runtime)
        self._gemm: Callable[..., None] = runtime.gemm
        self._uploader = Uploader(runtime)
        self._block_lists = Staging(runtime, 1 << 12)
        self._shape: AttentionShape | None = None
        self._cache: DeviceArray = None

    # Memory

    def free_memory(self) -> int:
        return self.runtime.memory_info()[0]

    def kv_cache_budget(self, gpu_memory_utilization: float) -> int:
        self.runtime.synchronize()
        # The small one of the largest step makes room.
        self._release_cache()
        free, total = self.runtime.memory_info()
        return max(0, int(total * gpu_memory_utilization) - (total - free))

    def upload(self, array: NDArray[Any]) -> DeviceArray:
        return self._uploader.upload(array)

    def upload_matrix(self, weight: NDArray[Any] | QuantizedMatrix) -> DeviceArray:
        """Raises ModelError for rows that kernels cannot read 16 bytes at a time."""
        assert not isinstance(weight, QuantizedMatrix)
        if weight.shape[1] % self._vector:
            raise ModelError(
                f"a weight of shape {weight.shape}: the CUDA kernels need rows that are a multiple "
                f"of {self._vector} {self.dtype} elements. Use --device cpu for this model"
            )
        return self._uploader.upload(weight)

    def download(self, array: DeviceArray) -> NDArray[Any]:
        target = self.runtime.pinned(array.shape, array.dtype)
        self.runtime.copy_out(target, array)
        self.runtime.synchronize()
        return target.copy()

    def prepare(self, shape: AttentionShape, *, progress: bool = False) -> None:
        """Raises ModelError for heads that there is no kernel for, and NvrtcError."""
        if shape == self._shape:
            return
        if shape.head_dim not in HEAD_DIMS:
            raise ModelError(
                f"head_dim={shape.head_dim}: the CUDA kernels are made for "
                f"{', '.join(map(str, HEAD_DIMS))}. Use --device cpu for this model"
            )
        runtime, limits, itemsize = self.runtime, self._limits, self._dtype.itemsize
        started = time.perf_counter()
        self._kernels: KernelSet = load_kernels(
            runtime, self.dtype, itemsize, shape.head_dim, progress=progress
        )
        logger.info(
            "kernels for sm_%d, %s, head_dim %d: ready in %.2f s",
            runtime.architecture,
            self.dtype,
            shape.head_dim,
            time.perf_counter() - started,
        )
        self._attention = PagedAttention(
            runtime, self._kernels, shape, self.dtype, itemsize, max_num_seqs=limits.max_num_seqs
        )
        self._inputs = StepInputs(
            runtime,
            self._attention,
            limits,
            max_tiles=self._attention.most_tiles(limits.max_tokens, limits.max_num_seqs),
            use_graphs=self._use_graphs,
        )
        self._sampler = Sampler(runtime, self._kernels, max_rows=limits.max_rows)
        self._graphs.clear()
        self._shape = shape

    def allocate_kv_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> DeviceArray:
        """With one block more than asked for: what pads a step writes there."""
        self.prepare(shape)
        self._uploader.release()
        self._release_cache()
        self._layout = CacheLayout(num_blocks + 1, block_size)
        self._cache = self.runtime.empty(
            (num_layers, 2, num_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim),
            self._dtype,
        )
        return self._cache

    def _release_cache(self) -> None:
        """And the graphs, which hold its address."""
        self._graphs.clear()
        self._cache = None

    def allocate_host_cache(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape
    ) -> HostArray:
        return self.runtime.pinned(
            (num_layers, 2, num_blocks, shape.num_kv_heads, block_size, shape.head_dim),
            self._dtype,
        )

    # Steps

    def range(self, name: str) -> AbstractContextManager[None]:
        return self.runtime.range(name)

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Within it the watcher is told of all that is launched, one by one, in order.

        Not of copies, nor of what a graph launches that was captured before.
        """
        self._kernels.watch(watcher)
        self._gemm = announced(GEMM, self.runtime.gemm, watcher)
        try:
            yield
        finally:
            self._kernels.watch(None)
            self._gemm = self.runtime.gemm

    def stage(self, batch: Batch) -> StagedStep:
        staged = self._inputs.stage(
            batch,
            block_size=self._layout.block_size,
            scratch_block=self._layout.num_blocks - 1,
        )
        if staged.token_sources:
            count = len(batch.token_ids)
            self._kernels.gather_tokens(
                (-(-count // 256), 1, 1),
                (256, 1, 1),
                staged.token_ids,
                self.runtime.address(self._sampler.tokens),
                staged.token_sources,
                count,
            )
        self._guard(staged)
        return staged

    def _guard(self, staged: StagedStep) -> None:
        self.runtime.guard(
            self._cache, staged.device_tables, staged.tables, staged.lens, staged.slots
        )

    def replay(self, staged: StagedStep, body: Callable[[], DeviceArray]) -> DeviceArray:
        if staged.graph is None:
            return body()
        return self._graphs.run(staged.graph, body)[: staged.num_rows]

    def copy_blocks(self, kv_cache: DeviceArray, staged: StagedStep) -> None:
        pairs = staged.batch.block_copies
        if len(pairs) == 0:
            return
        self.runtime.unguard(kv_cache, pairs[:, 0], pairs[:, 1])
        self._kernels.copy_blocks(
            (len(pairs), 2 * kv_cache.shape[0], 1),
            (256, 1, 1),
            *(self.runtime.address(kv_cache), self._send_pairs(pairs)),
            *(kv_cache.shape[2], self._block_vectors(kv_cache)),
        )
        self._guard(staged)

    def swap_out(self, kv_cache: DeviceArray, host_cache: HostArray, staged: StagedStep) -> None:
        pairs = staged.batch.swap_outs
        if pairs is not None and len(pairs):
            self.runtime.unguard(kv_cache, pairs[:, 0], _NONE)
            self._swap(host_cache, kv_cache, pairs)
            self._guard(staged)

    def swap_in(self, kv_cache: DeviceArray, host_cache: HostArray, staged: StagedStep) -> None:
        pairs = staged.batch.swap_ins
        if pairs is not None and len(pairs):
            self.runtime.unguard(kv_cache, _NONE, pairs[:, 1])
            self._swap(kv_cache, host_cache, pairs)
            self._guard(staged)

    def _swap(
        self, target: DeviceArray | HostArray, source: DeviceArray | HostArray, pairs: Int32
    ) -> None:
        self._kernels.swap_blocks(
            (len(pairs), 2 * target.shape[0], 1),
            (256, 1, 1),
            *(self.runtime.address(target), self.runtime.address(source)),
            *(self._send_pairs(pairs), target.shape[2], source.shape[2]),
            self._block_vectors(target),
        )

    def _send_pairs(self, pairs: Int32) -> int:
        self._block_lists.start(aligned(pairs.nbytes))
        address = self._block_lists.put(pairs)
        self._block_lists.send()
        return address

    def _block_vectors(self, cache: DeviceArray | HostArray) -> int:
        _, _, _, num_kv_heads, block_size, head_dim = cache.shape
        return int(num_kv_heads * block_size * head_dim // self._vector)

    # The model's operations

    def embedding(self, weight: DeviceArray, staged: StagedStep) -> DeviceArray:
        rows, width = staged.num_tokens, weight.shape[1]
        out = self._out("embedding", rows, width)
        self._by_vector(self._kernels.embedding, rows, width, out, weight, staged.token_ids)
        return out

    def linear(
        self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None
    ) -> DeviceArray:
        rows, width = len(x), weight.shape[0]
        out = self._out("linear", rows, width)
        if bias is not None:
            # The product is added to it, in float32, and rounded once.
            self._by_vector(self._kernels.broadcast_row, rows, width, out, bias)
        self._gemm(out, x, weight, accumulate=bias is not None)
        return out

    def logits(self, hidden: DeviceArray, weight: DeviceArray) -> DeviceArray:
        out = self._buffers.get(
            "logits",
            len(hidden),
            weight.shape[0],
            _FLOAT,
            capacity=min(LOGITS_ROWS, self._limits.max_rows),
        )
        if len(hidden):
            self._gemm(out, hidden, weight)
        return out

    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float) -> DeviceArray:
        rows, width = x.shape
        out, address = self._out("norm", rows, width), self.runtime.address
        self._kernels.rms_norm(
            (rows, 1, 1),
            self._norm_block(width),
            *(address(out), address(x), address(weight), width, eps),
        )
        return out

    def add_rms_norm(
        self, x: DeviceArray, residual: DeviceArray, weight: DeviceArray, eps: float
    ) -> DeviceArray:
        rows, width = x.shape
        out, address = self._out("norm", rows, width), self.runtime.address
        self._kernels.add_rms_norm(
            (rows, 1, 1),
            self._norm_block(width),
            *(address(out), address(x), address(residual), address(weight), width, eps),
        )
        return out

    def silu_mul(self, gate_up: DeviceArray) -> DeviceArray:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = self._out("silu_mul", rows, width)
        self._by_vector(self._kernels.silu_mul, rows, width, out, gate_up)
        return out

    def rotary_cache(
        self,
        qkv: DeviceArray,
        cos_sin: DeviceArray,
        kv_layer: DeviceArray,
        staged: StagedStep,
        shape: AttentionShape,
    ) -> DeviceArray:
        rows, address = len(qkv), self.runtime.address
        out = self._out("q", rows, shape.num_heads * shape.head_dim)
        items = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // 2 // self._vector
        self._kernels.rotary_cache(
            (rows, 1, 1),
            (min(256, -(-items // 32) * 32), 1, 1),
            *(address(out), address(qkv), address(cos_sin), address(kv_layer)),
            *(staged.positions, staged.slot_mapping, shape.num_heads, shape.num_kv_heads),
            *(self._layout.num_blocks, self._layout.block_size),
        )
        return out

    def paged_attention(
        self, q: DeviceArray, kv_layer: DeviceArray, staged: StagedStep, shape: AttentionShape
    ) -> DeviceArray:
        out, address = self._out("attention", *q.shape), self.runtime.address
        self._attention.launch(
            staged.plan,
            self._layout,
            out=address(out),
            q=address(q),
            kv_layer=address(kv_layer),
            block_tables=staged.block_tables,
            table_width=staged.table_width,
            query_start_loc=staged.query_start_loc,
            seq_lens=staged.seq_lens,
            tiles=staged.tiles,
        )
        return out

    def take_rows(self, x: DeviceArray, staged: StagedStep) -> DeviceArray:
        if staged.rows_are_tokens:
            return x
        rows, width = staged.num_rows, x.shape[1]
        out = self._buffers.get("rows", rows, width, self._dtype, capacity=self._limits.max_rows)
        self._by_vector(self._kernels.take_rows, rows, width, out, x, staged.logits_indices)
        return out

    def sample(
        self, logits: DeviceArray, sampling: SamplingBatch, *, first_row: int = 0
    ) -> PendingOutput:
        return self._sampler.sample(logits, sampling, first_row)

    def _out(self, name: str, rows: int, width: int) -> DeviceArray:
        return self._buffers.get(name, rows, width, self._dtype, capacity=self._limits.max_tokens)

    def _by_vector(
        self, kernel: Kernel, rows: int, width: int, *arguments: DeviceArray | int
    ) -> None:
        """Launch with one thread per 16-byte vector of a row of the result, `width` last."""
        if rows == 0:
            return
        vectors = width // self._vector
        threads = min(256, -(-vectors // 32) * 32)
        kernel(
            (-(-vectors // threads), rows, 1),
            (threads, 1, 1),
            *(a if isinstance(a, int) else self.runtime.address(a) for a in arguments),
            width,
        )

    def _norm_block(self, width: int) -> Dim:
        return (min(1024, -(-width // self._vector // 32) * 32), 1, 1)


def _compute_rate(runtime: Runtime, dtype: str) -> float:
    """Half of what the chip could do at 1.5 GHz, in operations a second; nothing depends on more.

    Multiply-adds of a multiprocessor and cycle: 128 in float32, 512 on tensor cores before sm_80,
    1024 from there and 2048 from sm_90 on.
    """
    if dtype == "float32":
        rate = 128
    else:
        rate = 512 if runtime.architecture < 80 else 1024 if runtime.architecture < 90 else 2048
    return runtime.multiprocessors * rate * 1.5e9

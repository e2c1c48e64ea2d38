"""A device whose operations are timed: it stands before the real one, and the model never knows.

Nothing in the engine, the model or a device is made for it; without it nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cuengine.batch import Batch, SamplingBatch
from cuengine.device.interface import Array, Device, StagedBatch
from cuengine.model.llama import Llama
from cuengine.profiling import work
from cuengine.profiling.recording import Recorder
from cuengine.profiling.stream import StreamTimes
from cuengine.profiling.work import Work

OPERATIONS = (
    *("embedding", "linear", "logits", "rms_norm", "add_rms_norm", "silu_mul", "rotary_cache"),
    *("paged_attention", "take_rows", "copy_blocks", "swap_out", "swap_in", "sample"),
)
"""Of `Device`: what takes time in a step."""

Named = tuple[str, Work]


class Counts:
    """The name and the work of each operation of a step, from sizes of model and batch.

    One method for each of OPERATIONS, with its arguments. Matrices are told apart by the weight.

    num_drawn  rows of logits that the step is about, without a graph's padding
    block_bytes  of a KV block, in all layers
    """

    def __init__(self, llama: Llama, block_size: int) -> None:
        config = llama.config
        self._hidden, self._intermediate = config.hidden_size, config.intermediate_size
        self._vocab, self._layers = config.vocab_size, config.num_layers
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._block_size = block_size
        self._itemsize = np.dtype(llama.device.dtype).itemsize
        heads, kv_heads, dim = self._heads
        self.block_bytes = 2 * self._layers * kv_heads * dim * block_size * self._itemsize
        sizes = {
            "qkv": (self._hidden, (heads + 2 * kv_heads) * dim),
            "o": (heads * dim, self._hidden),
            "gate_up": (self._hidden, 2 * self._intermediate),
            "down": (self._intermediate, self._hidden),
        }
        self._matrices = {
            id(getattr(layer, name)): (f"linear {name}", *size)
            for layer in llama.weights.layers
            for name, size in sizes.items()
        }
        self._rows = self.num_drawn = 0
        self._attention = work.NO_WORK
        self._copies = self._swapped_out = self._swapped_in = 0

    def stage(self, batch: Batch) -> None:
        """The operations that follow are of this batch."""
        self._rows, self.num_drawn = len(batch.token_ids), len(batch.logits_indices)
        counts = np.diff(batch.query_start_loc).tolist()
        lens = batch.seq_lens.tolist()
        self._attention = work.paged_attention(
            counts, lens, *self._heads, self._block_size, self._itemsize
        )
        self._copies = len(batch.block_copies)
        self._swapped_out = 0 if batch.swap_outs is None else len(batch.swap_outs)
        self._swapped_in = 0 if batch.swap_ins is None else len(batch.swap_ins)

    def embedding(self, weight: Array, staged: StagedBatch) -> Named:
        return "embedding", work.embedding(self._rows, self._hidden, self._itemsize)

    def linear(self, x: Array, weight: Array, bias: Array | None = None) -> Named:
        name, inputs, outputs = self._matrices[id(weight)]
        has_bias = bias is not None
        return name, work.linear(self._rows, inputs, outputs, self._itemsize, bias=has_bias)

    def logits(self, hidden: Array, weight: Array) -> Named:
        rows = min(len(hidden), self.num_drawn)
        return "logits", work.logits(rows, self._hidden, self._vocab, self._itemsize)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Named:
        return "rms_norm", work.rms_norm(self._rows, self._hidden, self._itemsize)

    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float) -> Named:
        return "add_rms_norm", work.add_rms_norm(self._rows, self._hidden, self._itemsize)

    def silu_mul(self, gate_up: Array) -> Named:
        return "silu_mul", work.silu_mul(self._rows, self._intermediate, self._itemsize)

    def rotary_cache(self, *arguments: Any) -> Named:
        return "rotary_cache", work.rotary_cache(self._rows, *self._heads, self._itemsize)

    def paged_attention(self, *arguments: Any) -> Named:
        return "paged_attention", self._attention

    def take_rows(self, x: Array, staged: StagedBatch) -> Named:
        return "take_rows", work.embedding(self.num_drawn, self._hidden, self._itemsize)

    def copy_blocks(self, kv_cache: Array, staged: StagedBatch) -> Named:
        return "copy_blocks", self._copied(self._copies)

    def swap_out(self, kv_cache: Array, host_cache: Array, staged: StagedBatch) -> Named:
        return "swap_out", self._copied(self._swapped_out)

    def swap_in(self, kv_cache: Array, host_cache: Array, staged: StagedBatch) -> Named:
        return "swap_in", self._copied(self._swapped_in)

    def _copied(self, blocks: int) -> Work:
        return work.copied_blocks(blocks, self.block_bytes)

    def sample(self, logits: Array, sampling: SamplingBatch, *, first_row: int = 0) -> Named:
        return "sample", work.greedy_sample(len(sampling.target_ids), self._vocab)


class ProfiledDevice:
    """Implements `Device` by another one: all is passed on, OPERATIONS are timed on the way.

    On a GPU, pass the times of its stream; then every operation is launched by itself, as within a
    CUDA graph none could be told from the others.
    """

    def __init__(
        self, device: Device, counts: Counts, recorder: Recorder, stream: StreamTimes | None
    ) -> None:
        self._device = device
        self._counts = counts
        self._recorder = recorder
        self._stream = stream
        for name in OPERATIONS:
            setattr(self, name, self._timed(getattr(device, name), getattr(counts, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def _timed(
        self, operation: Callable[..., Any], count: Callable[..., Named]
    ) -> Callable[..., Any]:
        recorder, stream = self._recorder, self._stream

        def on_host(*arguments: Any, **keywords: Any) -> Any:
            span = recorder.begin(*count(*arguments, **keywords))
            result = operation(*arguments, **keywords)
            recorder.end(span)
            return result

        def on_stream(*arguments: Any, **keywords: Any) -> Any:
            named = count(*arguments, **keywords)
            assert stream is not None
            stream.begin(*named)
            result = operation(*arguments, **keywords)
            stream.end()
            return result

        return on_host if stream is None else on_stream

    def range(self, name: str) -> AbstractContextManager[None]:
        return self._recorder.range(name)

    def stage(self, batch: Batch) -> StagedBatch:
        self._counts.stage(batch)
        staged = self._device.stage(batch)
        if self._stream is not None:
            self._stream.hold()
        return staged

    def replay(self, staged: StagedBatch, body: Callable[[], Array]) -> Array:
        return body()[: self._counts.num_drawn]

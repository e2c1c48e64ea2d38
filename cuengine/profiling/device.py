"""A device whose operations are timed: it stands before the real one, and the model never knows.

Nothing in the engine, the model or a device is made for it; without it nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cuengine.batch import Batch, Int32, SamplingBatch
from cuengine.device.interface import Array, Device, StagedBatch
from cuengine.model.llama import Llama
from cuengine.profiling import work
from cuengine.profiling.recording import Count, Named, Recorder, now
from cuengine.profiling.stream import StreamTimes
from cuengine.profiling.work import Work

OPERATIONS = (
    *("embedding", "linear", "logits", "rms_norm", "add_rms_norm", "silu_mul", "rotary_cache"),
    *("paged_attention", "take_rows", "copy_blocks", "swap_out", "swap_in", "sample"),
)
"""Of `Device`: what takes time in a step."""


class Counts:
    """The name and the work of each operation of a step, from sizes of model and batch.

    Matrices are told apart by the weight.

    num_drawn    rows of logits that the step is about, without a graph's padding
    block_bytes  of a KV block, in all layers
    """

    def __init__(self, llama: Llama, block_size: int) -> None:
        config = self._config = llama.config
        self._block_size = block_size
        self._itemsize = np.dtype(llama.device.dtype).itemsize
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        heads, kv_heads, dim = self._heads
        numbers = 2 * config.num_layers * kv_heads * dim * block_size
        self.block_bytes = numbers * self._itemsize
        sizes = {
            "qkv": (config.hidden_size, (heads + 2 * kv_heads) * dim),
            "o": (heads * dim, config.hidden_size),
            "gate_up": (config.hidden_size, 2 * config.intermediate_size),
            "down": (config.intermediate_size, config.hidden_size),
        }
        layers = llama.weights.layers
        # Layers may have been quantized to different bits: what one takes on average.
        weight_bytes = {
            name: sum(getattr(layer, name).nbytes for layer in layers) // len(layers)
            for name in sizes
        }
        self._products = {
            name: (*size, weight_bytes[name], getattr(layers[0], f"{name}_bias") is not None)
            for name, size in sizes.items()
        }
        self._head_bytes = llama.weights.lm_head.nbytes
        self._names = {id(getattr(layer, name)): name for layer in layers for name in sizes}
        self._batch: Batch | None = None
        self._named: dict[str, Named] = {}
        self.num_drawn = 0

    def stage(self, batch: Batch) -> None:
        """The operations that follow are of this batch."""
        self._batch, self.num_drawn = batch, len(batch.logits_indices)
        self._named = {}

    def _the_same(self, name: str) -> Named:
        """Of what is the same wherever in the step it is done; name: a matrix's, or an operation's.

        Computed where it is first asked for: on the host that is when the step is over.
        """
        if not self._named:
            assert self._batch is not None
            self._named = self._count(self._batch)
        return self._named[name]

    def _count(self, batch: Batch) -> dict[str, Named]:
        sizes, itemsize = self._config, self._itemsize
        rows, hidden = len(batch.token_ids), sizes.hidden_size
        counted = {
            "embedding": work.embedding(rows, hidden, itemsize),
            "rms_norm": work.rms_norm(rows, hidden, itemsize),
            "add_rms_norm": work.add_rms_norm(rows, hidden, itemsize),
            "silu_mul": work.silu_mul(rows, sizes.intermediate_size, itemsize),
            "rotary_cache": work.rotary_cache(rows, *self._heads, itemsize),
            "paged_attention": work.paged_attention(
                np.diff(batch.query_start_loc).tolist(),
                batch.seq_lens.tolist(),
                *self._heads,
                self._block_size,
                itemsize,
            ),
            "take_rows": work.embedding(self.num_drawn, hidden, itemsize),
            "copy_blocks": self._copied(batch.block_copies),
            "swap_out": self._copied(batch.swap_outs),
            "swap_in": self._copied(batch.swap_ins),
        }
        named = {name: (name, amount) for name, amount in counted.items()}
        for name, (inputs, outputs, weight_bytes, bias) in self._products.items():
            amount = work.linear(
                rows, inputs, outputs, itemsize, weight_bytes=weight_bytes, bias=bias
            )
            named[name] = (f"linear {name}", amount)
        return named

    def _copied(self, pairs: Int32 | None) -> Work:
        return work.copied_blocks(0 if pairs is None else len(pairs), self.block_bytes)

    def of(self, operation: str) -> Count:
        """Gives name and work for the arguments of one of OPERATIONS."""
        if operation in ("linear", "logits", "sample"):
            counted: Count = getattr(self, f"_of_{operation}")
            return counted

        return lambda *arguments: self._the_same(operation)

    def _of_linear(self, x: Array, weight: Array, bias: Array | None = None) -> Named:
        return self._the_same(self._names[id(weight)])

    def _of_logits(self, hidden: Array, weight: Array) -> Named:
        rows = min(len(hidden), self.num_drawn)
        hidden, vocab = self._config.hidden_size, self._config.vocab_size
        return "logits", work.logits(
            rows, hidden, vocab, self._itemsize, weight_bytes=self._head_bytes
        )

    def _of_sample(self, logits: Array, sampling: SamplingBatch, *, first_row: int = 0) -> Named:
        return "sample", work.greedy_sample(len(sampling.target_ids), self._config.vocab_size)


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
            setattr(self, name, self._timed(getattr(device, name), counts.of(name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def _timed(self, operation: Callable[..., Any], count: Count) -> Callable[..., Any]:
        record, stream = self._recorder.operation, self._stream

        def on_host(*arguments: Any, **keywords: Any) -> Any:
            start = now()
            result = operation(*arguments, **keywords)
            record(count, (arguments, keywords), start, now())
            return result

        if stream is None:
            return on_host

        def on_stream(*arguments: Any, **keywords: Any) -> Any:
            stream.begin(*count(*arguments, **keywords))
            result = operation(*arguments, **keywords)
            stream.end()
            return result

        return on_stream

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

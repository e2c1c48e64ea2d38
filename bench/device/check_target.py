"""What the device check runs on: a GPU, or with --dry-run the emulated device.

Also the arrays that its parts have in common: random ones, and batches by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch
from cuengine.device.cuda.device import CudaDevice
from cuengine.device.cuda.inputs import StagedStep
from cuengine.device.cuda.runtime import DeviceArray, Runtime
from cuengine.device.interface import AttentionShape, StepLimits

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Target:
    """dry: emulated, with small sizes. seed: of all random data."""

    dry: bool
    seed: int

    @property
    def device_name(self) -> str:
        return "emulated" if self.dry else "cuda"

    @cached_property
    def runtime(self) -> Runtime:
        if self.dry:
            from cuengine.device.emulated.host import EmulatedRuntime

            return EmulatedRuntime()
        from cuengine.device.cuda.cupy_runtime import CupyRuntime

        return CupyRuntime()

    def device(self, dtype: str, limits: StepLimits, *, use_graphs: bool = False) -> CudaDevice:
        return CudaDevice(self.runtime, dtype, limits, use_graphs=use_graphs)

    def random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def seconds(self, work: Callable[[], None], *, least: float = 0.02) -> float:
        """Of one call, by events on the stream, from so many calls that they take `least`."""
        start, end = self.runtime.event(timing=True), self.runtime.event(timing=True)

        def run(times: int) -> float:
            start.record()
            for _ in range(times):
                work()
            end.record()
            end.wait()
            return end.elapsed_ms(start) / 1e3

        if self.dry:
            return run(1)
        run(3)
        times = 4
        while (elapsed := run(times)) < least and times < 1 << 12:
            times *= 2
        return elapsed / times


def normal(
    random: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1
) -> Array:
    """Normal numbers of a dtype."""
    return (random.standard_normal(tuple(shape), np.float32) * scale).astype(DTYPES[dtype])


def send(runtime: Runtime, target: DeviceArray, source: Array) -> None:
    """Fill an array on the device that is there already."""
    staged = runtime.pinned(source.shape, source.dtype)
    staged[...] = source
    runtime.copy_in(target, staged)
    runtime.synchronize()


def fill_cache(runtime: Runtime, cache: DeviceArray, content: Array) -> None:
    """All blocks of a KV cache, as if a model had written them."""
    runtime.unguard(cache, _NONE, np.arange(cache.shape[2], dtype=np.int32))
    send(runtime, cache, content)


def random_cache(
    device: CudaDevice,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    shape: AttentionShape,
    random: np.random.Generator,
) -> DeviceArray:
    """A KV cache full of normal numbers: some blocks from the host, the others copies of them."""
    cache = device.allocate_kv_cache(num_layers, num_blocks, block_size, shape)
    filled = min(num_blocks, 256)
    device.runtime.unguard(cache, _NONE, np.arange(filled, dtype=np.int32))
    first = normal(random, cache[0][0][:filled].shape, device.dtype)
    for layer in range(num_layers):
        for part in range(2):
            send(device.runtime, cache[layer][part][:filled], first)
    anywhere = np.zeros((1, 1), np.int32)
    while filled < num_blocks:
        more = np.arange(min(filled, num_blocks - filled), dtype=np.int32)
        pairs = np.stack([more, more + filled], 1)
        batch = make_batch(anywhere, [1], [1], block_size, block_copies=pairs)
        device.copy_blocks(cache, device.stage(batch))
        filled += len(more)
    return cache


def write_new_tokens(
    device: CudaDevice,
    cache: DeviceArray,
    staged: StagedStep,
    shape: AttentionShape,
    qkv: Array,
) -> DeviceArray:
    """Keys and values of a step's own tokens into all layers, turned by nothing; the queries.

    qkv  [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    """
    table = np.zeros((int(staged.lens.max()), shape.head_dim), np.float32)
    table[:, : shape.head_dim // 2] = 1  # cosines; the sines are 0
    there, cos_sin = device.upload(qkv), device.upload(table)
    queries: DeviceArray = None
    for layer in range(cache.shape[0]):
        queries = device.rotary_cache(there, cos_sin, cache[layer], staged, shape)
    device.runtime.synchronize()
    return queries


def make_batch(
    tables: Array, counts: Sequence[int], lengths: Sequence[int], block_size: int, **fields: Any
) -> Batch:
    """counts[i] new tokens of a sequence that then has lengths[i]; logits of each one's last.

    tables  int32 [num_seqs, width]
    """
    positions = np.concatenate(
        [np.arange(length - n, length) for n, length in zip(counts, lengths, strict=True)]
    ).astype(np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    made: dict[str, Any] = {
        "token_ids": np.zeros(len(positions), np.int32),
        "positions": positions,
        "slot_mapping": tables[rows, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        "block_tables": tables,
        "query_start_loc": starts,
        "seq_lens": np.array(lengths, np.int32),
        "logits_indices": starts[1:] - 1,
        "block_copies": np.empty((0, 2), np.int32),
    }
    return Batch(**(made | fields))


def attention_shape(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, float(np.float32(head_dim**-0.5)))


class Deadline:
    """Seconds that a part may still begin something new in."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() > self._end

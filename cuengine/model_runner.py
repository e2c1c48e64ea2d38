"""Runs a batch through the model and samples: the only place where the two meet.

What to run is decided in scheduler.py; the arithmetic is the device's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from cuengine.batch import Batch, Int32, PendingOutput, SamplerOutput, SamplingBatch
from cuengine.device.interface import LOGITS_ROWS, Array, Device, StagedBatch


class Model(Protocol):
    device: Device

    def forward(self, staged: StagedBatch, kv_cache: Array) -> Array: ...

    def logits(self, hidden: Array) -> Array: ...


class ModelRunner:
    """A model with its KV cache, and the host's cache for blocks that are swapped out, if any.

    overlaps  `run` returns before its work is done
    """

    def __init__(self, model: Model, kv_cache: Array, host_cache: Array | None = None) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.host_cache = host_cache
        self.overlaps = model.device.overlaps

    def range(self, name: str) -> AbstractContextManager[None]:
        return self.model.device.range(name)

    def run(self, batch: Batch, sampling: SamplingBatch) -> PendingOutput:
        """Write the batch's keys and values into the cache and sample its rows of logits."""
        device = self.model.device
        with device.range("copy-in"):
            staged = device.stage(batch)
            if batch.swap_outs is not None:
                device.swap_out(self.kv_cache, self.host_cache, staged)
            if len(batch.block_copies):
                device.copy_blocks(self.kv_cache, staged)
            if batch.swap_ins is not None:
                device.swap_in(self.kv_cache, self.host_cache, staged)
        if not len(batch.token_ids):  # only blocks to move
            return _empty_output()
        num_rows = len(batch.logits_indices)
        if num_rows <= LOGITS_ROWS:
            with device.range("forward"):
                logits = device.replay(
                    staged, lambda: self.model.logits(self.model.forward(staged, self.kv_cache))
                )
            with device.range("sample"):
                return device.sample(logits, sampling)
        with device.range("forward"):
            hidden = self.model.forward(staged, self.kv_cache)
        parts = []
        for start in range(0, num_rows, LOGITS_ROWS):
            stop = min(start + LOGITS_ROWS, num_rows)
            with device.range("sample"):
                logits = self.model.logits(hidden[start:stop])
                rows = _rows(sampling, start, stop)
                parts.append(device.sample(logits, rows, first_row=start))
        return _Parts(parts)

    def warm_up(self) -> None:
        """Run a prefill and a decode, so that compiling and first touches cost no request.

        Writes to the first block; nothing must live in the cache yet.
        """
        for start, length in ((0, 3), (3, 1)):
            positions: Int32 = np.arange(start, start + length, dtype=np.int32)
            batch = Batch(
                token_ids=np.zeros(length, np.int32),
                positions=positions,
                slot_mapping=positions.astype(np.int64),
                block_tables=np.zeros((1, 1), np.int32),
                query_start_loc=np.array([0, length], np.int32),
                seq_lens=np.array([start + length], np.int32),
                logits_indices=np.array([length - 1], np.int32),
                block_copies=np.empty((0, 2), np.int32),
            )
            self.run(batch, SamplingBatch.greedy(1)).fetch()


@dataclass(slots=True)
class _Parts:
    """The pending output of a step whose rows were sampled in several calls."""

    parts: list[PendingOutput]

    def fetch(self) -> SamplerOutput:
        return _concatenate([part.fetch() for part in self.parts])


_OFFSETS = ("prompt_offsets", "output_offsets")
_FLAT = ("prompt_ids", "output_ids", "bias_rows", "bias_ids", "bias_values")


def _rows(sampling: SamplingBatch, start: int, stop: int) -> SamplingBatch:
    """Rows start:stop of a sampling batch."""
    changes: dict[str, Any] = {}
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if value is not None and field.name not in _OFFSETS + _FLAT:
            changes[field.name] = value[start:stop]
    for ids, offsets in (("prompt_ids", "prompt_offsets"), ("output_ids", "output_offsets")):
        bounds = getattr(sampling, offsets)
        if bounds is not None:
            changes[offsets] = bounds[start : stop + 1] - bounds[start]
            changes[ids] = getattr(sampling, ids)[bounds[start] : bounds[stop]]
    if sampling.bias_rows is not None:
        inside = (sampling.bias_rows >= start) & (sampling.bias_rows < stop)
        changes["bias_rows"] = sampling.bias_rows[inside] - np.int32(start)
        for name in ("bias_ids", "bias_values"):
            changes[name] = getattr(sampling, name)[inside]
    return replace(sampling, **changes)


def _empty_output() -> SamplerOutput:
    ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
    return SamplerOutput(ints, floats, ints, ints.reshape(0, 0), floats.reshape(0, 0))


def _concatenate(parts: list[SamplerOutput]) -> SamplerOutput:
    """One output of several; those with fewer top tokens are padded with -1 and NaN."""
    most = max(part.top_ids.shape[1] for part in parts)

    def pad(array: Any, value: float) -> Any:
        missing = most - array.shape[1]
        return np.pad(array, ((0, 0), (0, missing)), constant_values=value)

    return SamplerOutput(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([pad(part.top_ids, -1) for part in parts]),
        top_logprobs=np.concatenate([pad(part.top_logprobs, np.nan) for part in parts]),
    )

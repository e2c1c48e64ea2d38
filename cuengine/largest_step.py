"""The largest step that an engine can schedule, run once before the KV cache is sized.

A device allocates what steps need when they first need it. Once this has run, what is free stays
free, and the KV cache can have it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cuengine.batch import Batch, SamplingBatch
from cuengine.device.interface import LOGITS_ROWS, AttentionShape, StepLimits
from cuengine.model_runner import Model, ModelRunner


def run_largest_step(
    model: Model, num_layers: int, shape: AttentionShape, limits: StepLimits
) -> None:
    """All tokens that a step may have, and as many rows of logits, with penalties, as it draws.

    Makes a KV cache for that and lets it go. Raises DeviceMemoryError where that does not fit.
    """
    size, num_tokens = limits.block_size, limits.max_num_batched_tokens
    starts = np.arange(0, num_tokens, limits.max_model_len)
    lengths = np.minimum(num_tokens - starts, limits.max_model_len).astype(np.int32)
    width = -(-limits.max_model_len // size)
    tables = np.arange(len(starts) * width, dtype=np.int32).reshape(-1, width)
    positions = (np.arange(num_tokens) % limits.max_model_len).astype(np.int32)
    blocks = tables[np.arange(num_tokens) // limits.max_model_len, positions // size]
    num_blocks = int(blocks.max()) + 1
    num_rows = min(limits.max_drawn, LOGITS_ROWS)
    batch = Batch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * size + positions % size,
        block_tables=tables[:, : -(-int(lengths.max()) // size)],
        query_start_loc=np.append(starts, num_tokens).astype(np.int32),
        seq_lens=lengths,
        logits_indices=np.full(num_rows, num_tokens - 1, np.int32),
        block_copies=np.empty((0, 2), np.int32),
    )
    kv_cache = model.device.allocate_kv_cache(num_layers, num_blocks, size, shape)
    ModelRunner(model, kv_cache).run(batch, _sampling(num_rows)).fetch()


def _sampling(num_rows: int) -> SamplingBatch:
    def floats(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.full(num_rows, value, np.float32)

    nothing, offsets = np.zeros(0, np.int32), np.zeros(num_rows + 1, np.int32)
    return replace(
        SamplingBatch.greedy(num_rows),
        temperature=floats(1),
        num_logprobs=np.zeros(num_rows, np.int32),
        repetition_penalty=floats(1.1),
        presence_penalty=floats(0),
        frequency_penalty=floats(0),
        prompt_ids=nothing,
        prompt_offsets=offsets,
        output_ids=nothing,
        output_offsets=offsets,
    )

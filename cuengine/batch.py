"""One step's work as flat arrays: what a model and a device are given, and what they give back.

Nothing here decides anything: the scheduler says which tokens run, batch_builder.py fills these in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]


@dataclass(slots=True)
class Batch:
    """Tokens to run through the model, flattened over sequences.

    token_ids           int32 [num_tokens]            0 where token_sources names another place
    positions           int32 [num_tokens]            position of each token in its sequence
    slot_mapping        int64 [num_tokens]            block * block_size + offset for K and V
    block_tables        int32 [num_seqs, max_blocks]  padded with -1
    query_start_loc     int32 [num_seqs + 1]          sequence i has tokens [i] to [i + 1]
    seq_lens            int32 [num_seqs]              tokens in the cache after this step
    logits_indices      int32 [num_rows]              tokens whose logits are wanted, with repeats
    block_copies        int32 [num_copies, 2]         (from, to), in all layers, before the forward
        pass; no block is in both columns, none twice in the second
    token_sources       int32 [num_tokens] or None    row of the last step's output whose token this
        is, which the host does not know yet; -1: it is in token_ids
    swap_outs           int32 [num_blocks, 2] or None (device, host) blocks, before block_copies
    swap_ins            int32 [num_blocks, 2] or None (host, device) blocks, after block_copies
    """

    token_ids: Int32
    positions: Int32
    slot_mapping: Int64
    block_tables: Int32
    query_start_loc: Int32
    seq_lens: Int32
    logits_indices: Int32
    block_copies: Int32
    token_sources: Int32 | None = None
    swap_outs: Int32 | None = None
    swap_ins: Int32 | None = None


@dataclass(slots=True)
class SamplingBatch:
    """How to turn each row of logits into a token; rows are those of `Batch.logits_indices`.

    A row either draws a token or, where `target_ids` names one, only reports that token's
    log-probability (prompt log-probabilities). Arrays that no row needs are None, so that a plain
    greedy batch costs an argmax and no more.

    target_ids          int32 [num_rows]              token to report, or -1: draw one
    temperature         float32 [num_rows]            0: greedy
    top_k               int32 [num_rows]              0: off
    top_p               float32 [num_rows]            1: off
    min_p               float32 [num_rows]            0: off
    seeds               uint64 [num_rows]             Philox key; the next two count
    sample_indices      uint32 [num_rows]             sample of its request
    positions           uint32 [num_rows]             position of the token drawn
    num_logprobs        int32 [num_rows]              most likely tokens to report; -1: none
    repetition_penalty  float32 [num_rows] or None    1: off; over prompt and output
    presence_penalty    float32 [num_rows] or None    0: off; over output
    frequency_penalty   float32 [num_rows] or None    0: off; over output
    prompt_ids          int32 [..] or None            prompts of the rows with a penalty
    prompt_offsets      int32 [num_rows + 1] or None  where each row's begins (and the end)
    output_ids          int32 [..] or None            the same for their outputs so far
    output_offsets      int32 [num_rows + 1] or None
    bias_rows, bias_ids int32 [num_biases] or None    which logits to add to
    bias_values         float32 [num_biases] or None  what to add; -inf forbids the token
    allowed_mask        uint32 [num_rows, ceil(vocab / 32)] or None
        bit i % 32 of word i // 32 set: token i may be drawn
    """

    target_ids: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: UInt64
    sample_indices: UInt32
    positions: UInt32
    num_logprobs: Int32
    repetition_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    prompt_ids: Int32 | None = None
    prompt_offsets: Int32 | None = None
    output_ids: Int32 | None = None
    output_offsets: Int32 | None = None
    bias_rows: Int32 | None = None
    bias_ids: Int32 | None = None
    bias_values: Float32 | None = None
    allowed_mask: UInt32 | None = None

    @classmethod
    def greedy(cls, num_rows: int) -> SamplingBatch:
        """The most likely token of every row, with nothing reported."""
        return cls(
            target_ids=np.full(num_rows, -1, np.int32),
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.uint64),
            sample_indices=np.zeros(num_rows, np.uint32),
            positions=np.zeros(num_rows, np.uint32),
            num_logprobs=np.full(num_rows, -1, np.int32),
        )


class PendingOutput(Protocol):
    """A SamplerOutput that may still be in the making; its tokens can be used on the device."""

    def fetch(self) -> SamplerOutput:
        """Wait for it. Called once, before the step after the next one is given to the device.

        Raises ModelError for logits that are NaN or +inf.
        """
        ...


@dataclass(slots=True)
class SamplerOutput:
    """What came of each row of a SamplingBatch. On a device that returns results, its own pending.

    Log-probabilities are natural logs of the softmax of the raw logits, before penalties, bias,
    temperature and truncation, as vLLM reports them by default.

    token_ids           int32 [num_rows]              token drawn, or the target
    logprobs            float32 [num_rows]            NaN where num_logprobs is -1
    ranks               int32 [num_rows]              1: most likely; 0 where num_logprobs is -1
    top_ids             int32 [num_rows, k]           best first; k: the largest num_logprobs
    top_logprobs        float32 [num_rows, k]         their log-probabilities
    """

    token_ids: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32

    def fetch(self) -> SamplerOutput:
        return self

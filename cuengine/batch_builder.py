"""A scheduled step as arrays: what the model runs on and how its logits become tokens.

Decides nothing. Rows of logits are laid out chunk by chunk: first the rows that report prompt
log-probabilities, then one row per token to draw; engine.py reads the results in the same order.
A row that is drawn after guessed tokens takes them for output: it counts as it will if they hold.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Batch, Int32, SamplingBatch
from cuengine.grammar import MaskRow, allowed_mask
from cuengine.scheduler import Chunk, Step
from cuengine.sequence import UNKNOWN_TOKEN, Sequence


def build_batch(step: Step, block_size: int) -> Batch:
    """The step's tokens, where their keys and values go and whose logits are wanted."""
    chunks = step.chunks
    num_seqs = len(chunks)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    seq_lens = np.array([chunk.end for chunk in chunks], np.int32)
    lengths = seq_lens - starts
    query_start_loc = np.zeros(num_seqs + 1, np.int32)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    width = -(-int(seq_lens.max(initial=0)) // block_size)
    block_tables = np.full((num_seqs, width), -1, np.int32)
    token_ids = np.empty(num_tokens, np.int32)
    at = 0
    for i, chunk in enumerate(chunks):
        sequence = chunk.sequence
        blocks = sequence.table.blocks[: -(-chunk.end // block_size)]
        block_tables[i, : len(blocks)] = blocks
        if chunk.end - chunk.start == 1 and not chunk.draft_ids:
            token_ids[at] = sequence.token_ids[chunk.start]
        else:
            tokens = sequence.token_ids[chunk.start : chunk.end]
            if chunk.draft_ids:
                known = len(sequence.token_ids)
                tokens += chunk.draft_ids[max(0, chunk.start - known) : chunk.end - known]
            token_ids[at : at + chunk.end - chunk.start] = tokens
        at += chunk.end - chunk.start

    rows = np.repeat(np.arange(num_seqs), lengths)
    positions = np.arange(num_tokens, dtype=np.int32) - (query_start_loc[:-1] - starts)[rows]
    unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
    token_sources = None
    if len(unknown):
        token_sources = np.full(num_tokens, -1, np.int32)
        token_sources[unknown] = [chunks[i].sequence.last_row for i in rows[unknown]]
        token_ids[unknown] = 0
    blocks_of = block_tables[rows, positions // block_size].astype(np.int64)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks_of * block_size + positions % block_size,
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        logits_indices=_logits_indices(chunks, query_start_loc),
        block_copies=np.array(step.block_copies, np.int32).reshape(-1, 2),
        token_sources=token_sources,
        swap_outs=np.array(step.swap_outs, np.int32) if step.swap_outs else None,
        swap_ins=np.array(step.swap_ins, np.int32) if step.swap_ins else None,
    )


def _logits_indices(chunks: list[Chunk], query_start_loc: Int32) -> Int32:
    if all(chunk.num_rows == chunk.num_samples == 1 for chunk in chunks):
        return query_start_loc[1:] - 1
    indices: list[int] = []
    for first, chunk in zip(query_start_loc.tolist(), chunks, strict=False):
        indices.extend(range(first, first + chunk.num_prompt_rows))
        last = first + chunk.end - chunk.start - 1
        indices.extend([last - chunk.num_drafts] * chunk.num_samples)
        indices.extend(range(last - chunk.num_drafts + 1, last + 1))
    return np.array(indices, np.int32)


@dataclass(slots=True)
class _Row:
    """A row of logits.

    drawn  a token is drawn from it; else it reports one of the prompt
    index  of the sample it is for
    ahead  guessed tokens, after the sequence's own, that come before the one drawn
    """

    sequence: Sequence
    drawn: bool
    index: int
    ahead: array[int]

    @property
    def position(self) -> int:
        return len(self.sequence.token_ids) + len(self.ahead)

    @property
    def must_go_on(self) -> bool:
        """It may not end here: min_tokens."""
        return self.position - self.sequence.prompt_len < self.sequence.request.params.min_tokens


_NONE_AHEAD: array[int] = array("i")


def _rows(chunk: Chunk) -> list[_Row]:
    sequence = chunk.sequence
    index = sequence.index
    rows = [_Row(sequence, False, index, _NONE_AHEAD) for _ in range(chunk.num_prompt_rows)]
    if not chunk.draft_ids:
        return rows + [
            _Row(sequence, True, index + sample, _NONE_AHEAD) for sample in range(chunk.num_samples)
        ]
    first = chunk.known_end - len(sequence.token_ids)
    return rows + [
        _Row(sequence, True, index, chunk.draft_ids[:ahead])
        for ahead in range(first, first + chunk.num_drafts + 1)
    ]


def build_sampling(step: Step) -> SamplingBatch:
    """How each row of the step's logits becomes a token."""
    rows = [row for chunk in step.chunks for row in _rows(chunk)]
    params = [row.sequence.request.params for row in rows]
    batch = SamplingBatch(
        target_ids=np.full(len(rows), -1, np.int32),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(0, p.top_k) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seeds=np.array([row.sequence.request.seed for row in rows], np.uint64),
        sample_indices=np.array([row.index for row in rows], np.uint32),
        positions=np.array([row.position for row in rows], np.uint32),
        num_logprobs=np.array([_num_logprobs(row.sequence) for row in rows], np.int32),
    )
    _report_prompt(batch, step.chunks)
    _add_penalties(batch, rows)
    _add_biases(batch, rows)
    batch.allowed_mask = allowed_mask([_grammar_row(row) for row in rows])
    return batch


def _num_logprobs(sequence: Sequence) -> int:
    params, search = sequence.request.params, sequence.request.beam_search
    if search is not None:
        return search.num_candidates
    if params.logprobs is not None:
        return params.logprobs
    # best_of ranks by the log-probabilities of the drawn tokens.
    return 0 if params.num_samples > params.n else -1


def _report_prompt(batch: SamplingBatch, chunks: list[Chunk]) -> None:
    """Turn the rows of prompt tokens into reports of the token that follows each."""
    row = 0
    for chunk in chunks:
        count = chunk.num_prompt_rows
        if count:
            first = chunk.start + 1
            batch.target_ids[row : row + count] = chunk.sequence.token_ids[first : first + count]
            batch.num_logprobs[row : row + count] = (
                chunk.sequence.request.params.prompt_logprobs or 0
            )
        row += chunk.num_rows


def _add_penalties(batch: SamplingBatch, rows: list[_Row]) -> None:
    """Penalties and the tokens they are over, where a row has any."""
    wanted = [row.drawn and row.sequence.request.penalized for row in rows]
    if not any(wanted):
        return
    num_rows = len(rows)
    repetition = np.ones(num_rows, np.float32)
    presence = np.zeros(num_rows, np.float32)
    frequency = np.zeros(num_rows, np.float32)
    none = np.empty(0, np.int32)
    prompts: list[Int32] = [none] * num_rows
    outputs: list[Int32] = [none] * num_rows
    for i, row in enumerate(rows):
        if not wanted[i]:
            continue
        sequence, params = row.sequence, row.sequence.request.params
        repetition[i] = params.repetition_penalty
        presence[i] = params.presence_penalty
        frequency[i] = params.frequency_penalty
        tokens = np.array(sequence.token_ids + row.ahead, np.int32)
        prompts[i] = tokens[: sequence.prompt_len]
        outputs[i] = tokens[sequence.prompt_len :]
    batch.repetition_penalty = repetition
    batch.presence_penalty = presence
    batch.frequency_penalty = frequency
    batch.prompt_ids, batch.prompt_offsets = _ragged(prompts)
    batch.output_ids, batch.output_offsets = _ragged(outputs)


def _ragged(parts: list[Int32]) -> tuple[Int32, Int32]:
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts), offsets


def _add_biases(batch: SamplingBatch, rows: list[_Row]) -> None:
    """logit_bias, and no end of the sample before min_tokens."""
    entries: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        if not row.drawn:
            continue
        request = row.sequence.request
        for token, bias in request.params.logit_bias.items():
            entries.append((i, token, bias))
        # Under a grammar the mask forbids them, where it allows something else.
        if row.sequence.matcher is None and row.must_go_on:
            entries.extend((i, token, -np.inf) for token in request.ending_ids)
    if entries:
        table: NDArray[np.float64] = np.array(entries, np.float64)
        batch.bias_rows = table[:, 0].astype(np.int32)
        batch.bias_ids = table[:, 1].astype(np.int32)
        batch.bias_values = table[:, 2].astype(np.float32)


def _grammar_row(row: _Row) -> MaskRow | None:
    """What is drawn under a grammar, and with what it should not end."""
    matcher = row.sequence.matcher
    if not row.drawn or matcher is None:
        return None
    request = row.sequence.request
    forbidden = request.ending_ids if row.must_go_on else frozenset[int]()
    if request.params.ignore_eos:
        forbidden |= matcher.eos_ids
    return MaskRow(matcher, forbidden, row.ahead)

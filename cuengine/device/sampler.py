"""From logits to tokens, on the host: NumPy alone.

The order is vLLM's: log-probabilities from the raw logits; allowed tokens; bias and forbidden
tokens; penalties; then greedy, or temperature, min-p, top-k, top-p and the draw. A draw is the
argmax of logits plus Gumbel noise, which samples from their softmax (Gumbel-max), with the noise of
philox.py. Every row stands alone: what else is in the batch changes nothing.

Ties: greedy takes the lowest id. top-k keeps all tokens as likely as the k-th, as vLLM. top-p takes
tokens from the most likely on, lowest id first among equals, up to and including the one that
brings their sum to p, so at least one. A row in which every token is forbidden gives token 0.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cuengine.batch import Float32, Int32, Int64, SamplerOutput, SamplingBatch
from cuengine.device.philox import MAX_NOISE, MIN_NOISE, gumbel, token_words
from cuengine.errors import ModelError

_GROUP = 64
"""Values whose maximum stands for them while looking for the k largest."""


class DrawRows(Protocol):
    """Draws a token for each of `rows` (indices into logits), into `token_ids` [num_rows]."""

    def __call__(
        self, logits: Float32, rows: Int64, sampling: SamplingBatch, token_ids: Int32
    ) -> None: ...


def draw_rows(logits: Float32, rows: Int64, sampling: SamplingBatch, token_ids: Int32) -> None:
    """`DrawRows` in NumPy."""
    for row, least in zip(rows, least_scaled(sampling.min_p[rows]), strict=True):
        token_ids[row] = draw(
            logits[row],
            temperature=sampling.temperature[row],
            top_k=int(sampling.top_k[row]),
            top_p=float(sampling.top_p[row]),
            least=least,
            seed=int(sampling.seeds[row]),
            sample_index=int(sampling.sample_indices[row]),
            position=int(sampling.positions[row]),
        )


def sample(
    logits: Float32, sampling: SamplingBatch, draw_rows: DrawRows = draw_rows
) -> SamplerOutput:
    """Tokens and log-probabilities for logits [num_rows, vocab], which are overwritten.

    Raises ModelError for logits that are NaN or +inf.
    """
    best = logits.argmax(axis=1)
    check_finite(logits[np.arange(len(logits)), best])
    targets = sampling.target_ids
    output = empty_output(sampling)
    reported = np.flatnonzero(sampling.num_logprobs >= 0)
    raw = logits[reported]
    if has_constraints(sampling):
        apply_constraints(logits, sampling)
        best = logits.argmax(axis=1)
    output.token_ids[:] = np.where(targets < 0, best, targets)
    drawn = np.flatnonzero((targets < 0) & (sampling.temperature != 0))
    if len(drawn):
        draw_rows(logits, drawn, sampling, output.token_ids)
    for row, values in zip(reported, raw, strict=True):
        report(output, int(row), values, int(sampling.num_logprobs[row]))
    return output


def check_finite(maxima: Float32) -> None:
    """Raise ModelError where a row's largest logit is NaN or +inf."""
    bad = np.flatnonzero(np.isnan(maxima) | (maxima == np.inf))
    if len(bad):
        raise ModelError(
            f"the model gave logits that are not numbers (NaN or infinite) in {len(bad)} of "
            f"{len(maxima)} rows, the first being row {bad[0]}: its weights are broken, or "
            "overflow in this dtype"
        )


def empty_output(sampling: SamplingBatch) -> SamplerOutput:
    """An output with nothing to report; ids not reported are -1, log-probabilities NaN."""
    num_rows = len(sampling.target_ids)
    width = max(0, int(sampling.num_logprobs.max(initial=0)))
    return SamplerOutput(
        token_ids=np.empty(num_rows, np.int32),
        logprobs=np.full(num_rows, np.nan, np.float32),
        ranks=np.zeros(num_rows, np.int32),
        top_ids=np.full((num_rows, width), -1, np.int32),
        top_logprobs=np.full((num_rows, width), np.nan, np.float32),
    )


def has_constraints(sampling: SamplingBatch) -> bool:
    """Whether any row's logits are changed before a token is taken."""
    parts = (
        sampling.allowed_mask,
        sampling.bias_rows,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    return any(part is not None for part in parts)


def apply_constraints(logits: Float32, sampling: SamplingBatch) -> None:
    """Allowed tokens, bias and penalties, in place."""
    vocab = logits.shape[1]
    if sampling.allowed_mask is not None:
        bits = np.unpackbits(
            sampling.allowed_mask.astype("<u4", copy=False).view(np.uint8),
            axis=1,
            bitorder="little",
        )
        logits[bits[:, :vocab] == 0] = -np.inf
    if sampling.bias_rows is not None:
        rows, ids, values = sampling.bias_rows, sampling.bias_ids, sampling.bias_values
        assert ids is not None
        assert values is not None
        np.add.at(logits, (rows, ids), values)
    for row in range(len(logits)):
        repetition = _entry(sampling.repetition_penalty, row, 1)
        presence = _entry(sampling.presence_penalty, row, 0)
        frequency = _entry(sampling.frequency_penalty, row, 0)
        if repetition == 1 and presence == 0 and frequency == 0:
            continue
        prompt = _slice(sampling.prompt_ids, sampling.prompt_offsets, row)
        output = _slice(sampling.output_ids, sampling.output_offsets, row)
        if repetition != 1:
            seen = np.unique(np.concatenate([prompt, output]))
            old = logits[row, seen]
            logits[row, seen] = np.where(old > 0, old / repetition, old * repetition)
        unique, counts = np.unique(output, return_counts=True)
        logits[row, unique] -= frequency * counts.astype(np.float32) + presence


def _entry(values: Float32 | None, row: int, neutral: float) -> np.float32:
    return np.float32(neutral) if values is None else values[row]


def _slice(ids: Int32 | None, offsets: Int32 | None, row: int) -> Int32:
    if ids is None or offsets is None:
        return np.empty(0, np.int32)
    return ids[offsets[row] : offsets[row + 1]]


def draw(
    logits: Float32,
    *,
    temperature: np.float32,
    top_k: int,
    top_p: float,
    least: np.float32,
    seed: int,
    sample_index: int,
    position: int,
) -> int:
    """One token of a row of logits [vocab], which is left as it is."""
    highest = logits.max()
    if highest == -np.inf:
        return 0
    # The largest is taken off first, so that no temperature, however low, can overflow.
    scaled = (logits - highest) / temperature
    if 0 < top_k < len(scaled):
        least = max(least, kth_largest(scaled, top_k))
    ids = np.flatnonzero(scaled >= least)
    if top_p < 1:
        ids = nucleus(ids, scaled[ids], top_p)
    else:
        # No noise could lift the others above the most likely one.
        ids = ids[scaled[ids] > MIN_NOISE - MAX_NOISE]
    scores = scaled[ids] + gumbel(token_words(ids, seed, sample_index, position))
    return int(ids[scores.argmax()])


def least_scaled(min_p: Float32) -> Float32:
    """The scaled logits (0 is the most likely token's) from which on min-p keeps tokens."""
    with np.errstate(divide="ignore"):
        return np.log(min_p)


def kth_largest(values: Float32, k: int) -> np.float32:
    """The k-th largest of values, 1 <= k <= len(values)."""
    whole = len(values) // _GROUP * _GROUP
    groups = whole // _GROUP
    if k <= groups:
        # At least k values reach the k-th largest maximum, so only those can be it: few.
        maxima = values[:whole].reshape(groups, _GROUP).max(axis=1)
        values = values[values >= np.partition(maxima, groups - k)[groups - k]]
    result: np.float32 = np.partition(values, len(values) - k)[len(values) - k]
    return result


def nucleus(ids: NDArray[np.int64], scaled: Float32, top_p: float) -> NDArray[np.int64]:
    """Those of ids, in order, that top-p keeps; their scaled logits are given."""
    weights = np.exp(scaled.astype(np.float64))
    total = weights.sum()
    # Tokens below this bound weigh less than 1 - p all together, so none of them is kept: a sort of
    # the few above it does for a sort of all.
    bound = (1 - top_p) * total / len(ids) * (1 - 1e-9)
    above = np.flatnonzero(weights >= bound)
    order = above[np.argsort(-scaled[above], kind="stable")]
    ahead = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
    count = max(1, int(np.searchsorted(ahead, top_p * total, side="left")))
    return np.sort(ids[order[:count]])


def report(output: SamplerOutput, row: int, raw: Float32, count: int) -> None:
    """Fill in one row's log-probabilities, from its raw logits and the token chosen."""
    highest = float(raw.max())
    normalizer = highest + math.log(np.exp(raw - raw.max(), dtype=np.float32).sum(dtype=np.float64))
    chosen = raw[output.token_ids[row]]
    output.logprobs[row] = float(chosen) - normalizer
    output.ranks[row] = 1 + np.count_nonzero(raw > chosen)
    count = min(count, len(raw))
    if count:
        ids = np.flatnonzero(raw >= kth_largest(raw, count))
        ids = ids[np.argsort(-raw[ids], kind="stable")][:count]
        output.top_ids[row, :count] = ids
        output.top_logprobs[row, :count] = raw[ids].astype(np.float64) - normalizer

"""What comes of a request. The engine gives tokens, step by step; its caller gets them with text:
deltas while the request runs, a RequestOutput in the end.

Names follow vLLM's outputs. Text and log-probabilities are attached by output_processor.py. The
engine's outputs go from process to process, many a step: as arrays, without the fields' names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
"""abort: its caller did not want it any more. error: it could not be finished, as the sample's
grammar could be followed no further; AsyncEngine raises RequestFailedError instead."""


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token at one position.

    rank           1 for the most likely token
    decoded_token  the token's text on its own, or None where there is no tokenizer
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen token first, then the most likely ones."""


class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """One new token of one sample; logprobs where asked for (or needed to rank `best_of`).

    stop_reason  the token id that ended it, where it is a stop token; of an error what went wrong
    complete     the sample ends with it, and it belongs to the text: its grammar allows no more
    score        of a text that beam search found, with its last token
    """

    index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    complete: bool = False
    score: float | None = None


class EngineOutput(msgspec.Struct, array_like=True, gc=False):
    """One step's news of a request; prompt_logprobs with the first token only.

    What beam search found comes all at once, in the end.
    """

    request_id: str
    tokens: list[TokenOutput] = msgspec.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class SequenceDelta:
    """What one sample of a request gained since the last delta.

    text           safe to show: no half characters, nothing that may still become a stop string
    token_ids      new tokens; `text` may lag behind them
    logprobs       one entry per new token, or None where they were not asked for
    finish_reason  set on the last delta only
    stop_reason    the stop string or stop token id that ended it; None for EOS or length; of an
                   error what went wrong
    score          of a text that beam search found, on the last delta only
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestDelta:
    """One step's news of a request, for all its samples that have any.

    prompt_logprobs is set once, on the first delta, where asked for: one entry per prompt token,
    None for the first. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    sequences: list[SequenceDelta]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One finished sample; score is there where beam search found it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request: `n` samples, best first where `best_of` ranked them, else by index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0


@dataclass(slots=True)
class BeamSearchOutput:
    """The texts that a beam search found, best score first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[CompletionOutput]

"""Runs the prompts of one HTTP request on the engine and brings their deltas together.

What the deltas become is in chat_answer.py, completions.py and responses.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cuengine.api.access_log import progress
from cuengine.api.errors import ApiError
from cuengine.api.metrics import RequestTimer
from cuengine.api.protocol import (
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    SamplingFields,
    Usage,
)
from cuengine.api.state import ServerState
from cuengine.counted import counted
from cuengine.outputs import FinishReason, RequestDelta, SequenceDelta, TokenLogprobs
from cuengine.sampling_params import RequestParams, SamplingParams
from cuengine.structured_outputs import StructuredOutputsParams

T = TypeVar("T")

Deltas = AsyncGenerator[tuple[int, RequestDelta], None]
"""The news of all prompts of a request: (index of the prompt, delta)."""

# What JSON has instead of minus infinity, as in vLLM.
LOGPROB_FLOOR = -9999.0


def sampling_params(
    request: SamplingFields,
    state: ServerState,
    *,
    n: int | None = None,
    max_tokens: int | None,
    best_of: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    structured_outputs: StructuredOutputsParams | None,
) -> SamplingParams:
    """The request's parameters; what it leaves open is as generation_config.json recommends.

    Raises RequestError for a value out of range.
    """
    defaults = state.engine.generation_defaults
    return SamplingParams(
        n=_given(n, 1),
        best_of=best_of,
        temperature=_given(request.temperature, _given(defaults.temperature, 1.0)),
        top_p=_given(request.top_p, _given(defaults.top_p, 1.0)),
        top_k=_given(request.top_k, _given(defaults.top_k, 0)),
        min_p=_given(request.min_p, 0.0),
        seed=request.seed,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=_given(request.ignore_eos, False),
        max_tokens=max_tokens,
        min_tokens=_given(request.min_tokens, 0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(
            request.repetition_penalty, _given(defaults.repetition_penalty, 1.0)
        ),
        logit_bias=request.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=_given(request.skip_special_tokens, True),
        include_stop_str_in_output=_given(request.include_stop_str_in_output, False),
        structured_outputs=structured_outputs,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


async def run_prompts(
    state: ServerState,
    prompts: Sequence[list[int]],
    params: RequestParams,
    *,
    request_id: str,
    priority: int | None,
    cache_salt: str | None,
) -> Deltas:
    """Submit all prompts at once and yield their deltas as they come.

    Closing this generator, or cancelling the task that waits for it, closes the engine's, which
    aborts what still runs. Raises ApiError 429 where too many prompts wait already, and 504 for one
    that takes too long.
    """
    state.limits.check_queue()
    if len(prompts) == 1:
        run = _run_one(state, prompts[0], params, request_id, priority or 0, cache_salt)
        async with aclosing(run) as deltas:
            async for delta in deltas:
                yield 0, delta
        return

    # Bounded: a reader that is slow holds up its own prompts, not the server's memory.
    news: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue(len(prompts))

    async def pump(index: int, prompt: list[int]) -> None:
        run = _run_one(
            state, prompt, replace(params), f"{request_id}-{index}", priority or 0, cache_salt
        )
        try:
            async with aclosing(run) as deltas:
                async for delta in deltas:
                    await news.put((index, delta))
            await news.put((index, None))
        except Exception as error:
            await news.put((index, error))

    tasks = [asyncio.create_task(pump(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        running = len(tasks)
        while running:
            index, item = await news.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_one(
    state: ServerState,
    prompt: list[int],
    params: RequestParams,
    request_id: str,
    priority: int,
    cache_salt: str | None,
) -> AsyncGenerator[RequestDelta, None]:
    timer = RequestTimer(state.metrics)
    limit = state.settings.request_timeout
    deadline = None if limit is None else asyncio.get_running_loop().time() + limit
    run = state.engine.generate(
        prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt
    )
    try:
        with state.limits.one_prompt() as waiting:
            async with aclosing(run) as deltas:
                while (delta := await _next_delta(deltas, deadline)) is not None:
                    waiting.over()
                    timer.observe(delta)
                    yield delta
    except TimeoutError:
        raise ApiError(
            504,
            "The answer took longer than this server's limit of "
            f"{counted(f'{limit:g}', 'second')}.",
            code="request_timeout",
        ) from None
    finally:
        timer.close()
        progress.get().tokens += timer.num_tokens
        if state.tracing is not None:
            state.tracing.record(request_id, len(prompt), params, timer)


async def _next_delta(
    deltas: AsyncGenerator[RequestDelta, None], deadline: float | None
) -> RequestDelta | None:
    """None at the end. Raises TimeoutError once the event loop's clock shows `deadline`."""
    if deadline is None:
        return await anext(deltas, None)
    async with asyncio.timeout_at(deadline):
        return await anext(deltas, None)


@dataclass(slots=True)
class Sample:
    """One whole sample, put together from its deltas."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: SequenceDelta) -> None:
        self.pieces.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class PromptResult:
    """All samples of one prompt."""

    samples: list[Sample]
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class UsageCounter:
    """Tokens of one HTTP request, over all its prompts and samples."""

    __slots__ = ("_cached", "_completion", "_prompts")

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion = 0

    def add(self, prompt_index: int, delta: RequestDelta) -> None:
        if prompt_index not in self._prompts:
            self._prompts[prompt_index] = len(delta.prompt_token_ids)
            self._cached[prompt_index] = delta.num_cached_tokens
        for sequence in delta.sequences:
            self._completion += len(sequence.token_ids)

    def usage(self) -> Usage:
        prompt = sum(self._prompts.values())
        cached = PromptTokensDetails(sum(self._cached.values()))
        return Usage(prompt, self._completion, prompt + self._completion, cached)


async def collect(
    deltas: Deltas, num_prompts: int, num_samples: int
) -> tuple[list[PromptResult], UsageCounter]:
    """Wait for everything. (The engine ranks `best_of`: of its samples only `n` arrive here.)"""
    results = [PromptResult([Sample() for _ in range(num_samples)]) for _ in range(num_prompts)]
    usage = UsageCounter()
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            usage.add(prompt_index, delta)
            result = results[prompt_index]
            result.prompt_token_ids = delta.prompt_token_ids
            if delta.prompt_logprobs is not None:
                result.prompt_logprobs = delta.prompt_logprobs
            for sequence in delta.sequences:
                result.samples[sequence.index].add(sequence)
    return results, usage


def prompt_logprobs_shape(logprobs: list[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's shape: per prompt token a map from token id to its figures, null for the first."""
    return [
        None
        if at is None
        else {
            token: PromptLogprob(floored(entry.logprob), entry.rank, entry.decoded_token)
            for token, entry in at.items()
        }
        for at in logprobs
    ]


def floored(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)


def top_entries(at: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens at one position, (token id, log-probability), best first.

    The chosen token is among them only if it is one of them.
    """
    ranked = sorted(at.items(), key=lambda item: item[1].logprob, reverse=True)
    return [(token, floored(entry.logprob)) for token, entry in ranked[:count]]

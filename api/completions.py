"""POST /v1/completions: text or token ids in, their continuation out, whole or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from cuengine.api.answers import json_answer
from cuengine.api.beams import beam_params, beams_sent_as, check_beams
from cuengine.api.body import invalid_field
from cuengine.api.checks import check_completion, check_generation, named_as_sent
from cuengine.api.echo import Echo
from cuengine.api.errors import ApiError
from cuengine.api.generation import (
    PromptResult,
    Sample,
    UsageCounter,
    collect,
    floored,
    prompt_logprobs_shape,
    run_prompts,
    sampling_params,
    top_entries,
)
from cuengine.api.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from cuengine.api.state import ServerState
from cuengine.api.streaming import DONE, end_of_stream, event, stream_answer
from cuengine.api.structured import from_response_format, from_structured_outputs
from cuengine.api.tokens import (
    TokenNames,
    check_ids,
    check_length,
    check_num_tokens,
    encode,
    need_tokenizer,
)
from cuengine.counted import counted
from cuengine.outputs import RequestDelta, SequenceDelta, TokenLogprobs
from cuengine.sampling_params import RequestParams
from cuengine.structured_outputs import StructuredOutputsParams

DEFAULT_MAX_TOKENS = 16
# Prompts times samples of one request. Each is a sequence in the engine at once.
MAX_SEQUENCES = 4096


@dataclass(slots=True)
class Prompt:
    """text is there where it came as text, or where `echo` needs it; half: see echo.py."""

    token_ids: list[int]
    text: str = ""
    half: tuple[bytes, str] = (b"", "")


async def create_completion(
    request: web.Request, state: ServerState, body: CompletionRequest
) -> web.StreamResponse:
    model = state.check_model(body.model)
    check_generation(body, state.settings.max_n)
    check_completion(body)
    given = parse_prompt(body.prompt)
    # `echo` without new tokens scores the prompt. The engine always makes one: it is left out.
    score_only = bool(body.echo) and body.max_tokens == 0
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    wanted = from_structured_outputs(
        body.structured_outputs, from_response_format(body.response_format), "response_format"
    )
    check_beams(body, structured=wanted.params is not None)
    sent_as = {"beam_width": beams_sent_as(body)}
    with named_as_sent(sent_as, wanted.as_sent):
        params = _params(body, state, 1 if score_only else max_tokens, wanted.params)
    samples = 1 if body.n is None else body.n
    width = samples if body.best_of is None else body.best_of
    if len(given) * width > MAX_SEQUENCES:
        raise ApiError(
            400,
            f"{counted(len(given), 'prompt')} of {counted(width, 'sample')} each: at most "
            f"{MAX_SEQUENCES} sequences are taken.",
            param="prompt",
        )
    prompts = await _tokenize(state, body, given)
    answer = _Answer(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        body=body,
        prompts=prompts,
        samples=samples,
        score_only=score_only,
        names=TokenNames(state.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
    )
    deltas = run_prompts(
        state,
        [prompt.token_ids for prompt in prompts],
        params,
        request_id=answer.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    with named_as_sent(sent_as, wanted.as_sent):
        if body.stream:
            return await stream_answer(request, state, deltas, answer.chunks, answer.end)
        results, usage = await collect(deltas, len(prompts), samples)
        return json_answer(answer.whole(results, usage))


def _params(
    body: CompletionRequest,
    state: ServerState,
    max_tokens: int,
    structured_outputs: StructuredOutputsParams | None,
) -> RequestParams:
    if body.use_beam_search:
        return beam_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return sampling_params(
        body,
        state,
        n=body.n,
        max_tokens=max_tokens,
        best_of=body.best_of,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_outputs,
    )


def parse_prompt(prompt: Any) -> list[str] | list[list[int]]:
    """The four shapes that `prompt` may have, as a list. Raises ApiError 400 for any other."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(
            400,
            "prompt: a string, a list of strings, a list of token ids or a list of lists of token "
            "ids is needed, and not an empty list.",
            param="prompt",
        )
    try:
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, list[str])
        if isinstance(prompt[0], list):
            lists = msgspec.convert(prompt, list[list[int]])
        else:
            lists = [msgspec.convert(prompt, list[int])]
    except msgspec.ValidationError as error:
        raise invalid_field(error, "prompt") from None
    if not all(lists):
        raise ApiError(400, "prompt: a list of token ids is empty.", param="prompt")
    return lists


async def _tokenize(
    state: ServerState, body: CompletionRequest, given: list[str] | list[list[int]]
) -> list[Prompt]:
    special = True if body.add_special_tokens is None else body.add_special_tokens

    async def one(item: str | list[int]) -> Prompt:
        if isinstance(item, str):
            text = item
            need_tokenizer(state)
            await state.off_loop(lambda: check_length(state, text, "prompt"), len(text))
            return Prompt(await encode(state, text, add_special_tokens=special), text)
        check_ids(state, item, "prompt")
        if not body.echo:
            return Prompt(item)
        tokenizer = need_tokenizer(state)
        text = await state.off_loop(
            lambda: tokenizer.decode(item, skip_special_tokens=False), len(item)
        )
        return Prompt(item, text, tokenizer.half_character(item))

    prompts = await asyncio.gather(*map(one, given))
    if not all(prompt.token_ids for prompt in prompts):
        raise ApiError(400, "prompt: it is empty, there is nothing to continue.", param="prompt")
    for prompt in prompts:
        check_num_tokens(state, prompt.token_ids, "prompt")
    return prompts


@dataclass(slots=True)
class _Answer:
    """Shapes deltas into chunks, or results into the whole answer.

    Choices are numbered through: sample `s` of prompt `p` is choice `p * samples + s`.
    offsets    per choice, characters of the text so far, for `text_offset`
    echoes     per choice that is streamed, what is left of its prompt's text
    """

    id: str
    created: int
    model: str
    body: CompletionRequest
    prompts: list[Prompt]
    samples: int
    score_only: bool
    names: TokenNames
    usage: UsageCounter = field(default_factory=UsageCounter)
    offsets: dict[int, int] = field(default_factory=dict)
    echoes: dict[int, Echo] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)

    def chunks(self, prompt_index: int, delta: RequestDelta) -> bytes:
        """The events of one engine step: one per sample that has news."""
        self.usage.add(prompt_index, delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[prompt_index] = delta.prompt_logprobs
        return b"".join(
            self._event([choice])
            for sequence in delta.sequences
            if (choice := self._chunk_choice(prompt_index, sequence)) is not None
        )

    def _chunk_choice(self, prompt_index: int, sequence: SequenceDelta) -> CompletionChoice | None:
        index = prompt_index * self.samples + sequence.index
        first = index not in self.offsets
        finished = sequence.finish_reason is not None
        prompt = self.prompts[prompt_index]
        text, logprobs = self._own(sequence.text, sequence.token_ids, sequence.logprobs)
        echoed: list[TokenLogprobs | None] | None = None
        if first:
            self.offsets[index] = 0
            if self.body.echo:
                self.echoes[index] = Echo(prompt.text, *prompt.half)
                echoed = self.prompt_logprobs.get(prompt_index)
        if (echo := self.echoes.get(index)) is not None:
            text = self._echo(echo, sequence.token_ids, finished=finished) + text
        if not (first or text or logprobs or finished or self.body.return_token_ids):
            return None
        shape = self._logprobs(index, prompt, echoed, sequence.token_ids, logprobs)
        return CompletionChoice(
            index,
            text,
            shape,
            sequence.finish_reason,
            sequence.stop_reason,
            prompt_token_ids=prompt.token_ids if first and self.body.return_token_ids else UNSET,
            token_ids=self._own_ids(sequence.token_ids),
        )

    def end(self, error: ApiError | None) -> bytes:
        """The last events of a stream."""
        options = self.body.stream_options
        if error is None and options is not None and options.include_usage:
            return self._event([], usage=self._usage(self.usage)) + DONE
        return end_of_stream(error)

    def _event(
        self, choices: list[CompletionChoice], *, usage: Usage | UnsetType | None = UNSET
    ) -> bytes:
        options = self.body.stream_options
        if options is not None and choices:
            if options.continuous_usage_stats:
                usage = self._usage(self.usage)
            elif options.include_usage:
                usage = None
        return event(
            Completion(
                id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
            )
        )

    def whole(self, results: list[PromptResult], usage: UsageCounter) -> Completion:
        choices: list[CompletionChoice] = []
        for prompt, result in zip(self.prompts, results, strict=True):
            for sample in result.samples:
                choices.append(self._choice(len(choices), prompt, result, sample))
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._usage(usage),
        )

    def _choice(
        self, index: int, prompt: Prompt, result: PromptResult, sample: Sample
    ) -> CompletionChoice:
        text, logprobs = self._own(sample.text, sample.token_ids, sample.logprobs)
        self.offsets[index] = 0
        echoed = result.prompt_logprobs if self.body.echo else None
        if self.body.echo:
            echo = Echo(prompt.text, *prompt.half)
            text = self._echo(echo, sample.token_ids, finished=True) + text
        shape = self._logprobs(index, prompt, echoed, sample.token_ids, logprobs)
        return CompletionChoice(
            index,
            text,
            shape,
            sample.finish_reason,
            sample.stop_reason,
            UNSET
            if self.body.prompt_logprobs is None or result.prompt_logprobs is None
            else prompt_logprobs_shape(result.prompt_logprobs),
            prompt.token_ids if self.body.return_token_ids else UNSET,
            self._own_ids(sample.token_ids),
        )

    def _own(
        self, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> tuple[str, list[TokenLogprobs]]:
        """What of a sample is shown: nothing where only the prompt was to be scored."""
        if self.score_only:
            return "", []
        return text, logprobs or []

    def _echo(self, echo: Echo, token_ids: list[int], *, finished: bool) -> str:
        shown = [] if self.score_only else token_ids
        data = b"".join(bytes(self.names.bytes(token) or []) for token in shown)
        return echo.before(data, finished=finished)

    def _own_ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        if not self.body.return_token_ids:
            return UNSET
        return [] if self.score_only else token_ids

    def _usage(self, counter: UsageCounter) -> Usage:
        usage = counter.usage()
        if self.score_only:
            usage.total_tokens -= usage.completion_tokens
            usage.completion_tokens = 0
        return usage

    def _logprobs(
        self,
        index: int,
        prompt: Prompt,
        echoed: list[TokenLogprobs | None] | None,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
    ) -> CompletionLogprobs | None:
        """OpenAI's four lists, for the echoed prompt and then the sample's own tokens."""
        top = self.body.logprobs
        if top is None:
            return None
        shape = CompletionLogprobs([], [], [], [])
        offset = self.offsets[index]
        entries = list(zip(prompt.token_ids, echoed, strict=True)) if echoed is not None else []
        entries += zip(token_ids[: len(logprobs)], logprobs, strict=True)
        for token, at in entries:
            name = self.names.text(token)
            shape.tokens.append(name)
            shape.text_offset.append(offset)
            offset += len(name)
            if at is None:
                shape.token_logprobs.append(None)
                shape.top_logprobs.append(None)
                continue
            chosen = floored(at[token].logprob)
            shape.token_logprobs.append(chosen)
            best = {self.names.text(t): logprob for t, logprob in top_entries(at, top)}
            shape.top_logprobs.append({name: chosen} | best)
        self.offsets[index] = offset
        return shape

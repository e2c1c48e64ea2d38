"""POST /v1/chat/completions: messages in, the assistant's answer out, whole or streamed."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import UNSET, UnsetType

from cuengine.api.answers import json_answer
from cuengine.api.checks import check_chat, check_generation
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
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Delta,
    TopLogprob,
    Usage,
)
from cuengine.api.state import ServerState
from cuengine.api.streaming import event, stream_answer
from cuengine.api.tokens import TokenNames, encode_chat
from cuengine.errors import RequestError
from cuengine.outputs import RequestDelta, TokenLogprobs
from cuengine.sampling_params import SamplingParams


async def create_chat_completion(
    request: web.Request, state: ServerState, body: ChatRequest
) -> web.StreamResponse:
    model = state.check_model(body.model)
    check_generation(body, state.settings.max_n)
    check_chat(body)
    params = _params(body, state)
    prompt = await encode_chat(
        state,
        body,
        add_special_tokens=bool(body.add_special_tokens),
        with_tools=body.tool_choice != "none",
    )
    answer = _Answer(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        body=body,
        names=TokenNames(state.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
    )
    deltas = run_prompts(
        state,
        [prompt],
        params,
        request_id=answer.id,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    if body.stream:
        return await stream_answer(request, state, deltas, answer.chunks, answer.last_chunk)
    results, usage = await collect(deltas, 1, params)
    return json_answer(answer.whole(results[0], usage))


def _params(body: ChatRequest, state: ServerState) -> SamplingParams:
    newer = body.max_completion_tokens is not None
    try:
        return sampling_params(
            body,
            state,
            max_tokens=body.max_completion_tokens if newer else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
    except RequestError as error:
        if newer and error.param == "max_tokens":
            message = str(error).replace("max_tokens", "max_completion_tokens", 1)
            raise RequestError(message, param="max_completion_tokens", code=error.code) from None
        raise


@dataclass(slots=True)
class _Answer:
    """Shapes deltas into chunks, or a result into the whole answer."""

    id: str
    created: int
    model: str
    body: ChatRequest
    names: TokenNames
    usage: UsageCounter = field(default_factory=UsageCounter)
    started: set[int] = field(default_factory=set)

    def chunks(self, _prompt_index: int, delta: RequestDelta) -> bytes:
        """The events of one engine step: one per sample that has news."""
        self.usage.add(0, delta)
        events = []
        for sequence in delta.sequences:
            if sequence.index not in self.started:
                ids = delta.prompt_token_ids if self.body.return_token_ids else UNSET
                role = ChatChunkChoice(sequence.index, Delta(role="assistant", content=""))
                events.append(self._event([role], prompt_token_ids=ids))
                self.started.add(sequence.index)
            finished = sequence.finish_reason is not None
            if not (sequence.text or sequence.logprobs or finished or self.body.return_token_ids):
                continue
            choice = ChatChunkChoice(
                sequence.index,
                Delta(content=sequence.text) if sequence.text or not finished else Delta(),
                self._logprobs(sequence.token_ids, sequence.logprobs),
                sequence.finish_reason,
                sequence.stop_reason if finished else UNSET,
                sequence.token_ids if self.body.return_token_ids else UNSET,
            )
            events.append(self._event([choice]))
        return b"".join(events)

    def last_chunk(self) -> bytes:
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return b""
        return self._event([], usage=self.usage.usage())

    def _event(
        self,
        choices: list[ChatChunkChoice],
        *,
        usage: Usage | UnsetType | None = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        options = self.body.stream_options
        if options is not None and choices:
            if options.continuous_usage_stats:
                usage = self.usage.usage()
            elif options.include_usage:
                usage = None
        return event(
            ChatChunk(
                id=self.id,
                created=self.created,
                model=self.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt_token_ids,
            )
        )

    def whole(self, result: PromptResult, usage: UsageCounter) -> ChatAnswer:
        return ChatAnswer(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, sample) for i, sample in enumerate(result.samples)],
            usage=usage.usage(),
            prompt_logprobs=UNSET
            if result.prompt_logprobs is None
            else prompt_logprobs_shape(result.prompt_logprobs),
            prompt_token_ids=result.prompt_token_ids if self.body.return_token_ids else UNSET,
        )

    def _choice(self, index: int, sample: Sample) -> ChatChoice:
        return ChatChoice(
            index,
            AnswerMessage(sample.text),
            self._logprobs(sample.token_ids, sample.logprobs),
            sample.finish_reason,
            sample.stop_reason,
            sample.token_ids if self.body.return_token_ids else UNSET,
        )

    def _logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> ChatLogprobs | None:
        if not self.body.logprobs or logprobs is None:
            return None
        names, top = self.names, self.body.top_logprobs or 0
        return ChatLogprobs(
            [
                ChatLogprob(
                    names.text(token),
                    floored(at[token].logprob),
                    names.bytes(token),
                    [
                        TopLogprob(names.text(t), lp, names.bytes(t))
                        for t, lp in top_entries(at, top)
                    ],
                )
                for token, at in zip(token_ids, logprobs, strict=True)
            ]
        )

"""POST /v1/responses: OpenAI's newer interface, for text, whole or streamed.

No response is stored: a conversation goes on by sending all of it again. Tools, and whatever needs
earlier responses, are refused.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from aiohttp import web

from cuengine.api.answers import json_answer
from cuengine.api.chat_answer import logprob_entries
from cuengine.api.checks import (
    check_no_tool_choice,
    check_sampling,
    check_top_logprobs,
    named_as_sent,
    refuse,
)
from cuengine.api.errors import ApiError
from cuengine.api.generation import Sample, UsageCounter, collect, run_prompts, sampling_params
from cuengine.api.protocol import ChatLogprob, ChatMessage, ChatRequest
from cuengine.api.responses_protocol import (
    ErrorEvent,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    ItemEvent,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartEvent,
    Response,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
    TextFormat,
    TextSettings,
)
from cuengine.api.state import ServerState
from cuengine.api.streaming import stream_answer
from cuengine.api.structured import from_structured_outputs, from_text_format
from cuengine.api.tokens import TokenNames, encode_chat, template_messages
from cuengine.outputs import RequestDelta, TokenLogprobs
from cuengine.sampling_params import SamplingParams

_LOGPROBS = "message.output_text.logprobs"

_encode = msgspec.json.Encoder().encode


async def create_response(
    request: web.Request, state: ServerState, body: ResponsesRequest
) -> web.StreamResponse:
    model = state.check_model(body.model)
    _check_supported(body)
    wanted = from_text_format(None if body.text is None else body.text.format)
    wanted = from_structured_outputs(body.structured_outputs, wanted, "text.format")
    with named_as_sent({"max_tokens": "max_output_tokens"}, wanted.as_sent):
        params = sampling_params(
            body,
            state,
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if _LOGPROBS in (body.include or ()) else None,
            structured_outputs=wanted.params,
        )
        prompt = await encode_chat(
            state,
            _messages(body),
            ChatRequest(messages=[], chat_template_kwargs=body.chat_template_kwargs),
            add_special_tokens=False,
            field="input",
        )
        answer = _Answer(
            id=f"resp_{uuid.uuid4().hex}",
            item_id=f"msg_{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            body=body,
            params=params,
            names=TokenNames(state.engine.tokenizer, as_ids=False),
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
            return await stream_answer(request, state, deltas, answer.chunks, answer.end)
        results, answer.usage = await collect(deltas, 1, 1)
        answer.sample = results[0].samples[0]
        return json_answer(answer.response())


def _check_supported(body: ResponsesRequest) -> None:
    check_sampling(body)
    check_top_logprobs(body.top_logprobs)
    check_no_tool_choice(body.tool_choice)
    if body.truncation == "auto":
        raise refuse("truncation", "truncation 'auto' is not supported; only 'disabled' is.")


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    items = (
        body.input if isinstance(body.input, list) else [InputItem(role="user", content=body.input)]
    )
    messages = template_messages([_message(item, i) for i, item in enumerate(items)], "input")
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return messages


def _message(item: InputItem, index: int) -> ChatMessage:
    place = f"input[{index}]"
    if item.type != "message":
        raise refuse(
            f"{place}.type", f"{place}.type: {item.type!r} is not supported; only 'message' is."
        )
    if item.role is None:
        raise refuse(f"{place}.role", f"{place}.role: required, but missing")
    return ChatMessage(role=item.role, content=item.content)


@dataclass(slots=True)
class _Answer:
    """Shapes deltas into events, or a result into the whole response. There is one sample."""

    id: str
    item_id: str
    created: int
    model: str
    body: ResponsesRequest
    params: SamplingParams
    names: TokenNames
    usage: UsageCounter = field(default_factory=UsageCounter)
    sample: Sample = field(default_factory=Sample)
    num_events: int = 0

    def chunks(self, _prompt_index: int, delta: RequestDelta) -> bytes:
        """The events of one engine step; with the first come those that open the stream."""
        self.usage.add(0, delta)
        opening = b"" if self.num_events else self._opening()
        (news,) = delta.sequences
        self.sample.add(news)
        if not (news.text or news.logprobs):
            return opening
        return opening + self._event(
            TextDeltaEvent(
                sequence_number=0,
                item_id=self.item_id,
                delta=news.text,
                logprobs=self._logprobs(news.token_ids, news.logprobs),
            )
        )

    def end(self, error: ApiError | None) -> bytes:
        """The last events of a stream."""
        if error is not None:
            return self._event(
                ErrorEvent(
                    sequence_number=0, code=error.code, message=error.message, param=error.param
                )
            )
        part, item = self._text(), self._item()
        done = TextDoneEvent(
            sequence_number=0, item_id=self.item_id, text=part.text, logprobs=part.logprobs
        )
        events: list[StreamEvent] = [
            done,
            self._part_event("done", part),
            ItemEvent(type="response.output_item.done", sequence_number=0, item=item),
            self._response_event(self._status()),
        ]
        return b"".join(map(self._event, events))

    def _opening(self) -> bytes:
        item = OutputMessage(self.item_id, "in_progress", [])
        events: list[StreamEvent] = [
            self._response_event("created"),
            self._response_event("in_progress"),
            ItemEvent(type="response.output_item.added", sequence_number=0, item=item),
            self._part_event("added", OutputText("")),
        ]
        return b"".join(map(self._event, events))

    def _part_event(self, what: Literal["added", "done"], part: OutputText) -> PartEvent:
        return PartEvent(
            type=f"response.content_part.{what}",
            sequence_number=0,
            item_id=self.item_id,
            part=part,
        )

    def _response_event(self, what: str) -> ResponseEvent:
        return ResponseEvent(type=f"response.{what}", sequence_number=0, response=self.response())

    def _event(self, data: StreamEvent) -> bytes:
        """One event, numbered."""
        data.sequence_number = self.num_events
        self.num_events += 1
        return b"event: %b\ndata: %b\n\n" % (data.type.encode(), _encode(data))

    def response(self) -> Response:
        body, params, status = self.body, self.params, self._status()
        return Response(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=[] if status == "in_progress" else [self._item()],
            usage=None if status == "in_progress" else self._usage(),
            incomplete_details=IncompleteDetails("max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            text=TextSettings((body.text and body.text.format) or TextFormat("text")),
            tools=[],
            tool_choice="none" if body.tool_choice == "none" else "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            user=body.user,
        )

    def _status(self) -> Literal["in_progress", "completed", "incomplete"]:
        match self.sample.finish_reason:
            case None:
                return "in_progress"
            case "stop":
                return "completed"
        return "incomplete"

    def _item(self) -> OutputMessage:
        return OutputMessage(self.item_id, self._status(), [self._text()])

    def _text(self) -> OutputText:
        sample = self.sample
        return OutputText(sample.text, self._logprobs(sample.token_ids, sample.logprobs))

    def _logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> list[ChatLogprob]:
        if not logprobs:
            return []
        return logprob_entries(self.names, token_ids, logprobs, self.body.top_logprobs or 0)

    def _usage(self) -> ResponseUsage:
        usage = self.usage.usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(),
            usage.total_tokens,
        )

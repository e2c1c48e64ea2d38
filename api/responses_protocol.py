"""Requests, answers and stream events of /v1/responses, for text. Only shapes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct

from cuengine.api.protocol import (
    REFUSED_EVERYWHERE,
    ChatLogprob,
    ContentPart,
    SamplingFields,
    Typed,
)


class InputItem(Struct):
    """A message; items of other types are refused by their type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None


class TextFormat(Struct, omit_defaults=True):
    """The last four go with json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The last three have no effect here."""

    refused: ClassVar[frozenset[str]] = REFUSED_EVERYWHERE | {
        "background",
        "best_of",
        "conversation",
        "previous_response_id",
        "prompt",
        "tools",
        "use_beam_search",
    }

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tool_choice: str | Typed | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None


class OutputText(Struct):
    text: str
    logprobs: list[ChatLogprob] = []
    annotations: list[Any] = []
    type: Literal["output_text"] = "output_text"


class OutputMessage(Struct):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class InputTokensDetails(Struct):
    """cache_write_tokens, which OpenAI bills, is always 0: nothing is paid for here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class TextSettings(Struct):
    format: TextFormat


class Response(Struct, kw_only=True):
    """What was asked for comes back with the answer, as OpenAI has it. Nothing is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    error: None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    temperature: float
    top_p: float
    top_logprobs: int
    text: TextSettings
    truncation: Literal["disabled"] = "disabled"
    tools: list[Any]
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    user: str | None


class ResponseEvent(Struct, kw_only=True):
    """created, in_progress, completed and incomplete."""

    type: str
    sequence_number: int
    response: Response


class ItemEvent(Struct, kw_only=True):
    """output_item.added and .done."""

    type: str
    sequence_number: int
    output_index: int = 0
    item: OutputMessage


class PartEvent(Struct, kw_only=True):
    """content_part.added and .done."""

    type: str
    sequence_number: int
    output_index: int = 0
    content_index: int = 0
    item_id: str
    part: OutputText


class TextDeltaEvent(Struct, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    output_index: int = 0
    content_index: int = 0
    item_id: str
    delta: str
    logprobs: list[ChatLogprob]


class TextDoneEvent(Struct, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    output_index: int = 0
    content_index: int = 0
    item_id: str
    text: str
    logprobs: list[ChatLogprob]


class ErrorEvent(Struct, kw_only=True):
    type: Literal["error"] = "error"
    sequence_number: int
    code: str | None
    message: str
    param: str | None


StreamEvent = ResponseEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent | ErrorEvent

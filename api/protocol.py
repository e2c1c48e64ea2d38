"""Requests and answers as OpenAI's API and vLLM's extensions name them. Only shapes, no behaviour.

msgspec checks types while it decodes; ranges are checked where SamplingParams is made. A field that
is left out and one that is null mean the same. UNSET fields of an answer are left out of the JSON.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]

# Fields of OpenAI's and vLLM's that change which tokens come out, and that cannot be followed here.
# They are refused rather than ignored.
REFUSED_EVERYWHERE = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "logits_processors",
        "repetition_detection",
        "truncate_prompt_tokens",
    }
)


# Of these an empty list, object or text means something, too: that no token is allowed, or that the
# answer is any JSON. Of the others it means as little as null.
MEANT_IF_EMPTY = frozenset(
    {"allowed_token_ids", "guided_choice", "guided_grammar", "guided_json", "guided_regex"}
)


# --- requests ---------------------------------------------------------------------------------


class Body(Struct, kw_only=True):
    """What all requests have in common.

    refused  fields that this route does not have and does not ignore either
    """

    refused: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Typed(Struct):
    """Any object that says its type; what else is in it does not matter here."""

    type: str


class JsonSchema(Struct):
    """name, strict and description are OpenAI's; a schema is always followed to the letter here."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct):
    """vLLM's; exactly one of the first five. The last two are refused."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    structural_tag: str | None = None


class SamplingFields(Body, kw_only=True):
    """How tokens are to be chosen, whatever the route. The last six have no effect here."""

    refused: ClassVar[frozenset[str]] = REFUSED_EVERYWHERE

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


class GenerationRequest(SamplingFields, kw_only=True):
    """What chat and plain completions have in common."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}


class CompletionRequest(GenerationRequest, kw_only=True):
    """prompt: a string, strings, token ids or lists of them. A msgspec union takes one array type
    only, so it is checked by hand.
    """

    refused: ClassVar[frozenset[str]] = REFUSED_EVERYWHERE | {"prompt_embeds", "suffix"}

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Struct, omit_defaults=True):
    """parameters is a JSON schema, which the chat template shows to the model."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct):
    name: str


class ToolChoice(Typed):
    """A function that is to be called."""

    function: NamedFunction | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    refused: ClassVar[frozenset[str]] = REFUSED_EVERYWHERE | {
        "chat_template",
        "echo",
        "function_call",
        "functions",
        "web_search_options",
    }

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None


class TokenizeRequest(Body, kw_only=True):
    """prompt, or messages and what a chat template takes."""

    refused: ClassVar[frozenset[str]] = frozenset({"chat_template"})

    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    tokens: list[int]


# --- answers ----------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(Struct):
    """arguments is JSON as the model wrote it: it may be broken."""

    name: str
    arguments: str


class AnswerToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """id, type and name come once, with a call's beginning."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Four lists, one entry per token; text_offset counts characters from the text's beginning."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cuengine"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct):
    prompt: str


class Health(Struct):
    """restarting: the engine died and comes back, running requests go on then."""

    status: Literal["ok", "restarting"]


class Version(Struct):
    version: str

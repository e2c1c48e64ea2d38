"""From text and messages to token ids, and from token ids to what log-probabilities show of them.

All calls that take time run on the tokenizer threads, never on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from cuengine.api.body import why_not_json
from cuengine.api.engine import ServingTemplate, ServingTokenizer
from cuengine.api.errors import ApiError
from cuengine.api.protocol import ChatMessage, ChatRequest, TokenizeRequest, Tool, ToolCall
from cuengine.api.state import SHORT_TEXT, ServerState
from cuengine.counted import counted
from cuengine.errors import RequestError

logger = logging.getLogger("cuengine.api")

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "self"}
)


def need_tokenizer(state: ServerState) -> ServingTokenizer:
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise ApiError(
            400,
            "This server runs without a tokenizer: send prompts as token ids, to /v1/completions.",
        )
    return tokenizer


def check_length(state: ServerState, text: str, param: str) -> None:
    """Text that cannot fit is refused before the seconds are spent that tokenizing it takes."""
    # A token is a byte or more, so that most texts need no closer look.
    if len(text) > state.max_prompt_tokens and len(text) > state.longest_text:
        raise ApiError(
            400,
            f"The prompt does not fit: {_limit(state)} is "
            f"{counted(state.max_prompt_tokens, 'token')}, which {len(text)} characters exceed in "
            "any case.",
            param=param,
            code="context_length_exceeded",
        )


def check_num_tokens(state: ServerState, token_ids: list[int], param: str) -> None:
    """The operator's limit; that of the context is the engine's to hold."""
    limit = state.settings.max_prompt_tokens
    if limit is not None and len(token_ids) > limit:
        raise ApiError(
            400,
            f"The prompt does not fit: it has {len(token_ids)} tokens, and {_limit(state)} is "
            f"{counted(limit, 'token')}.",
            param=param,
            code="context_length_exceeded",
        )


def _limit(state: ServerState) -> str:
    own = state.max_prompt_tokens < state.engine.max_model_len
    return "this server's limit" if own else "this model's maximum context length"


async def encode(state: ServerState, text: str, *, add_special_tokens: bool) -> list[int]:
    tokenizer = need_tokenizer(state)
    return await state.off_loop(
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
    )


def check_ids(state: ServerState, ids: list[int], param: str) -> None:
    """Token ids from outside must be in the vocabulary. Raises ApiError 400."""
    tokenizer = state.engine.tokenizer
    if tokenizer is None or not ids:
        return
    worst = max(ids) if min(ids) >= 0 else min(ids)
    if not 0 <= worst < tokenizer.vocab_size:
        raise ApiError(
            400,
            f"{param}: token id {worst} is not from 0 to {tokenizer.vocab_size - 1}.",
            param=param,
        )


async def encode_chat(
    state: ServerState,
    messages: list[dict[str, Any]],
    request: ChatRequest | TokenizeRequest,
    *,
    add_special_tokens: bool,
    with_tools: bool = True,
    must_fit: bool = True,
    field: str = "messages",
) -> list[int]:
    """The prompt that the model's chat template makes of the messages, as token ids.

    messages  from `template_messages`
    request   how the template is to be used
    field     where the messages came from
    Raises ApiError or RequestError 400 for messages that cannot be rendered.
    """
    tokenizer = need_tokenizer(state)
    template = state.engine.chat_template
    if template is None:
        raise ApiError(
            400,
            "This model has no chat template. Start the server with --chat-template, "
            "or use /v1/completions.",
        )
    kwargs = dict(request.chat_template_kwargs or {})
    if taken := kwargs.keys() & _TEMPLATE_ARGUMENTS:
        raise ApiError(
            400,
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}: "
            "the request has fields of that name.",
            param="chat_template_kwargs",
        )
    if request.documents is not None:
        kwargs["documents"] = request.documents
    continued = bool(request.continue_final_message)
    prompted = (
        not continued if request.add_generation_prompt is None else request.add_generation_prompt
    )
    if continued and prompted:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message cannot both be true.",
            param="continue_final_message",
        )
    tools = request.tools or [] if with_tools else []

    def work() -> list[int]:
        text = _render(template, messages, prompted, continued, tools, kwargs, field)
        if must_fit:
            check_length(state, text, field)
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if must_fit:
            check_num_tokens(state, token_ids, field)
        return token_ids

    # What a template makes of tools and arguments may be any length.
    texts = [message.get("content") for message in messages]
    size = sum(len(text) if isinstance(text, str) else SHORT_TEXT for text in texts)
    return await state.off_loop(work, SHORT_TEXT + 1 if tools or kwargs else size + len(messages))


def _render(
    template: ServingTemplate,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[Tool],
    kwargs: dict[str, Any],
    field: str,
) -> str:
    try:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=[msgspec.to_builtins(tool) for tool in tools] or None,
            **kwargs,
        )
    except RequestError:
        raise
    except Exception as error:
        # A template is a program that the model's author wrote; what it fails on came with the
        # request.
        logger.warning("The chat template failed", exc_info=error)
        raise RequestError(
            f"The model's chat template fails on these messages: {error}", param=field
        ) from None


def template_messages(messages: Sequence[ChatMessage], field: str) -> list[dict[str, Any]]:
    """Messages as templates expect them: text as one string, tool arguments as an object.
    `field` is where they came from.

    `developer` is what OpenAI's newer models call `system`; no LLaMA template knows it.
    """
    if not messages:
        raise ApiError(400, f"{field}: at least one message is needed.", param=field)
    return [_template_message(message, f"{field}[{i}]") for i, message in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _flat_text(message, where)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            _template_tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return result


def _flat_text(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None:
        if message.role not in ("assistant", "function"):
            raise ApiError(
                400,
                f"{where}.content: required for role {message.role!r}.",
                param=f"{where}.content",
            )
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type not in _TEXT_PARTS:
            raise ApiError(
                400,
                f"{place}.type: {part.type!r} is not supported; this model reads text only.",
                param=f"{place}.type",
            )
        elif part.text is None:
            raise ApiError(400, f"{place}.text: required, but missing", param=f"{place}.text")
        else:
            texts.append(part.text)
    return "\n".join(texts)


def _template_tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    place = f"{where}.function.arguments"
    data = (call.function.arguments or "{}").encode()
    try:
        arguments = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(400, why_not_json(data, error, place), param=place) from None
    except RecursionError:
        raise ApiError(400, f"{place} is nested too deeply.", param=place) from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{place} is not a JSON object.", param=place)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


class TokenNames:
    """How answers show single tokens: their text, or `token_id:N` where that was asked for."""

    __slots__ = ("_as_ids", "_tokenizer")

    def __init__(self, tokenizer: ServingTokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        if self._tokenizer is None:
            return None
        return list(self._tokenizer.token_bytes(token_id))

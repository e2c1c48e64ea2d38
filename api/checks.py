"""What a generation request may ask for, beyond types and the ranges of SamplingParams.

Anything that this server cannot do is refused here, so that no answer pretends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cuengine.api.errors import ApiError
from cuengine.api.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    SamplingFields,
    ToolChoice,
    Typed,
)
from cuengine.counted import counted
from cuengine.errors import RequestError

MAX_TOP_LOGPROBS = 20
# OpenAI takes four stop strings, vLLM any number. Each is followed through every character of an
# answer, on the engine's thread, so both their number and their length are bounded.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_CACHE_SALT = 1024
_INT64 = range(-(2**63), 2**63)


def refuse(param: str, message: str) -> ApiError:
    """A 400 that blames the field `param`."""
    return ApiError(400, message, param=param)


@contextmanager
def named_as_sent(
    names: Mapping[str, str], structured: Callable[[RequestError], RequestError]
) -> Iterator[None]:
    """Blames the fields that the client sent.

    names       they, by what the engine calls them, where that differs
    structured  gives an error about structured outputs as one about the client's field
    """
    try:
        yield
    except RequestError as error:
        if error.param is not None and error.param in names:
            name = names[error.param]
            message = str(error).replace(error.param, name, 1)
            raise RequestError(message, param=name, code=error.code) from None
        raise structured(error) from None


def check_sampling(body: SamplingFields) -> None:
    """What all routes that generate have in common. Raises ApiError 400."""
    _check_stop(body.stop)
    if body.priority is not None and body.priority not in _INT64:
        raise refuse("priority", f"priority={body.priority} is not a 64-bit integer.")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_CACHE_SALT:
        raise refuse("cache_salt", f"cache_salt: 1 to {MAX_CACHE_SALT} characters are taken.")


def check_generation(body: GenerationRequest, max_n: int) -> None:
    """What chat and plain completions have in common. Raises ApiError 400."""
    check_sampling(body)
    for name, value in (("n", body.n), ("best_of", body.best_of)):
        if value is not None and value > max_n:
            raise refuse(name, f"{name}={value} is more than this server's limit of {max_n}.")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "stream_options needs stream: true.")
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise refuse(
            "best_of",
            f"best_of={body.best_of} with stream: true: the best {body.n or 1} are known only in "
            "the end.",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise refuse("prompt_logprobs", "prompt_logprobs cannot be combined with stream: true.")


def check_chat(body: ChatRequest) -> None:
    _check_tools(body)
    if body.modalities and body.modalities != ["text"]:
        raise refuse("modalities", "modalities: only ['text'] is supported.")
    check_top_logprobs(body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise refuse("top_logprobs", "top_logprobs needs logprobs: true.")


def check_top_logprobs(count: int | None, param: str = "top_logprobs") -> None:
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise refuse(param, f"{param}={count} is not from 0 to {MAX_TOP_LOGPROBS}.")


def check_completion(body: CompletionRequest) -> None:
    check_top_logprobs(body.logprobs, "logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise refuse(
            "max_tokens",
            "max_tokens=0 is allowed with echo: true only, where it scores the prompt; else ask "
            "for at least 1.",
        )


def _check_stop(stop: str | list[str] | None) -> None:
    strings = stop if isinstance(stop, list) else [stop or ""]
    characters = sum(map(len, strings))
    if len(strings) > MAX_STOP_STRINGS or characters > MAX_STOP_CHARACTERS:
        raise refuse(
            "stop",
            f"stop: {counted(len(strings), 'string')} of {characters} characters together; at most "
            f"{MAX_STOP_STRINGS} strings of {MAX_STOP_CHARACTERS} characters together are taken.",
        )


def check_no_tool_choice(choice: str | Typed | None) -> None:
    """Where a route has no tools."""
    if choice not in (None, "none", "auto"):
        wanted = choice.type if isinstance(choice, Typed) else choice
        raise refuse(
            "tool_choice", f"tool_choice {wanted!r} is not supported; 'none' and 'auto' are."
        )


def _check_tools(body: ChatRequest) -> None:
    if body.tools == []:
        raise refuse("tools", "tools: an empty list. Give at least one tool, or leave it out.")
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, ToolChoice) and choice.function else None
    if choice not in (None, "none", "auto", "required") and named is None:
        wanted = choice.type if isinstance(choice, ToolChoice) else choice
        raise refuse(
            "tool_choice",
            f"tool_choice {wanted!r} is not supported; 'none', 'auto', 'required' and a named "
            "function are.",
        )
    if body.tools is None and choice not in (None, "none"):
        raise refuse("tool_choice", f"tool_choice {named or choice!r} needs tools.")
    if named is not None and named not in [tool.function.name for tool in body.tools or ()]:
        raise refuse("tool_choice", f"tool_choice: {named!r} is not among the tools.")

"""POST /v1/chat/completions: messages in, the assistant's answer out, whole or streamed.

What the answer looks like is in chat_answer.py.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from aiohttp import web

from cuengine.api.answers import json_answer
from cuengine.api.beams import beam_params, beams_sent_as, check_beams
from cuengine.api.chat_answer import ChatAnswerer
from cuengine.api.checks import check_chat, check_generation, named_as_sent, refuse
from cuengine.api.generation import collect, run_prompts, sampling_params
from cuengine.api.protocol import ChatRequest, ToolChoice
from cuengine.api.settings import ToolCallFormat
from cuengine.api.state import ServerState
from cuengine.api.streaming import stream_answer
from cuengine.api.structured import (
    Demand,
    from_response_format,
    from_structured_outputs,
    of_tool_calls,
)
from cuengine.api.tokens import TokenNames, encode_chat, template_messages
from cuengine.api.tool_calls import ToolCallParser
from cuengine.sampling_params import RequestParams
from cuengine.structured_outputs import StructuredOutputsParams


async def create_chat_completion(
    request: web.Request, state: ServerState, body: ChatRequest
) -> web.StreamResponse:
    model = state.check_model(body.model)
    check_generation(body, state.settings.max_n)
    check_chat(body)
    style = _tool_call_style(body, state)
    wanted = _wanted(body, state, style)
    check_beams(body, structured=wanted.params is not None)
    new_parser = None if style is None else _tool_call_parser(body, style)
    names = {"beam_width": beams_sent_as(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with named_as_sent(names, wanted.as_sent):
        params = _params(body, state, wanted.params)
        if new_parser is not None:
            # What marks a call is a special token in many models, which would be left out.
            params.skip_special_tokens = False
        prompt = await encode_chat(
            state,
            template_messages(body.messages, "messages"),
            body,
            add_special_tokens=bool(body.add_special_tokens),
            with_tools=body.tool_choice != "none",
        )
        answer = ChatAnswerer(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            body=body,
            names=TokenNames(state.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
            new_parser=new_parser,
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
        samples = 1 if body.n is None else body.n
        results, usage = await collect(deltas, 1, samples)
        return json_answer(answer.whole(results[0], usage))


def _params(
    body: ChatRequest, state: ServerState, structured_outputs: StructuredOutputsParams | None
) -> RequestParams:
    newer = body.max_completion_tokens
    max_tokens = body.max_tokens if newer is None else newer
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.use_beam_search:
        return beam_params(body, max_tokens=max_tokens, logprobs=logprobs)
    return sampling_params(
        body,
        state,
        n=body.n,
        max_tokens=max_tokens,
        best_of=body.best_of,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        structured_outputs=structured_outputs,
    )


def _tool_call_style(body: ChatRequest, state: ServerState) -> ToolCallFormat | None:
    """How calls are to be found in the answer; None: there are none, or the format is not known.

    Raises ApiError 400 where the model would never get to see the tools.
    """
    template = state.engine.chat_template
    if not body.tools or body.tool_choice == "none" or template is None:
        return None
    if not template.takes_tools:
        raise refuse("tools", "tools: this model's chat template has no place for them.")
    style = state.settings.tool_call_parser or template.tool_call_format
    # A call that is forced needs some format: the one that is nothing but JSON.
    return style or ("llama3_json" if _must_call(body) else None)


def _must_call(body: ChatRequest) -> bool:
    return body.tool_choice not in (None, "none", "auto")


def _wanted(body: ChatRequest, state: ServerState, style: ToolCallFormat | None) -> Demand:
    """What the answer must look like: calls, where they are forced, are all that it consists of."""
    answer = from_response_format(body.response_format)
    tokenizer = state.engine.tokenizer
    if style is None or tokenizer is None or not body.tools:
        return from_structured_outputs(body.structured_outputs, answer, "response_format")
    several = body.parallel_tool_calls is not False
    if not _must_call(body):
        answer = from_structured_outputs(body.structured_outputs, answer, "response_format")
        if answer.params is None or body.structured_outputs is not None:
            return answer
        return of_tool_calls(style, body.tools, tokenizer, several=several, instead=answer)
    if body.structured_outputs is not None:
        raise refuse(
            "structured_outputs", "structured_outputs cannot be combined with a forced tool call."
        )
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, ToolChoice) and choice.function else None
    return of_tool_calls(
        style, body.tools, tokenizer, only=named, several=several and named is None
    )


def _tool_call_parser(body: ChatRequest, style: ToolCallFormat) -> Callable[[], ToolCallParser]:
    """What finds calls in an answer."""
    known = [tool.function.name for tool in body.tools or ()]
    return lambda: ToolCallParser(style, known, parallel=body.parallel_tool_calls is not False)

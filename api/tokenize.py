"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from aiohttp import web

from cuengine.api.answers import json_answer
from cuengine.api.errors import ApiError
from cuengine.api.protocol import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from cuengine.api.state import ServerState
from cuengine.api.tokens import check_ids, encode, encode_chat, need_tokenizer, template_messages


async def tokenize(request: web.Request, state: ServerState, body: TokenizeRequest) -> web.Response:
    state.check_model(body.model)
    tokenizer = need_tokenizer(state)
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        tokens = await encode(state, body.prompt, add_special_tokens=special)
    elif body.messages:
        tokens = await encode_chat(
            state,
            template_messages(body.messages, "messages"),
            body,
            add_special_tokens=bool(body.add_special_tokens),
            must_fit=False,
        )
    else:
        raise ApiError(400, "prompt or messages is needed.", param="prompt")
    texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    return json_answer(TokenizeAnswer(len(tokens), state.engine.max_model_len, tokens, texts))


async def detokenize(
    request: web.Request, state: ServerState, body: DetokenizeRequest
) -> web.Response:
    state.check_model(body.model)
    tokenizer = need_tokenizer(state)
    check_ids(state, body.tokens, "tokens")
    text = await state.off_loop(
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), len(body.tokens)
    )
    return json_answer(DetokenizeAnswer(text))

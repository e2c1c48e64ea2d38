"""All routes in one table, and the one place through which every request passes.

A handler gets the request, the server's state and, where its route names a type, the decoded body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from cuengine.api import chat, completions, models, pages, responses, tokenize
from cuengine.api.body import BodyDecoder, read_json
from cuengine.api.connection import Connection
from cuengine.api.errors import ApiError, error_from, error_response
from cuengine.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cuengine.api.responses_protocol import ResponsesRequest
from cuengine.api.state import STATE, ServerState

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """handler(request, state), or handler(request, state, body) where there is a body type."""

    method: str
    path: str
    handler: Callable[..., Awaitable[web.StreamResponse]]
    body: type | None = None


ROUTES = (
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/{model:.+}", models.show_model),
    Route("POST", "/v1/completions", completions.create_completion, CompletionRequest),
    Route("POST", "/v1/chat/completions", chat.create_chat_completion, ChatRequest),
    Route("POST", "/v1/responses", responses.create_response, ResponsesRequest),
    Route("POST", "/tokenize", tokenize.tokenize, TokenizeRequest),
    Route("POST", "/detokenize", tokenize.detokenize, DetokenizeRequest),
    Route("GET", "/health", pages.health),
    Route("GET", "/version", pages.version),
    Route("GET", "/metrics", pages.metrics),
    Route("GET", "/", pages.chat_page),
    Route("GET", "/static/{name}", pages.static_file),
)


def add_routes(app: web.Application, state: ServerState) -> None:
    for route in ROUTES:
        app.router.add_route(route.method, route.path, _bind(route, state))
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, _bind(route, state))


def _bind(route: Route, state: ServerState) -> _Handler:
    handler = route.handler
    if route.body is None:

        async def without_body(request: web.Request) -> web.StreamResponse:
            return await handler(request, state)

        return without_body

    decoder: BodyDecoder[Any] = BodyDecoder(route.body)

    async def with_body(request: web.Request) -> web.StreamResponse:
        data = await read_json(request, state)
        return await handler(request, state, decoder.decode(data, route.path, state))

    return with_body


@web.middleware
async def gate(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Counts the request, lets it in or not, and turns what it raises into an answer."""
    state = request.app[STATE]
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.request_started()
    state.request_started()
    try:
        response = await _admit(request, handler, state)
    finally:
        state.request_finished()
        if isinstance(connection, Connection):
            connection.request_finished()
    if state.draining:
        response.force_close()
    return response


async def _admit(request: web.Request, handler: _Handler, state: ServerState) -> web.StreamResponse:
    try:
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return web.Response(status=204)
        _check_key(request, state)
        if state.draining and request.path != "/metrics":
            raise ApiError(
                503,
                "The server is shutting down.",
                code="shutting_down",
                headers={"Retry-After": "5"},
            )
        return await handler(request)
    except asyncio.CancelledError:
        raise
    except web.HTTPNotFound:
        error = ApiError(404, f"There is no route {request.method} {request.path}.")
    except web.HTTPMethodNotAllowed as problem:
        allowed = ", ".join(sorted(problem.allowed_methods))
        error = ApiError(
            405,
            f"{request.path} takes {allowed}, not {request.method}.",
            headers={"Allow": allowed},
        )
    except ConnectionError:
        raise  # the client has left: there is nobody to answer
    except Exception as problem:
        error = error_from(problem)
    return error_response(error)


def _check_key(request: web.Request, state: ServerState) -> None:
    """/v1 needs one of the API keys, where there are any; the rest is open, as in vLLM."""
    keys = state.settings.api_keys
    if not keys or not request.path.startswith("/v1"):
        return
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    # Digests have one length, and all are compared: the time says nothing about a key.
    given = _digest(key.strip()) if scheme.lower() == "bearer" else b""
    matches = [hmac.compare_digest(given, _digest(known)) for known in keys]
    if not any(matches):
        raise ApiError(
            401,
            "The API key is wrong or missing. Send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Let browsers at the allowed origins read the answers."""
    origins = request.app[STATE].settings.cors_origins
    origin = request.headers.get("Origin")
    if origin is None or not ("*" in origins or origin in origins):
        return
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Vary"] = "Origin"
    if request.method == "OPTIONS":
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
        response.headers["Access-Control-Allow-Headers"] = request.headers.get(
            "Access-Control-Request-Headers", "authorization, content-type"
        )
        response.headers["Access-Control-Max-Age"] = "600"

"""All routes in one table, and the one place through which every request passes.

A handler gets the request, the server's state and, where its route names a type, the decoded body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from aiohttp import web

from cuengine.api import chat, completions, dashboard, models, openapi, pages, responses, tokenize
from cuengine.api.access_log import identify
from cuengine.api.body import BodyDecoder, read_json
from cuengine.api.connection import Connection
from cuengine.api.errors import ApiError, error_from, error_response
from cuengine.api.protocol import (
    ChatAnswer,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    Health,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
    Version,
)
from cuengine.api.responses_protocol import Response, ResponsesRequest
from cuengine.api.route import PRIVATE, Route
from cuengine.api.state import STATE, ServerState

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat.create_chat_completion,
        summary="Answer a conversation",
        body=ChatRequest,
        answer=ChatAnswer,
        generates=True,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions.create_completion,
        summary="Continue a text",
        body=CompletionRequest,
        answer=Completion,
        generates=True,
    ),
    Route(
        method="POST",
        path="/v1/responses",
        handler=responses.create_response,
        summary="Answer a conversation, in the shape of OpenAI's newer interface",
        body=ResponsesRequest,
        answer=Response,
        generates=True,
    ),
    Route(
        method="GET",
        path="/v1/models",
        handler=models.list_models,
        summary="The names under which the model is served",
        answer=ModelList,
    ),
    Route(
        method="GET",
        path="/v1/models/{model:.+}",
        handler=models.show_model,
        summary="One of these names",
        answer=ModelCard,
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=tokenize.tokenize,
        summary="The tokens of a text or of a conversation",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handler=tokenize.detokenize,
        summary="The text of tokens",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
    ),
    Route(
        method="GET",
        path="/health",
        handler=pages.health,
        summary="Whether the server is alive",
        answer=Health,
        while_draining=True,
    ),
    Route(
        method="GET",
        path="/ready",
        handler=pages.ready,
        summary="Whether the server takes requests",
    ),
    Route(
        method="GET",
        path="/version",
        handler=pages.version,
        summary="The version of cuengine",
        answer=Version,
        while_draining=True,
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=pages.metrics,
        summary="Figures for Prometheus",
        answer="text/plain",
        while_draining=True,
    ),
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi.show,
        summary="This description",
        answer="application/json",
    ),
    Route(
        method="GET",
        path="/",
        handler=pages.chat_page,
        summary="A page to chat on",
        answer="text/html",
    ),
    Route(
        method="GET",
        path="/dashboard",
        handler=dashboard.page,
        summary="A page that shows the block pool, block tables and batches as they are",
        answer="text/html",
    ),
    Route(
        method="GET",
        path="/dashboard/events",
        handler=dashboard.events,
        summary="What that page shows, as server-sent events",
        answer="text/event-stream",
    ),
    Route(
        method="GET",
        path="/static/{name}",
        handler=pages.static_file,
        summary="A part of these pages",
        answer="*/*",
    ),
)


_GENERATING = {route.path for route in ROUTES if route.generates}


def add_routes(app: web.Application, state: ServerState) -> None:
    """Every route, and again under the root path: some proxies cut it off and some do not."""
    settings = state.settings
    state.openapi = openapi.describe(ROUTES, settings.root_path, with_keys=bool(settings.api_keys))
    for route in ROUTES:
        handler = _bind(route, state)
        for prefix in {"", settings.root_path}:
            app.router.add_route(route.method, prefix + route.path, handler)
            if route.method == "GET":
                app.router.add_route("HEAD", prefix + route.path, handler)


def _bind(route: Route, state: ServerState) -> _Handler:
    def check_draining() -> None:
        if state.draining and not route.while_draining:
            raise ApiError(
                503,
                "The server is shutting down.",
                code="shutting_down",
                headers={"Retry-After": "5"},
            )

    if route.body is None:

        async def without_body(request: web.Request) -> web.StreamResponse:
            check_draining()
            return await route.handler(request, state)

        return without_body

    decoder: BodyDecoder[Any] = BodyDecoder(route.body)

    async def with_body(request: web.Request) -> web.StreamResponse:
        check_draining()
        with state.limits.one_request() if route.generates else nullcontext():
            data = await read_json(request, state)
            return await route.handler(request, state, decoder.decode(data, route.path, state))

    return with_body


@web.middleware
async def gate(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Counts the request, lets it in or not, and turns what it raises into an answer."""
    state = request.app[STATE]
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.request_started()
    state.request_started()
    identify(request)
    if state.tracing is not None:
        state.tracing.note_parent(request.headers)
    try:
        response = await _admit(request, handler, state)
    except (asyncio.CancelledError, ConnectionError):
        if isinstance(connection, Connection):
            connection.request_cut_off(request)
        raise
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
    if request.path.removeprefix(state.settings.root_path) in _GENERATING:
        state.metrics.errors.labels(str(error.status)).inc()
    return error_response(error)


def _check_key(request: web.Request, state: ServerState) -> None:
    """What PRIVATE names needs one of the API keys, where there are any; the rest is open."""
    keys = state.settings.api_keys
    paths = (request.path, request.path.removeprefix(state.settings.root_path))
    if not keys or not any(path.startswith(PRIVATE) for path in paths):
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

"""What a route is; the table of all of them is in routes.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from cuengine.api.protocol import Body

PRIVATE = ("/v1", "/dashboard/events")
"""How the paths begin that need an API key: what vLLM asks one for, and what names requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """handler(request, state), or handler(request, state, body) where there is a body type.

    summary         one line, for the OpenAPI document
    answer          type of the JSON answer; a content type where it is no JSON; None: it is empty
    generates       it runs the model: it counts against the limit and may be streamed
    while_draining  it answers even when the server is shutting down
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[web.StreamResponse]]
    summary: str
    body: type[Body] | None = None
    answer: type | str | None = None
    generates: bool = False
    while_draining: bool = False

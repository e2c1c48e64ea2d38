"""Files of the web pages, and what machines ask a server about itself: health, version, metrics."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from cuengine.api.answers import json_answer
from cuengine.api.errors import ApiError
from cuengine.api.protocol import Health, Version
from cuengine.api.state import ServerState

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Everything from this server, nothing inline, nobody may frame it.
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    content_type: str
    etag: str


def _read_pages() -> dict[str, Page]:
    pages = {}
    for file in resources.files("cuengine.api").joinpath("static").iterdir():
        kind = file.name.rpartition(".")[2]
        if kind in _TYPES:
            body = file.read_bytes()
            pages[file.name] = Page(body, _TYPES[kind], hashlib.sha256(body).hexdigest()[:16])
    return pages


PAGES = _read_pages()


async def chat_page(request: web.Request, state: ServerState) -> web.Response:
    return page_answer(request, PAGES["index.html"])


async def static_file(request: web.Request, state: ServerState) -> web.Response:
    page = PAGES.get(request.match_info["name"])
    if page is None:
        raise ApiError(404, f"There is no file {request.path}.")
    return page_answer(request, page)


def page_answer(request: web.Request, page: Page) -> web.Response:
    headers = {**_SECURITY, "ETag": f'"{page.etag}"'}
    if any(tag.value == page.etag for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(
        body=page.body, content_type=page.content_type, charset="utf-8", headers=headers
    )


async def health(request: web.Request, state: ServerState) -> web.Response:
    """Whether this process is worth keeping: 200 while it drains or starts its engine again, too,
    503 after a failure.
    """
    if state.engine.failed:
        raise ApiError(503, "The engine has failed; the log says why.", code="engine_stopped")
    return json_answer(Health("restarting" if state.engine.restarting else "ok"))


async def ready(request: web.Request, state: ServerState) -> web.Response:
    """Whether new requests are worked on. Draining is answered 503 before this is reached."""
    if state.engine.restarting:
        raise ApiError(
            503,
            "The engine is being started again; requests wait until it is.",
            code="engine_restarting",
            headers={"Retry-After": "5"},
        )
    return await health(request, state)


async def version(request: web.Request, state: ServerState) -> web.Response:
    return json_answer(Version(importlib.metadata.version("cuengine")))


async def metrics(request: web.Request, state: ServerState) -> web.Response:
    return web.Response(
        body=state.metrics.render(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )

"""The dashboard: a page, and the stream of pictures that it draws; watchers.py takes them."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from aiohttp import web

from cuengine.api.pages import PAGES, page_answer
from cuengine.api.state import ServerState
from cuengine.api.streaming import EventStream, event


async def page(request: web.Request, state: ServerState) -> web.Response:
    return page_answer(request, PAGES["dashboard.html"])


async def events(request: web.Request, state: ServerState) -> web.StreamResponse:
    """Pictures as server-sent events, at most ten a second, for as long as the client stays.

    Of the engine that `replica` in the query names, where there are several.
    """
    watchers = state.watchers_of(request.query.get("replica"))
    stream = EventStream(request, state)
    try:
        await stream.open()
        if request.method != "HEAD":
            async with aclosing(watchers.pictures()) as pictures:
                async for picture in pictures:
                    await stream.write(event(msgspec.Raw(picture)))
        return await stream.finish(b"")
    finally:
        stream.close()

"""Server-sent events: one answer as a stream of `data:` lines.

A stream writes one piece per step of the engine. A reader who falls behind is waited for (the
engine's other requests are not), one who stops reading is dropped; a stream with nothing to say
sends a comment line now and then, so that no proxy takes it for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from aiohttp import web

from cuengine.api.connection import Connection
from cuengine.api.errors import ApiError, error_body, error_from
from cuengine.api.generation import Deltas
from cuengine.api.state import ServerState
from cuengine.outputs import RequestDelta

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """One event with `data` as JSON."""
    return b"data: %b\n\n" % _encode(data)


def end_of_stream(error: ApiError | None) -> bytes:
    """What ends a stream: [DONE], after the error where there was one."""
    return DONE if error is None else b"data: %b\n\n%b" % (error_body(error), DONE)


class EventStream:
    """The response of one stream. Opened late, so that an error before it can have its status."""

    __slots__ = (
        "_blocked_since",
        "_comment",
        "_last_write",
        "_loop",
        "_request",
        "_response",
        "_settings",
        "_timer",
    )

    def __init__(self, request: web.Request, state: ServerState) -> None:
        self._request = request
        self._settings = state.settings
        self._response = web.StreamResponse(headers=_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._last_write = 0.0
        self._blocked_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def opened(self) -> bool:
        return self._response.prepared

    async def open(self) -> None:
        await self._response.prepare(self._request)
        self._last_write = self._loop.time()
        self._start_timer()

    async def write(self, data: bytes) -> None:
        """Send `data`, and wait while the client has more than a buffer's worth still to read."""
        self._last_write = self._blocked_since = self._loop.time()
        await self._response.write(data)
        self._blocked_since = None

    async def finish(self, last: bytes) -> web.StreamResponse:
        await self.write(last)
        await self._response.write_eof()
        return self._response

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self) -> None:
        interval = min(self._settings.keepalive_seconds, self._settings.write_timeout)
        self._timer = self._loop.call_later(interval, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if self._blocked_since is not None:
            if now - self._blocked_since >= self._settings.write_timeout:
                self._drop()
                return
        elif now - self._last_write >= self._settings.keepalive_seconds * 0.99:
            # A comment is far smaller than the buffer, so this task ends at once.
            self._comment = self._loop.create_task(self._write_comment())
            self._last_write = now
        self._start_timer()

    async def _write_comment(self) -> None:
        with suppress(ConnectionError):  # the client has gone, which the next delta will find, too
            await self._response.write(_COMMENT)

    def _drop(self) -> None:
        protocol = self._request.protocol
        if isinstance(protocol, Connection):
            protocol.abort()
        elif self._request.transport is not None:
            self._request.transport.abort()


async def stream_answer(
    request: web.Request,
    state: ServerState,
    deltas: Deltas,
    encode: Callable[[int, RequestDelta], bytes],
    end: Callable[[ApiError | None], bytes],
) -> web.StreamResponse:
    """Send every delta as what `encode` makes of it, then what `end` says.

    An error before anything was sent is raised; a later one is handed to `end`.
    """
    stream = EventStream(request, state)
    failure: ApiError | None = None
    try:
        async with aclosing(deltas):
            first = asyncio.ensure_future(anext(deltas, None))
            try:
                # Whether the engine takes the request shows here, while a status can still be sent.
                await asyncio.wait({first}, timeout=state.settings.keepalive_seconds)
                if not first.done():
                    await stream.open()
                    await stream.write(_COMMENT)
                item = await first
                if not stream.opened:
                    await stream.open()
                if item is not None:
                    await _send(stream, encode(*item))
                    async for index, delta in deltas:
                        await _send(stream, encode(index, delta))
            except Exception as error:
                if not stream.opened or isinstance(error, ConnectionError):
                    raise
                failure = error_from(error)
                state.metrics.errors.labels(str(failure.status)).inc()
            finally:
                first.cancel()
                await asyncio.wait({first})
        return await stream.finish(end(failure))
    finally:
        stream.close()


async def _send(stream: EventStream, data: bytes) -> None:
    if data:
        await stream.write(data)

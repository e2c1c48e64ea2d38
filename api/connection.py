"""One client's connection: when to give up on it. Requests and answers are aiohttp's business.

aiohttp cancels a handler when the connection is lost (with `handler_cancellation`), but asyncio
reports the loss only after the write buffer has drained, which never happens where a client stopped
reading and then left. And it waits long for the first headers.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_server import Server

from cuengine.api.access_log import AccessLogger
from cuengine.api.errors import ApiError, error_body, error_from, error_response

logger = logging.getLogger("cuengine.api")

_TIMEOUT_BODY = error_body(ApiError(408, "The request's headers did not arrive in time."))
_TIMEOUT_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_TIMEOUT_BODY), _TIMEOUT_BODY)
)


class Connection(RequestHandler):
    """aiohttp's protocol with a deadline for headers, and an end as soon as the client has left."""

    __slots__ = ("_busy", "_deadline", "_started", "_stopping")

    def __init__(
        self,
        server: Server,
        *,
        loop: asyncio.AbstractEventLoop,
        header_timeout: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(server, loop=loop, **kwargs)
        self._busy = self._stopping = False
        self._started = 0.0
        self._deadline = loop.call_later(header_timeout, self._headers_late)

    def request_started(self) -> None:
        self._deadline.cancel()
        self._busy = True
        self._started = self._loop.time()

    def request_finished(self) -> None:
        self._busy = False

    def request_cut_off(self, request: web.BaseRequest) -> None:
        """For the access log, where it was the client that left: aiohttp logs whole answers only.

        To be called by the task that was answering.
        """
        gone = self.transport is None or self.transport.is_closing()
        if gone and not self._stopping and isinstance(self.access_logger, AccessLogger):
            self.access_logger.log_departure(request, self._loop.time() - self._started)

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """The server stops: from here on it leaves, and not the client."""
        self._stopping = True
        await super().shutdown(timeout)

    def eof_received(self) -> None:
        if self._busy:
            self.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no HTTP. Anyone can send that: it is no error of the server's."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size:
            return super().handle_error(request, status, exc, message)
        logger.debug("Not HTTP, from %s", request.remote, exc_info=exc)
        answer = error_response(ApiError(status, f"This is not HTTP: {message}"))
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """An answer that aiohttp made before any handler was asked gets OpenAI's shape, too."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(error_from(resp))
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Not for a client that has left, nor for a body that turns out after the answer to be none
        that can be read: these are no errors of the server's, either.
        """
        error = kwargs.get("exc_info")
        if isinstance(error, ConnectionError | RequestPayloadError):
            logger.debug("A client has left, or sent no body", exc_info=error)
        else:
            super().log_exception(*args, **kwargs)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Drop the connection now, with what was not sent yet; its handler is cancelled."""
        if self.transport is not None:
            self.transport.abort()

    def _headers_late(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_TIMEOUT_ANSWER)
            self.force_close()

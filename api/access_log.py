"""One log line per request, and the id by which a request is found again in logs.

A client's own X-Request-Id is kept; it comes back with every answer. A client that leaves before
its answer's end has a line, too: with the status that was sent, or where none was with 499, as
nginx has it.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from cuengine.counted import counted

HEADER = "X-Request-Id"
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Of the request that the running task answers."""

CLIENT_LEFT = 499
"""The status in the log where none was sent."""


@dataclass(slots=True)
class Progress:
    """How far a request has come that generates.

    tokens  that the engine has brought for its prompts that are over
    """

    tokens: int = 0


progress: ContextVar[Progress] = ContextVar("progress")
"""Of the same request; tasks that it starts share it."""


def identify(request: web.Request) -> None:
    """Give a request its id: the client's, or one of our own where that cannot be shown."""
    given = request.headers.get(HEADER, "")
    request_id.set(given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex)
    progress.set(Progress())


async def add_id_header(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[HEADER] = request_id.get()


class AccessLogger(AbstractAccessLogger):
    """`127.0.0.1 "POST /v1/completions" 200 1234 B 0.052 s id`, and the same as fields for JSON."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        fields = {
            **_begin(request),
            "status": response.status,
            "bytes": response.body_length,
            "seconds": round(time, 6),
            "request_id": response.headers.get(HEADER, "-"),
        }
        self.logger.info(_LINE, fields, extra={"fields": fields})

    def log_departure(self, request: web.BaseRequest, time: float) -> None:
        """Of a client that has left; called by the task that was answering it."""
        sent = request.writer.output_size
        fields = {
            **_begin(request),
            "status": 200 if sent else CLIENT_LEFT,  # only streams send anything so early
            "bytes": sent,
            "seconds": round(time, 6),
            "request_id": request_id.get(),
            "client_left": True,
            "tokens": (tokens := progress.get().tokens),
        }
        left = f"client left after {counted(tokens, 'token')}" if tokens else "client left"
        self.logger.info(f"{_LINE} ({left})", fields, extra={"fields": fields})


_LINE = '%(remote)s "%(method)s %(path)s" %(status)d %(bytes)d B %(seconds).3f s %(request_id)s'


def _begin(request: web.BaseRequest) -> dict[str, Any]:
    path = request.raw_path if request.raw_path.isprintable() else repr(request.raw_path)
    return {"remote": request.remote or "-", "method": request.method, "path": path}

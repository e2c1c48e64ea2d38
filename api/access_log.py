"""One log line per request, and the id by which a request is found again in logs.

A client's own X-Request-Id is kept; it comes back with every answer.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

HEADER = "X-Request-Id"
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Of the request that the running task answers."""


def identify(request: web.Request) -> None:
    """Give a request its id: the client's, or one of our own where that cannot be shown."""
    given = request.headers.get(HEADER, "")
    request_id.set(given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex)


async def add_id_header(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[HEADER] = request_id.get()


class AccessLogger(AbstractAccessLogger):
    """`127.0.0.1 "POST /v1/completions" 200 1234 B 0.052 s id`, and the same as fields for JSON."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        path = request.raw_path if request.raw_path.isprintable() else repr(request.raw_path)
        fields = {
            "remote": request.remote or "-",
            "method": request.method,
            "path": path,
            "status": response.status,
            "bytes": response.body_length,
            "seconds": round(time, 6),
            "request_id": response.headers.get(HEADER, "-"),
        }
        self.logger.info(
            '%(remote)s "%(method)s %(path)s" %(status)d %(bytes)d B %(seconds).3f s '
            "%(request_id)s",
            fields,
            extra={"fields": fields},
        )

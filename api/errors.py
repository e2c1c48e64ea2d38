"""How an error becomes an HTTP answer, in OpenAI's shape. Where errors are caught is in routes.py.

Nothing of a traceback reaches a client: what was not raised on purpose is logged and answered 500.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from cuengine.api.access_log import request_id
from cuengine.errors import EngineDiedError, EngineStoppedError, RequestError, RequestFailedError

logger = logging.getLogger("cuengine.api")

MAX_MESSAGE = 2000

_encoder = msgspec.json.Encoder()


class ApiError(Exception):
    """An answer other than success, decided by the server itself.

    status  HTTP status
    param   the request's field that is to blame, where there is one
    code    OpenAI's machine-readable code where it has one
    headers to send along, e.g. Retry-After
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo


def error_from(exc: Exception) -> ApiError:
    """The answer that `exc` stands for; one that nobody expected is logged with its traceback."""
    match exc:
        case ApiError():
            return exc
        case RequestError():
            return ApiError(400, str(exc), param=exc.param, code=exc.code)
        case EngineStoppedError():
            return ApiError(503, str(exc), code="engine_stopped", headers={"Retry-After": "5"})
        case EngineDiedError():
            return ApiError(500, str(exc), code="engine_died")
        case RequestFailedError():
            return ApiError(500, str(exc), code="request_failed")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, exc.text or "The request body is too large.")
        case web.HTTPException():
            return ApiError(exc.status, exc.text or exc.reason)
        case RequestPayloadError():
            return ApiError(400, f"The request body cannot be read: {exc}")
    logger.error(
        "Request %s failed in a way nobody expected",
        request_id.get(),
        exc_info=exc,
        extra={"fields": {"request_id": request_id.get()}},
    )
    return ApiError(500, "The server failed on this request; its log says why.")


def error_body(error: ApiError) -> bytes:
    """The JSON of one error, `{"error": {message, type, param, code}}`."""
    kind = (
        "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else _client_type(error)
    )
    message = error.message
    if len(message) > MAX_MESSAGE:  # it may quote what the client sent
        message = message[:MAX_MESSAGE] + " ..."
    return _encoder.encode(ErrorBody(ErrorInfo(message, kind, error.param, error.code)))


def _client_type(error: ApiError) -> str:
    return {401: "authentication_error", 429: "rate_limit_error"}.get(
        error.status, "invalid_request_error"
    )


def error_response(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers=error.headers,
    )

"""From a request's bytes to one of protocol.py's types, or a 4xx that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
from aiohttp import web

from cuengine.api.errors import ApiError
from cuengine.api.protocol import MEANT_IF_EMPTY, Body
from cuengine.api.state import ServerState
from cuengine.counted import counted

T = TypeVar("T", bound=Body)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = frozenset({b"null"})
_NOTHING = frozenset({b"null", b"false", b"[]", b"{}", b'""'})
# msgspec puts the place at the end of its message: "... - at `$.messages[0].role`".
_PLACE = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")


async def read_json(request: web.Request, state: ServerState) -> bytes:
    """The whole body, checked for type, size and time. Raises ApiError 408, 413 or 415."""
    settings = state.settings
    if request.content_type != "application/json":
        raise ApiError(
            415, f"Content-Type is {request.content_type!r}; this route reads application/json."
        )
    limit = settings.max_body_bytes
    too_large = ApiError(413, f"The request body is larger than the limit of {limit} bytes.")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    try:
        async with asyncio.timeout(settings.body_timeout):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            408,
            "The request body did not arrive within "
            f"{counted(f'{settings.body_timeout:g}', 'second')}.",
            headers={"Connection": "close"},
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except RuntimeError as error:
        if request.transport is not None:
            raise
        # aiohttp's word for a connection that was lost before anyone read from it.
        raise ConnectionResetError("the connection is closed") from error


class BodyDecoder(Generic[T]):
    """Decodes and checks bodies of one type.

    The top level is scanned once more for fields that the type does not have: those that would
    change the answer are refused, the rest are ignored and logged.
    """

    def __init__(self, body_type: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(body_type)
        info: Any = msgspec.inspect.type_info(body_type)
        self._known = frozenset(field.encode_name for field in info.fields)
        self._refused = body_type.refused

    def decode(self, data: bytes, route: str, state: ServerState) -> T:
        """Raises ApiError 400, with `param` where one field is to blame."""
        try:
            fields = _FIELDS.decode(data)
            body = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise invalid_field(error) from None
        except msgspec.DecodeError as error:
            raise ApiError(400, why_not_json(data, error, "The request body")) from None
        except RecursionError:
            raise ApiError(400, "The request body is nested too deeply.") from None
        unknown = fields.keys() - self._known
        if unknown:
            _refuse(fields, unknown & self._refused)
            state.note_ignored(route, unknown)
        return body


def invalid_field(error: msgspec.ValidationError, root: str = "") -> ApiError:
    """A 400 that names the field; `root` is the field that was converted, where it was only one."""
    what, path = str(error), ""
    if place := _PLACE.match(what):
        what, path = place["what"], place["path"]
    if missing := _MISSING.match(what):
        path = f"{path}.{missing['name']}"
        what = "required, but missing"
    param = (root + path.replace("[...]", "")).lstrip(".")
    return ApiError(400, f"{param}: {what}" if param else what, param=param or None)


def _refuse(fields: Mapping[str, msgspec.Raw], names: set[str]) -> None:
    for name in sorted(names):
        nothing = _NULL if name in MEANT_IF_EMPTY else _NOTHING
        if bytes(fields[name]).strip() not in nothing:
            raise ApiError(400, f"{name} is not supported by this server.", param=name)


def why_not_json(data: bytes, error: msgspec.DecodeError, what: str) -> str:
    """A sentence about `what`. msgspec calls half of a surrogate pair 'truncated'; Python's slower
    parser can tell.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        return f"{what} is not UTF-8: byte {problem.start} ({data[problem.start]:#04x})."
    try:
        json.loads(text, parse_constant=_no_constant)
    except _Constant as constant:
        return f"{what} is not JSON: {constant} is not a JSON number."
    except RecursionError:
        return f"{what} is nested too deeply."
    except ValueError as problem:
        return f"{what} is not JSON: {problem}."
    if "\\ud" in text.lower():
        return f"{what} has half of a surrogate pair (\\ud800 to \\udfff), which is no text."
    return f"{what} is not JSON: {error}."


class _Constant(Exception):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _Constant(name)

"""Whole answers as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

_encode = msgspec.json.Encoder().encode


def json_answer(data: Any) -> web.Response:
    return web.Response(body=_encode(data), content_type="application/json")

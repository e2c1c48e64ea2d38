"""GET /openapi.json: the routes and their types, described from the very objects that serve them.

Ranges that depend on the model or on the operator's limits are not in it; what breaks them is a 400
with the field in `param`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from cuengine.api.answers import json_answer
from cuengine.api.errors import ErrorBody
from cuengine.api.route import PRIVATE, Route
from cuengine.api.state import ServerState

_REF = "#/components/schemas/{name}"
_EVENTS: dict[str, Any] = {"text/event-stream": {}}  # OpenAPI 3.1 has no schema for events
_VARIABLE = re.compile(r"\{(\w+)(:[^}]*)?\}")


async def show(request: web.Request, state: ServerState) -> web.Response:
    return json_answer(state.openapi)


def describe(routes: Sequence[Route], root_path: str, *, with_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of `routes`. with_keys: PRIVATE paths need an API key."""
    types = [kind for r in routes for kind in (r.body, r.answer) if isinstance(kind, type)]
    types.append(ErrorBody)
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _VARIABLE.sub(r"{\1}", route.path)
        secured = with_keys and path.startswith(PRIVATE)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, secured)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "cuengine", "version": importlib.metadata.version("cuengine")},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _operation(route: Route, secured: bool) -> dict[str, Any]:
    name = f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_')}"
    operation: dict[str, Any] = {
        "operationId": name.rstrip("_"),
        "summary": route.summary,
        "responses": {
            "200": {"description": "It worked.", **_content(route)},
            "default": {"description": "It did not; why is in it.", **_json(ErrorBody)},
        },
    }
    if variables := _VARIABLE.findall(route.path):
        operation["parameters"] = [
            {"name": variable, "in": "path", "required": True, "schema": {"type": "string"}}
            for variable, _ in variables
        ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_json(route.body)}
    if secured:
        operation["security"] = [{"key": []}]
    return operation


def _content(route: Route) -> dict[str, Any]:
    match route.answer:
        case None:
            return {}
        case "text/event-stream":
            return {"content": _EVENTS}
        case str(media):
            return {"content": {media: {"schema": {"type": "string"}}}}
    shape = _json(route.answer)
    if route.generates:
        shape["content"] |= _EVENTS
    return shape


def _json(kind: type) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"content": {"application/json": {"schema": schema}}}

"""A client for tests of the server: JSON, streams and raw sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from cuengine.api.server import RunningServer


@dataclass
class Served:
    """A running server with a client of its own."""

    engine: Any
    server: RunningServer
    session: aiohttp.ClientSession

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.server.url + path, **kwargs) as answer:
            return answer.status, await _content(answer)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """`body` as JSON; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        url = self.server.url + path
        async with self.session.post(url, data=data, headers=headers, **kwargs) as answer:
            return answer.status, await _content(answer)

    async def error(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        status, content = await self.post(path, body, **kwargs)
        assert set(content) == {"error"}, content
        assert set(content["error"]) == {"message", "type", "param", "code"}
        return status, content["error"]

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, which must end with [DONE]; that one is left out."""
        status, text = await self.post(path, body | {"stream": True})
        assert status == 200, text
        events = [line for line in text.split("\n\n") if line and not line.startswith(":")]
        assert all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which `data` was sent."""
        reader, writer = await self.connect()
        writer.write(data)
        await writer.drain()
        return reader, writer


async def _content(answer: aiohttp.ClientResponse) -> Any:
    text = await answer.text()
    return json.loads(text) if answer.content_type == "application/json" else text


def raw_request(path: str, body: Any, **headers: str) -> bytes:
    """A POST as bytes for a raw socket."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


Serve = Callable[..., Awaitable[Served]]

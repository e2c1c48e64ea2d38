"""Spans as a collector gets them: their names, their numbers and whose children they are."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from fake_engine import FakeEngine
from serving import raw_request

from cuengine.api.server import ServerSettings, running_server
from cuengine.errors import ConfigError

pytest.importorskip("opentelemetry.sdk", reason="needs the package opentelemetry-sdk")
pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http",
    reason="needs the package opentelemetry-exporter-otlp-proto-http",
)

import aiohttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
COMPLETIONS = "/v1/completions"


@dataclass
class Collector:
    """An OTLP collector: what it was sent."""

    url: str = ""
    services: set[str] = field(default_factory=set)
    spans: list[Any] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")


def attributes(span: Any) -> dict[str, Any]:
    kinds = ((a.key, a.value, a.value.WhichOneof("value")) for a in span.attributes)
    return {key: getattr(value, kind) for key, value, kind in kinds}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    collector.url = f"http://{host}:{port}/v1/traces"
    yield collector
    await runner.cleanup()


async def spans_of(engine: FakeEngine, *requests: tuple[dict[str, Any], dict[str, str]]) -> Any:
    """The collector after these bodies with these headers; a server that stops sends all it has."""
    async with collecting() as collector:
        settings = ServerSettings(port=0, otlp_traces_endpoint=collector.url)
        async with running_server(engine, settings) as server, aiohttp.ClientSession() as session:
            for body, headers in requests:
                url = server.url + COMPLETIONS
                async with session.post(url, json=body, headers=headers) as answer:
                    await answer.read()
        return collector


async def test_a_span_has_vllms_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    body = {"prompt": "abc", "max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.9}
    collector = await spans_of(FakeEngine(text="Hello!", delay=0.01), (body, {}))
    assert collector.services == {"cuengine"}
    (span,) = collector.spans
    assert (span.name, span.kind) == ("llm_request", 2)  # SPAN_KIND_SERVER
    found = attributes(span)
    first, whole = (found.pop(f"gen_ai.latency.{name}") for name in ("time_to_first_token", "e2e"))
    assert 0.01 <= first < whole
    assert whole == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9)
    assert found.pop("gen_ai.request.id").startswith("cmpl-")
    assert found == {
        "gen_ai.response.model": "fake-model",
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
    }
    assert not span.parent_span_id


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_has_a_span_under_the_clients(stream: bool) -> None:
    body = {"prompt": ["a", "b"], "stream": stream}
    collector = await spans_of(FakeEngine(), (body, {"traceparent": PARENT}), ({"prompt": "c"}, {}))
    trace, parent = PARENT.split("-")[1:3]
    children = [span for span in collector.spans if span.parent_span_id.hex() == parent]
    assert len(children) == 2
    assert {span.trace_id.hex() for span in children} == {trace}
    (other,) = [span for span in collector.spans if span not in children]
    assert other.trace_id.hex() != trace


async def test_a_header_that_names_no_parent_is_ignored() -> None:
    collector = await spans_of(FakeEngine(), ({"prompt": "a"}, {"traceparent": "00-zz-zz-zz"}))
    (span,) = collector.spans
    assert not span.parent_span_id


async def test_a_failed_request_and_one_whose_client_left_are_marked() -> None:
    failing = FakeEngine(text="abc", error=ZeroDivisionError("x"), error_at=1)
    collector = await spans_of(failing, ({"prompt": "a"}, {}))
    engine = FakeEngine(text="x" * 900, delay=0.005)
    async with collecting() as other:
        settings = ServerSettings(port=0, otlp_traces_endpoint=other.url)
        async with running_server(engine, settings) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(raw_request(COMPLETIONS, {"prompt": "a", "max_tokens": 900}))
            await engine.until(lambda: len(engine.calls) == 1)
            writer.close()
            await engine.until(lambda: engine.calls[0].aborted)
    for span in (*collector.spans, *other.spans):
        assert span.status.code == 2  # STATUS_CODE_ERROR
    assert len(other.spans) == len(collector.spans) == 1


async def test_a_collector_that_is_not_there_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    settings = ServerSettings(port=0, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    async with (
        running_server(FakeEngine(), settings) as server,
        aiohttp.ClientSession() as session,
        session.post(server.url + COMPLETIONS, json={"prompt": "a"}) as answer,
    ):
        assert answer.status == 200


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuengine.api.tracing._PACKAGES", ("opentelemetry_not_there.sdk",))
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        ServerSettings(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(ConfigError, match="localhost:4317"):
        ServerSettings(otlp_traces_endpoint="localhost:4317")


def test_a_server_without_an_endpoint_imports_nothing_of_it() -> None:
    script = (
        "import sys, cuengine.api.server as s\n"
        "s.create_app\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True)

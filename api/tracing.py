"""OpenTelemetry: one span per prompt, with vLLM's names, sent to a collector by OTLP over HTTP.

Needs the extra `otel`; only a server that is given --otlp-traces-endpoint imports it. A client's
`traceparent` header makes its span the parent. The SDK's own variables hold (OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...).
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from cuengine.errors import ConfigError
from cuengine.extras import how_to_install
from cuengine.sampling_params import BeamSearchParams, RequestParams

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from cuengine.api.metrics import RequestTimer

_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError for what is no URL, and where the extra is not installed."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} is not a URL such as "
            "http://localhost:4318/v1/traces (OTLP over HTTP)"
        )
    if not all(map(_is_installed, _PACKAGES)):
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry, which is not installed: "
            f"{how_to_install('otel')}"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


class Tracing:
    """Spans of one server. They are sent from a thread of the SDK's, some at a time."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = os.environ.get("OTEL_SERVICE_NAME", "cuengine")
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("cuengine")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._model_name = model_name
        self._parent: ContextVar[Context | None] = ContextVar("parent", default=None)

    def note_parent(self, headers: Mapping[str, str]) -> None:
        """Spans of the running task belong to the one that its request's headers name, if any."""
        if "traceparent" in headers:
            self._parent.set(self._propagator.extract(headers))

    def record(
        self, request_id: str, prompt_tokens: int, params: RequestParams, timer: RequestTimer
    ) -> None:
        """The span of a prompt that is over, whether it finished or not."""
        seconds = timer.seconds
        end = time.time_ns()
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
            "gen_ai.usage.completion_tokens": timer.num_tokens,
            "gen_ai.latency.e2e": seconds,
        }
        if timer.seconds_to_first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = timer.seconds_to_first_token
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if isinstance(params, BeamSearchParams):
            attributes["gen_ai.request.n"] = params.beam_width if params.n is None else params.n
        else:
            attributes |= {
                "gen_ai.request.n": params.n,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
            }
        span = self._tracer.start_span(
            "llm_request",
            context=self._parent.get(),
            kind=self._kind,
            attributes=attributes,
            start_time=end - int(seconds * 1e9),
        )
        if not timer.finished:
            span.set_status(self._failed)
        span.end(end)

    def close(self) -> None:
        """Send what is left; takes as long as the collector does."""
        self._provider.shutdown()

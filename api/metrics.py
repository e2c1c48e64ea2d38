"""Prometheus metrics of one server: the engine's own figures, and latencies seen from here.

The engine's figures are read when somebody asks for them; only the histograms cost anything while
tokens flow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from cuengine.api.engine import ServingEngine, ServingStats
from cuengine.outputs import RequestDelta

_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0,
)  # fmt: skip
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0,
)  # fmt: skip

_SERVER_ERRORS = (500, 503, 504)

LAST_FIRST_TOKENS, LAST_GAPS = 100, 1000
"""Latencies that are kept as they are, for people who look at the moment."""

_GAUGES = (
    ("requests_running", "num_running", "Requests in the running batch"),
    ("requests_waiting", "num_waiting", "Requests waiting for room"),
    ("kv_blocks", "num_blocks", "KV-cache blocks in all"),
    ("kv_blocks_free", "num_free_blocks", "KV-cache blocks that no sequence holds"),
    ("kv_blocks_used", "num_used_blocks", "KV-cache blocks held by sequences"),
    ("kv_blocks_cached", "num_cached_blocks", "KV-cache blocks reusable by their prefix hash"),
)
_COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache"),
    ("preemptions", "num_preemptions", "Sequences preempted"),
    ("swaps", "num_swaps", "Preemptions that moved KV blocks to host memory"),
    ("engine_steps", "num_steps", "Steps of the engine"),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens computed"),
    ("generation_tokens", "generation_tokens", "Tokens generated"),
    ("spec_decode_num_drafts", "num_drafts", "Drafts of speculative decoding"),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Tokens in these drafts"),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Draft tokens that were right"),
)


class Metrics:
    """One registry per server, so that two in one process do not mix."""

    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self.last_first_tokens: deque[float] = deque(maxlen=LAST_FIRST_TOKENS)
        self.last_gaps: deque[float] = deque(maxlen=LAST_GAPS)
        self._registry.register(_EngineCollector(engine, model_name))
        self.first_token = Histogram(
            "cuengine_time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            "cuengine_inter_token_latency_seconds",
            "Between two tokens of one sample",
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.per_output_token = Histogram(
            "cuengine_time_per_output_token_seconds",
            "Mean time between the tokens of a finished request",
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.request = Histogram(
            "cuengine_e2e_request_latency_seconds",
            "From a request's arrival at the engine to its end",
            buckets=_REQUEST_BUCKETS,
            registry=self._registry,
        )
        self.finished = Counter(
            "cuengine_requests_finished",
            "Samples by how they ended",
            ["finished_reason"],
            registry=self._registry,
        )
        self.errors = Counter(
            "cuengine_request_errors",
            "Requests to the model that ended with an error, also within a stream, by its status",
            ["status"],
            registry=self._registry,
        )
        # From the start on: of a series that begins at 100, Prometheus sees no increase.
        for status in _SERVER_ERRORS:
            self.errors.labels(str(status))

    def render(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)


class RequestTimer:
    """Times one engine request from its submission, by the deltas it yields.

    num_tokens  of all its samples so far
    finished    it came to its end, and was not abandoned
    """

    __slots__ = ("_first", "_last", "_metrics", "_start", "finished", "num_tokens")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = perf_counter()
        self._first = 0.0
        self._last: dict[int, float] = {}
        self.num_tokens = 0
        self.finished = False

    def observe(self, delta: RequestDelta) -> None:
        now = perf_counter()
        metrics = self._metrics
        for sequence in delta.sequences:
            count = len(sequence.token_ids)
            if count:
                last = self._last.get(sequence.index)
                if last is not None:
                    gap = (now - last) / count
                    metrics.inter_token.observe(gap)
                    metrics.last_gaps.append(gap)
                self._last[sequence.index] = now
                self.num_tokens += count
            if sequence.finish_reason is not None:
                metrics.finished.labels(sequence.finish_reason).inc()
        if not self._first and self.num_tokens:
            self._first = now
            metrics.first_token.observe(now - self._start)
            metrics.last_first_tokens.append(now - self._start)
        if delta.finished:
            self.finished = True
            metrics.request.observe(now - self._start)
            # Samples of one request run side by side: its tokens per sample set its pace.
            per_sample = self.num_tokens / max(1, len(self._last))
            if per_sample > 1:
                metrics.per_output_token.observe((now - self._first) / (per_sample - 1))

    @property
    def seconds(self) -> float:
        """Since the submission."""
        return perf_counter() - self._start

    @property
    def seconds_to_first_token(self) -> float | None:
        return self._first - self._start if self._first else None

    def close(self) -> None:
        """The request is over; one that did not finish was abandoned."""
        if not self.finished:
            self._metrics.finished.labels("abort").inc()


class _EngineCollector(Collector):
    def __init__(self, engine: ServingEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        replicas = self._engine.replicas()
        named = ["replica"] if replicas is not None else []
        engines: list[tuple[list[str], ServingStats]] = [([], self._engine.stats())]
        if replicas is not None:
            engines = [([name], stats) for name, stats in sorted(replicas.items())]
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"cuengine_{name}", text, labels=named)
            for labels, stats in engines:
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        usage = GaugeMetricFamily(
            "cuengine_kv_cache_usage_ratio", "Share of the KV-cache blocks in use", labels=named
        )
        for labels, stats in engines:
            share = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
            usage.add_metric(labels, share)
        yield usage
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"cuengine_{name}", text, labels=named)
            for labels, stats in engines:
                counter.add_metric(labels, getattr(stats, field))
            yield counter
        positions = CounterMetricFamily(
            "cuengine_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by their place in the draft",
            labels=[*named, "position"],
        )
        for labels, stats in engines:
            for position, count in enumerate(stats.num_accepted_tokens_per_pos):
                positions.add_metric([*labels, str(position)], count)
        yield positions
        counts = self._engine.replica_counts()
        if counts is not None:
            ready, wanted = counts
            yield GaugeMetricFamily(
                "cuengine_replicas", "Engines that take requests now", value=ready
            )
            yield GaugeMetricFamily(
                "cuengine_replicas_wanted", "Engines that there are to be", value=wanted
            )
        up = not (self._engine.restarting or self._engine.failed)
        yield GaugeMetricFamily(
            "cuengine_engine_up", "1: the engine runs; 0: it is started again, or failed", value=up
        )
        yield CounterMetricFamily(
            "cuengine_engine_restarts",
            "Times that the engine died and was started again",
            value=self._engine.num_restarts,
        )
        yield InfoMetricFamily(
            "cuengine_model", "The model served", value={"model_name": self._model_name}
        )

"""Alerts, dashboard and the autoscaler's metrics ask for what a server really exports."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from fake_engine import FakeEngine
from kustomize import Resource, build
from prometheus_client.parser import text_string_to_metric_families
from promql import COUNTER_FUNCTIONS, TARGET_LABELS, result_labels, selectors

from cuengine.api.server import ServerSettings, running_server

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
FROM_PROMETHEUS = {"up": frozenset[str]()}
"""Series that Prometheus itself has of every target."""

GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h"}


@dataclass(frozen=True, slots=True)
class Exported:
    """labels   of each series by its full name, as cuengine_x_bucket
    counters names of series that only grow
    """

    labels: dict[str, frozenset[str]]
    counters: frozenset[str]


async def _metrics_page() -> str:
    """Of a server that has answered one request and refused another."""
    async with (
        running_server(FakeEngine(text="abc"), ServerSettings(port=0)) as server,
        aiohttp.ClientSession() as session,
    ):
        for body in ({"prompt": "a"}, {"prompt": 5}):
            await (await session.post(f"{server.url}/v1/completions", json=body)).read()
        return await (await session.get(f"{server.url}/metrics")).text()


@pytest.fixture(scope="module")
def exported() -> Exported:
    text = asyncio.run(_metrics_page())
    labels: dict[str, frozenset[str]] = dict(FROM_PROMETHEUS)
    counters = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            known = labels.get(sample.name, frozenset())
            labels[sample.name] = known | sample.labels.keys()
            if family.type == "counter" or sample.name.endswith(("_bucket", "_count", "_sum")):
                counters.add(sample.name)
    assert len(counters) > 10
    return Exported(labels, frozenset(counters))


def check(expression: str, exported: Exported) -> None:
    """Every series exists, with the labels asked for, and is asked what fits its kind."""
    found = selectors(expression)
    assert found, expression
    for selector in found:
        assert selector.name in exported.labels, f"{selector.name}: not exported; {expression}"
        known = exported.labels[selector.name] | TARGET_LABELS
        assert selector.labels | selector.grouped <= known, (selector, expression)
        is_counter = selector.name in exported.counters
        grows = bool(set(selector.functions) & set(COUNTER_FUNCTIONS))
        assert is_counter == grows, f"{selector.name} in {selector.functions}: {expression}"
        if "histogram_quantile" in selector.functions:
            assert selector.name.endswith("_bucket"), expression
            assert "le" in selector.grouped, expression


@cache
def _one(folder: str, kind: str) -> Resource:
    [found] = [each for each in build(KUBERNETES / folder) if each["kind"] == kind]
    return found


def _alerts() -> list[dict[str, Any]]:
    rule = _one("monitoring", "PrometheusRule")
    return [alert for group in rule["spec"]["groups"] for alert in group["rules"]]


@cache
def _dashboard() -> dict[str, Any]:
    [text] = _one("monitoring", "ConfigMap")["data"].values()
    dashboard: dict[str, Any] = json.loads(text)
    return dashboard


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


def _expression(text: str) -> str:
    """With Grafana's variables replaced by what they may stand for."""
    for name, value in GRAFANA_VARIABLES.items():
        text = text.replace(name, value)
    names = "|".join(variable["name"] for variable in _dashboard()["templating"]["list"])
    text = re.sub(rf"\$({names})\b", "x", text)
    assert "$" not in text, f"no such variable: {text}"
    return text


def _queries() -> Iterator[tuple[str, str]]:
    """Legend and expression of all that the dashboard asks Prometheus for."""
    for panel in _panels():
        for target in panel["targets"]:
            yield target.get("legendFormat", ""), _expression(target["expr"])
    for annotation in _dashboard()["annotations"]["list"]:
        yield annotation["textFormat"], _expression(annotation["expr"])


def _adapter_rules() -> list[dict[str, Any]]:
    values = yaml.safe_load((KUBERNETES / "monitoring/prometheus_adapter_values.yaml").read_text())
    rules: list[dict[str, Any]] = values["rules"]["custom"]
    return rules


# --- the check itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("cuengine_requests_wating", "not exported"),
        ("cuengine_preemptions", "not exported"),
        ("rate(cuengine_time_to_first_token_seconds[5m])", "not exported"),
        ('cuengine_requests_waiting{model="x"}', "model"),
        ("sum by (model) (cuengine_requests_waiting)", "model"),
        ('rate(cuengine_request_errors_total{code="500"}[5m])', "code"),
        ("cuengine_preemptions_total > 0", "cuengine_preemptions_total"),
        ("rate(cuengine_requests_waiting[5m])", "cuengine_requests_waiting"),
        (
            "histogram_quantile(0.9, sum(rate(cuengine_time_to_first_token_seconds_bucket[5m])))",
            "le",
        ),
        (
            "histogram_quantile(0.9, rate(cuengine_time_to_first_token_seconds_sum[5m]))",
            "histogram_quantile",
        ),
    ],
)
def test_a_query_that_would_find_nothing_is_found(
    exported: Exported, expression: str, problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        check(expression, exported)


def test_sides_that_never_have_the_same_labels_are_found() -> None:
    labels: dict[str, frozenset[str]] = {"a": frozenset(), "b": frozenset({"status"})}
    for expression in ("a / b", "sum by (pod) (a) and a", "sum(a) / sum by (pod) (a)"):
        with pytest.raises(AssertionError, match="never match"):
            result_labels(expression, labels)
    assert result_labels("sum by (pod, status) (rate(b[5m])) > 1", labels) == {"pod", "status"}


# --- alerts -------------------------------------------------------------------------------------


def test_alerts_ask_for_what_is_exported(exported: Exported) -> None:
    for alert in _alerts():
        check(alert["expr"], exported)


def test_alerts_name_only_labels_that_their_results_have(exported: Exported) -> None:
    for alert in _alerts():
        text = " ".join(alert["annotations"].values())
        named = set(re.findall(r"\$labels\.(\w+)", text))
        assert named <= result_labels(alert["expr"], exported.labels), alert["alert"]
        assert alert["labels"]["severity"] in ("warning", "critical")


def test_alerts_cover_what_an_operator_has_to_know(exported: Exported) -> None:
    asked = {selector.name for alert in _alerts() for selector in selectors(alert["expr"])}
    assert asked >= {
        "up", "cuengine_engine_up", "cuengine_engine_restarts_total", "cuengine_requests_waiting",
        "cuengine_time_to_first_token_seconds_bucket", "cuengine_kv_cache_usage_ratio",
        "cuengine_preemptions_total", "cuengine_request_errors_total",
    }  # fmt: skip
    names = [alert["alert"] for alert in _alerts()]
    assert len(set(names)) == len(names)


def test_alerts_select_the_job_that_the_monitor_makes() -> None:
    jobs = {job for alert in _alerts() for job in re.findall(r'job="(.*?)"', alert["expr"])}
    assert jobs == {_one("base", "Service")["metadata"]["labels"]["app.kubernetes.io/name"]}


# --- the dashboard ------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_is_exported(exported: Exported) -> None:
    for _, expression in _queries():
        check(expression, exported)


def test_its_legends_name_labels_that_the_results_have(exported: Exported) -> None:
    for legend, expression in _queries():
        named = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert named <= result_labels(expression, exported.labels), (legend, expression)


def test_its_variables_are_read_from_a_series_that_is_exported(exported: Exported) -> None:
    dashboard = _dashboard()
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    queries = [each["definition"] for each in variables.values() if each["type"] == "query"]
    assert len(queries) == 2
    for query in queries:
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert selectors(_expression(series))[0].name in exported.labels
        assert label in TARGET_LABELS
    assert variables["datasource"]["type"] == "datasource"


def test_it_shows_what_an_operator_looks_for(exported: Exported) -> None:
    asked = {selector.name for _, query in _queries() for selector in selectors(query)}
    assert asked >= {
        "cuengine_requests_running", "cuengine_requests_waiting",
        "cuengine_time_to_first_token_seconds_bucket",
        "cuengine_time_per_output_token_seconds_bucket", "cuengine_generation_tokens_total",
        "cuengine_kv_cache_usage_ratio", "cuengine_preemptions_total",
        "cuengine_prefix_cache_hits_total", "cuengine_engine_restarts_total",
        "cuengine_request_errors_total",
    }  # fmt: skip


def test_its_panels_are_laid_out_side_by_side_and_use_the_chosen_prometheus() -> None:
    dashboard = _dashboard()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, panel["title"]
        cells |= mine
    for panel in _panels():
        assert panel["title"]
        assert panel["description"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_grafana_finds_it_by_its_label() -> None:
    assert _one("monitoring", "ConfigMap")["metadata"]["labels"]["grafana_dashboard"] == "1"


# --- the autoscaler -----------------------------------------------------------------------------


def test_the_adapter_makes_what_the_autoscaler_asks_for(exported: Exported) -> None:
    made = {}
    for rule in _adapter_rules():
        [pattern] = re.findall(r'__name__=~"(.*?)"', rule["seriesQuery"])
        labels = selectors(rule["seriesQuery"])[0].labels - {"__name__"}
        assert labels == {"namespace", "pod"} == rule["resources"]["overrides"].keys()
        assert {each["resource"] for each in rule["resources"]["overrides"].values()} == labels
        for name in exported.labels:
            if re.fullmatch(pattern, name):
                made[name] = rule["metricsQuery"]
    scaler = _one("base", "HorizontalPodAutoscaler")
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert asked == made.keys() == {"cuengine_requests_waiting", "cuengine_requests_running"}
    for name, query in made.items():
        for placeholder, value in (
            ("<<.Series>>", name),
            ("<<.LabelMatchers>>", 'namespace="x",pod=~"y"'),
            ("<<.GroupBy>>", "pod"),
        ):
            assert placeholder in query
            query = query.replace(placeholder, value)  # noqa: PLW2901
        check(query, exported)
        assert result_labels(query, exported.labels) == {"pod"}

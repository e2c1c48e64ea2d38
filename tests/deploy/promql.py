"""What a PromQL expression reads, and with which labels its results come.

Both are found in the tree that promql_parser makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql

TARGET_LABELS = frozenset(
    {"job", "instance", "namespace", "service", "endpoint", "pod", "container"}
)
"""What Prometheus adds to every series that it scrapes through a ServiceMonitor."""

COUNTER_FUNCTIONS = ("rate", "increase", "irate")
"""What may be asked of counters; what else there is goes wrong when one starts anew."""


@dataclass(frozen=True, slots=True)
class Selector:
    """name       of the metric, with its suffix
    labels     that it is selected by
    functions  that it is an argument of, the innermost last
    grouped    labels of all aggregations around it
    """

    name: str
    labels: frozenset[str]
    functions: tuple[str, ...]
    grouped: frozenset[str]


def selectors(expression: str) -> list[Selector]:
    """Raises ValueError for what is no PromQL."""
    return list(_selectors(promql.parse(expression), (), frozenset()))


def _selectors(
    node: Any, functions: tuple[str, ...], grouped: frozenset[str]
) -> Iterator[Selector]:
    match node:
        case promql.VectorSelector():
            labels = frozenset(matcher.name for matcher in node.matchers.matchers)
            yield Selector(str(node.name), labels, functions, grouped)
        case promql.MatrixSelector():
            yield from _selectors(node.vector_selector, functions, grouped)
        case promql.Call():
            for argument in node.args:
                yield from _selectors(argument, (*functions, node.func.name), grouped)
        case promql.AggregateExpr():
            labels = frozenset(node.modifier.labels if node.modifier else ())
            yield from _selectors(node.expr, functions, grouped | labels)
        case promql.BinaryExpr():
            yield from _selectors(node.lhs, functions, grouped)
            yield from _selectors(node.rhs, functions, grouped)
        case promql.ParenExpr():
            yield from _selectors(node.expr, functions, grouped)
        case promql.NumberLiteral():
            pass
        case _:
            raise NotImplementedError(f"{type(node).__name__}: {node.prettify()}")


def result_labels(expression: str, metric_labels: dict[str, frozenset[str]]) -> frozenset[str]:
    """Labels of the results; metric_labels: what each metric has besides its target's."""
    return _result_labels(promql.parse(expression), metric_labels)


def _result_labels(node: Any, metric_labels: dict[str, frozenset[str]]) -> frozenset[str]:
    match node:
        case promql.VectorSelector():
            return TARGET_LABELS | metric_labels[str(node.name)]
        case promql.MatrixSelector():
            return _result_labels(node.vector_selector, metric_labels)
        case promql.Call() if node.func.name == "absent":
            return frozenset()  # at least: those that it is asked for by equality
        case promql.Call():
            inner = _result_labels(node.args[-1], metric_labels)
            return inner - {"le"} if node.func.name == "histogram_quantile" else inner
        case promql.AggregateExpr():
            if node.modifier is None:
                return frozenset()
            assert node.modifier.type == promql.AggModifierType.By
            return frozenset(node.modifier.labels) & _result_labels(node.expr, metric_labels)
        case promql.BinaryExpr():
            left = _result_labels(node.lhs, metric_labels)
            if isinstance(node.rhs, promql.NumberLiteral):
                return left
            # Without on() and ignoring(), both sides have to agree in all labels.
            right = _result_labels(node.rhs, metric_labels)
            assert node.modifier is None or node.modifier.matching is None
            assert left == right, f"never match: {sorted(left)} and {sorted(right)}"
            return left
        case promql.ParenExpr():
            return _result_labels(node.expr, metric_labels)
    raise NotImplementedError(f"{type(node).__name__}: {node.prettify()}")

"""Reads the Grafana dashboard: its panels, and the series that its queries use."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser

FOLDER = Path(__file__).parents[3] / "verl_mixed" / "views" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "mixed_training.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]

_BUILT_IN = {"__rate_interval": "1m", "__all": ".*"}
"""Variables that Grafana defines, each with a value."""

_LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")
_USES = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True, slots=True)
class Use:
    """One series that a panel or a variable uses, with every label in the query."""

    where: str
    name: str
    labels: frozenset[str]


def variables() -> set[str]:
    """Variables that the dashboard defines."""
    return {variable["name"] for variable in DASHBOARD["templating"]["list"]}


def variables_used() -> set[str]:
    """Variables that panels and variables use."""
    used = _USES.findall(json.dumps([PANELS, DASHBOARD["templating"]]))
    return set(used) - _BUILT_IN.keys()


def uses() -> Iterator[Use]:
    """Every use of a series.

    Raises:
        ValueError: a query is not PromQL.
    """
    for panel in PANELS:
        for target in panel.get("targets", ()):
            query = _USES.sub(lambda match: _BUILT_IN.get(match[1], ".*"), target["expr"])
            legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
            yield from _uses(panel["title"], promql_parser.parse(query), frozenset(legend))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert found is not None, variable["query"]
            query = promql_parser.parse(_USES.sub(".*", found["series"]))
            yield from _uses(f"variable {variable['name']}", query, frozenset({found["label"]}))


def _uses(where: str, query: Any, labels: frozenset[str]) -> Iterator[Use]:
    """The series of a query, or of a part of it, whose result must have these labels."""
    if isinstance(query, promql_parser.VectorSelector):
        named = {matcher.name for matcher in query.matchers.matchers}
        yield Use(where, query.name or "", labels | named)
    elif isinstance(query, promql_parser.AggregateExpr):
        grouping = query.modifier.labels if query.modifier else []
        lost = labels - set(grouping)
        assert not lost, f"{where}: the legend shows {lost}, which the query sums away"
        yield from _uses(where, query.expr, labels | set(grouping))
    elif isinstance(query, promql_parser.BinaryExpr):
        for side in (query.lhs, query.rhs):
            yield from _uses(where, side, labels)
    elif isinstance(query, promql_parser.Call):
        for argument in query.args:
            yield from _uses(where, argument, labels)
    elif isinstance(query, promql_parser.MatrixSelector):
        yield from _uses(where, query.vector_selector, labels)
    elif isinstance(query, promql_parser.ParenExpr):
        yield from _uses(where, query.expr, labels)
    else:
        assert isinstance(query, promql_parser.NumberLiteral), query

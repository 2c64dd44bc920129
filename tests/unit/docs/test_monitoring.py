"""docs/operations/monitoring.md, the alert rules and the dashboard name the metrics of the operator, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from finetune_operator import metrics
from support.documents import PAGES

Json = dict[str, Any]
MONITORING = Path(__file__).parents[3] / "charts" / "finetune-operator" / "monitoring"
PAGE = next(page for page in PAGES if page.name == "docs/operations/monitoring.md")
RULES: Json = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))
ALERTS: list[Json] = [rule for group in RULES["groups"] for rule in group["rules"]]
DASHBOARD: Json = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
PANELS: list[Json] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
METRICS = {
    f"{family.name}_total" if family.type == "counter" else family.name: item
    for item in vars(metrics).values()
    if isinstance(item, MetricWrapperBase)
    for family in item.describe()
}
SERIES = {
    f"{name}{suffix}"
    for name, item in METRICS.items()
    for suffix in (("_bucket", "_count", "_sum") if isinstance(item, Histogram) else ("",))
}
# Series of the Python client and of the kubelet.
FOREIGN = {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "kubelet_volume_stats_available_bytes",
    "kubelet_volume_stats_capacity_bytes",
}
EXPRESSIONS = {
    **{rule["alert"]: str(rule["expr"]) for rule in ALERTS},
    **{panel["title"]: " ".join(target["expr"] for target in panel["targets"]) for panel in PANELS},
    "the variable": " ".join(
        item["query"]["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"
    ),
}


def rows(heading: str) -> list[list[str]]:
    """The rows of the table of a chapter, without their head."""
    chapter = PAGE.prose.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in chapter.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def find_series(expression: str) -> set[str]:
    """The series that an expression reads: words with an underscore that are no label, variable, grouping or function."""
    without_labels = re.sub(r"\{(?!__name__)[^}]*\}|\b(by|on) \([^)]*\)|\[[^]]*\]|\$\w+", "", expression)
    patterns = re.findall(r'__name__=~"([^"]+)"', without_labels)
    words = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", re.sub(r"\{[^}]*\}", "", without_labels))
    functions = {"histogram_quantile", "min_over_time", "label_values", "job_namespace"}
    named = {series for series in SERIES for pattern in patterns if re.fullmatch(pattern, series)}
    return named | ({*words} - functions)


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_alerts_and_panels_read_series_that_exist(expression: str) -> None:
    series = find_series(expression)
    assert series
    assert series - SERIES <= FOREIGN


def test_series_that_do_not_exist_are_noticed() -> None:
    assert find_series('rate(finetune_operator_passes_total{kind="a_b"}[5m])') == {
        "finetune_operator_passes_total"
    }


def test_every_metric_is_documented_with_its_labels_and_no_other() -> None:
    documented = {
        name.strip("`"): labels.replace("`", "").split(", ") if labels else []
        for name, labels, _ in rows("Metrics")
    }
    assert documented == {name: [*item._labelnames] for name, item in METRICS.items()}


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set().union(*(find_series(EXPRESSIONS[panel["title"]]) for panel in PANELS))
    names = {re.sub("_(bucket|count|sum)$", "", series) for series in shown}
    assert {*METRICS} - names == set()


def test_every_alert_is_documented_with_its_severity_and_an_anchor() -> None:
    documented = [(first, severity) for first, severity, _, _ in rows("Alerts")]
    assert documented == [
        (f'<a id="{rule["alert"]}"></a>{rule["alert"]}', rule["labels"]["severity"]) for rule in ALERTS
    ]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_explain_themselves(rule: Json) -> None:
    assert rule["alert"].startswith("FineTune")
    assert rule["labels"].keys() == {"severity"}
    assert rule["annotations"].keys() == {"summary", "description"}
    assert not rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")


def test_panels_explain_themselves_and_fill_their_rows() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len({*titles}) == len(titles)
    assert [panel["title"] for panel in PANELS if not panel["description"].endswith(".")] == []
    widths: dict[int, int] = {}
    for panel in DASHBOARD["panels"]:
        where = panel["gridPos"]
        assert widths.get(where["y"], 0) == where["x"]
        widths[where["y"]] = where["x"] + where["w"]
    assert {*widths.values()} == {24}


def test_panels_use_the_data_source_that_the_reader_chooses() -> None:
    sources = {json.dumps(item["datasource"]) for panel in PANELS for item in (panel, *panel["targets"])}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}

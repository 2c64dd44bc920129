"""The alert rules and the dashboard in the chart."""

from __future__ import annotations

import json
from typing import Any

import yaml

from integration.chart import CHART
from integration.chart_without_crds import objects

Json = dict[str, Any]
RULES: Json = yaml.safe_load((CHART / "monitoring" / "rules.yaml").read_text(encoding="utf-8"))
PAGE = "https://docs.example.com/finetune/operations/monitoring.html"


def test_neither_is_there_unless_asked() -> None:
    assert {kind for kind, _ in objects()}.isdisjoint({"PrometheusRule"})
    assert ("ConfigMap", "finetune-operator-dashboard") not in objects()


def test_the_rules_are_those_of_the_file() -> None:
    rule = objects(
        "metrics.prometheusRule.enabled=true",
        "metrics.prometheusRule.namespace=monitoring",
        "metrics.prometheusRule.labels.release=prometheus",
    )["PrometheusRule", "finetune-operator"]
    meta = rule["metadata"]
    assert (meta["namespace"], meta["labels"]["release"]) == ("monitoring", "prometheus")
    assert rule["spec"] == RULES


def test_each_alert_links_to_its_row_in_the_documentation() -> None:
    for url in ("https://docs.example.com/finetune", "https://docs.example.com/finetune/"):
        chart_objects = objects(
            "metrics.prometheusRule.enabled=true", f"metrics.prometheusRule.docsUrl={url}"
        )
        (group,) = chart_objects["PrometheusRule", "finetune-operator"]["spec"]["groups"]
        links = {item["alert"]: item["annotations"]["runbook_url"] for item in group["rules"]}
        assert links == {item["alert"]: f"{PAGE}#{item['alert']}" for item in RULES["groups"][0]["rules"]}


def test_the_dashboard_has_the_label_that_the_sidecar_of_grafana_looks_for() -> None:
    config = objects(
        "metrics.grafanaDashboard.enabled=true",
        "metrics.grafanaDashboard.namespace=monitoring",
        "metrics.grafanaDashboard.labels.team=ml",
        "metrics.grafanaDashboard.annotations.grafana_folder=ML",
    )["ConfigMap", "finetune-operator-dashboard"]
    meta = config["metadata"]
    assert (meta["namespace"], meta["annotations"]) == ("monitoring", {"grafana_folder": "ML"})
    assert (meta["labels"]["grafana_dashboard"], meta["labels"]["team"]) == ("1", "ml")
    file = CHART / "monitoring" / "dashboard.json"
    assert json.loads(config["data"]["finetune-operator.json"]) == json.loads(
        file.read_text(encoding="utf-8")
    )

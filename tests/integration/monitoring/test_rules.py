"""The alert rules, as Prometheus' own tool checks and evaluates them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from cluster import binaries
from integration.chart import CHART

RULES = CHART / "monitoring" / "rules.yaml"
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
P = "finetune_operator_"


def promtool(*arguments: str) -> str:
    """Run promtool, which must succeed; its output."""
    command = [str(binaries.path("promtool")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid() -> None:
    assert f"{len(ALERTS)} rules found" in promtool(
        "check", "rules", "--lint=all", "--lint-fatal", str(RULES)
    )


@dataclass
class Case:
    """Series with a sample a minute, and what an alert says of them after a time.

    Attributes:
        series: the samples in the notation of promtool, by the series.
        minutes: the first minute in which the alert fires; if it does not fire, a later minute.
        labels: the labels of the alert besides its severity; None if it does not fire.
        description: its description.
    """

    series: dict[str, str]
    minutes: int
    labels: dict[str, str] | None = None
    description: str = ""
    severity: str = field(default="warning")


def reached(server: str, good: str, bad: str) -> dict[str, str]:
    """The requests to a server, with and without a response."""
    return {
        f'{P}requests_total{{server="{server}", code="200"}}': good,
        f'{P}requests_total{{server="{server}", code="none"}}': bad,
    }


def passes(errors: str, reason: str) -> dict[str, str]:
    """60 passes a minute, and those that failed."""
    return {
        f'{P}reconcile_seconds_count{{kind="FineTuneJob"}}': "0+60x60",
        f'{P}reconcile_errors_total{{kind="FineTuneJob", reason="{reason}"}}': errors,
    }


def goodput(useful: str, finished: str) -> dict[str, str]:
    return {
        f'{P}useful_pod_seconds_total{{job_namespace="team"}}': useful,
        f'{P}finished_pod_seconds_total{{job_namespace="team"}}': finished,
    }


def disk(free: int, claim: str = "finetune-operator-mlflow") -> dict[str, str]:
    return {
        f'kubelet_volume_stats_available_bytes{{persistentvolumeclaim="{claim}"}}': f"{free}x30",
        f'kubelet_volume_stats_capacity_bytes{{persistentvolumeclaim="{claim}"}}': "100x30",
    }


CASES: dict[str, dict[str, Case]] = {
    "FineTuneOperatorDown": {
        "no operator": Case(
            {"up": "1x30"},
            5,
            {},
            "No operator has been scraped for 5 minutes. Pods that run continue, but no job or promotion makes progress.",
            "critical",
        ),
        "an operator": Case({f'{P}queue_depth{{kind="FineTuneJob"}}': "0x30"}, 30),
        "an operator that restarts": Case({f'{P}queue_depth{{kind="FineTuneJob"}}': "0x5 _x2 0x20"}, 10),
    },
    "FineTuneOperatorNoLeader": {
        "two standbys": Case(
            {f'{P}is_leader{{pod="{pod}"}}': "0x30" for pod in "ab"},
            1,
            {},
            "0 replicas of the operator lead. If none does, pods that run continue, but no job or promotion makes progress.",
            "critical",
        ),
        "another leader after a moment": Case(
            {f'{P}is_leader{{pod="a"}}': "1x3 0x30", f'{P}is_leader{{pod="b"}}': "0x4 1x30"}, 10
        ),
    },
    "FineTuneTenancyOutdated": {
        "of one replica": Case(
            {f'{P}tenancy_outdated{{pod="a"}}': "0x30", f'{P}tenancy_outdated{{pod="b"}}': "0 0 1x30"},
            4,
            {},
            "The file with the tenancy has a mistake or cannot be read. The rules that were read before apply, and an operator that starts now "
            "ends.",
            "critical",
        ),
        "a mistake that is corrected": Case({f"{P}tenancy_outdated": "0 1 0x30"}, 10),
    },
    "FineTuneQueueOld": {
        "a slow server": Case(
            {f'{P}queue_oldest_seconds{{kind="ModelPromotion"}}': "90x30"},
            5,
            {"kind": "ModelPromotion"},
            "A ModelPromotion has waited 1m 30s for a worker. The operator does not keep up, or a server that it asks is slow.",
        ),
        "a burst": Case({f'{P}queue_oldest_seconds{{kind="ModelPromotion"}}': "90x3 0x20"}, 6),
    },
    "FineTuneInternalError": {
        "one": Case(
            {f'{P}reconcile_errors_total{{kind="FineTuneJob", reason="InternalError"}}': "0 0 1x20"},
            2,
            {"kind": "FineTuneJob"},
            "The operator cannot reconcile a FineTuneJob because of an error of its own, and retries. Its log has the traceback.",
            "critical",
        ),
        "long ago": Case(
            {f'{P}reconcile_errors_total{{kind="FineTuneJob", reason="InternalError"}}': "0 0 1x40"}, 30
        ),
        "an error of another reason": Case(passes("0+10x40", "Forbidden"), 10),
    },
    "FineTunePassesFailing": {
        "a right is missing": Case(
            passes("0+30x60", "Forbidden"),
            16,
            {"kind": "FineTuneJob"},
            "50% of the passes over FineTuneJobs have failed for 15 minutes. The label reason of finetune_operator_reconcile_errors_total says why.",
        ),
        "a few": Case(passes("0+6x60", "Forbidden"), 40),
        "other clients write too": Case(passes("0+30x60", "Conflict"), 40),
    },
    "FineTuneServerUnreachable": {
        "MLflow is away": Case(
            reached("MLflow", "0x60", "0+4x60"),
            11,
            {"server": "MLflow"},
            "100% of the requests to MLflow had no usable response for 10 minutes. Training continues; jobs cannot start, register or be promoted.",
        ),
        "one MLflow of several is away": Case(reached("MLflow", "0+60x60", "0+4x60"), 25),
        "MLflow was away for a minute": Case(reached("MLflow", "0+60x60", "0x5 0+60x1 60x60"), 25),
        "the API server is away": Case(reached("Kubernetes", "0x60", "0+4x60"), 25),
    },
    "FineTuneApiServerFailing": {
        "one of ten requests": Case(
            reached("Kubernetes", "0+9x60", "0+1x60"),
            11,
            {},
            "10% of the requests of the operator to the API server had no usable response for 10 minutes.",
        ),
        "one of a hundred": Case(reached("Kubernetes", "0+99x60", "0+1x60"), 25),
        "not found is an answer": Case(
            {
                f'{P}requests_total{{server="Kubernetes", code="200"}}': "0+1x60",
                f'{P}requests_total{{server="Kubernetes", code="404"}}': "0+9x60",
            },
            25,
        ),
    },
    "FineTuneRestartLimitReached": {
        "two jobs": Case(
            {f'{P}jobs_at_restart_limit{{job_namespace="team"}}': "0 0 2x20"},
            3,
            {"job_namespace": "team"},
            "Jobs in namespace team that have reached runPolicy.maxRestarts: 2. Their next failure is final.",
        ),
        "none": Case({f'{P}jobs_at_restart_limit{{job_namespace="team"}}': "0x20"}, 5),
    },
    "FineTuneGpusIdle": {
        "a gang without a node for its last pod": Case(
            {f'{P}idle_gpus_oldest_seconds{{job_namespace="team"}}': "0+60x60"},
            36,
            {"job_namespace": "team"},
            "A job in namespace team has held GPUs for 36m 0s in a phase that does not use them. Some of its pods may have no node, or cannot start.",
        ),
        "jobs that start": Case(
            {f'{P}idle_gpus_oldest_seconds{{job_namespace="team"}}': "0+60x10 0+60x10"}, 21
        ),
    },
    "FineTuneJobStuck": {
        "starting": Case(
            {f'{P}job_phase_oldest_seconds{{phase="Starting"}}': "0+60x90"},
            66,
            {"phase": "Starting"},
            "A job has been Starting for 1h 6m 0s.",
        ),
        "training": Case({f'{P}job_phase_oldest_seconds{{phase="Training"}}': "0+60x90"}, 70),
    },
    "FineTuneJobFailed": {
        "the second one": Case(
            {f'{P}jobs{{phase="Failed"}}': "1x10 2x100"},
            11,
            {},
            "Jobs that have failed within an hour: 1.",
            "info",
        ),
        "long ago": Case({f'{P}jobs{{phase="Failed"}}': "1x10 2x100"}, 90),
        "an operator that restarts": Case({f'{P}jobs{{phase="Failed"}}': "2x10 _x2 2x100"}, 20),
    },
    "FineTuneGoodputLow": {
        "much is lost": Case(
            goodput("0 0 40000x60", "0 0 100000x60"),
            17,
            {"job_namespace": "team"},
            "40% of the pod time of the jobs that finished within a day in namespace team went into steps whose result was kept.",
            "info",
        ),
        "little is lost": Case(goodput("0 0 90000x60", "0 0 100000x60"), 20),
        "little was used": Case(goodput("0 0 40x60", "0 0 100x60"), 20),
    },
    "FineTunePromotionsBlocked": {
        "refused": Case(
            {f'{P}promotions{{phase="Refused"}}': "0 0 3x90"},
            62,
            {"phase": "Refused"},
            "Promotions that have been Refused for an hour: 3.",
        ),
        "pending": Case({f'{P}promotions{{phase="Pending"}}': "0 0 3x90"}, 70),
    },
    "FineTuneSchedulesNotReady": {
        "a template that is wrong": Case(
            {f'{P}schedules_ready{{status="False", reason="JobTemplateInvalid"}}': "1x30"},
            15,
            {"reason": "JobTemplateInvalid"},
            "Schedules that have created no jobs for 15 minutes, with the reason JobTemplateInvalid: 1.",
        ),
        "ready": Case({f'{P}schedules_ready{{status="True", reason="JobCreated"}}': "1x30"}, 20),
    },
    "FineTuneAccessMissing": {
        "of a job": Case(
            {f'{P}jobs_ready{{status="False", reason="MlflowForbidden"}}': "2x30"},
            15,
            {"reason": "MlflowForbidden"},
            "Jobs or promotions with the reason MlflowForbidden for 15 minutes: 2.",
        ),
        "of a promotion that is ready": Case(
            {f'{P}promotions_ready{{status="True", reason="MoveRefused"}}': "1x30"},
            15,
            {"reason": "MoveRefused"},
            "Jobs or promotions with the reason MoveRefused for 15 minutes: 1.",
        ),
        "a gate": Case({f'{P}promotions_ready{{status="False", reason="GateFailed"}}': "1x30"}, 20),
    },
    "FineTuneMlflowDiskFull": {
        "of this chart": Case(
            disk(5),
            5,
            {"persistentvolumeclaim": "finetune-operator-mlflow"},
            "5% of the volume finetune-operator-mlflow is free. The MLflow server of the chart stops when it is full.",
            "critical",
        ),
        "of a release with another name": Case(
            disk(5, "ml-finetune-operator-mlflow"),
            5,
            {"persistentvolumeclaim": "ml-finetune-operator-mlflow"},
            "5% of the volume ml-finetune-operator-mlflow is free. The MLflow server of the chart stops when it is full.",
            "critical",
        ),
        "of another MLflow": Case(disk(5, "mlflow"), 10),
        "half full": Case(disk(50), 10),
    },
}


def test_every_alert_fires_in_a_case_and_stays_quiet_in_another() -> None:
    tested = {alert: {case.labels is None for case in cases.values()} for alert, cases in CASES.items()}
    assert tested == {alert: {True, False} for alert in ALERTS}


@pytest.mark.parametrize(
    ("alert", "case"),
    [(alert, case) for alert, cases in CASES.items() for case in cases.values()],
    ids=[f"{alert}: {name}" for alert, cases in CASES.items() for name in cases],
)
def test_an_alert_fires_when_it_should(alert: str, case: Case, tmp_path: Path) -> None:
    rule = next(
        rule
        for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if rule["alert"] == alert
    )
    expected = {
        "exp_labels": {**(case.labels or {}), "severity": case.severity},
        "exp_annotations": {"description": case.description},
    }
    firing = [] if case.labels is None else [expected]
    del rule["annotations"]["summary"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": [rule]}]}))
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.minutes - 1}m", "alertname": alert, "exp_alerts": []},
            {"eval_time": f"{case.minutes}m", "alertname": alert, "exp_alerts": firing},
        ],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool("test", "rules", str(file))

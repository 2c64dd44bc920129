"""The benchmark of the operator beside JobSet: what it reads from logs and /proc, and what it makes of the figures."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path

import yaml

from bench.operator.api import Client, Json
from bench.operator.contenders import OURS, JobSet, Ours, jobset_configuration, jobset_manifest
from bench.operator.figures import Fleet, Reaction, Restart, Running, Visit
from bench.operator.job_watch import JobWatch
from bench.operator.pods import failed_status, running_status
from bench.operator.report import Goal, Result, as_json, as_markdown, percentile
from bench.operator.requests import audit_policy, count_access, count_audit, list_mlflow_writes, list_writes
from bench.operator.running import find_current_share, is_training
from bench.operator.usage import parse_cpu_seconds, parse_memory_mib
from finetune_crds import FineTuneJob
from support.process import Process

IDLE_PROCESS = Process("controller", ["true"], Path("/dev/null"))


def audit(
    verb: str, resource: str = "", uri: str = "/apis", stage: str = "ResponseComplete", sub: str = ""
) -> str:
    event: dict[str, object] = {"verb": verb, "requestURI": uri, "stage": stage}
    if resource:
        event["objectRef"] = {"resource": resource, "subresource": sub}
    return json.dumps(event)


def access(method: str, target: str, address: str = "127.0.0.1") -> str:
    return f'2026/11/27 09:33:09 INFO:     {address}:45836 - "{method} {target} HTTP/1.1" 200 OK'


API = "/api/2.0/mlflow"


def test_requests_to_the_api_server_by_verb_and_resource() -> None:
    requests = count_audit(
        [
            audit("patch", "finetunejobs", sub="status"),
            audit("patch", "finetunejobs", sub="status"),
            audit("create", "pods", "/api/v1/namespaces/a/pods?dryRun=All&fieldManager=b"),
            audit("create", "jobs"),
            audit("watch", "jobs", stage="ResponseStarted"),
            audit("watch", "jobs", stage="ResponseComplete"),
            audit("update", "leases"),
            audit("get", "", "/version?timeout=32s"),
        ]
    )
    assert requests == {
        "patch finetunejobs/status": 2,
        "create (dry run) pods": 1,
        "create jobs": 1,
        "watch jobs": 1,
        "update leases": 1,
        "get /version": 1,
    }
    assert list_writes(requests) == {"patch finetunejobs/status": 2, "create jobs": 1}


def test_the_audit_log_has_one_user_alone() -> None:
    rules = yaml.safe_load(audit_policy("jobset"))["rules"]
    assert rules == [{"level": "Metadata", "users": ["jobset"]}, {"level": "None"}]


def test_requests_to_mlflow_without_those_of_the_benchmark() -> None:
    requests = count_access(
        [
            access("GET", f"{API}/runs/get?run_id=1"),
            access("POST", f"{API}/runs/search"),
            access("POST", f"{API}/runs/create"),
            access("POST", f"{API}/runs/log-batch", "127.0.0.2"),
            access("GET", "/health"),
            "INFO:     Application startup complete.",
        ]
    )
    assert requests == {"GET runs/get": 1, "POST runs/search": 1, "POST runs/create": 1}
    assert list_mlflow_writes(requests) == {"POST runs/create": 1}


def test_cpu_time_and_memory_of_a_process() -> None:
    stat = "42 (a (b) c) S 1 42 42 0 -1 4194560 1 2 3 4 250 50 7 8 20 0 5 0 100 200 300"
    assert parse_cpu_seconds(stat, 100) == 3.0
    status = "Name:\toperator\nVmPeak:\t  900000 kB\nVmHWM:\t  204800 kB\nVmRSS:\t  102400 kB\nThreads:\t3\n"
    assert parse_memory_mib(status) == (100.0, 200.0)


def test_our_job_is_valid_and_has_four_pods() -> None:
    job = Ours(IDLE_PROCESS, "").manifest("job-0001")
    parsed = FineTuneJob.model_validate(job)
    assert (parsed.spec.distributed.nodes, parsed.spec.distributed.processes_per_node) == (4, 1)


def test_a_job_set_has_four_pods_and_a_service() -> None:
    spec = jobset_manifest("job-0001")["spec"]
    (workers,) = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (workers["replicas"], job["parallelism"], job["completions"]) == (1, 4, 4)
    assert spec["network"]["enableDNSHostnames"]


def test_job_set_runs_without_managed_certificates() -> None:
    configuration = jobset_configuration(Path("/certificates"), "127.0.0.1:1")
    assert configuration["internalCertManagement"] == {"enable": False}
    assert configuration["clientConnection"] == {"qps": 500, "burst": 500}


def test_when_a_status_says_that_the_pods_were_created() -> None:
    ours, jobset = Ours(IDLE_PROCESS, ""), JobSet(IDLE_PROCESS, "")
    assert not ours.is_reported({})
    assert not ours.is_reported({"status": {"phase": "Pending"}})
    assert ours.is_reported({"status": {"phase": "Starting", "attempt": 1, "jobs": {"train": "uid"}}})
    assert not jobset.is_reported({"status": {}})
    assert jobset.is_reported({"status": {"replicatedJobsStatus": [{"name": "workers", "active": 1}]}})


def fleet(jobs: int, seconds: float, cpu_seconds: float) -> Fleet:
    requests = Counter({"create jobs": jobs, "create services": jobs})
    return Fleet(
        jobs, seconds, 1.25 * seconds, cpu_seconds, 2 * cpu_seconds, cpu_seconds, requests, Counter()
    )


def result() -> Result:
    restart = Restart(600, 8.0, 120.0, 140.0, 5.0)
    ours = Visit("ours", [fleet(100, 4, 1), fleet(500, 25, 6)], 140.0, 160.0, 0.5, restart)
    again = Visit("ours", [fleet(100, 5, 1.2), fleet(500, 25, 6)], 144.0, 160.0)
    jobset = Visit("jobset", [fleet(100, 4, 0.6), fleet(500, 20, 3)], 110.0, 112.0, 0.25)
    large_restart = Restart(2000, 12.0, 240.0, 260.0, 9.0, Counter({"create events": 3}))
    large = Visit("ours", [fleet(2000, 100, 30)], 240.0, 250.0, None, large_restart)
    return Result([ours, jobset, jobset, again], large, running())


def running() -> Running:
    reactions = [Reaction(0.5 + number / 100, 1 + number / 100) for number in range(200)]
    asked = Counter({"patch finetunejobs/status": 6000}), Counter({"POST runs/search": 1200})
    return Running(2000, 300, 30.0, 245.0, 255.0, *asked, 0.99, 10_000, 3, reactions, 1)


def test_goals_are_judged_by_medians() -> None:
    assert [(goal.what, goal.figure, goal.verdict()) for goal in result().goals()] == [
        ("100 x 4 pods: jobs/s, of JobSet's", 0.9, "missed"),
        ("500 x 4 pods: jobs/s, of JobSet's", 0.8, "missed"),
        ("100 x 4 pods: CPU time a job", 11.0, "missed"),
        ("500 x 4 pods: CPU time a job", 12.0, "missed"),
        ("memory after 600 jobs", 142.0, "reached"),
        ("memory after a restart with 600 jobs", 120.0, "reached"),
        ("CPU time a minute, idle with 600 jobs", 0.5, "reached"),
        ("memory after 2000 jobs", 240.0, "reached"),
        ("memory after a restart with 2000 jobs", 240.0, "reached"),
        ("seconds until a restart has reconciled 2000 jobs", 12.0, "missed"),
        ("writes after a restart with 2000 jobs", 3.0, "missed"),
        ("requests/s to MLflow with 2000 running jobs", 4.0, "reached"),
    ]


def test_a_goal_without_a_figure_is_not_measured() -> None:
    assert Goal("memory", 1, None).verdict() == "not measured"
    assert Result([Visit("ours", [fleet(100, 4, 1)])]).ratio(100) is None
    assert Result(large=Visit("ours", [fleet(200, 4, 1)])).goals() == [
        Goal("memory after 200 jobs", 250, None, " MiB")
    ]


def test_a_needless_write_and_a_part_without_figures_are_failures() -> None:
    measured = result()
    measured.broken_parts = ["round 1, jobset: not after 120 seconds"]
    assert list(measured.failures()) == [
        "round 1, jobset: not after 120 seconds",
        "a restart with 2000 jobs made 3 needless writes: create events",
    ]


MACHINE = {"cpu": "Fast CPU", "cores": 2, "load": 0.1}


def test_the_tables_have_both_contenders() -> None:
    lines = as_markdown(MACHINE, "2026-11-27", result()).splitlines()
    assert lines[0] == "Fast CPU, 2 cores, load 0.1, 2026-11-27"
    assert lines[4:6] == [
        "| ours | 100 x 4 | 22.5 (20.0 to 25.0) | 18.0 | 11.0 | 22 | 11 | 45.8 | 2.0, 0.0 |",
        "| jobset | 100 x 4 | 25.0 (25.0 to 25.0) | 20.0 | 6.0 | 12 | 6 | 83.3 | 2.0, 0.0 |",
    ]
    assert "| ours | 600 | 140 | 160 | 0.50 | 120 | 140 | 8.0 | 5.0 | 0 |" in lines
    assert "| jobset | 600 | 110 | 112 | 0.25 | - | - | - | - | - |" in lines
    assert "| ours | 2000 | 240 | 250 | - | 240 | 260 | 12.0 | 9.0 | 3 |" in lines
    assert (
        "| 2000 | 5.0 | 20.0 | 4.0 | 6.0 | 245 | 255 | 99% | 10000, 3 | 201 (1 without a next attempt) | 2.0, 3.0 | 1.5, 2.5 |"
        in lines
    )
    assert "| 100 x 4 pods: jobs/s, of JobSet's | at least 1x | 0.90x | missed |" in lines


def test_json_has_every_fleet() -> None:
    written = as_json(MACHINE, "2026-11-27", result())
    assert (written["schema"], len(written["visits"]), written["large"]["contender"]) == (
        "finetune-bench-operator/1",
        4,
        OURS,
    )
    assert written["visits"][0]["fleets"][0] == {
        "jobs": 100,
        "podsSeconds": 4,
        "statusSeconds": 5.0,
        "jobsPerSecond": 25.0,
        "cpuSeconds": 1,
        "controlPlaneCpuSeconds": 2,
        "mlflowCpuSeconds": 1,
        "apiRequests": {"create jobs": 100, "create services": 100},
        "mlflowRequests": {},
    }


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile(range(1, 201), percent) for percent in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert percentile([7.0], 99) == 7.0


POD = {
    "metadata": {"name": "tune-train-1-0-abcde", "namespace": "fleet-1"},
    "spec": {"containers": [{"name": "trainer", "image": "trainer:latest"}]},
}


def test_pods_as_a_kubelet_reports_them() -> None:
    container = {"name": "trainer", "image": "trainer:latest", "imageID": "", "restartCount": 0}
    assert running_status(POD) == {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{**container, "ready": True, "state": {"running": {}}}],
    }
    end = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-11-27T09:00:00Z"}
    assert failed_status(POD, datetime(2026, 11, 27, 9, tzinfo=UTC)) == {
        "phase": "Failed",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{**container, "ready": False, "state": {"terminated": end}}],
    }


def job_event(kind: str, name: str, *conditions: tuple[str, str]) -> Json:
    status = {"conditions": [{"type": condition, "status": value} for condition, value in conditions]}
    return {"type": kind, "object": {"metadata": {"name": name}, "status": status}}


def test_a_watch_keeps_the_first_moments() -> None:
    watch = JobWatch(Client(lambda: HTTPConnection("127.0.0.1")), "fleet-1")
    for moment, event in enumerate(
        [
            job_event("ADDED", "tune-train-1"),
            job_event("MODIFIED", "tune-train-1", ("FailureTarget", "True"), ("Failed", "False")),
            job_event("MODIFIED", "tune-train-1", ("Failed", "True")),
            job_event("MODIFIED", "tune-train-1", ("Failed", "True")),
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
            job_event("ADDED", "tune-train-2"),
        ]
    ):
        watch.record(event, float(moment))
    assert (watch.created, watch.failed) == (
        {"tune-train-1": 0.0, "tune-train-2": 5.0},
        {"tune-train-1": 2.0},
    )


def ftj(name: str, **status: object) -> Json:
    return {"metadata": {"name": name}, "status": status}


def test_a_job_trains_with_a_run() -> None:
    assert is_training(ftj("a", phase="Training", mlflow={"runId": "r"}))
    assert not is_training(ftj("a", phase="Training"))
    assert not is_training(ftj("a", phase="Starting", mlflow={"runId": "r"}))
    assert not is_training({"metadata": {"name": "a"}})


def test_progress_is_current_up_to_the_last_report_but_one() -> None:
    jobs = [ftj(name, progress={"step": step}) for name, step in (("a", 30), ("b", 20), ("c", 10))]
    jobs.append(ftj("d"))
    runs = {name: f"run-{name}" for name in "abcd"}
    assert find_current_share(jobs, runs, dict.fromkeys(runs.values(), 30)) == 0.5
    # After the first report, a job without progress is not current.
    assert find_current_share(jobs, runs, dict.fromkeys(runs.values(), 10)) == 0.75

"""The benchmark of promotions: what it counts as a write, and what it makes of the figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench.promotions.report import Restart, Result, as_json, as_markdown
from bench.promotions.world import promotion, settled
from bench.promotions.writes import Tail, count
from finetune_crds import ModelPromotion


def audit(verb: str, resource: str, subresource: str = "", agent: str = "operator", name: str = "any") -> str:
    target = {"resource": resource, "subresource": subresource, "name": name}
    return json.dumps({"verb": verb, "objectRef": target, "userAgent": agent})


def access(method: str, target: str) -> str:
    return f'2026/11/21 15:33:09 INFO:     127.0.0.1:45836 - "{method} {target} HTTP/1.1" 200 OK'


API = "/api/2.0/mlflow"


def test_what_is_a_write_and_whose() -> None:
    found = count(
        [
            audit("patch", "modelpromotions", "status"),
            audit("patch", "modelpromotions", "status"),
            audit("create", "events"),
            audit("create", "modelpromotions", agent="Python-urllib/3.11"),
            audit("update", "leases", name="finetune-aliases-1"),
            audit("patch", "leases", name="operator-1"),
        ],
        [
            access("GET", f"{API}/registered-models/get?name=model-0001"),
            access("GET", f"{API}/registered-models/get?name=model%2D0002"),
            access("GET", "/health"),
            access("POST", f"{API}/runs/search"),
            access("POST", f"{API}/registered-models/alias"),
            access("DELETE", f"{API}/registered-models/alias"),
            "2026/11/21 15:33:09 INFO:     Shutting down",
        ],
    )
    assert found.api_writes == {"patch modelpromotions/status": 2, "create events": 1, "update leases": 1}
    assert found.mlflow_writes == {
        f"POST {API}/registered-models/alias": 1,
        f"DELETE {API}/registered-models/alias": 1,
    }
    assert (found.mlflow_reads, found.models) == (3, {"model-0001", "model-0002"})


def test_a_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    tail = Tail(log)
    with log.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.lines() == ["one"]
        file.write("o\n")
        file.flush()
        assert tail.lines() == ["two"]
    assert tail.lines() == []


def test_a_log_that_is_not_there_yet_is_read_from_its_beginning(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    (tmp_path / "log").write_text("one\n")
    assert tail.lines() == ["one"]


def result(*restarts: Restart) -> Result:
    found = Result(500, 250, 80.0, Counter({"patch modelpromotions/status": 1500}), Counter({"POST x": 500}))
    found.restarts = list(restarts)
    return found


GOOD = Restart(20.0, 500, 1500, 150.0)


def test_what_fails_is_said_in_sentences() -> None:
    bad = Restart(61.0, 500, 1500, 150.0, Counter({"create events": 3}), Counter({"POST x": 1}), 2)
    assert list(result(GOOD).failings()) == []
    assert list(result(GOOD, bad).failings()) == [
        "restart 2: not settled after 60 s, but after 61.0 s",
        "restart 2: 3 needless writes to the API server: create events",
        "restart 2: 1 needless writes to MLflow: POST x",
        "restart 2: 2 passes failed",
    ]


MACHINE = {"cpu": "Fast CPU", "cores": 2}


def test_the_row_has_medians_and_sums() -> None:
    found = result(GOOD, Restart(24.0, 500, 1700, 170.0), Restart(22.0, 500, 1600, 160.0))
    row = as_markdown(MACHINE, "2026-11-21", found).splitlines()[2]
    assert row == (
        "| Fast CPU, 2 cores, 2026-11-21 | 500, 250 | 22.0 s (20.0 to 24.0) | 0, 0 | 1,600 | 160 | 80.0 | 1,500, 500 |"
    )


def test_json_has_every_restart() -> None:
    found = as_json(MACHINE, "2026-11-21", result(GOOD))
    assert found["restarts"] == [
        {
            "seconds": 20.0,
            "passes": 500,
            "mlflowReads": 1500,
            "memoryMiB": 150.0,
            "apiWrites": {},
            "mlflowWrites": {},
            "failures": 0,
        }
    ]
    assert (found["schema"], found["failings"]) == ("finetune-bench-promotions/1", [])


def test_promotions_are_such_as_the_api_has() -> None:
    for alias, source in (("staging", "candidate"), ("champion", "staging")):
        spec = ModelPromotion.model_validate(promotion("model-0001", alias)).spec
        assert (spec.alias, spec.source.alias, len(spec.gates)) == (alias, source, 2)


def test_settled_is_promoted_as_the_spec_now_says() -> None:
    body = {"metadata": {"generation": 2}, "status": {"phase": "Promoted", "observedGeneration": 2}}
    assert settled([body])
    assert not settled([body, {"metadata": {"generation": 1}}])
    assert not settled([body | {"metadata": {"generation": 3}}])

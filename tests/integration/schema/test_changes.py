"""Which parts of a FineTuneJob can change, and what two writers make of a set."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from fixtures.operator_processes.servers import Plane
from integration.schema import dry_run
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]

CHANGES: dict[str, tuple[Json, str | None]] = {
    "training": ({"training": {"seed": 7}}, "spec.training cannot change once the job exists"),
    "a part that was not there": ({"checkpoint": {"uri": "/other"}}, "spec.checkpoint cannot change"),
    "a part taken away": ({"register": None}, "spec.register cannot change"),
    "suspend": ({"suspend": True}, None),
    "runPolicy": ({"runPolicy": {"maxRestarts": 9}}, None),
    "a template": ({"pods": {"train": {"template": {"spec": {"nodeSelector": {"pool": "spare"}}}}}}, None),
    "credentials": (
        {
            "pods": {
                "all": {"envFrom": [{"secretRef": {"name": "new"}}], "env": [{"name": "A", "value": "b"}]}
            }
        },
        None,
    ),
    "an account": ({"pods": {"all": {"serviceAccountName": "other"}}}, None),
    "images": ({"pods": {role: {"image": "me/mine:2"} for role in ("prepare", "train")}}, None),
    "a command": ({"trainer": {"command": ["mine"]}}, "spec.trainer cannot change"),
    "a tag of the run": ({"tracking": {"tags": {"a": "b"}}}, "spec.tracking cannot change"),
    "nodes": ({"distributed": {"nodes": 3}}, "spec.distributed cannot change"),
    "an evaluation": ({"evaluation": {}}, "spec.evaluation cannot change"),
    "an output": ({"output": {"uri": "s3://a/b"}}, "spec.output cannot change"),
    "a filter": ({"data": {"prepare": {"filter": "a = 1"}}}, "spec.data cannot change"),
    "the source": ({"data": {"source": {"path": "/other"}}}, "spec.data cannot change"),
    "no preparation": ({"data": {"prepare": None}}, "spec.data cannot change"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_spec_is_immutable_but_for_what_the_next_attempt_can_take_up(api: Api, case: str) -> None:
    change, sentence = CHANGES[case]
    if sentence is None:
        assert dry_run.change(api, job(), change)
        return
    with refused(sentence):
        dry_run.change(api, job(), change)


def test_what_two_writers_apply_to_a_set_is_all_there(plane: Plane, namespace: str, api: Api) -> None:
    body = job(runPolicy={"retryableExitCodes": [1, 2]})
    part = {key: body[key] for key in ("apiVersion", "kind", "metadata")}
    part["spec"] = {**body["spec"], "runPolicy": {"retryableExitCodes": [2, 3]}}
    for writer, content in (("git", body), ("team", part)):
        apply = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "--namespace", namespace, "apply"]
        apply += ["--server-side", "--field-manager", writer, "--filename", "-"]
        subprocess.run(apply, input=json.dumps(content), text=True, check=True, capture_output=True)
    merged = api.get("FineTuneJob", namespace, "tune") or {}
    assert sorted(merged["spec"]["runPolicy"]["retryableExitCodes"]) == [1, 2, 3]

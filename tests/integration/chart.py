"""The chart, rendered by helm."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from cluster import binaries
from support.manifests import parse

CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
KUBE_VERSION = "1.37.0"
Json = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm to its end."""
    command = [str(binaries.path("helm")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def build_options(*values: str) -> list[str]:
    """The options for values, `name=value` each. A list in brackets is JSON, since `--set` has no empty list."""
    options: list[str] = []
    for value in values:
        options += ("--set-json" if "=[" in value else "--set", value)
    return options


@cache
def rendered(*values: str) -> str:
    """The manifests of the chart with these values, `name=value` each."""
    settings = build_options(*values)
    done = helm(
        "template",
        "finetune-operator",
        str(CHART),
        "--namespace",
        "fs",
        "--kube-version",
        KUBE_VERSION,
        *settings,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def parts(*values: str) -> list[Json]:
    """The manifests, parsed. NB: not to be changed."""
    return parse(rendered(*values))


def objects(*values: str) -> dict[tuple[str, str], Json]:
    """The manifests by kind and name."""
    return {(part["kind"], part["metadata"]["name"]): part for part in parts(*values)}


def environment(*values: str) -> dict[str, str]:
    """The environment of the operator's container."""
    return environment_of(objects(*values)["Deployment", "finetune-operator"], "fs")


def environment_of(deployment: Json, namespace: str) -> dict[str, str]:
    """The environment of a Deployment's only container, in a pod in `namespace`."""
    fields = {"metadata.namespace": namespace, "metadata.name": "finetune-operator-pod"}
    return {
        variable["name"]: fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        if "valueFrom" in variable
        else variable.get("value", "")
        for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }


def allowed_by(role: Json) -> set[tuple[str, str]]:
    """What a Role or ClusterRole allows: resources with their groups, and verbs."""
    return {
        (f"{group}/{resource}".strip("/"), verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def notes_of(kubeconfig: Path, *values: str) -> str:
    """What helm prints after an installation."""
    settings = build_options("crds.enabled=false", *values)
    where = ["--namespace", "fs", "--dry-run=server", "--kubeconfig", str(kubeconfig)]
    done = helm("install", "finetune-operator", str(CHART), *where, *settings)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]

"""Every sample is a manifest that the API server accepts as it stands."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml

from cluster.controlplane import ControlPlane
from finetune_crds import FineTuneJob
from finetune_crds.training import MethodType, ObjectiveType
from integration.world import Api

SAMPLES = sorted((Path(__file__).parents[2] / "crds" / "samples").glob("*.yaml"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_api_server_accepts(sample: Path, plane: ControlPlane, api: Api) -> None:
    command = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "create", "--dry-run=server"]
    command += ["--validate=strict", "--filename", str(sample)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_operator_reads_all_of_it(sample: Path) -> None:
    """What the models understand, written out again, holds everything the sample says."""
    for part in yaml.safe_load_all(sample.read_text(encoding="utf-8")):
        if part["kind"] == "FineTuneJob":
            assert lost(part["spec"], FineTuneJob.model_validate(part).spec.to_json(), "spec") == []


def lost(said: object, understood: object, where: str) -> list[str]:
    """The fields of `said` that `understood` does not hold."""
    if isinstance(said, dict) and isinstance(understood, dict):
        return [
            field
            for key, value in said.items()
            for field in (
                lost(value, understood[key], f"{where}.{key}") if key in understood else [f"{where}.{key}"]
            )
        ]
    if isinstance(said, list) and isinstance(understood, list) and len(said) == len(understood):
        pairs = enumerate(zip(said, understood, strict=True))
        return [field for number, (one, other) in pairs for field in lost(one, other, f"{where}[{number}]")]
    return [] if said == understood else [where]


def test_every_method_and_objective_has_a_sample() -> None:
    specs = [
        FineTuneJob.model_validate(part).spec
        for sample in SAMPLES
        for part in yaml.safe_load_all(sample.read_text(encoding="utf-8"))
        if part["kind"] == "FineTuneJob"
    ]
    assert {spec.method.type for spec in specs} == set(get_args(MethodType))
    assert {spec.objective.type for spec in specs} == set(get_args(ObjectiveType))


def test_four_published_ways_are_here() -> None:
    names = {sample.stem for sample in SAMPLES}
    assert {
        "databricks-notebook",
        "air-cli",
        "nemo-recipe",
        "fabric-stack",
        "quickstart",
        "own-script",
    } <= names

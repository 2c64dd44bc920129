"""The demo's manifests: complete, and restricted as their namespace requires."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from demo.install import MANIFESTS, SAMPLES
from demo.kubectl import render
from demo.results import QUESTION
from demo.scripts import ask

VALUES = {
    "namespace": "demo",
    "name": "seed",
    "versitygw_image": "gateway:1",
    "trainer_image": "trainer:1",
    "command": '"python ask.py"',
    "tracking_uri": "http://mlflow:5000",
}


@pytest.mark.parametrize("file", sorted(MANIFESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_rendered_pods_are_restricted(file: Path) -> None:
    for part in yaml.safe_load_all(render(file, VALUES)):
        pod = part.get("spec", {}).get("template", {}).get("spec")
        if pod is not None:
            assert pod["securityContext"]["runAsNonRoot"]
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert [container["securityContext"] for container in pod["containers"]] == [
                {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
            ]


# NB: MLflow's own imports warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_question_is_asked_as_it_was_trained() -> None:
    quickstart = yaml.safe_load((SAMPLES / "quickstart.yaml").read_text(encoding="utf-8"))
    template = quickstart["spec"]["data"]["prepare"]["promptTemplate"]
    assert ask.prompt(QUESTION) == template.format(instruction=QUESTION).rstrip("\n")

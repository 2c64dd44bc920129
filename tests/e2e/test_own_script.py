"""A script of the user's own, on HF's Trainer, finds the rendezvous, its parameters, its packages and the run in its environment.

What it leaves in a folder of the pod is uploaded.
"""

from __future__ import annotations

import base64
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from demo.install import SAMPLES
from demo.kubectl import Json
from e2e.stories import Stage
from support import wheels

WHEELHOUSE = "/wheelhouse"
OUTPUT = {
    "uri": "s3://finetune/models/own-script",
    "from": "/outputs",
    "secretRef": {"name": "s3-credentials"},
}


@dataclass(frozen=True)
class OwnScript:
    """The job at its end, and what its pods printed."""

    job: Json
    logs: str


def run_story(stage: Stage) -> OwnScript:
    """Run the sample with a package of its own."""
    code, job = yaml.safe_load_all((SAMPLES / "own-script.yaml").read_text(encoding="utf-8"))
    code["data"]["train.py"] += (
        "if os.environ['NODE_RANK'] == '0':\n    open('/outputs/config.json', 'w').write('{}')\n"
    )
    job["spec"]["output"] = OUTPUT
    with tempfile.TemporaryDirectory() as folder:
        name = stage.jobs.apply(*with_a_package(code, job, Path(folder)))
    return OwnScript(stage.jobs.follow(name), stage.jobs.logs(name))


def test_a_script_without_model_and_data_trains_on_both_nodes(story: OwnScript) -> None:
    # NB: two ranks that print at once may share a line.
    assert sorted(re.findall(r"rank \d of \d on node \d of \d", story.logs)) == [
        "rank 0 of 2 on node 0 of 2",
        "rank 1 of 2 on node 1 of 2",
    ]
    assert sorted(re.findall(r"tiny 1\.0 on node \d", story.logs)) == [
        "tiny 1.0 on node 0",
        "tiny 1.0 on node 1",
    ]
    assert {"model", "data"} & set(story.job["spec"]) == set()
    # The step and the number of steps are those that HF's Trainer logs to MLflow, and the parameters are numbers.
    progress = story.job["status"]["progress"]
    assert (progress["step"], progress["maxSteps"], progress["summary"]) == (40, 40, "100%")
    assert progress["loss"] < 1.0


def test_what_the_script_left_is_uploaded(story: OwnScript) -> None:
    assert story.job["status"]["model"] == {"folder": OUTPUT["uri"], "summary": OUTPUT["uri"]}


def with_a_package(code: Json, job: Json, folder: Path) -> list[Json]:
    """The sample, with a package that pip finds in a folder of a ConfigMap: the cluster has no index."""
    wheels.wheel(folder, "tiny", "1.0")
    (package,) = folder.glob("*.whl")
    wheelhouse = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "my-wheels"},
        "binaryData": {package.name: base64.b64encode(package.read_bytes()).decode()},
    }
    print_line = "print(f\"tiny {tiny.VERSION} on node {os.environ['NODE_RANK']}\", flush=True)\n"
    code["data"]["train.py"] = code["data"]["train.py"].replace(
        "import os\n", f"import os\n\nimport tiny\n\n{print_line}"
    )
    job["spec"]["trainer"]["dependencies"] = ["tiny>=1"]
    train = job["spec"]["pods"]["train"]
    train["env"] += [
        {"name": "PIP_NO_INDEX", "value": "1"},
        {"name": "PIP_FIND_LINKS", "value": WHEELHOUSE},
    ]
    mounted = {"name": "main", "volumeMounts": [{"name": "wheels", "mountPath": WHEELHOUSE}]}
    volume = {"name": "wheels", "configMap": {"name": "my-wheels"}}
    train["template"] = {"spec": {"containers": [mounted], "volumes": [volume]}}
    return [wheelhouse, code, job]

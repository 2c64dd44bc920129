"""The script of an `air` workload, on FSDP1, in the two pods of the sample, and what torch itself does with it on CPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from finetune_crds.reference import SAMPLES
from fixtures.fake_hub import Hub, Repository
from fixtures.operator_processes.scripts import run_job
from support.documents import ROOT, Page
from support.http_server import serving
from support.pods import examples
from support.training import history

if TYPE_CHECKING:
    from pathlib import Path

    from support.training import Mlflow

SCRIPTS = ROOT / "tests" / "fixtures" / "own_scripts"
# What docs/coming-from.md changes in a script for GPUs.
ON_CPUS = {
    '    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))\n    torch.cuda.set_device(device)\n': '    device = torch.device("cpu")\n',
    '"nccl"': '"gloo"',
    "offload_to_cpu=True": "offload_to_cpu=False",
}
STEPS = 6


def change_for_cpus(script: str) -> str:
    """Return the script with those changes."""
    for there, here in ON_CPUS.items():
        assert script.count(there) == 1
        script = script.replace(there, here)
    return script


def spec_of_the_sample(parameters: dict[str, Any]) -> dict[str, Any]:
    """The spec of air-cli with two pods on this machine; all that the script needs is in its image, and the model stays in the pod."""
    (body,) = yaml.safe_load_all((SAMPLES / "air-cli.yaml").read_text(encoding="utf-8"))
    spec: dict[str, Any] = body["spec"]
    spec["distributed"] = {"nodes": 2, "processesPerNode": 1}
    spec["trainer"] |= {
        "parameters": spec["trainer"]["parameters"] | parameters,
        "dependencies": [],
    }
    return {name: part for name, part in spec.items() if name not in ("output", "tracking")}


def alpaca() -> Repository:
    """A data set with the columns of tatsu-lab/alpaca."""
    rows = [{"instruction": row["prompt"], "input": "", "output": row["response"]} for row in examples()]
    return Repository({"train.jsonl": "\n".join(json.dumps(row) for row in rows).encode()})


def test_the_script_trains_over_both_pods_and_rank_0_writes_the_model(
    tmp_path: Path, base_model: Path, mlflow_of_test: Mlflow
) -> None:
    base = {file.name: file.read_bytes() for file in base_model.iterdir()}
    hub = Hub({"tatsu-lab/alpaca": alpaca()}, {"meta-llama/Llama-3.1-8B": Repository(base, gated=True)})
    output = tmp_path / "output"
    spec = spec_of_the_sample(
        {"max_seq_len": 64, "max_steps": STEPS, "learning_rate": 5e-3, "output_dir": str(output)}
    )
    with serving(hub) as address:
        env = {"HF_ENDPOINT": address, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        ended = run_job(
            spec,
            {"train.py": change_for_cpus((SCRIPTS / "fsdp_sft.py").read_text())},
            tmp_path,
            mlflow_of_test,
            env=env,
        )
    assert ended.codes == [0, 0], "\n".join(ended.output)
    assert ["rank 0 of 2" in ended.output[0], "rank 1 of 2" in ended.output[1]] == [True, True]

    # The script logs its loss alone; the number of steps is that of its parameters.
    losses = history(mlflow_of_test, "train_loss")
    assert [*losses] == [*range(1, STEPS + 1)]
    assert losses[STEPS] < losses[1]
    assert ended.progress
    assert (ended.progress.step, ended.progress.max_steps, ended.progress.summary) == (STEPS, STEPS, "100%")
    assert ended.progress.loss == pytest.approx(losses[STEPS], abs=1e-4)

    trained, untrained = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (output, base_model)
    )
    assert {name: value.shape for name, value in trained.items()} == {
        name: value.shape for name, value in untrained.items()
    }
    assert [name for name, value in trained.items() if torch.equal(value, untrained[name])] == []


# What FSDP1 gathers on CPUs. NB: if torch corrects one of these, correct docs/coming-from.md too.
OUTCOMES = {
    "default": r"the weights",
    "use_orig_params": r"the weights",
    "offload_to_cpu": r"RuntimeError: setStorage: .* are out of bounds for storage of size 0",
    "offload_to_cpu, use_orig_params": f"exit code -{signal.SIGSEGV}",
    "no device_id": r"RuntimeError: FSDP needs a non-CPU accelerator device, .*",
}


def test_torch_gathers_weights_on_cpus_only_without_offloading_them() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPTS / "fsdp1_on_cpus.py")],
        env={**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    outcomes = json.loads(ended.stdout)
    assert outcomes.keys() == OUTCOMES.keys()
    assert {
        case: outcome for case, outcome in outcomes.items() if not re.fullmatch(OUTCOMES[case], outcome)
    } == {}


def test_the_page_has_these_changes_and_outcomes() -> None:
    (paragraph,) = re.findall(
        r"^On CPUs, .*?(?=^## )", Page("docs/coming-from.md").text, re.MULTILINE | re.DOTALL
    )
    for words in (
        '`init_process_group("gloo")`',
        '`device_id=torch.device("cpu")`',
        "`offload_to_cpu=False`",
        "`use_orig_params=True`",
        "`RuntimeError: setStorage: ... out of bounds for storage of size 0`",
        "segmentation fault",
    ):
        assert words in paragraph

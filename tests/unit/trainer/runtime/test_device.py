"""What a pod computes on, and what it refuses to start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds.recipe import Recipe
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.runtime.device import Gpus, check, tags

if TYPE_CHECKING:
    from support.pods import Pod

LARGE, SMALL = 7_615_616_512, 1_000_000_000
NONE, FOR_CPUS = Gpus(0), Gpus(0, "2.13.0+cpu")
NO_WHEEL = "the image has torch 2.13.0+cpu, which is built for CPUs: set pods.train.image to an image that is built for CUDA"

# The device that is asked for, processes, GPUs, parameters (None: not to be counted), and the refusal.
CASES: dict[str, tuple[str | None, int, Gpus, int | None, str | None]] = {
    "a small model on CPUs": (None, 2, NONE, SMALL, None),
    "a large model on CPUs that are asked for": ("CPU", 2, NONE, None, None),
    "CPUs that are asked for beside GPUs": ("CPU", 8, Gpus(4), None, None),
    "GPUs for all processes": (None, 4, Gpus(4), None, None),
    "GPUs that are asked for": ("GPU", 1, Gpus(1), None, None),
    "a large model without a GPU": (
        None,
        1,
        NONE,
        LARGE,
        "NoGpu: model.base BASE has 7.6 billion parameters and the pod sees no GPU: set distributed.gpusPerNode, or "
        "distributed.device: CPU to train it on CPUs",
    ),
    "a large model in an image for CPUs": (
        None,
        1,
        FOR_CPUS,
        LARGE,
        "NoGpu: model.base BASE has 7.6 billion parameters and the pod sees no GPU: set distributed.gpusPerNode, or "
        f"distributed.device: CPU to train it on CPUs; {NO_WHEEL}",
    ),
    "GPUs that are asked for and not there": (
        "GPU",
        1,
        NONE,
        None,
        "NoGpu: distributed.device is GPU and the pod sees no GPU; check that the pod requests GPUs, and that its node "
        "has the driver and the device plugin",
    ),
    "GPUs that are asked for in an image for CPUs": (
        "GPU",
        1,
        FOR_CPUS,
        None,
        f"NoGpu: distributed.device is GPU and the pod sees no GPU; {NO_WHEEL}",
    ),
    "eight processes on four GPUs": (
        None,
        8,
        Gpus(4),
        None,
        "TooFewGpus: the pod has 8 processes and sees 4 GPUs: set distributed.gpusPerNode to 8, or "
        "distributed.processesPerNode to 4 or less",
    ),
    "two processes on one GPU": (
        "GPU",
        2,
        Gpus(1),
        None,
        "TooFewGpus: the pod has 2 processes and sees 1 GPU: set distributed.gpusPerNode to 2, or "
        "distributed.processesPerNode to 1 or less",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pod_without_the_gpus_that_it_needs_is_refused(pod: Pod, case: str) -> None:
    device, processes, gpus, size, sentence = CASES[case]

    def parameters() -> int:
        assert size is not None
        return size

    changes: dict[str, Any] = {"distributed.device": device, "model.base": "BASE"}
    recipe = Recipe.model_validate(pod.but(changes).recipe)
    if sentence is None:
        check(recipe, processes, gpus, parameters)
        return
    with pytest.raises(RecipeRefusedError) as refused:
        check(recipe, processes, gpus, parameters)
    assert f"{refused.value.reason}: {refused.value.message}" == sentence


ASKED: dict[str, tuple[int, Gpus, str]] = {
    "a small model, and a pod that sees none": (
        8,
        NONE,
        "distributed.gpusPerNode is 8 and the pod sees no GPU; check that the pod requests GPUs, and that its node has "
        "the driver and the device plugin",
    ),
    "an image for CPUs": (8, FOR_CPUS, f"distributed.gpusPerNode is 8 and the pod sees no GPU; {NO_WHEEL}"),
    "devices that a pod sees one of": (
        8,
        Gpus(1),
        "the pod has 8 processes and sees 1 GPU: set distributed.processesPerNode to 1 or less, since a pod sees only one "
        "device of some resources, for example MIG",
    ),
}


@pytest.mark.parametrize(("gpus_per_node", "gpus", "sentence"), ASKED.values(), ids=ASKED)
def test_gpus_that_a_job_asks_for_are_there(pod: Pod, gpus_per_node: int, gpus: Gpus, sentence: str) -> None:
    recipe = Recipe.model_validate(pod.but({"distributed.gpusPerNode": gpus_per_node}).recipe)
    with pytest.raises(RecipeRefusedError) as refused:
        check(recipe, gpus_per_node, gpus, lambda: 1)
    assert refused.value.message == sentence


# torch's version of CUDA, whether it finds a driver, how many devices, and what the pod sees.
SEEN: dict[str, tuple[str | None, bool, int, Gpus]] = {
    "GPUs": ("13.0", True, 4, Gpus(4)),
    "no driver": ("13.0", False, 0, Gpus(0)),
    "a torch for CPUs": (None, False, 0, Gpus(0, torch.__version__)),
}


@pytest.mark.parametrize(("cuda", "available", "count", "expected"), SEEN.values(), ids=SEEN)
def test_the_gpus_that_a_pod_sees(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, count: int, expected: Gpus
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert Gpus.visible() == expected


def test_a_run_is_tagged_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H100 of {device}")
    assert tags(torch.device("cuda", 1)) == {
        "finetune.dev/device": "GPU",
        "finetune.dev/device-name": "NVIDIA H100 of cuda:1",
    }
    on_cpu = tags(torch.device("cpu"))
    assert on_cpu["finetune.dev/device"] == "CPU"
    assert on_cpu["finetune.dev/device-name"]

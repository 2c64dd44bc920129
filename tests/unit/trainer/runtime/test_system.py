"""System metrics of a rank that has a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from finetune_trainer.train.runtime.system import Sampler

GPU = torch.device("cuda", 0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A GPU of 100 bytes, 40 of them used, whose utilization is 75% until a test says otherwise; the reads of it."""
    devices: list[torch.device] = []

    def utilization(device: torch.device) -> int:
        devices.append(device)
        return 75

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60, 100))
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    return devices


def of_gpu(sampler: Sampler) -> dict[str, float]:
    return {name: value for name, value in sampler.sample().items() if name.startswith("gpu_")}


def test_memory_and_utilization(reads: list[torch.device]) -> None:
    assert of_gpu(Sampler(GPU)) == {"gpu_memory_bytes": 40.0, "gpu_percent": 75.0}
    assert reads == [GPU]


def test_the_library_that_torch_reads_the_utilization_with_is_installed() -> None:
    """On a CPU too: it says there that it finds no driver."""
    pynvml = importlib.import_module("pynvml")
    assert callable(pynvml.nvmlDeviceGetUtilizationRates)


def test_a_utilization_that_cannot_be_read_is_said_once(
    reads: list[torch.device], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(device: torch.device) -> int:
        reads.append(device)
        raise RuntimeError("the driver is not loaded")

    monkeypatch.setattr(torch.cuda, "utilization", refused)
    sampler = Sampler(GPU)
    assert [of_gpu(sampler) for _ in range(3)] == [{"gpu_memory_bytes": 40.0}] * 3
    assert (
        capsys.readouterr().out
        == "cannot read the GPU utilization; system metrics omit gpu_percent: the driver is not loaded\n"
    )
    assert reads == [GPU]

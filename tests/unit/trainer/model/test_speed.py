"""How well the machine is used."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from finetune_trainer.train.data import pack
from finetune_trainer.train.model import speed
from finetune_trainer.train.model.network import Network
from finetune_trainer.train.objectives.sft import Sft
from support import networks

if TYPE_CHECKING:
    from typing import Any


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            tie_word_embeddings=True,
        )
    )


def test_flops_are_those_of_the_formula() -> None:
    made = model()
    flops = speed.Flops(Network(made, Sft()))
    parameters = sum(weight.numel() for weight in made.parameters())
    assert flops.of(100, 0) == 6 * parameters * 100
    assert flops.of(0, 100) == 12 * 3 * 32 * 100


def test_flops_are_about_what_torch_counts() -> None:
    """One document, so that all tokens are attended to; the formula has norms too, and torch the products alone."""
    made = model()
    # Torch counts the products of eager attention, and none of the CPU's flash attention.
    made.set_attn_implementation("eager")
    network = Network(made, Sft())
    batch = pack.collate(networks.of_documents(list(range(2, 66))), [[0]], pad_id=0)
    with FlopCounterMode(display=False) as counted:
        made(input_ids=batch.input_ids, labels=batch.input_ids).loss.backward()
    found = speed.Flops(network).of(batch.tokens, batch.attended)
    assert found == pytest.approx(counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 2080", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    assert speed.peak_flops(torch.device("cuda", 0)) == peak
    assert speed.peak_flops(torch.device("cpu")) is None


PEAKS = """
import resource, torch
from finetune_trainer.train.model import speed
print(speed.peak_memory(torch.device("cpu")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_peak_memory_is_that_of_the_process_alone() -> None:
    """Linux starts ru_maxrss of a program at the peak of the process that started it."""
    before = speed.peak_memory(torch.device("cpu"))
    held = torch.ones(before // 4 + 2**26)
    own = speed.peak_memory(torch.device("cpu"))
    assert own > before + 2**27
    del held
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    of_child, inherited = map(int, done.stdout.split())
    assert inherited > 0.9 * own
    assert of_child < 0.75 * own

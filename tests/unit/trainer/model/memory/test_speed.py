"""How well the machine is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from finetune_trainer.train.data import pack
from finetune_trainer.train.model.memory import speed
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.sft import Sft
from support import networks
from support.model_files import saved

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
    small_model = model()
    flops = speed.Flops(Network(small_model, Sft()))
    parameters = sum(weight.numel() for weight in small_model.parameters())
    assert flops.count(100, 0) == 6 * parameters * 100
    assert flops.count(0, 100) == 12 * 3 * 32 * 100


@pytest.mark.filterwarnings(networks.PEFT_WARNINGS[0])
def test_a_layer_that_is_trained_whole_computes_once() -> None:
    low_rank = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    whole = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapted = [peft.get_peft_model(model(), peft.LoraConfig(**low_rank, **more)) for more in ({}, whole)]
    flops = [speed.Flops(Network(each, Sft())).count(100, 0) for each in (model(), *adapted)]
    # What is trained has gradients too, and what is frozen has none.
    assert flops[1] < flops[2] < flops[0]


def mixture() -> Any:
    """Four experts, of which a token uses two; the embedding is not the output layer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
    )


def test_flops_leave_out_what_multiplies_nothing() -> None:
    moe = mixture()
    sizes = {name: weight.numel() for name, weight in moe.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts == 2 * 4 * 3 * 32 * 64
    used = sum(sizes.values()) - experts // 2 - 96 * 32
    assert speed.Flops(Network(moe, Sft())).count(1, 0) == 6 * used
    # The gradients of frozen weights are not computed.
    assert speed.Flops(Network(moe.requires_grad_(False), Sft())).count(1, 0) == 4 * used


@pytest.mark.filterwarnings(networks.PEFT_WARNINGS[0])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_rows_of_new_tokens_multiply_in_the_output_layer_alone(
    *, tied: bool, base_model: Path, tmp_path: Path
) -> None:
    """Of a network that is sharded, as where a run starts; each has a row in the frozen base too."""
    base = saved(base_model, tmp_path / "base", tied=tied)
    recipe = networks.recipe(base, method={"type": "LoRA"})
    added = recipe.model.model_copy(update={"new_tokens": ["<tool>", "</tool>"]})
    with networks.alone() as world:
        before, after = (
            speed.Flops(networks.build(recipe.model_copy(update={"model": model}), base, world)).count(1, 0)
            for model in (recipe.model, added)
        )
    assert after - before == (4 + 6) * 2 * 32


def test_flops_are_about_what_torch_counts() -> None:
    """One document, so that all tokens are attended to; the formula has norms too, and torch the products alone."""
    llama = model()
    # Torch counts the products of eager attention, and none of the CPU's flash attention.
    llama.set_attn_implementation("eager")
    network = Network(llama, Sft())
    batch = pack.collate(networks.of_documents(list(range(2, 66))), [[0]], pad_id=0)
    with FlopCounterMode(display=False) as counted:
        llama(input_ids=batch.input_ids, labels=batch.input_ids).loss.backward()
    estimated = speed.Flops(network).count(batch.tokens, batch.attended)
    assert estimated == pytest.approx(counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 2080", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
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
from finetune_trainer.train.model.memory import speed
print(speed.read_peak_memory(torch.device("cpu")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_peak_memory_is_that_of_the_process_alone() -> None:
    """Linux starts ru_maxrss of a program at the peak of the process that started it."""
    # Other tests may have used much: from here on the peak is that of what is in use.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = speed.read_peak_memory(torch.device("cpu"))
    ballast = torch.ones(2**27)
    parent_peak = speed.read_peak_memory(torch.device("cpu"))
    assert parent_peak > before + 2**28
    del ballast
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    of_child, inherited = map(int, done.stdout.split())
    assert inherited > 0.9 * parent_peak
    assert of_child < 0.75 * parent_peak

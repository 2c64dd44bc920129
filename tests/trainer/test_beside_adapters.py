"""What is trained beside low-rank layers, and new tokens, on two ranks: as peft and transformers compute it unsharded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from finetune_trainer.train.data import pack
from finetune_trainer.train.model import rows as of_rank
from finetune_trainer.train.model.network.trained_network import trained_parameters
from support import networks
from support.model_files import with_biases

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]


@dataclass(frozen=True)
class Case:
    """What is trained here, and how peft names it; `rows_of` are its trainable_token_indices.

    biased: on a base with biases and an output layer of its own; without, the output layer is tied.
    """

    method: str
    lora: dict[str, Any]
    theirs: dict[str, Any]
    biased: bool = True
    more: set[str] = field(default_factory=set)
    """Ends of the names of what is trained beside low-rank layers; of a Full training, nothing."""
    new: tuple[str, ...] = ()


NEW = ("<tool>", "</tool>")

CASES = {
    "biases of adapted layers, and the output layer": Case(
        "LoRA",
        {"targetModules": ["q_proj", "down_proj"], "bias": "LoraOnly", "modulesToSave": ["lm_head"]},
        {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only", "modules_to_save": ["lm_head"]},
        more={"q_proj.bias", "down_proj.bias", "lm_head.weight"},
    ),
    # NB: to peft, norm would be the end of input_layernorm too.
    "all biases, and layers of any kind": Case(
        "DoRA",
        {"targetModules": ["v_proj"], "bias": "All", "modulesToSave": ["norm", "embed_tokens"]},
        {"target_modules": ["v_proj"], "bias": "all", "modules_to_save": ["model.norm", "embed_tokens"]},
        more={
            *(f"{name}_proj.bias" for name in ("q", "k", "v", "o", "gate", "up", "down")),
            *("norm.weight", "embed_tokens.weight"),
        },
    ),
    "an embedding that is the output layer too": Case(
        "LoRA",
        {"modulesToSave": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        biased=False,
        more={"embed_tokens.weight"},
    ),
    "a base in four bits": Case(
        "QLoRA",
        {"bias": "All", "targetModules": ["q_proj"], "modulesToSave": ["embed_tokens", "lm_head"]},
        {"bias": "all", "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        more={
            *(f"{name}_proj.bias" for name in ("q", "k", "v", "o", "gate", "up", "down")),
            *("embed_tokens.weight", "lm_head.weight"),
        },
    ),
    "new tokens": Case("Full", {}, {}, biased=False, new=NEW),
    "rows of new tokens": Case(
        "LoRA",
        {},
        {"rows_of": ["embed_tokens", "lm_head"]},
        more={"trainable_tokens_delta.default"},
        new=NEW,
    ),
    "rows of new tokens in an embedding that is the output layer too": Case(
        "DoRA",
        {"targetModules": ["q_proj"]},
        {"target_modules": ["q_proj"], "rows_of": ["embed_tokens"]},
        biased=False,
        more={"trainable_tokens_delta.default"},
        new=NEW,
    ),
    "rows of new tokens on a base in four bits": Case(
        "QLoRA",
        {"modulesToSave": ["lm_head"]},
        {"modules_to_save": ["lm_head"], "rows_of": ["embed_tokens"]},
        more={"trainable_tokens_delta.default", "lm_head.weight"},
        new=NEW,
    ),
}
EXAMPLES = 8


def value_of(name: str, before: torch.Tensor) -> torch.Tensor:
    """A value near the one that a parameter has, by its name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
    return before + 0.05 * torch.randn(before.shape, generator=torch.Generator().manual_seed(seed))


def of_peft(case: Case, base: Path) -> Any:
    """The model of peft, unsharded."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.float32}
    if case.method == "QLoRA":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    vocabulary = model.config.vocab_size
    if case.new:
        model.resize_token_embeddings(vocabulary + len(case.new))
    if case.method == "Full":
        return model
    model.requires_grad_(False)
    settings = {"target_modules": "all-linear", **case.theirs, "use_dora": case.method == "DoRA"}
    ids = list(range(vocabulary, vocabulary + len(case.new)))
    settings["trainable_token_indices"] = dict.fromkeys(settings.pop("rows_of", []), ids) or None
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **settings)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return peft.get_peft_model(model, config)


def plain_loss(model: Any, split: Split) -> torch.Tensor:
    """The summed cross-entropy of plain forward passes."""
    losses = []
    for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
        tokens = torch.from_numpy(split.tokens[begin:end].copy()).long()
        learned = torch.from_numpy(split.loss_mask[begin:end].copy())[1:]
        logits = model(input_ids=tokens.unsqueeze(0)).logits[0, :-1]
        losses.append(functional.cross_entropy(logits[learned], tokens[1:][learned], reduction="sum"))
    return torch.stack(losses).sum()


def computes_as_peft(world: World, bases: tuple[Path, Path]) -> None:
    split = networks.random_split(examples=EXAMPLES)
    for what, case in CASES.items():
        base = bases[case.biased]
        method: dict[str, Any] = {"type": case.method}
        if case.method != "Full":
            method["lora"] = {"rank": 4, "alpha": 8, **case.lora}
        recipe = networks.recipe(base, method=method)
        model = recipe.model.model_copy(update={"new_tokens": list(case.new)})
        network = networks.build(recipe.model_copy(update={"model": model}), base, world)
        theirs = of_peft(case, base)
        expected = {name: weight for name, weight in theirs.named_parameters() if weight.requires_grad}
        ours = {name: weight for name, weight in network.model.named_parameters() if weight.requires_grad}
        assert {*ours} == {*expected}, what
        trained_weights = {name for name in ours if ".lora_" not in name and case.method != "Full"}
        plain = {
            ".".join(name.replace(".base_layer", "").replace(".modules_to_save.default", "").split(".")[-2:])
            for name in trained_weights
        }
        assert plain == case.more, what
        assert {weight.dtype for weight in trained_parameters(network)} == {torch.float32}
        for name, weight in ours.items():
            with torch.no_grad():
                if name in trained_weights or case.method == "Full":
                    # NB: transformers adds noise to the rows of new tokens.
                    noise = 5e-5 if case.new else 0
                    torch.testing.assert_close(weight.full_tensor(), expected[name], rtol=0, atol=noise)
                expected[name].copy_(value_of(name, expected[name]))
            of_rank.set_rows(weight, expected[name].detach())
        data = split
        if case.new:
            tokens = np.where(np.arange(len(split.tokens)) % 5, split.tokens, network.head.vocabulary - 1)
            data = replace(split, tokens=tokens.astype(np.int32))
        rows = [[row] for row in range(world.rank, EXAMPLES, world.size)]
        loss, _ = network.train()(pack.collate(data, rows, pad_id=0))
        loss.backward()
        total = plain_loss(theirs.train(), data)
        total.backward()
        (summed,) = world.sum_over_ranks(loss.item())
        assert summed == pytest.approx(total.item(), rel=1e-5), what
        for name, weight in ours.items():
            torch.testing.assert_close(
                weight.grad.full_tensor(), expected[name].grad, rtol=1e-3, atol=1e-5, msg=f"{what}: {name}"
            )


def test_each_computes_on_two_ranks_as_peft_does_unsharded(base_model: Path, tmp_path: Path) -> None:
    biased = with_biases(base_model, tmp_path / "biased")
    networks.on_ranks(2, tmp_path / "rendezvous", computes_as_peft, (base_model, biased))

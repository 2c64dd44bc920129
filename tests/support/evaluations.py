"""What evaluations read: splits with a test split, recipes, and models that know the answers."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.contract import TerminationMessage
from support.pods import examples

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.evaluation import EvaluationResult
    from finetune_crds.recipe import Recipe
    from support.pods import Pod

PAIRS = {"type": "PromptResponse"}


def rows_of_splits() -> list[dict[str, Any]]:
    """The tiny corpus: every tenth example is for validation, and the one after it for the test."""
    rows = examples()
    for at, row in enumerate(rows):
        if at % 10 == 1:
            row["split"] = "test"
    return rows


def save_splits(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Save rows as a Delta table with a split column, at version 0."""
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(str(folder), pa.Table.from_pylist(rows_of_splits() if rows is None else rows))
    return folder


def recipe(
    base: Path | str,
    splits: Path,
    evaluation: dict[str, Any] | None = None,
    *,
    columns: dict[str, Any] | None = PAIRS,
    **parts: Any,
) -> Recipe:
    """A recipe that evaluates on a table, in fp32 and of 64 tokens at most."""
    from finetune_crds.recipe import Recipe

    return Recipe.model_validate(
        {
            "job": {"name": "tiny", "namespace": "tests", "uid": "0123456789abcdef"},
            "model": {"base": str(base)},
            "data": {"columns": columns, "splits": {"type": "Delta", "path": str(splits), "version": 0}},
            "training": {"maxLength": 64, "precision": "FP32"},
            "evaluation": evaluation or {},
            **parts,
        }
    )


def save_model(base: Path, folder: Path, *, width: int, deviation: float) -> Path:
    """Save a model of random weights with the tokenizer of a base.

    deviation: standard deviation of the weights. Those of `save_base_model` are so small that no adapter makes it sure of a token.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(base)
    config.hidden_size, config.intermediate_size, config.head_dim = width, 2 * width, width // 4
    config.initializer_range = deviation
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, kind: str = "LoRA") -> Path:
    """Save an adapter of a base with random weights, or virtual tokens, beside the base's tokenizer.

    kind: LoRA, PromptTuning or PrefixTuning.
    """
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    kinds: dict[str, Any] = {
        "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False),
        "PromptTuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "PrefixTuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), kinds[kind]())
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def evaluate(pod: Pod, model: str) -> EvaluationResult:
    """Run the command on a pod's recipe."""
    from finetune_trainer.evaluate.__main__ import main

    on_sigterm, file = signal.getsignal(signal.SIGTERM), pod.folder / "evaluation.json"
    environment = {
        **pod.env,
        "FINETUNE_RECIPE": str(pod.folder / "recipe.yaml"),
        "FINETUNE_TERMINATION_PATH": str(file),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            assert main(["--model", model]) == 0
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
    message = TerminationMessage.parse(file.read_text())
    assert message is not None
    assert message.evaluation is not None
    return message.evaluation

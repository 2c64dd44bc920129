"""The table of methods and objectives, and what is checked of each of its cells."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from torch.nn import functional

from finetune_crds import contract
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE, ObjectiveType
from finetune_crds.recipe import Recipe
from finetune_crds.training import MethodType
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from support.training import Mlflow, eval_loss_of, history, split_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.pods import Outcome, Pod

# What peft and generation say whenever they run; for a module's pytestmark.
WARNINGS = (
    # peft reads a property that transformers is about to rename.
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    # What peft says whenever it generates behind a prompt.
    "ignore:Position ids are not supported:UserWarning",
)
_PARAMETERS = {name: name.lower() for name in COLUMNS_OF_OBJECTIVE} | {"RewardModel": "rewardModel"}
BETA, GAMMA, TEMPERATURE, WEIGHT = 0.5, 0.3, 2.0, 0.7
PROMPT = "What is the red house? "


@dataclass(frozen=True)
class Cell:
    """A cell of the table of methods and objectives.

    loss: of DPO, where it is not the default.
    tolerance: by which share the reloaded model's loss may differ from the reported one.
    """

    method: str
    objective: str
    ranks: int = 1
    merge: bool = False
    loss: str = ""
    tolerance: float = 1e-4
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method}-{self.loss or self.objective}"

    @property
    def low_rank(self) -> bool:
        return self.method in ("LoRA", "QLoRA", "DoRA")


@dataclass(frozen=True)
class Models:
    """Folders of what a cell trains from."""

    base: Path
    preferences: Path
    unpaired: Path
    teacher: Path


SOFT = {"training.packing": False, "method.softPrompt": {"virtualTokens": 8}, "training.learningRate": 0.05}
PISSA = {"method.lora.init": "PiSSA"}
NEW_TOKENS = {"model.newTokens": ["The ", " house"]}
TABLE = [
    Cell("Full", "SFT"),
    Cell("Full", "DPO", ranks=2),
    Cell("Full", "KTO", ranks=2, changes=NEW_TOKENS),
    Cell("Full", "ORPO"),
    Cell("Full", "SimPO", ranks=2),
    Cell("Full", "Distillation"),
    Cell("Full", "RewardModel", ranks=2),
    Cell("LoRA", "SFT", changes={"method.lora.scaling": "RankStabilized", **PISSA}),
    Cell("LoRA", "DPO", merge=True, changes={"method.lora.modulesToSave": ["embed_tokens"]}),
    Cell("LoRA", "KTO", merge=True, changes=PISSA),
    Cell("LoRA", "DPO", loss="IPO"),
    Cell("LoRA", "ORPO"),
    Cell("LoRA", "SimPO", merge=True, changes=PISSA),
    Cell("LoRA", "Distillation", changes={"method.lora.modulesToSave": ["norm"]}),
    Cell("LoRA", "RewardModel", changes={"method.lora.modulesToSave": ["norm"], **PISSA}),
    Cell("DoRA", "SFT", merge=True),
    Cell("DoRA", "DPO"),
    Cell("DoRA", "KTO"),
    Cell("DoRA", "ORPO", merge=True, changes=NEW_TOKENS),
    Cell("DoRA", "SimPO"),
    Cell("DoRA", "Distillation"),
    Cell("DoRA", "RewardModel", merge=True, changes=NEW_TOKENS),
    # Loaded as anyone would, its base has all of its bits: 4-bit rounding is gone, and with it a little loss.
    Cell("QLoRA", "SFT", ranks=2, merge=True, tolerance=0.02),
    Cell("QLoRA", "DPO", tolerance=0.15, changes={"training.learningRate": 0.01}),
    Cell("QLoRA", "KTO", tolerance=0.15, changes={"training.learningRate": 0.01}),
    Cell("QLoRA", "ORPO", tolerance=0.15, changes={"training.learningRate": 0.01}),
    Cell("QLoRA", "SimPO", tolerance=0.15, changes={"training.learningRate": 0.01}),
    Cell("QLoRA", "RewardModel", tolerance=0.15, changes={"training.learningRate": 0.01}),
    Cell("PrefixTuning", "SFT", changes=SOFT),
    Cell("PromptTuning", "SFT", changes={**SOFT, "method.softPrompt.initText": "The house is red."}),
]


def let_through() -> set[tuple[str, str]]:
    """The methods with the objectives that the schema accepts."""
    from finetune_trainer.pod import spec_rules

    combinations = set()
    for method, objective in product(get_args(MethodType), get_args(ObjectiveType)):
        columns = {"type": COLUMNS_OF_OBJECTIVE.get(objective, "Text")}
        spec = {"distillation": {"teacher": "/teacher"}} if objective == "Distillation" else {}
        recipe = Recipe.model_validate(
            {
                "job": {"name": "a", "namespace": "b", "uid": "c"},
                "model": {"base": "/base"},
                "method": {"type": method},
                "objective": {"type": objective, **spec},
                "training": {"packing": False},
                "data": {"columns": columns, "splits": {"type": "Delta", "path": "/data"}},
            }
        )
        if not spec_rules.find_violations_of_recipe(recipe):
            combinations.add((method, objective))
    return combinations


def pod_of(cell: Cell, pod: Pod, models: Models) -> Pod:
    """A pod that trains what the cell says."""
    pod = pod.but(
        {
            "method.type": cell.method,
            "training.maxSteps": 10,
            "distributed.processesPerNode": cell.ranks,
            "training.perDeviceBatchSize": 4 // cell.ranks,
            "register": {"model": "cell", "aliases": []},
        }
    )
    if cell.low_rank:
        # NB: with 0.02, whether a loss about preferences falls is up to the rounding of the machine.
        rate = 0.005 if cell.objective in COLUMNS_OF_OBJECTIVE else 0.02
        pod = pod.but({"method.lora": {"rank": 8}, "training.learningRate": rate})
        pod = pod.but({"method.export": "Merged"}) if cell.merge else pod
    if cell.objective in COLUMNS_OF_OBJECTIVE:
        columns = COLUMNS_OF_OBJECTIVE[cell.objective]
        path = models.preferences if columns == "Preference" else models.unpaired
        pod = pod.but(
            {
                "objective": {"type": cell.objective, _PARAMETERS[cell.objective]: parameters(cell)},
                "data": {
                    "columns": {"type": columns},
                    "splits": {"type": "Delta", "path": str(path)},
                },
                # One pass: the loss of KTO depends on what is in it.
                "training.perDeviceEvalBatchSize": 64,
            }
        )
    if cell.objective == "Distillation":
        spec = {"teacher": str(models.teacher), "temperature": TEMPERATURE, "weight": WEIGHT}
        pod = pod.but({"objective": {"type": "Distillation", "distillation": spec}})
    return pod.but(cell.changes)


def parameters(cell: Cell) -> dict[str, Any]:
    """What the loss about an example's two answers has."""
    if cell.objective == "ORPO":
        return {"weight": BETA}
    if cell.objective == "RewardModel":
        return {"centerRewardsCoefficient": 0.01}
    options: dict[str, dict[str, Any]] = {"SimPO": {"gamma": GAMMA}, "DPO": {"loss": cell.loss or "Sigmoid"}}
    return {"beta": BETA, **options.get(cell.objective, {})}


def answers(model: Any, pod: Pod) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits at each document's answer, fp32 [answer, vocabulary], and the answer [answer]: plain forward passes."""
    split = split_of(pod, "validation")
    for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
        tokens = torch.from_numpy(split.tokens[begin:end].copy()).long()
        learned = torch.from_numpy(split.loss_mask[begin:end].copy())[1:]
        with torch.no_grad():
            # Virtual tokens come first, and have logits too.
            logits = model.eval()(input_ids=tokens.unsqueeze(0)).logits[0, -len(tokens) : -1].float()
        yield logits[learned], tokens[1:][learned]


def log_probabilities(model: Any, pod: Pod, *, mean: bool = False) -> torch.Tensor:
    """Of both answers of each example [examples, 2], or the means over their tokens."""
    reduction = "mean" if mean else "sum"
    each = [
        -functional.cross_entropy(logits, answer, reduction=reduction)
        for logits, answer in answers(model, pod)
    ]
    return torch.stack(each).view(-1, 2)


def log_odds(means: torch.Tensor) -> torch.Tensor:
    """Of the second answers to the first ones, after the definition."""
    odds = means.exp() / (1 - means.exp())
    return (odds[:, 0] / odds[:, 1]).log()


def rewards(model: Any, pod: Pod) -> torch.Tensor:
    """The rewards of both documents of each example [examples, 2]: plain forward passes, each document alone."""
    split = split_of(pod, "validation")
    documents = [
        torch.from_numpy(split.tokens[begin:end].copy()).long()
        for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True)
    ]
    with torch.no_grad():
        scores = [model.eval()(input_ids=document.unsqueeze(0)).logits.float() for document in documents]
    return torch.cat(scores).view(-1, 2)


def loss_of_pairs(model: Any, cell: Cell, pod: Pod, base: Any) -> float:
    """The mean loss of an objective about preferences over the validation split, in plain torch."""
    mean = (cell.loss or cell.objective) != "DPO"
    gains = log_probabilities(model, pod, mean=mean)
    if cell.objective == "DPO":
        gains -= log_probabilities(base, pod, mean=mean)
    ahead = gains[:, 0] - gains[:, 1]
    each = {
        "DPO": lambda: -functional.logsigmoid(BETA * ahead),
        "IPO": lambda: (ahead - 1 / (2 * BETA)) ** 2,
        "SimPO": lambda: -functional.logsigmoid(BETA * ahead - GAMMA),
        "ORPO": lambda: -gains[:, 0] - BETA * functional.logsigmoid(log_odds(gains)),
    }
    return float(each[cell.loss or cell.objective]().mean())


def loss_of(model: Any, cell: Cell, pod: Pod, base: Any, teacher: Any) -> float:
    """The objective's mean loss over the validation split, in plain torch."""
    if cell.objective == "RewardModel":
        chosen, rejected = rewards(model, pod).unbind(dim=1)
        return float(-functional.logsigmoid(chosen - rejected).mean())
    if COLUMNS_OF_OBJECTIVE.get(cell.objective) == "Preference":
        return loss_of_pairs(model, cell, pod, base)
    if cell.objective == "KTO":
        gained = log_probabilities(model, pod) - log_probabilities(base, pod)
        labels = split_of(pod, "validation").labels
        assert labels is not None
        sign = 2 * torch.from_numpy(labels.copy()).float() - 1
        divergence = gained[:, 1].mean().clamp(min=0)
        return float((1 - torch.sigmoid(BETA * sign * (gained[:, 0] - divergence))).mean())
    pairs = list(answers(model, pod))
    logits, targets = torch.cat([each for each, _ in pairs]), torch.cat([answer for _, answer in pairs])
    data = functional.cross_entropy(logits, targets)
    if cell.objective == "SFT":
        return float(data)
    taught = torch.cat([each for each, _ in answers(teacher, pod)])
    divergence = functional.kl_div(
        functional.log_softmax(logits / TEMPERATURE, -1),
        functional.log_softmax(taught / TEMPERATURE, -1),
        reduction="batchmean",
        log_target=True,
    )
    return float(WEIGHT * TEMPERATURE**2 * divergence + (1 - WEIGHT) * data)


def exported(pod: Pod, name: str) -> Path:
    """A folder of the logged model."""
    (folder,) = pod.folder.glob(f"artifacts/models/*/artifacts/{name}")
    return folder


def assert_learned(cell: Cell, outcome: Outcome, tracked: Mlflow) -> None:
    """The loss fell, on what is trained on and on what is held out, and so did what the objective is about."""
    assert outcome.message is not None
    assert outcome.message.train is not None
    before, after = outcome.message.train.base_eval_loss, eval_loss_of(outcome)
    assert before is not None
    assert after < before - 0.02, (before, after)
    assert outcome.losses[10] < outcome.losses[1] - 0.02
    if cell.objective == "DPO":
        begin = 1 / (2 * BETA) ** 2 if cell.loss == "IPO" else math.log(2)
        assert before == pytest.approx(begin, rel=1e-5)
        assert outcome.losses[1] == pytest.approx(begin, abs=1e-4)
        accuracy = history(tracked, contract.METRIC_REWARD_ACCURACY)
        margin = history(tracked, contract.METRIC_REWARD_MARGIN)
        assert margin[1] == pytest.approx(0, abs=1e-4)
        assert margin[10] > 0.1
        assert accuracy[10] > 0.6
        assert outcome.message.train.perplexity is None
    if cell.objective in ("ORPO", "SimPO", "RewardModel"):
        margin = history(tracked, contract.METRIC_REWARD_MARGIN)
        assert margin[10] > margin[1]
        assert outcome.message.train.perplexity is None
    if cell.objective == "KTO":
        assert (before, outcome.losses[1]) == pytest.approx((0.5, 0.5), abs=1e-4)
        margin = history(tracked, contract.METRIC_REWARD_MARGIN)
        assert margin[10] > 0.1
        assert outcome.message.train.perplexity is None
    if cell.objective == "Distillation":
        divergence = history(tracked, "divergence")
        assert divergence[10] < divergence[1]


def with_adapter(cell: Cell, pod: Pod, base: Any) -> tuple[Any, Any]:
    """The adapter on its base as peft finds it, and the base; QLoRA's is in four bits, as it was in training."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    adapter = exported(pod, "peft")
    if cell.method != "QLoRA":
        return AutoPeftModelForCausalLM.from_pretrained(adapter), base
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"quantization_config": four_bits, "dtype": torch.float32}
    models = (
        AutoPeftModelForCausalLM.from_pretrained(adapter, **options),
        AutoModelForCausalLM.from_pretrained(pod.recipe["model"]["base"], **options),
    )
    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # NB: bitsandbytes would pack the weights anew for inference, and layers this small it cannot.
            module.support_avx512bf16_for_cpu = False
    return models


def check_reward_model(cell: Cell, pod: Pod, reported: float) -> None:
    """Load what was registered with transformers, peft and MLflow, and compare the losses and the rewards."""
    import mlflow
    import pandas as pd
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig

    scoring: Any = None
    if cell.method != "Full":
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        options = {"quantization_config": four_bits, "dtype": torch.float32} if cell.method == "QLoRA" else {}
        folder = exported(pod, "peft")
        # With new tokens, the base has too few rows for the adapter.
        if not cell.changes.get("model.newTokens"):
            scoring = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)
            for module in scoring.modules():
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
            assert loss_of(scoring, cell, pod, None, None) == pytest.approx(reported, rel=1e-4)
    if cell.method == "Full" or cell.merge:
        folder = exported(pod, "model")
        scoring = AutoModelForSequenceClassification.from_pretrained(folder)
        assert loss_of(scoring, cell, pod, None, None) == pytest.approx(reported, rel=cell.tolerance)
    if cell.method == "QLoRA":
        return
    # Rows of different lengths: the config has the padding token by which the last token is found.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": "What is red? ", "response": answer} for answer in ("Red.", "The house is red.")]
    if cell.method == "Full" or cell.merge:
        # Prompt and answer are encoded separately, as in training.
        ids = [
            [
                *tokenizer(row["prompt"]).input_ids,
                *tokenizer(row["response"]).input_ids,
                tokenizer.eos_token_id,
            ]
            for row in rows
        ]
        batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        with torch.no_grad():
            expected = scoring(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]
        served = mlflow.pyfunc.load_model("models:/cell/1").predict(pd.DataFrame(rows))
        assert served["reward"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
        classifier = mlflow.transformers.load_model("models:/cell/1")
        assert classifier.model.config.pad_token_id == tokenizer.pad_token_id


def check(cell: Cell, pod: Pod, models: Models, tracked: Mlflow, capsys: pytest.CaptureFixture[str]) -> None:
    """Train a cell, load what it registered as anyone would, and ask it.

    Args:
        cell: what to train.
        pod: the pod that tests change.
        models: what it trains from.
        tracked: MLflow, which this process uses too.
        capsys: takes the output of a pod with one rank.
    """
    import mlflow
    from transformers import AutoModelForCausalLM

    pod = pod_of(cell, pod, models)
    pod.env |= tracked.env
    pod.forked = cell.ranks > 1
    outcome = pod.run() if pod.forked else pod.run_here(capsys)
    assert outcome.code == 0, outcome.output
    assert_learned(cell, outcome, tracked)
    if cell.objective == "RewardModel":
        check_reward_model(cell, pod, eval_loss_of(outcome))
        return

    parts = mlflow.transformers.load_model("models:/cell/1", return_type="components")
    base = AutoModelForCausalLM.from_pretrained(models.base)
    spec = Recipe.model_validate(pod.recipe).model
    NewTokens.of(spec, parts["tokenizer"]).enlarge(base)
    taught = AutoModelForCausalLM.from_pretrained(models.teacher)
    reported = eval_loss_of(outcome)
    tolerance = cell.tolerance
    assert loss_of(parts["model"], cell, pod, base, taught) == pytest.approx(reported, rel=tolerance)
    question = parts["tokenizer"](PROMPT, return_tensors="pt")
    generated = parts["model"].generate(
        input_ids=question.input_ids,
        attention_mask=question.attention_mask,
        max_new_tokens=4,
        do_sample=False,
    )
    assert generated.shape[1] > question.input_ids.shape[1]

    if cell.method != "Full":
        adapted, its_base = with_adapter(cell, pod, base)
        assert loss_of(adapted, cell, pod, its_base, taught) == pytest.approx(reported, rel=1e-4)
    if cell.merge:
        merged = AutoModelForCausalLM.from_pretrained(exported(pod, "model"))
        assert not hasattr(parts["model"], "peft_config")
        assert not [name for name, _ in merged.named_modules() if "lora" in name]
        assert loss_of(merged, cell, pod, base, taught) == pytest.approx(reported, rel=tolerance)

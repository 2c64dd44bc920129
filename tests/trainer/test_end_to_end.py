"""Whole runs through `finetune-train`: real ranks, a real Delta table, a real MLflow."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from finetune_crds import contract
from finetune_crds.recipe import Recipe
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.distillation import Distillation
from finetune_trainer.train.objectives.dpo import Dpo
from finetune_trainer.train.objectives.kto import Kto
from finetune_trainer.train.objectives.reward import RewardModel
from finetune_trainer.train.objectives.sft import Sft
from support.checkpoints import complete_steps
from support.ends import Attempt
from support.evaluations import save_splits
from support.ports import free_port
from support.training import error_of, eval_loss_of, history, split_of, validation_loss

if TYPE_CHECKING:
    from support.pods import Pod
    from support.training import Mlflow, Trained

_ANSWER = """
import json, sys, mlflow
pipe = mlflow.transformers.load_model(sys.argv[1], torch_dtype="float32")
out = pipe(sys.argv[2], max_new_tokens=12, do_sample=False, return_full_text=False)
print(json.dumps(out[0]["generated_text"]))
"""


def answer(mlflow: Mlflow, uri: str, prompt: str) -> str:
    """What a registered model says in a process of its own, loaded as anyone would."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ANSWER, uri, prompt],
        env={"PATH": "", "MLFLOW_TRACKING_URI": mlflow.uri, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_run_trains_evaluates_and_registers(trained: Trained, table: Path) -> None:
    outcome = trained.outcome
    assert outcome.code == 0, outcome.output
    assert outcome.message is not None
    result = outcome.message.train
    assert result is not None
    assert (result.step, result.model_name, result.model_version) == (60, "tiny", "1")
    assert outcome.message.checkpoint_step == 60
    assert result.base_eval_loss is not None
    assert result.eval_loss is not None
    assert result.eval_loss < 0.5 * result.base_eval_loss
    assert result.perplexity == pytest.approx(math.exp(result.eval_loss))

    client = trained.mlflow.client()
    (version,) = client.search_model_versions("name='tiny'")
    digest = Recipe.model_validate(trained.pod.recipe).digest()
    assert version.tags == {
        "team": "support",
        contract.TAG_RECIPE: digest,
        contract.TAG_DATA_PATH: str(table),
        contract.TAG_DATA_VERSION: "0",
        contract.TAG_EVAL_DATA: split_of(trained.pod, "validation").digest,
        contract.TAG_EVAL_LOSS: f"{result.eval_loss:.6g}",
        contract.TAG_PERPLEXITY: f"{result.perplexity:.6g}",
    }
    assert (version.run_id, list(version.aliases)) == (trained.mlflow.run_id, [])


def test_the_run_tells_progress_parameters_and_lineage(trained: Trained, table: Path) -> None:
    run = trained.mlflow.client().get_run(trained.mlflow.run_id)
    metrics = run.data.metrics
    names = {value for name, value in vars(contract).items() if name.startswith("METRIC_")}
    of_data = {name for name in metrics if name.startswith(("train_", "validation_"))}
    of_system = {name for name in metrics if name.startswith("system/")}
    of_objectives = {
        metric for objective in (Distillation, Dpo, Kto, RewardModel) for metric in objective.metrics
    }
    assert set(metrics) - of_data - of_system == names - of_objectives - {
        contract.METRIC_MFU,
        contract.METRIC_LOSS_SCALE,
    }
    assert {name: metrics[name] for name in of_data if metrics[name]} == {
        "train_rows_read": 72,
        "train_rows_kept": 72,
        "validation_rows_read": 8,
        "validation_rows_kept": 8,
    }
    assert of_system == {
        f"system/rank-{rank}/{name}" for rank in range(2) for name in ("cpu_percent", "memory_bytes")
    }
    assert (run.data.metrics["step"], run.data.metrics["max_steps"]) == (60, 60)
    some = {
        name: run.data.params[name] for name in ("method", "train_samples", "val_samples", "effective_batch")
    }
    assert some == {"method": "Full", "train_samples": "72", "val_samples": "8", "effective_batch": "4"}
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("tiny", "version-0")
    assert str(table) in used.dataset.source
    assert run.data.tags[contract.TAG_DATA_VERSION] == "0"
    assert run.data.tags[contract.TAG_EVAL_DATA] == split_of(trained.pod, "validation").digest
    assert run.data.tags[contract.TAG_DEVICE] == "CPU"
    assert run.data.tags[contract.TAG_DEVICE_NAME]
    plan = contract.MemoryPlan.parse(run.data.tags[contract.TAG_PLAN])
    assert plan is not None
    assert (plan.activation_checkpointing, plan.trained_parameters) == ("None", plan.parameters)
    assert (
        plan.memory_bytes
        == metrics[contract.METRIC_PLAN_MEMORY]
        == pytest.approx(sum(plan.parts.values()), abs=6)
    )
    # Of weights in FP32 on two ranks.
    assert (plan.parts["weights"], plan.staged_bytes) == (4 * plan.parameters // 2, 12 * plan.parameters // 2)


def test_the_registered_version_answers_by_its_alias(trained: Trained) -> None:
    client = trained.mlflow.client()
    client.set_registered_model_alias("tiny", "candidate", "1")
    response = answer(trained.mlflow, "models:/tiny@candidate", "What is the red house? ")
    assert re.fullmatch(r'"The \w+ is \w+\."', response)


def test_the_registered_weights_are_the_evaluated_ones(trained: Trained) -> None:
    from transformers import AutoModelForCausalLM

    (config,) = trained.pod.folder.glob("artifacts/models/*/artifacts/model/config.json")
    assert validation_loss(AutoModelForCausalLM.from_pretrained(config.parent), trained.pod) == pytest.approx(
        eval_loss_of(trained.outcome), rel=1e-5
    )


LINES = (
    r"train: 72 read, 72 kept",
    r"validation: 8 read, 8 kept",
    r"72 examples with 936 tokens in 18 sequences \(81% full\); 60 steps of 4 sequences on 2 ranks",
    r"memory: about \S+ GiB a rank \(.*\) of \S+ GiB; activation checkpointing None; logits of \d+ tokens at a time",
    r"asynchronous checkpoints keep a copy of \S+ GiB per rank in host memory",
    r"model\.base \S+ computes the same logits in training as in transformers",
    r"evaluation before training: loss \S+",
    r"step \d+/60  \d+%  loss \S+  lr \S+  grad \S+  \S+ tok/s  mem \S+ GiB  eta \S+",
    r"evaluation at step 60: loss \S+  perplexity \S+",
    r"registered tiny version 1",
)


def test_the_log_holds_our_own_lines_alone(trained: Trained) -> None:
    strange = [
        line
        for line in trained.outcome.output.splitlines()
        if not any(re.fullmatch(pattern, line) for pattern in LINES)
    ]
    assert strange == []


def test_the_first_step_is_that_of_plain_torch(trained: Trained, base_model: Path) -> None:
    """Loss and gradient norm of two FSDP ranks equal those of one process without any of our machinery."""
    from transformers import AutoModelForCausalLM

    split = split_of(trained.pod, "train")
    rows = pack.pack_examples(split.lengths, max_length=64, packing=True)
    plan = pack.Plan.of(rows, global_batch=4, seed=42, epochs=None, max_steps=60)
    examples = [[example] for row in plan.of_step(0) for example in row]
    batch = pack.collate(split, examples, pad_id=1)
    model = AutoModelForCausalLM.from_pretrained(base_model)
    loss = Network(model, Sft())(batch)[0] / batch.targets_count
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert history(trained.mlflow, "loss")[1] == pytest.approx(loss.item(), rel=1e-5)
    assert history(trained.mlflow, "grad_norm")[1] == pytest.approx(norm.item(), rel=1e-4)


def test_one_rank_takes_the_same_steps_as_two_while_mlflow_is_away(
    pod: Pod, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = pod.but({"register": {"model": "tiny"}})
    pod.env |= {
        "MLFLOW_TRACKING_URI": f"http://localhost:{free_port()}",
        "MLFLOW_RUN_ID": "1",
        "FINETUNE_MLFLOW_PATIENCE_SECONDS": "0.2",
    }
    outcome = pod.run_here(capsys)
    assert (outcome.code, error_of(outcome).reason) == (1, "MlflowUnreachable")
    assert outcome.output.count("MLflow is unreachable; continuing without it") == 1
    assert outcome.losses == pytest.approx(
        {step: trained.outcome.losses[step] for step in range(1, 7)}, abs=2e-3
    )


def test_a_second_attempt_registers_no_second_version(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of two ranks is also read by one."""
    outcome = trained.pod.run_here(capsys)
    assert outcome.code == 0
    assert "resuming from the checkpoint of step 60" in outcome.output
    # The result of the check is in the checkpoint.
    assert ("the same logits" in trained.outcome.output, "the same logits" in outcome.output) == (True, False)
    assert outcome.losses == {}
    assert outcome.message is not None
    assert outcome.message.train is not None
    assert trained.outcome.message is not None
    assert trained.outcome.message.train is not None
    same = ("step", "base_eval_loss", "model_name", "model_version")
    for name in same:
        assert getattr(outcome.message.train, name) == getattr(trained.outcome.message.train, name)
    assert eval_loss_of(outcome) == pytest.approx(eval_loss_of(trained.outcome), rel=1e-5)
    assert len(trained.mlflow.client().search_model_versions("name='tiny'")) == 1
    assert len(list(trained.pod.folder.glob("artifacts/models/*"))) == 1


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(trained: Trained, tmp_path: Path) -> None:
    """Trap 12: with the same number of ranks, every loss is that of the run that was not stopped."""
    pod = trained.pod.but({"checkpoint.uri": str(tmp_path / "checkpoints"), "register": None})
    pod.folder, pod.env, pod.forked = tmp_path, {}, True
    with Attempt.start(pod) as attempt:
        attempt.run_to("evaluation before training")
        attempt.send("TERM")
        first = attempt.end()
    assert first.code == contract.EXIT_PREEMPTED, first.output
    stopped_at = max(first.losses)
    assert stopped_at < 60
    assert first.message is not None
    assert first.message.checkpoint_step == stopped_at
    second = pod.run()
    assert second.code == 0, second.output
    assert min(second.losses) == stopped_at + 1
    assert first.losses | second.losses == trained.outcome.losses


def test_a_checkpoint_of_another_recipe_is_refused(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = trained.pod.but({"training.seed": 43}).run_here(capsys)
    assert outcome.code == 64
    assert error_of(outcome).reason == "ForeignCheckpoint"
    assert "belongs to a run with other settings (training.seed 42 -> 43): " in error_of(outcome).message


def test_another_job_carries_the_run_on_with_other_ranks_and_more_steps(
    pod: Pod, trained: Trained, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    (begin,) = trained.pod.folder.glob("checkpoints/*/step-00000040")
    pod = pod.but(
        {
            "job": {"name": "next", "namespace": "tests", "uid": "fedcba9876543210"},
            "training.maxSteps": 62,
            "training.logEverySteps": 1,
            "checkpoint": {
                "uri": str(pod.folder / "checkpoints"),
                "everySteps": 100,
                "resumeFrom": {"type": "Uri", "uri": str(begin)},
            },
        }
    )
    pod.env |= mlflow.env
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome.output
    assert f"resuming from the checkpoint of step 40 of another job, {begin}\n" in outcome.output
    assert [*outcome.losses] == [*range(41, 63)]
    shared = range(41, 61)
    assert [outcome.losses[step] for step in shared] == pytest.approx(
        [trained.outcome.losses[step] for step in shared], abs=2e-3
    )
    run = mlflow.client().get_run(mlflow.run_id).data
    assert (run.params["resumed_from"], run.tags[contract.TAG_RESUMED_FROM]) == (str(begin), str(begin))
    assert [path.name for path in pod.folder.glob("checkpoints/*/step-*")] == ["step-00000062"]


def test_a_job_that_carries_on_from_the_last_step_delivers_the_same_model(
    pod: Pod, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the last job of a sweep does after an early stop: it has as many steps as the checkpoint."""
    checkpoints = {"uri": str(tmp_path / "checkpoints"), "everySteps": 100}
    begins = pod.but({"training.maxSteps": 2, "training.logEverySteps": 1, "checkpoint": checkpoints})
    first = begins.run_here(capsys)
    assert first.code == 0, first.output
    (checkpoint,) = tmp_path.glob("checkpoints/*/step-00000002")
    goes_on = begins.but(
        {
            "job": {"name": "tiny-best", "namespace": "tests", "uid": "fedcba9876543210"},
            "checkpoint.resumeFrom": {"type": "Uri", "uri": str(checkpoint.parent)},
        }
    )
    last = goes_on.run_here(capsys)
    assert last.code == 0, last.output
    assert ([*first.losses], [*last.losses]) == ([1, 2], [])
    results = [item.message.train for item in (first, last) if item.message and item.message.train]
    assert [item.step for item in results] == [2, 2]
    assert results[1].eval_loss == pytest.approx(results[0].eval_loss)


def test_another_job_carries_on_with_the_day_that_the_chat_template_wrote(
    pod: Pod, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "the house"}, {"role": "assistant", "content": "is red."}]
    rows = [{"messages": turns, "split": split} for split in ("train", "train", "validation")]
    dated = (
        "{{ strftime_now('%Y-%m-%d') }}\n{% for turn in messages %}{{ turn.role }}: {{ turn.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    begins = pod.but(
        {
            "job.created": "2026-11-24",
            "model.chatTemplate": {"type": "Jinja", "jinja": dated},
            "data.splits.path": str(save_splits(tmp_path / "splits", rows)),
            "data.splits.version": 0,
            "data.columns": {"type": "Messages"},
            "training.maxSteps": 1,
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 1},
        }
    )
    outcome = begins.run_here(capsys)
    assert outcome.code == 0, outcome.output
    (checkpoint,) = tmp_path.glob("checkpoints/*/step-00000001")
    goes_on = begins.but(
        {
            "job": {"name": "next", "namespace": "tests", "uid": "fedcba9876543210", "created": "2026-11-25"},
            "training.maxSteps": 2,
            "checkpoint.resumeFrom": {"type": "Uri", "uri": str(checkpoint)},
        }
    )
    outcome = goes_on.run_here(capsys)
    assert outcome.code == 0, outcome.output
    assert [*outcome.losses] == [2]


@pytest.mark.parametrize("optimizer", [{}, {"type": "AdamW8bit", "weights": "BF16"}])
def test_bf16_learns_as_fp32_does(
    pod: Pod, trained: Trained, optimizer: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = pod.but({"training.precision": "BF16", "training.optimizer": optimizer}).run_here(capsys)
    assert outcome.code == 0, outcome
    assert outcome.losses == pytest.approx(
        {step: trained.outcome.losses[step] for step in range(1, 7)}, rel=0.02
    )


def test_training_stops_when_evaluation_no_longer_gets_better(
    pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = pod.but(
        {
            "training.maxSteps": 50,
            "training.evalEverySteps": 2,
            "training.logEverySteps": 4,
            "training.earlyStopping": {"patience": 3, "minDelta": 100.0},
        }
    ).run_here(capsys)
    assert outcome.code == 0, outcome
    assert list(outcome.losses) == [4, 6]
    assert "stopping early: the evaluation loss did not fall for 3 evaluations" in outcome.output
    assert re.search(r"step 6/50 .* eta 0s\n", outcome.output)


def test_a_loss_that_is_not_finite_ends_the_attempt_and_no_checkpoint_holds_it(
    pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = pod.but(
        {
            "training.learningRate": 10.0,
            "training.maxGradNorm": 1e30,
            "training.weightDecay": 1.0,
            "training.maxSteps": 200,
            "training.maxSkippedSteps": 3,
            "training.logEverySteps": 7,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 1, "keep": 100},
        }
    ).run_here(capsys)
    error = error_of(outcome)
    assert (outcome.code, error.reason) == (1, "NonFiniteLoss")
    match = re.search(r"gradients of 4 steps up to step (\d+) are not finite", error.message)
    assert match is not None
    assert complete_steps(pod.folder / "checkpoints") == [*range(1, int(match.group(1)))]


def test_a_run_decays_to_a_floor_and_is_evaluated_without_label_smoothing(
    pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"scheduler": "WSD", "decaySteps": 2, "minLearningRate": 1e-3, "optimizer": {"beta2": 0.95}}
    changes = {f"training.{name}": value for name, value in schedule.items()}
    plain = pod.but(changes).run_here(capsys)
    smoothed = pod.but(changes | {"objective.labelSmoothing": 0.3}).run_here(capsys)
    for outcome in (plain, smoothed):
        assert outcome.code == 0, outcome.output
        assert re.findall(r"lr (\S+)", outcome.output) == ["5.00e-03"] * 5 + ["2.17e-03"]
    before, without = (
        outcome.message.train.base_eval_loss
        for outcome in (plain, smoothed)
        if outcome.message and outcome.message.train
    )
    assert before == without
    assert abs(smoothed.losses[1] - plain.losses[1]) > 1e-3

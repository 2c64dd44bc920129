"""An evaluation from the recipe to its numbers: the registered version, then the base model, on the same rows."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune_crds.evaluation import GENERATED, REWARD_METRICS, Evaluation, EvaluationResult
from finetune_trainer.evaluate import loss, metrics, model, rewards, rows, table
from finetune_trainer.evaluate.answers import Decoding
from finetune_trainer.evaluate.questions import Ending
from finetune_trainer.examples.tokenizer import load_tokenizer, pad_id
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.sinks.feed import Sinks
from finetune_trainer.train.data import corpus
from finetune_trainer.train.model import precision
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from finetune_trainer.train.model.network import task
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.worker import quiet_libraries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Model
    from finetune_trainer.evaluate.questions import Question
    from finetune_trainer.evaluate.rows import Rows
    from finetune_trainer.models.download import Source
    from finetune_trainer.train.model.network.trained_network import Network


@dataclass(frozen=True)
class _Measurement:
    """The results of one model.

    numbers: the metrics by name.
    answers: the generated answers, in the order of the questions; empty without questions.
    references: the expected answers, in the same order.
    """

    numbers: dict[str, float]
    answers: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


def run(recipe: Recipe, uri: str) -> EvaluationResult:
    """Evaluate a registered version and, unless evaluation.baseModel is false, the model that it was trained from.

    Args:
        recipe: a recipe with data.splits and evaluation.
        uri: the version, such as models:/name/3.

    Raises:
        RecipeRefusedError: a model cannot be loaded, or the rows have no answers to compare with.
        DataError: the rows cannot be read, or there are none.
        TrainingError: the Hub does not answer, or a loss is not a number.
    """
    spec = recipe.evaluation
    if spec is None:
        raise RecipeRefusedError("the recipe has no evaluation: set spec.evaluation")
    quiet_libraries()
    splits = recipe.data.splits
    assert splits is not None  # noqa: S101 - load_recipe() refuses a recipe without splits
    recipe = corpus.resolve_columns(recipe, splits)
    run_id = os.environ.get("MLFLOW_RUN_ID")
    with (
        tempfile.TemporaryDirectory(prefix="finetune-") as name,
        Tracker(run_id) as tracker,
        Sinks.of(recipe, "evaluation") as sinks,
    ):
        folder = Path(name)
        version = model.fetch_version(recipe, uri, folder / "version")
        tokenizer = load_tokenizer(model.build_version_spec(recipe, uri), version.tokenizer)
        evaluated_rows = rows.load(recipe, spec, tokenizer)
        print(
            f"{spec.split.lower()}: {evaluated_rows.summary}; evaluating {len(evaluated_rows):,} rows",
            flush=True,
        )
        device = model.choose_device(recipe)
        dtype = precision.inference_dtype(Card.of(device), recipe.training.precision)
        score = None
        if task.of_recipe(recipe) == "RewardModel":
            # A reward model generates nothing: without generations, no model is asked a question.
            spec = spec.model_copy(update={"metrics": spec.metrics or [*REWARD_METRICS], "generations": 0})
            score = model.ScoreHead(recipe.training.seed, pad_id(tokenizer))
        evaluator = _Evaluator(spec, evaluated_rows, tokenizer, device, dtype, score)
        trained = evaluator.measure(version, model.build_version_spec(recipe, uri), model.VERSION)
        base = _Measurement({})
        if spec.base_model:
            source = model.fetch_base(recipe, version, folder / "base")
            base = evaluator.measure(source, recipe.model, model.BASE)
        if evaluator.table_questions:
            answers_by_model = (
                {"base": base.answers, "model": trained.answers}
                if spec.base_model
                else {"model": trained.answers}
            )
            # If a metric compares answers, all questions have answers, not only those of the table.
            table.log_table(
                tracker,
                folder,
                evaluator.table_questions,
                references=trained.references[: spec.generations],
                answers={name: answers[: spec.generations] for name, answers in answers_by_model.items()},
            )
        result = EvaluationResult(
            rows=len(evaluated_rows), digest=evaluated_rows.digest, metrics=trained.numbers, base=base.numbers
        )
        # The operator logs the numbers to MLflow.
        sinks.metrics(recipe.metrics_step or 0, result.tracked_metrics, is_result=True)
        return result


@dataclass(frozen=True)
class _Evaluator:
    """Measures models on the same rows."""

    spec: Evaluation
    rows: Rows
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype
    score: model.ScoreHead | None

    @property
    def table_questions(self) -> list[Question]:
        """The questions of the table."""
        return self.rows.questions[: self.spec.generations]

    @property
    def model_questions(self) -> list[Question]:
        """The questions for each model: only the questions of the table if no metric compares answers."""
        compared = any(metric in GENERATED for metric in self.spec.selected_metrics)
        return self.rows.questions if compared else self.table_questions

    def measure(self, source: Source, spec: Model, name: str) -> _Measurement:
        """Load a model and measure it."""
        try:
            measurement = self._measure_network(source, spec, name)
        except torch.OutOfMemoryError as error:
            raise RecipeRefusedError(
                f"{name} {spec.base} does not fit into the memory of the GPU with evaluation.batchSize "
                f"{self.spec.batch_size}: lower evaluation.batchSize, or request a larger GPU in "
                "spec.pods.evaluate.template",
                reason="OutOfMemory",
            ) from error
        summary = ", ".join(f"{metric} {value:.4g}" for metric, value in measurement.numbers.items())
        print(f"{name} {spec.base}: {summary or 'answers generated'}", flush=True)
        return measurement

    def _measure_network(self, source: Source, spec: Model, name: str) -> _Measurement:
        requested_metrics, batch_size = self.spec.selected_metrics, self.spec.batch_size
        numbers: dict[str, float] = {}
        new_tokens = NewTokens.of(spec, self.tokenizer)
        with model.load_model(
            source, spec, name, self.device, new_tokens, dtype=self.dtype, score=self.score
        ) as network:
            if self.score is not None:
                return _Measurement(self._measure_rewards(network, name, spec))
            if "Loss" in requested_metrics or "Perplexity" in requested_metrics:
                padding = pad_id(self.tokenizer)
                mean_loss = loss.compute_mean_loss(
                    network, self.rows.split, batch_size=batch_size, pad_id=padding, device=self.device
                )
                _check_finite(mean_loss, name, spec)
                numbers = metrics.compute_loss_metrics(requested_metrics, mean_loss)
            questions = self.model_questions
            if not questions:
                return _Measurement(numbers)
            ending = Ending(self.tokenizer, model.read_stops(source, spec, self.tokenizer))
            decoding = Decoding(ending, self.spec.max_new_tokens, batch_size)
            answers = decoding.answers(network, questions, self.device)
        references = [ending.cut(question.reference) for question in questions]
        return _Measurement(
            numbers | metrics.compute_answer_metrics(requested_metrics, answers, references),
            answers,
            references,
        )

    def _measure_rewards(self, network: Network, name: str, spec: Model) -> dict[str, float]:
        split, padding = self.rows.split, pad_id(self.tokenizer)
        pair_rewards = rewards.compute_rewards(
            network, split, batch_size=self.spec.batch_size, pad_id=padding, device=self.device
        )
        numbers = rewards.compute_metrics(self.spec.selected_metrics, pair_rewards, split.margins)
        _check_finite(float(pair_rewards.sum()), name, spec)
        return numbers


def _check_finite(mean_loss: float, name: str, spec: Model) -> None:
    if not math.isfinite(mean_loss):
        raise TrainingError(
            "LossNotFinite",
            f"the loss of {name} {spec.base} is {mean_loss}, so the weights are broken: train the model again",
        )

"""The progress of a run, which a checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Progress:
    """What the next attempt needs of a run, besides the weights and the state of the optimizer.

    Data order, learning rate and random numbers are functions of the seed and the step.
    """

    step: int = 0
    recipe: str = ""
    """Digest of the recipe that wrote the checkpoint."""
    data_version: int | None = None
    """Version of the Delta table of the splits; None if the splits are not in one table."""
    table_versions: str = ""
    """Versions of the tables of the splits, such as train=3,test=0; empty if the splits do not have a table each."""
    base_eval_loss: float | None = None
    """Evaluation loss before the first step."""
    best_eval_loss: float | None = None
    """The least evaluation loss so far; with training.monitor Accuracy, the least share of pairs that are ranked the wrong way round."""
    best_step: int | None = None
    """Step of the checkpoint with the least evaluation loss. That checkpoint is kept."""
    best_step_loss: float | None = None
    """Evaluation loss of the checkpoint of `best_step`; above `best_eval_loss` if a later, better checkpoint could not be saved."""
    best_in: str = ""
    """URI of the folder with the best checkpoint; empty if it is the folder of this checkpoint."""
    evals_without_gain: int = 0
    """Number of evaluations since the loss fell, as training.earlyStopping counts them."""
    evaluated_step: int = 0
    """Step of the newest evaluation."""
    productive_seconds: float = 0.0
    """Seconds of all attempts in steps whose result is kept."""
    elapsed_seconds: float = 0.0
    """Seconds from the start of each attempt to its newest checkpoint, summed."""
    skipped_steps: int = 0
    """Steps that changed nothing, because their gradients were not finite."""
    loss_scale: float | None = None
    """The scale of the loss; None if the loss is not scaled."""
    good_steps: int = 0
    """Steps with finite gradients since the scale of the loss changed."""
    examples: str = ""
    """Digest of the tokenized training split; empty in checkpoints of earlier releases."""
    day: str = ""
    """The day that the chat template writes, in ISO 8601; empty in checkpoints of earlier releases."""
    recomputation: Mapping[str, str] | None = None
    """The fields of the newest `recomputation.Verdict`; None: nothing was checked."""
    eval_data: str | None = None
    """Identifies the evaluation data: losses on data with the same identity are comparable."""
    logits_checked: str = ""
    """Identifies everything that the check of the logits depended on when it passed (`probe.compute_key`); empty before that."""
    resumed_from: str = ""
    """URI of the checkpoint of another job that the run began with; empty if it began at step 0."""

    @classmethod
    def of(cls, saved_fields: Mapping[str, Any]) -> Progress:
        """Read the progress from a checkpoint; fields of later releases are ignored."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in saved_fields.items() if name in names})

    def for_new_job(self, uri: str, data_version: int | None, table_versions: str) -> Progress:
        """Return the progress for a new job that continues this one: times, skipped steps and the patience of earlyStopping start anew.

        Evaluation losses are compared with the best checkpoint's, because the new job can deliver that checkpoint.

        Args:
            uri: of the checkpoint.
            data_version: version of the splits to read; None for the newest.
            table_versions: versions of the tables of the splits to read; empty for the newest.
        """
        return replace(
            self,
            resumed_from=uri,
            data_version=data_version,
            table_versions=table_versions,
            best_eval_loss=self.best_step_loss,
            evals_without_gain=0,
            productive_seconds=0.0,
            elapsed_seconds=0.0,
            skipped_steps=0,
        )

    def without_best(self) -> Progress:
        """Return the progress without a best checkpoint: the next evaluation sets it."""
        return replace(self, best_eval_loss=None, best_step=None, best_step_loss=None, best_in="")

    def on_eval_data(self, eval_data: str | None) -> Progress:
        """Return the progress for evaluations on `eval_data`; results on other data are dropped."""
        # If `examples` is empty, nothing was evaluated yet, or an earlier release did not record on which data.
        if self.eval_data == eval_data or not self.examples:
            return replace(self, eval_data=eval_data)
        return replace(
            self.without_best(),
            eval_data=eval_data,
            base_eval_loss=None,
            evals_without_gain=0,
            evaluated_step=0,
        )

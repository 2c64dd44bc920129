"""The recipe: what the pods of a job read from FINETUNE_RECIPE."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError

from finetune_crds.base import ApiModel, NonNegative, first_mistake
from finetune_crds.checkpoint import Checkpoint
from finetune_crds.data import Data
from finetune_crds.distributed import Distributed
from finetune_crds.evaluation import Evaluation
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.objective import Objective
from finetune_crds.output import Output
from finetune_crds.own_script import Parameters
from finetune_crds.prepare import Prepare
from finetune_crds.status import DataStatus
from finetune_crds.tracking import Register, Tracking
from finetune_crds.training import Method, Model, Training


class RecipeError(ValueError):
    """The recipe cannot be read or does not fit the schema."""


def today() -> date:
    """Return the current day in UTC."""
    return datetime.now(UTC).date()


class JobReference(ApiModel):
    """The FineTuneJob that a recipe describes.

    Attributes:
        created: the day on which the job was created, in UTC. Chat templates use it as the current date in all pods of the job, on
            whatever day the pods run.
    """

    name: str
    namespace: str
    uid: str
    created: date = Field(default_factory=today)


class JobRecipe(ApiModel):
    """The recipe of a job: the fields of FineTuneJob.spec that pods read. With your own command, model and data can be absent.

    In training, `data.splits` names the splits and their version, even if this job prepared them.
    """

    kind: Literal["Recipe"] = "Recipe"
    job: JobReference
    model: Model | None = None
    data: Data | None = None
    method: Method = Field(default_factory=Method)
    objective: Objective = Field(default_factory=Objective)
    training: Training = Field(default_factory=Training)
    distributed: Distributed = Field(default_factory=Distributed)
    checkpoint: Checkpoint | None = None
    tracking: Tracking = Field(default_factory=Tracking)
    register_: Register | None = Field(default=None, alias="register")
    evaluation: Evaluation | None = None
    output: Output | None = None
    parameters: Parameters = Field(default_factory=dict)
    prepared: DataStatus | None = None
    """In training: the result of the preparation by this job or another job."""
    metrics_step: NonNegative | None = None
    """In an evaluation: the step of its metrics, after the last step of the training."""

    @classmethod
    def of(cls, job: JobReference, spec: FineTuneJobSpec) -> Self:
        """Return the recipe of a job, without `pods` and without the variables of a new Databricks cluster.

        NB: variables and templates can contain secrets, and a recipe is not only in pods: it is also in a ConfigMap, in the
        model card, and in the volume of a Databricks run.
        """
        shared_names = [name for name in cls.model_fields if name in type(spec).model_fields]
        fields = {name: value for name in shared_names if (value := getattr(spec, name)) is not None}
        if spec.data and spec.prepare:
            fields["data"] = spec.data.model_copy(update={"prepare": _without_cluster_env(spec.prepare)})
        return cls(job=job, parameters=spec.trainer.parameters, **fields)

    def on_day(self, day: date) -> Self:
        """Return the recipe with another day of creation."""
        return self.model_copy(update={"job": self.job.model_copy(update={"created": day})})

    @property
    def global_batch(self) -> int:
        """Sequences of an optimizer step on all ranks."""
        training = self.training
        return training.per_device_batch_size * training.gradient_accumulation * self.distributed.ranks

    def digest(self) -> str:
        """Return a short SHA-256 of the recipe. Jobs with the same digest train in the same way.

        The digest leaves out the job, its tracking, the model cache, the result of the preparation, and the evaluation. It also leaves
        out defaults, so that a field which a later version of the API adds does not change the digest. Whether a job can continue from a
        checkpoint is decided by `continuation`, not by this digest.
        """
        content = self.model_dump(
            mode="json",
            by_alias=True,
            exclude={
                "job": True,
                "tracking": True,
                "model": {"cache"},
                "prepared": True,
                "metrics_step": True,
                "evaluation": True,
            },
            exclude_defaults=True,
        )
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """Return the recipe as YAML for the ConfigMap."""
        return as_yaml(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a recipe.

        Raises:
            RecipeError: the file is missing, is not text, is not YAML, or does not match the schema. The message names the
                field.
        """
        try:
            return cls.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise RecipeError(f"the recipe {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RecipeError(f"the recipe {path} is not text: {error}") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"the recipe {path} is not YAML: {error}") from error
        except ValidationError as error:
            field, problem = first_mistake(error)
            raise RecipeError(f"the recipe {path} is invalid at {field}: {problem}") from error


def _without_cluster_env(prepare: Prepare) -> Prepare:
    databricks = prepare.spark.databricks
    if databricks is None or databricks.compute.new_cluster is None:
        return prepare
    cluster = databricks.compute.new_cluster.model_copy(update={"env": {}})
    compute = databricks.compute.model_copy(update={"new_cluster": cluster})
    spark = prepare.spark.model_copy(
        update={"databricks": databricks.model_copy(update={"compute": compute})}
    )
    return prepare.model_copy(update={"spark": spark})


class Recipe(JobRecipe):
    """The recipe of a job with a model and data, as the built-in commands need it."""

    model: Model
    data: Data


def as_yaml(content: Any) -> str:
    """Return a document as YAML for a ConfigMap, in the order of its fields."""
    # NB: not yaml.safe_dump: it takes five times as long as libyaml, and writes the control character U+0085 as a line break.
    return str(yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True))

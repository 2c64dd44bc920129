"""The task of a model: a language model predicts the next token, a reward model scores a document.

A reward model is transformers' sequence classification model with one label: its layer `score` computes the reward of a document from the
hidden states at the last token that is not padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from finetune_crds.recipe import Recipe

Task = Literal["LanguageModel", "RewardModel"]

SCORE = "score"
"""The layer of a reward model that computes the reward."""
HEAD_NAMES = (SCORE, "classifier")
"""The names of layers that peft always trains in sequence classification."""
PEFT_TASKS: dict[Task, str] = {"LanguageModel": "CAUSAL_LM", "RewardModel": "SEQ_CLS"}
"""peft's names of the tasks."""
_CLASSIFIER = "ForSequenceClassification"


def of_recipe(recipe: Recipe) -> Task:
    """Return the task that a recipe trains."""
    return "RewardModel" if recipe.objective.type == "RewardModel" else "LanguageModel"


def of_config(config: Any) -> Task:
    """Return the task of a stored model, by the architectures in its config."""
    architectures = getattr(config, "architectures", None) or []
    return "RewardModel" if any(name.endswith(_CLASSIFIER) for name in architectures) else "LanguageModel"


def of_adapter(config: Any) -> Task:
    """Return the task of an adapter, by peft's config."""
    name = getattr(config.task_type, "value", config.task_type)
    return "RewardModel" if name == PEFT_TASKS["RewardModel"] else "LanguageModel"


def of_model(model: PreTrainedModel) -> Task:
    """Return the task of a model without peft's wrapper; its score head may be wrapped."""
    has_score = model.get_output_embeddings() is None and hasattr(model, SCORE)
    return "RewardModel" if has_score else "LanguageModel"


def get_output_layer(model: PreTrainedModel) -> nn.Module:
    """Return the layer that computes logits or the reward from hidden states."""
    layer: Any = getattr(model, SCORE) if of_model(model) == "RewardModel" else model.get_output_embeddings()
    return layer


def get_auto_class(task: Task) -> Any:
    """Return the class of transformers that loads models of a task."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if task == "RewardModel" else AutoModelForCausalLM


def build_load_options(task: Task) -> dict[str, int]:
    """Return the options with which the class of a task loads a model whose config does not say how many labels it has."""
    return {"num_labels": 1} if task == "RewardModel" else {}


def configure(config: Any, task: Task, subject: str) -> None:
    """Check that a model of this config can be trained for a task, and set the number of labels of a new score head.

    Args:
        config: of transformers; may be changed.
        task: the task.
        subject: the model, for error messages.

    Raises:
        RecipeRefusedError: the model has another task, several labels, or no class for the task.
    """
    stored_task = of_config(config)
    if task == "LanguageModel":
        if stored_task == "RewardModel":
            raise RecipeRefusedError(
                f"{subject} is a sequence classification model, which cannot be trained as a language model: choose a language model, or "
                "set objective.type RewardModel",
                reason="ModelNotSupported",
            )
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    has_own_class = get_auto_class(task).__name__ in (getattr(config, "auto_map", None) or {})
    if not has_own_class and type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise RecipeRefusedError(
            f"{subject} is a {config.model_type}, which has no sequence classification model in this version of transformers: choose "
            "another model",
            reason="ModelNotSupported",
        )
    if stored_task == "RewardModel" and config.num_labels != 1:
        raise RecipeRefusedError(
            f"{subject} is a sequence classification model with {config.num_labels} labels, and a reward model has one: choose a "
            "language model, or a reward model",
            reason="ModelNotSupported",
        )
    config.num_labels = 1


def check_score_head(model: PreTrainedModel, subject: str) -> None:
    """Check that a reward model computes its reward with one linear layer.

    Raises:
        RecipeRefusedError: the model has another head.
    """
    from torch import nn

    score = getattr(model, SCORE, None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise RecipeRefusedError(
            f"{subject} is a {model.config.model_type}, whose sequence classification model has no linear layer {SCORE} with one "
            "output: choose another model",
            reason="ModelNotSupported",
        )


def set_padding(model: PreTrainedModel, pad_id: int) -> None:
    """Set the padding token by which a reward model finds the last token of a document."""
    model.config.get_text_config().pad_token_id = pad_id

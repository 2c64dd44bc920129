"""Jobs with `trainer.command`: its parameters, and what such a job may leave out."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from finetune_crds.base import Rule

# NB: CEL compares the values of such a map, and not its keys: it takes a map in which keys have other names and no value changed
# for the same one.
Parameters = Annotated[
    dict[str, Any],
    Field(max_length=64, json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""Parameters of a command: values of any JSON type, by their names."""

_HAS_COMMAND = "(has(self.trainer.command) && size(self.trainer.command) > 0)"

OWN_SCRIPT_RULES = (
    Rule(
        f"has(self.model) || {_HAS_COMMAND}",
        "model is missing: name the model to start from. Only a job with trainer.command may leave it out",
        ".model",
    ),
    Rule(
        f"has(self.data) || {_HAS_COMMAND}",
        "data is missing: set data.source or data.splits. Only a job with trainer.command may leave it out",
        ".data",
    ),
    Rule(
        "!has(self.data) || !has(self.data.source) || has(self.model)",
        "data.source needs model, whose tokenizer counts the tokens of each example: set model, or set data.splits to prepared splits",
        ".data.source",
    ),
    Rule(
        "!has(self.evaluation) || (has(self.model) && has(self.data))",
        "evaluation needs model and data: set both, or evaluate in your command",
        ".evaluation",
    ),
    Rule(
        f"!has(self.trainer.parameters) || {_HAS_COMMAND}",
        "trainer.parameters needs trainer.command: the built-in loop has fields for its parameters, such as those of training",
        ".trainer.parameters",
        at_creation=True,
    ),
    Rule(
        f"!has(self.register) || !has(self.register.upload) || !{_HAS_COMMAND}",
        "register.upload needs the built-in loop: your command uploads its own model, so set MLflow's variables in pods.train.env",
        ".register.upload",
    ),
)
"""Rules of FineTuneJobSpec."""

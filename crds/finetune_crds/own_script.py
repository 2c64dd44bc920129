"""Jobs with `trainer.command`: the parameters of the command, and the fields that only such a job can leave out."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from finetune_crds.base import Rule

# NB: in a map that the schema does not describe, CEL compares only the values: two maps that differ only in their keys are equal. So
# the rule that `trainer` cannot change does not notice a renamed parameter.
Parameters = Annotated[
    dict[str, Any],
    Field(max_length=64, json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""Parameters of a command by name, with values of any JSON type."""

HAS_COMMAND = "(has(self.trainer.command) && size(self.trainer.command) > 0)"
"""CEL expression on the spec of a job: whether the job has trainer.command."""

OWN_SCRIPT_RULES = (
    Rule(
        f"has(self.model) && has(self.data) || {HAS_COMMAND}",
        "model and data are required unless trainer.command is set",
    ),
    Rule(
        "!has(self.data) || !has(self.data.source) || has(self.model)",
        "data.source requires model, whose tokenizer counts the tokens of each example: set model, or use data.splits",
        ".data.source",
    ),
    Rule(
        "!has(self.evaluation) || has(self.model) && has(self.data) && has(self.register)",
        "evaluation requires model, data and register: set all three, or evaluate in your command",
        ".evaluation",
    ),
    Rule(
        f"!has(self.trainer.parameters) || {HAS_COMMAND}",
        "trainer.parameters can be set only when trainer.command is set",
        ".trainer.parameters",
        at_creation=True,
    ),
    Rule(
        f"!has(self.register) || !has(self.register.upload) || !{HAS_COMMAND}",
        "register.upload must not be set when trainer.command is set: your command uploads the model, so set MLflow's variables "
        "in pods.train.env",
        ".register.upload",
    ),
)
"""Rules of FineTuneJobSpec."""

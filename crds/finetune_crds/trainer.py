"""`spec.trainer`: the program in the training pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, LongText, replaced, rules
from finetune_crds.code import Code, Dependencies
from finetune_crds.own_script import Parameters
from finetune_crds.pods import build_moved_fields


class Trainer(ApiModel):
    """The program in the training pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(has(self.command) && size(self.command) > 0) || (!has(self.code) && (!has(self.args) || size(self.args) == 0) && "
                "(!has(self.dependencies) || size(self.dependencies) == 0))",
                "args, code and dependencies can be set only when command is set, such as [torchrun, my_train.py]",
            ),
        )
        | replaced(**build_moved_fields("image", "env", "envFrom", prefix="trainer.", settings="train"))
    )

    command: Annotated[list[LongText], Field(max_length=64)] = Field(default_factory=list)
    """Your own command, run once in each pod, such as [torchrun, my_train.py]. Default: the built-in loop."""
    args: Annotated[list[LongText], Field(max_length=256)] = Field(default_factory=list)
    """Arguments of the command."""
    code: Code | None = None
    """Your own training script."""
    dependencies: Dependencies = Field(default_factory=list)
    """Packages of your command, as pip requirements such as datasets>=3. Each pod installs what its image lacks."""
    parameters: Parameters = Field(default_factory=dict)
    """Parameters of the command, of any JSON type, in the YAML file HYPERPARAMETERS_PATH."""

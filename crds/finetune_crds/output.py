"""`spec.output`: the folder of the model, besides the registry or in place of it."""

from __future__ import annotations

from pydantic import ConfigDict

from finetune_crds.base import FOLDER_FORMATS, STORED_FOLDER_PATTERN, ApiModel, Rule, Uri, rules
from finetune_crds.databricks import build_workspace_folder_rules


class Output(ApiModel):
    """The folder of the model."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"self.uri.matches('{STORED_FOLDER_PATTERN}')",
                f"uri must be {FOLDER_FORMATS} on a volume",
                ".uri",
            )
        )
    )

    uri: Uri
    """s3://bucket/folder, gs://bucket/folder, abfss://container@account.dfs.core.windows.net/folder, or an absolute path on a volume
    that pods.train.template mounts, or, with tracking.uri databricks, in /Volumes of the workspace: a folder for this model alone.
    It has weights, configuration, tokenizer and model card, as transformers and peft save them, and model.base of another job may name
    it."""


def _with_slash(folder: str) -> str:
    """CEL: a folder with a slash at its end."""
    return f"({folder}.endsWith('/') ? {folder} : {folder} + '/')"


_OUTPUT_FOLDER, _CHECKPOINT_FOLDER = _with_slash("self.output.uri"), _with_slash("self.checkpoint.uri")

OUTPUT_RULES = (
    Rule(
        "!has(self.output) || !has(self.trainer.command) || size(self.trainer.command) == 0",
        "output must not be set when trainer.command is set: your command writes the model, so name its folder in trainer.args "
        "or trainer.parameters",
        ".output",
    ),
    Rule(
        "!has(self.output) || !has(self.checkpoint) || !has(self.checkpoint.uri) || "
        f"(!{_OUTPUT_FOLDER}.startsWith({_CHECKPOINT_FOLDER}) && !{_CHECKPOINT_FOLDER}.startsWith({_OUTPUT_FOLDER}))",
        "output.uri and checkpoint.uri overlap: set output.uri to a folder for the model only",
        ".output.uri",
    ),
    *build_workspace_folder_rules("output.uri"),
)
"""Rules of the spec."""

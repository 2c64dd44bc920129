"""`spec.output`: a folder for the model, in addition to the registry or instead of it."""

from __future__ import annotations

from pydantic import ConfigDict

from finetune_crds.base import FOLDER_FORMATS, STORED_FOLDER_PATTERN, ApiModel, Rule, Uri, rules
from finetune_crds.databricks import build_workspace_folder_rules


class Output(ApiModel):
    """A folder for the model."""

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
    """Folder for this model alone: s3://bucket/folder, gs://bucket/folder,
    abfss://container@account.dfs.core.windows.net/folder, or an absolute path on a volume that pods.train.template mounts;
    if tracking.uri is databricks, also /Volumes of the workspace. It gets weights, configuration, tokenizer and model card
    in the format of transformers and peft, and can be model.base of another job."""


def _with_slash(folder: str) -> str:
    """Return the CEL expression of a folder with a slash at its end: s3://b/model must not count as a parent of s3://b/model2."""
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
"""Rules of FineTuneJobSpec."""

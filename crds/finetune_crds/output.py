"""`spec.output`: a folder for the model, in addition to the registry or instead of it, or for what your command writes."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from finetune_crds.base import SHARED_FOLDER_FORMATS, ApiModel, Rule, Uri, is_shared_folder, rules
from finetune_crds.env import LocalReference
from finetune_crds.own_script import HAS_COMMAND

# Folders that the operator or Kubernetes mounts, and the root: nothing else can be mounted there.
_TAKEN_FOLDERS = "^/+$|^/(dev|proc|sys|etc/finetune|var/run)(/|$)"


class Output(ApiModel):
    """A folder for the model."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                is_shared_folder("self.uri"),
                f"uri must be {SHARED_FOLDER_FORMATS}",
                ".uri",
            ),
            (
                "!has(self.secretRef) || has(self.from)",
                "secretRef can be set only when from is set: the built-in loop uses the credentials in pods.train",
                ".secretRef",
            ),
        )
    )

    uri: Uri
    """Folder for this model alone, with the formats of checkpoint.uri: on a volume, one that pods.train.template
    mounts. It gets weights, configuration, tokenizer and model card in the format of transformers and peft, and can be
    model.base of another job. With from, it gets the files of your command."""
    from_: (
        Annotated[
            str,
            Field(
                min_length=2,
                max_length=512,
                json_schema_extra=rules(
                    (
                        "self.startsWith('/') && !self.contains('..') && !self.contains('//')",
                        "write the folder as an absolute path, such as /outputs",
                    ),
                    (
                        f"!self.matches('{_TAKEN_FOLDERS}')",
                        "the operator or Kubernetes uses this folder: choose another one, such as /outputs",
                    ),
                ),
            ),
        ]
        | None
    ) = Field(default=None, alias="from")
    """Folder of the first training pod whose files are uploaded to uri when trainer.command ends with 0; required with
    trainer.command. On no volume of pods.train.template, it is an emptyDir."""
    secret_ref: LocalReference | None = None
    """Secret whose keys become variables of the upload only, in addition to those of pods.train."""


def _with_slash(folder: str) -> str:
    """Return the CEL expression of a folder with a slash at its end: s3://b/model must not count as a parent of s3://b/model2."""
    return f"({folder}.endsWith('/') ? {folder} : {folder} + '/')"


_OUTPUT_FOLDER, _CHECKPOINT_FOLDER = _with_slash("self.output.uri"), _with_slash("self.checkpoint.uri")

_FROM = "has(self.output) && has(self.output.from)"
_FROM_FOLDER, _CODE_FOLDER = _with_slash("self.output.from"), _with_slash("self.trainer.code.mountPath")

OUTPUT_RULES = (
    Rule(
        f"!has(self.output) || has(self.output.from) == {HAS_COMMAND}",
        "output.from, the folder that your command writes, such as /outputs, is required when trainer.command is set, and "
        "forbidden otherwise",
        ".output.from",
    ),
    Rule(
        f"!({_FROM}) || !self.output.uri.startsWith('/') || "
        f"(!{_OUTPUT_FOLDER}.startsWith({_FROM_FOLDER}) && !{_FROM_FOLDER}.startsWith({_OUTPUT_FOLDER}))",
        "output.from and output.uri overlap: if your command writes to the volume itself, remove output",
        ".output.from",
    ),
    Rule(
        f"!({_FROM}) || !has(self.trainer.code) || has(self.trainer.code.git) || !{_FROM_FOLDER}.startsWith({_CODE_FOLDER})",
        "output.from is in trainer.code.mountPath, which is read-only: choose another folder, such as /outputs",
        ".output.from",
    ),
    Rule(
        "!has(self.output) || !has(self.checkpoint) || !has(self.checkpoint.uri) || "
        f"(!{_OUTPUT_FOLDER}.startsWith({_CHECKPOINT_FOLDER}) && !{_CHECKPOINT_FOLDER}.startsWith({_OUTPUT_FOLDER}))",
        "output.uri and checkpoint.uri overlap: set output.uri to a folder for the model only",
        ".output.uri",
    ),
)
"""Rules of FineTuneJobSpec."""

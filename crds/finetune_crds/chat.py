"""`spec.model.chatTemplate` and `spec.data.prepare.conversation`: how conversations become text."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from finetune_crds.base import ApiModel, LongText, rules


class ChatTemplate(ApiModel):
    """What renders conversations, in training and in the exported tokenizer."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(self.type == 'Jinja') == has(self.jinja)",
                "jinja is required when type is Jinja, and forbidden otherwise",
                ".jinja",
            ),
        )
    )

    type: Literal["ChatML", "Llama3", "Mistral", "Alpaca", "Jinja"]
    """ChatML, Llama3, Mistral, Alpaca: the template of that name. Jinja: a template of your own, in jinja."""
    jinja: LongText | None = None
    """Jinja template, as in the tokenizer_config.json of a model. It runs in a sandbox."""


class Conversation(ApiModel):
    """The turns that a prompt and its answer become."""

    system: LongText | None = None
    """Text of a system turn before the prompt. Default: no system turn."""

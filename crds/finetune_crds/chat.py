"""`spec.model.chatTemplate` and `spec.data.prepare.conversation`: templates and system messages of conversations."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from finetune_crds.base import ApiModel, LongText, rules


class ChatTemplate(ApiModel):
    """The template that renders conversations, in training and in the exported tokenizer."""

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
    """A built-in template (ChatML, Llama3, Mistral, Alpaca), or your own in the field jinja (Jinja)."""
    jinja: LongText | None = None
    """Your own Jinja template, like chat_template in tokenizer_config.json. It runs in a sandbox."""


class Conversation(ApiModel):
    """The conversation that is made of a prompt and its answer."""

    system: LongText | None = None
    """Text of a system message before the prompt. Default: no system message."""

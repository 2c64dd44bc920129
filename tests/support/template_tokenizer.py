"""A tokenizer whose only purpose is its chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from finetune_crds.chat import ChatTemplate
from finetune_trainer.examples import named_templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_tokenizer(template: ChatTemplate | str, **special: str) -> PreTrainedTokenizerBase:
    """Build a tokenizer with a template of the API, or with a Jinja template."""
    if isinstance(template, str):
        template = ChatTemplate(type="Jinja", jinja=template)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>", **special)
    named_templates.set_template(template, tokenizer)
    return tokenizer

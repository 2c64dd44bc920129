"""The model's tokenizer, the same for the preparation that counts tokens and the trainer that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.outcome import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.training import Model


def load_tokenizer(model: Model, folder: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the recipe's chat template when there is one.

    Raises:
        RecipeRefusedError: there is none, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise RecipeRefusedError(
            f"the tokenizer of model.base {model.base} cannot be loaded: {str(error).strip().splitlines()[0]}",
            reason="TokenizerNotLoadable",
        ) from error
    if tokenizer.eos_token_id is None:
        raise RecipeRefusedError(
            f"the tokenizer of model.base {model.base} has no end-of-text token: set eos_token in its "
            "tokenizer_config.json"
        )
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    # NB: it warns above this length; the recipe's maxTokens and maxLength decide on that.
    tokenizer.model_max_length = int(1e30)
    return tokenizer

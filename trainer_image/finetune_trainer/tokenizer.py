"""The model's tokenizer, which the preparation and the trainer share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer import chat_templates
from finetune_trainer.outcome import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.training import Model


def load_tokenizer(model: Model, folder: Path) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the recipe's chat template, if any.

    Raises:
        RecipeRefusedError: it cannot be loaded, or has no end-of-text token; or the chat template is none.
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
        chat_templates.use(model.chat_template, tokenizer)
    # NB: it warns about longer texts; maxTokens and maxLength of the recipe decide about those.
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or the end-of-text token where the tokenizer has none.

    Padding has no loss and nothing attends to it, so any token will do.
    """
    found = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return int(found)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows_of_embedding: int, base: str) -> None:
    """Check that the embedding has a row for each token of the tokenizer; it may have more.

    Raises:
        RecipeRefusedError: it has fewer.
    """
    last = max(tokenizer.get_vocab().values())
    if last >= rows_of_embedding:
        raise RecipeRefusedError(
            f"the tokenizer of model.base {base} has token ids up to {last:,}, and the embedding has "
            f"{rows_of_embedding:,} rows: use the tokenizer that the model was trained with, or add rows to its "
            "embedding",
            reason="VocabularyMismatch",
        )


def check_same_vocabulary(
    tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase, base: str, teacher: str
) -> None:
    """Check that each id means the same token to a model and to its teacher.

    Either may have tokens at ids that the other does not use; `check_vocabulary` checks the size of the teacher's
    embedding.

    Raises:
        RecipeRefusedError: an id or a token differs.
    """
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    known_to_teacher = {number: token for token, number in theirs.items()}
    differing = sorted(
        (number, token)
        for token, number in ours.items()
        if theirs.get(token, number) != number or known_to_teacher.get(number, token) != token
    )
    if differing:
        number, token = differing[0]
        raise RecipeRefusedError(
            f"the tokenizers of model.base {base} and of the teacher {teacher} disagree on {len(differing):,} tokens, "
            f"first on {token!r} with id {number:,} in {base}: choose a teacher of the same family",
            reason="VocabularyMismatch",
        )

"""The model's tokenizer, which the preparation and the trainer share."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING

from finetune_trainer.examples import named_templates
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path
    from typing import Self

    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.training import Model

# NB: in larger batches (thousands of texts), the encodings do not fit into the processor's cache, which costs a third of the speed.
_TEXTS_PER_BATCH = 256
# Files that the vocabulary of a tokenizer is read from.
_VOCABULARY_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.*")
# NB: for some models without any of these files, transformers makes a tokenizer that has only special tokens (T5's also has the token below).
# Such a tokenizer counts as missing.
_EMPTY_VOCABULARY = {"\u2581"}


def load_tokenizer(model: Model, folder: Path) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the new tokens and the chat template of the recipe, if any.

    Raises:
        DataError: the folder has no tokenizer.
        RecipeRefusedError: the tokenizer cannot be loaded, has no end-of-text token, or already has a new token; or the chat template is invalid.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if not any(file for names in _VOCABULARY_FILES for file in folder.glob(names)):
            raise _not_found_error(model) from error
        raise RecipeRefusedError(
            f"the tokenizer of model.base {model.base} cannot be loaded: {first_line(error)}",
            reason="TokenizerNotLoadable",
        ) from error
    if set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()) <= _EMPTY_VOCABULARY:
        raise _not_found_error(model)
    if tokenizer.eos_token_id is None:
        raise RecipeRefusedError(
            f"the tokenizer of model.base {model.base} has no end-of-text token: set eos_token in its "
            "tokenizer_config.json"
        )
    if model.new_tokens:
        _add_new_tokens(tokenizer, model)
    if model.chat_template is not None:
        named_templates.set_template(model.chat_template, tokenizer)
    # NB: the tokenizer would warn about texts above its own limit, but the recipe's maxTokens and maxLength limit texts.
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def _add_new_tokens(tokenizer: PreTrainedTokenizerBase, model: Model) -> None:
    """Add the new tokens in sorted order, so that their ids do not depend on the order in the recipe.

    NB: the new tokens do not become special tokens, which generation removes from an answer.
    """
    from tokenizers import AddedToken

    new = sorted(model.new_tokens)
    existing = [token for token in new if token in tokenizer.get_vocab()]
    if existing:
        raise RecipeRefusedError(
            f"model.newTokens {existing[0]} already exists in the tokenizer of model.base {model.base}: remove it from model.newTokens"
        )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])


def _not_found_error(model: Model) -> DataError:
    return DataError(
        "TokenizerNotFound",
        f"model.base {model.base} has no tokenizer: add its tokenizer files, for example tokenizer.json and "
        "tokenizer_config.json, to the folder of its config.json, or choose another model",
    )


@dataclass(frozen=True)
class Loaded:
    """A model's tokenizer, and the folder it was loaded from."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, model: Model, folder: Path) -> Self:
        """Load the tokenizer; raises as `load_tokenizer` does."""
        return cls(folder, load_tokenizer(model, folder))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or the end-of-text token if the tokenizer has no padding token.

    Padding has no loss and nothing attends to it, so any token will do. A reward model scores the last token that is not padding.
    """
    token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return int(token)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, rows_of_embedding: int, base: str, new: Collection[int] = ()
) -> None:
    """Check that the embedding has a row for each token of the tokenizer, or more rows.

    The ids in `new` are not checked: their rows are added later.

    Raises:
        RecipeRefusedError: the embedding has too few rows.
    """
    last = max(set(tokenizer.get_vocab().values()) - set(new))
    if last >= rows_of_embedding:
        raise RecipeRefusedError(
            f"the tokenizer of model.base {base} has token ids up to {last:,}, but the embedding has "
            f"only {rows_of_embedding:,} rows: use the tokenizer that the model was trained with, or add rows to its "
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
    model_ids, teacher_ids = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    teacher_tokens = {number: token for token, number in teacher_ids.items()}
    # A token or an id that the teacher does not have counts as equal.
    differing = sorted(
        (number, token)
        for token, number in model_ids.items()
        if teacher_ids.get(token, number) != number or teacher_tokens.get(number, token) != token
    )
    if differing:
        (number, token), *_ = differing
        raise RecipeRefusedError(
            f"the tokenizers of model.base {base} and of the teacher {teacher} disagree on {len(differing):,} tokens, "
            f"first on {token!r} with id {number:,} in {base}: choose a teacher of the same family",
            reason="VocabularyMismatch",
        )


@dataclass(frozen=True)
class TextTokenizer:
    """A model's tokenizer without its chat template."""

    backend_tokenizer: Tokenizer
    eos_token_id: int
    split_special_tokens: bool


def build_text_tokenizer_loader(tokenizer: PreTrainedTokenizerBase) -> Callable[[], TextTokenizer] | None:
    """Return a function that loads the tokenizer of texts in any process; None for a tokenizer that is Python code.

    NB: the function is part of the code of a Spark task, and contains the tokenizer as the driver loaded it: tokenizer.json, with the
    additions of the other files. So a worker need not import transformers and torch, which takes 3 s and 200 MB.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    text = zlib.compress(backend.to_str().encode())
    return partial(
        _load_text_tokenizer,
        text,
        int(tokenizer.eos_token_id),
        split_special_tokens=bool(tokenizer.split_special_tokens),
    )


@lru_cache(maxsize=1)
def _load_text_tokenizer(
    compressed: bytes, eos_token_id: int, *, split_special_tokens: bool
) -> TextTokenizer:
    from tokenizers import Tokenizer

    # Spark runs a worker on each core, so a worker needs no threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    backend = Tokenizer.from_str(zlib.decompress(compressed).decode())
    return TextTokenizer(backend, eos_token_id, split_special_tokens)


def encode(
    tokenizer: PreTrainedTokenizerBase | TextTokenizer, texts: Iterable[str], *, special: bool
) -> Iterator[list[int]]:
    """Yield the token ids of texts; `special`: with the tokens that the tokenizer puts around a text."""
    backend, remaining = _get_backend(tokenizer), iter(texts)
    while batch := list(islice(remaining, _TEXTS_PER_BATCH)):
        if backend is None:
            assert not isinstance(tokenizer, TextTokenizer)  # noqa: S101 - a TextTokenizer has a backend
            yield from tokenizer(batch, add_special_tokens=special)["input_ids"]
        else:
            yield from (
                encoding.ids for encoding in backend.encode_batch_fast(batch, add_special_tokens=special)
            )


def encode_with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoding | None:
    """Return the tokens of a text and where they are in it; None for a tokenizer that is Python code."""
    backend = _get_backend(tokenizer)
    return None if backend is None else backend.encode(text, add_special_tokens=False)


def _get_backend(tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> Tokenizer | None:
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # NB: a tokenizer.json may enable truncation and padding, and does not contain split_special_tokens.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def describe_identity(tokenizer: PreTrainedTokenizerBase | TextTokenizer) -> list[object]:
    """Return everything that determines the tokens a tokenizer makes from texts and conversations."""
    backend = _get_backend(tokenizer)
    if backend is not None:
        text = backend.to_str()
    else:
        assert not isinstance(tokenizer, TextTokenizer)  # noqa: S101 - a TextTokenizer has a backend
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return [
        hashlib.blake2b(text.encode()).hexdigest(),
        getattr(tokenizer, "chat_template", None),
        tokenizer.eos_token_id,
        tokenizer.split_special_tokens,
    ]

"""The end of a chat model's answer: the text that the chat template writes after an answer, and its token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.examples import chat_templates, template_input
from finetune_trainer.examples.chat_messages import Message
from finetune_trainer.examples.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


QUESTION: Message = {"role": "user", "content": "What is asked?"}
ANSWER: Message = {"role": "assistant", "content": "It is answered."}
"""Messages that show what a chat template does."""


def find_end_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the chat template writes after an answer, without white space around it.

    It is empty if there is no template, or if the template refuses a short conversation or changes the text of its answer.
    """
    if tokenizer.chat_template is None:
        return ""
    try:
        text = chat_templates.render(tokenizer, [QUESTION, ANSWER])
    except template_input.FAILURES:
        return ""
    _, answer, end = text.rpartition(ANSWER["content"])
    return end.strip() if answer else ""


def find_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token at which servers stop after an answer: the first special token of `find_end_text`, or its only token.

    Returns:
        None: `find_end_text` is empty, or the end of an answer is several tokens, at which no server stops.
    """
    _, token = _split_end(tokenizer)
    return token


def has_end(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Return whether a text after an answer has a special token, or the text with which the chat template ends an answer.

    The end-of-text token is removed from the template's text, unless it is the whole text: a template may write that token only after
    the last answer.
    """
    (tokens,) = encode(tokenizer, [text], special=False)
    end = find_end_text(tokenizer)
    end = end.removesuffix(str(tokenizer.eos_token)).strip() or end
    return _find_special(tokenizer, text, tokens) is not None or (bool(end) and end in text)


def explain_missing_stop(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return why servers do not stop right after an answer, and what to do; None if they do, or if `find_end_text` is empty."""
    text, _ = _split_end(tokenizer)
    if not text:
        return None
    return (
        f"the chat template ends an answer with {text!r}, which is several tokens of this tokenizer, so servers do "
        "not stop there: add this text to model.newTokens, or set another model.chatTemplate"
    )


def _split_end(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int | None]:
    """Return the text between an answer and the token at which servers stop, and that token; without such a token, the whole end and None.

    For example, `("", 151645)` for the end `<|im_end|>`, which is one token, and `("###", None)` for an end of several tokens.
    """
    end = find_end_text(tokenizer)
    (tokens,) = encode(tokenizer, [end], special=False)
    special_token = _find_special(tokenizer, end, tokens)
    if special_token is not None:
        before, _, _ = end.partition(_get_token_text(tokenizer, special_token))
        return before.strip(), special_token
    return ("", tokens[0]) if len(tokens) == 1 else (end, None)


def _find_special(tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[int]) -> int | None:
    """Return the first special token of a text, for example <|end|> if <|endoftext|> follows it; None if there is none."""
    added = tokenizer.added_tokens_decoder
    special_ids = {
        *tokenizer.all_special_ids,
        *(token for token, added_token in added.items() if added_token.special),
    }
    # NB: the token for unknown characters is special too, but its own text is not in `text`, so it does not count.
    return next(
        (token for token in tokens if token in special_ids and _get_token_text(tokenizer, token) in text),
        None,
    )


def _get_token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))

"""What a model is asked, and what it should answer: the beginning of an example, as in training, and its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_trainer import chat_templates, targets
from finetune_trainer.documents import reply_of, said, tools_of
from finetune_trainer.outcome import DataError
from finetune_trainer.tokenizer import encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.documents import Documents
    from finetune_trainer.turns import Message

_ASKED, _ANSWERED = "What is asked?", "It is answered."


@dataclass(frozen=True)
class Question:
    """A prompt and its answer.

    tokens: token ids of the prompt, with the chat template's beginning of an answer.
    prompt: the same as text.
    reference: the answer as text, before `Ending.cut`.
    """

    tokens: list[int]
    prompt: str
    reference: str


@dataclass(frozen=True)
class Ending:
    """How answers end, and how they are read.

    stops: token ids that end an answer.
    mark: text by which the chat template ends an answer, where that is no token of `stops`; empty for none.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    mark: str = ""

    def text(self, tokens: list[int]) -> str:
        """Return an answer as text: without what ends it, what comes after that, and special tokens."""
        end = next((at for at, token in enumerate(tokens) if token in self.stops), len(tokens))
        return self._without_mark(self._decoded(tokens[:end])).strip()

    def cut(self, reference: str) -> str:
        """Return the answer of a row as `text` would return it, if a model gave it."""
        (tokens,) = encoded(self.tokenizer, [self._without_mark(reference)], special=False)
        return self.text(tokens)

    def is_marked(self, tokens: list[int]) -> bool:
        """Whether tokens, the last ones of an answer, have the mark."""
        return bool(self.mark) and self.mark in self._decoded(tokens)

    def _without_mark(self, text: str) -> str:
        return text.split(self.mark, 1)[0] if self.mark else text

    def _decoded(self, tokens: list[int]) -> str:
        # NB: a tokenizer may be set to remove spaces before punctuation, which it would not put back.
        return str(
            self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


def ending(tokenizer: PreTrainedTokenizerBase, stops: frozenset[int]) -> Ending:
    """How the answers of a model end.

    Args:
        tokenizer: the model's.
        stops: token ids that end texts of the model. A chat template may end its turns otherwise.
    """
    mark = _mark(tokenizer)
    special = _first_special(tokenizer, mark)
    if special is not None:
        # What comes behind a special token is no text: answers are decoded without such tokens.
        stops |= {special}
        mark = mark.partition(_written(tokenizer, special))[0].strip()
    if not mark:
        return Ending(tokenizer, stops)
    (tokens,) = encoded(tokenizer, [mark], special=False)
    if len(tokens) == 1:
        return Ending(tokenizer, stops | frozenset(tokens))
    return Ending(tokenizer, stops, mark)


def _first_special(tokenizer: PreTrainedTokenizerBase, mark: str) -> int | None:
    """The first special token of a text, such as <|end|> of <|end|>, a line end and <|endoftext|>; None where it has none."""
    added = tokenizer.added_tokens_decoder
    known = {*tokenizer.all_special_ids, *(token for token, how in added.items() if how.special)}
    (tokens,) = encoded(tokenizer, [mark], special=False)
    # NB: the token of unknown characters is a special one too, and is not in the text.
    return next((token for token in tokens if token in known and _written(tokenizer, token) in mark), None)


def _written(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.convert_ids_to_tokens(token))


def _mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text behind an answer in the chat template, without spaces around it; empty where there is no template."""
    if tokenizer.chat_template is None:
        return ""
    messages: list[Message] = [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": _ANSWERED},
    ]
    try:
        text = chat_templates.render(tokenizer, messages)
    except chat_templates.FAILURES:
        return ""
    _, found, behind = text.rpartition(_ANSWERED)
    # A template may change what an answer says, such as to upper case.
    return behind.strip() if found else ""


def of(documents: Documents, rows: Mapping[str, list[Any]]) -> Iterator[Question | None]:
    """Yield the question of each row of a batch of columns; None for a row without an answer.

    The last answer of a conversation that is learned is asked for, and the chosen one of a preference. Also None where the chat
    template does not take what comes before that answer, such as a conversation that begins with the assistant: training with
    objective.lossOn: All needs no such prompt. And where the template hides how it renders that answer, which is no text.

    Raises:
        DataError: a row does not have the type of its column.
        RecipeRefusedError: an answer is a list of messages, and the tokenizer has no chat template.
    """
    columns = documents.columns
    if columns.messages is not None:
        values = rows[columns.messages]
        tools = rows[columns.tools] if columns.tools else [None] * len(values)
        for value, given in zip(values, tools, strict=True):
            messages, learned = documents.learned(value, columns.messages)
            yield _of_conversation(documents, messages, learned, tools_of(given, str(columns.tools)))
        return
    if columns.text is not None:
        yield from (None for _ in rows[columns.text])
        return
    prompts = rows[str(columns.prompt)]
    judged = [name for name in (columns.chosen, columns.rejected) if name] or [str(columns.response)]
    examples = list(zip(prompts, *(rows[name] for name in judged), strict=True))
    texts = [all(isinstance(value, str) for value in example) for example in examples]
    if not all(texts):
        documents.check_template("a preference with lists of {role, content}", "model.base")
    for (prompt, *answers), is_text in zip(examples, texts, strict=True):
        if is_text:
            (tokens,) = documents.given([prompt])
            yield Question(tokens, prompt, answers[0])
            continue
        asked = said(prompt, "user", str(columns.prompt))
        reply = reply_of(asked, said(answers[0], "assistant", judged[0]), judged[0])
        messages = [*asked, *reply]
        answered = [turn for turn in targets.answers(messages) if turn >= len(asked)]
        yield _of_conversation(documents, messages, answered, None)


def _of_conversation(
    documents: Documents, messages: list[Message], answers: list[int], tools: list[dict[str, Any]] | None
) -> Question | None:
    """Ask for the last one of some turns of the assistant; None where there are none."""
    if not answers:
        return None
    last = answers[-1]
    try:
        prompt = documents.rendered(messages[:last], tools, add_generation_prompt=True)
        whole = documents.rendered(messages[: last + 1], tools)
    except DataError:
        return None
    (tokens,) = encoded(documents.tokenizer, [prompt], special=False)
    if whole.startswith(prompt):
        # As the model was trained to say it, with calls of tools and what else the template makes of an answer.
        return Question(tokens, prompt, whole.removeprefix(prompt))
    content = messages[last]["content"]
    # A list of parts, or a call of tools without a word, has no text to compare with.
    return Question(tokens, prompt, content) if isinstance(content, str) and content.strip() else None

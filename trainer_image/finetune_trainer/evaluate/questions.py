"""The prompt and the expected answer of each row: the beginning of an example and its end, as in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import loss_mask
from finetune_trainer.examples.column_values import extract_reply, parse_tools, to_messages
from finetune_trainer.examples.tokenizer import encode
from finetune_trainer.pod.exit_status import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.examples.chat_messages import Message
    from finetune_trainer.examples.documents import Documents


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
    """What ends an answer, and the tokenizer that decodes answers.

    stops: token ids that end an answer: those in the files of the model, at which servers stop too, and the end of text.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]

    def text(self, tokens: list[int]) -> str:
        """Return an answer as text, up to its first stop token and without special tokens."""
        end = next((index for index, token in enumerate(tokens) if token in self.stops), len(tokens))
        # NB: the tokenizer's own setting may remove spaces before punctuation, which would change the answer.
        decoded = self.tokenizer.decode(
            tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(decoded).strip()

    def cut(self, reference: str) -> str:
        """Return a row's reference as `text` would return it if a model had generated it."""
        (tokens,) = encode(self.tokenizer, [reference], special=False)
        return self.text(tokens)


def build_questions(documents: Documents, rows: Mapping[str, list[Any]]) -> Iterator[Question | None]:
    """Yield the question of each row of a batch of columns; None for a row without one.

    The answer is the last learned answer of a conversation, the response to a prompt, or the chosen answer of a preference. There is
    no question in these cases:

    - The row has no answer; a row of a text column never has one.
    - The chat template refuses the messages before the answer, or the messages with it, for example because the conversation begins with
      the assistant. Training with objective.lossOn: All accepts such rows.
    - The rendered prompt is not the beginning of the rendered conversation, and the answer has no text.

    Raises:
        DataError: a row does not have the type of its column.
        RecipeRefusedError: an answer is a list of messages, and the tokenizer has no chat template.
    """
    columns = documents.columns
    if columns.messages is not None:
        values = rows[columns.messages]
        tools = rows[columns.tools] if columns.tools else [None] * len(values)
        for value, row_tools in zip(values, tools, strict=True):
            messages, learned = documents.select_learned(value, columns.messages)
            yield _build_question(documents, messages, learned, parse_tools(row_tools, str(columns.tools)))
        return
    if columns.text is not None:
        yield from (None for _ in rows[columns.text])
        return
    prompts = rows[str(columns.prompt)]
    # The first column has the reference. The rejected answer only shows whether training would encode the row as texts.
    answer_columns = [name for name in (columns.chosen, columns.rejected) if name] or [str(columns.response)]
    reference_column = answer_columns[0]
    examples = list(zip(prompts, *(rows[name] for name in answer_columns), strict=True))
    are_texts = [all(isinstance(value, str) for value in example) for example in examples]
    if not all(are_texts):
        documents.check_template("a preference with lists of {role, content}", "model.base")
    for (prompt, reference, *_), is_text in zip(examples, are_texts, strict=True):
        if is_text:
            (tokens,) = documents.encode_prompts([prompt])
            yield Question(tokens, prompt, reference)
            continue
        prompt_messages = to_messages(prompt, "user", str(columns.prompt))
        reference_messages = to_messages(reference, "assistant", reference_column)
        messages = [*prompt_messages, *extract_reply(prompt_messages, reference_messages, reference_column)]
        answered = [turn for turn in loss_mask.find_answers(messages) if turn >= len(prompt_messages)]
        yield _build_question(documents, messages, answered, tools=None)


def _build_question(
    documents: Documents, messages: list[Message], answers: list[int], tools: list[dict[str, Any]] | None
) -> Question | None:
    """Return the question about the last of `answers`, the indices of the assistant's turns; None as in `build_questions`."""
    if not answers:
        return None
    last = answers[-1]
    try:
        prompt = documents.render(messages[:last], tools, add_generation_prompt=True)
        full_text = documents.render(messages[: last + 1], tools)
    except DataError:
        return None
    (tokens,) = encode(documents.tokenizer, [prompt], special=False)
    if full_text.startswith(prompt):
        # The answer as the model was trained to write it, with tool calls and whatever the template adds to an answer.
        return Question(tokens, prompt, full_text.removeprefix(prompt))
    content = messages[last]["content"]
    # A message that only calls tools has no text to compare.
    return Question(tokens, prompt, content) if content.strip() else None

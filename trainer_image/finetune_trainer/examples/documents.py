"""Makes documents from the rows of a table: token ids, and which of them are answers.

The preparation writes the documents to its table. Training makes the documents if a table does not have them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import chat_messages, chat_templates, loss_mask
from finetune_trainer.examples.column_values import (
    extract_reply,
    get_texts,
    parse_conversation,
    parse_tools,
    split_weights,
    to_messages,
)
from finetune_trainer.examples.refused_rows import A_ROW, RowError
from finetune_trainer.examples.token_columns import Document
from finetune_trainer.examples.tokenizer import TextTokenizer, describe_identity, encode, encode_with_offsets
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.pod.release import get_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import date
    from typing import Self

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.data import Columns
    from finetune_crds.objective import Objective


@dataclass(frozen=True)
class Documents:
    """Makes the documents of examples: one for each example, or two for a preference with two answers.

    tokenizer: may be a TextTokenizer if all columns are text.
    columns: the columns of an example in the table.
    answers_only: whether only answers are targets of the loss.
    last_only: whether only the last answer of a conversation is a target.
    day: the date for chat templates that write the date; None: today.
    """

    tokenizer: PreTrainedTokenizerBase | TextTokenizer
    columns: Columns
    answers_only: bool
    last_only: bool = False
    day: date | None = None

    @classmethod
    def of_recipe(
        cls,
        tokenizer: PreTrainedTokenizerBase | TextTokenizer,
        columns: Columns,
        objective: Objective,
        day: date | None,
    ) -> Self:
        """Return the maker of documents for an objective."""
        return cls(
            tokenizer,
            columns,
            answers_only=objective.loss_on != "All",
            last_only=objective.loss_on == "LastAnswer",
            day=day,
        )

    @property
    def encoding(self) -> str:
        """An identifier of everything that determines token ids and loss masks, except the rows."""
        decided_by = [
            # Another release may encode rows differently.
            get_release(),
            self.columns.model_dump(mode="json", exclude_none=True),
            [self.answers_only, self.last_only],
            describe_identity(self.tokenizer),
            *([str(self.day)] if self.depend_on_day else []),
        ]
        return hashlib.blake2b(json.dumps(decided_by, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def depend_on_day(self) -> bool:
        """Whether the documents of the same rows may differ on another day."""
        columns = self.columns
        # NB: preferences count as rendered: only their rows show whether they are texts.
        is_rendered = columns.text is None and columns.response is None
        return (
            is_rendered
            and not isinstance(self.tokenizer, TextTokenizer)
            and chat_templates.writes_date(self.tokenizer)
        )

    @property
    def unknown_answers(self) -> str:
        """A message with the reason why a document has no loss mask, and the remedy."""
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            return (
                "the tokenizer of model.base is Python code that does not report token offsets, so answers in "
                "conversations cannot be separated from prompts: set objective.lossOn: All"
            )
        # The last answer mostly has a mask: no message follows it that could change how the text before is rendered.
        last = "" if self.last_only else "LastAnswer or "
        return (
            "the chat template renders the beginning of a conversation differently when the conversation continues, so "
            f"answers cannot be separated from prompts: set objective.lossOn: {last}All, or set model.chatTemplate to one "
            "with {% generation %} blocks"
        )

    def check_template(self, what: str, base: str) -> None:
        """Check that the tokenizer has a chat template, and that answers and their ends are learned with it.

        Raises:
            RecipeRefusedError: there is no template, or answers or their ends are not learned.
        """
        if self._chat.chat_template is None:
            raise RecipeRefusedError(
                f"{what} requires a chat template, but the tokenizer of {base} has none: set model.chatTemplate"
            )
        if self.answers_only:
            loss_mask.check_template(self._chat, base)

    def of(self, rows: Mapping[str, list[Any]]) -> Iterator[tuple[Document, ...]]:
        """Yield the documents of each row of a batch of columns, for example of `{"prompt": ["1 + 1"], "response": ["2"]}`.

        Raises:
            DataError: a row does not have the type of its column, or the chat template refuses it.
            RecipeRefusedError: an answer is a list of messages, and the tokenizer has no chat template.
        """
        columns = self.columns
        if columns.messages is not None:
            return self._encode_conversations(rows, columns.messages)
        if columns.text is not None:
            return self._encode_texts(get_texts(rows, columns.text))
        assert columns.prompt is not None  # noqa: S101 - the recipe was refused otherwise
        if columns.response is not None:
            return self._encode_answers(get_texts(rows, columns.prompt), get_texts(rows, columns.response))
        return self._encode_judged(rows[columns.prompt], *(rows[name] for name in self._judged_columns))

    @property
    def _chat(self) -> PreTrainedTokenizerBase:
        """The tokenizer of prompts and conversations, which can have a chat template."""
        assert not isinstance(self.tokenizer, TextTokenizer)  # noqa: S101 - only texts use a TextTokenizer
        return self.tokenizer

    def _encode_conversations(
        self, rows: Mapping[str, list[Any]], column: str
    ) -> Iterator[tuple[Document, ...]]:
        tools_of_rows = rows[self.columns.tools] if self.columns.tools else [None] * len(rows[column])
        for value, tools in zip(rows[column], tools_of_rows, strict=True):
            messages, learned = self.select_learned(value, column)
            definitions = parse_tools(tools, str(self.columns.tools))
            yield (self._encode_conversation(messages, learned, self.answers_only, definitions),)

    def select_learned(self, value: Any, column: str) -> tuple[list[chat_messages.Message], list[int]]:
        """Return the messages in a value of a column of conversations, and the indices of the assistant's messages that are learned.

        Raises:
            RowError: the value is not a conversation, or an answer has weight 0 although the loss is on all tokens.
        """
        messages, weights = split_weights(parse_conversation(value, column), column, self._weight_field)
        answers = loss_mask.find_answers(messages)
        if not self.answers_only and not all(weights[turn] for turn in answers):
            raise RowError(
                "MessageWeight",
                f"column {column} of {A_ROW} has an answer with {self._weight_field} 0, but objective.lossOn All computes the loss on "
                "every token: remove the weight, or objective.lossOn All",
            )
        considered = answers[-1:] if self.last_only else answers
        return messages, [turn for turn in considered if weights[turn]]

    @property
    def _weight_field(self) -> str:
        """The field of a message that says whether it is learned."""
        return self.columns.message_weight or chat_messages.WEIGHT

    def count_weighted(self, rows: Mapping[str, list[Any]]) -> int:
        """Return in how many rows of a batch a message has the field that data.columns.messageWeight names."""
        values = rows[self.columns.messages] if self.columns.messages else []
        # A value may have a wrong type: the errors about that come later.
        conversations = [
            [message for message in value if isinstance(message, dict)]
            for value in values
            if isinstance(value, list)
        ]
        return sum(
            any(message.get(self._weight_field) is not None for message in messages)
            for messages in conversations
        )

    def _encode_texts(self, texts: list[str]) -> Iterator[tuple[Document, ...]]:
        for ids in encode(self.tokenizer, texts, special=True):
            tokens = [*self._without_end(ids), self._end]
            yield (Document(tokens, [True] * len(tokens)),)

    def _encode_answers(self, prompts: list[str], responses: list[str]) -> Iterator[tuple[Document, ...]]:
        for prompt, answer in zip(self.encode_prompts(prompts), self._encode_replies(responses), strict=True):
            mask = [not self.answers_only] * len(prompt) + [True] * len(answer)
            yield (Document(prompt + answer, mask),)

    @property
    def _judged_columns(self) -> tuple[str, ...]:
        """The columns of judged answers: chosen and rejected answers, or one answer with a label."""
        columns = self.columns
        return tuple(name for name in (columns.chosen, columns.rejected, columns.completion) if name)

    def _encode_judged(self, prompts: list[Any], *answers: list[Any]) -> Iterator[tuple[Document, ...]]:
        """Yield the documents of each example: for each answer, the prompt followed by the answer."""
        # Adjacent rows of texts are encoded as one batch.
        rows = zip(prompts, *answers, strict=True)
        for is_text, run in groupby(rows, key=lambda row: all(isinstance(value, str) for value in row)):
            encode_run = self._encode_judged_texts if is_text else self._encode_judged_messages
            yield from encode_run(list(run))

    def _encode_judged_texts(self, rows: list[tuple[str, ...]]) -> Iterator[tuple[Document, ...]]:
        """Encode rows of texts, each a prompt and its answers, for example ("1 + 1", "2", "3")."""
        prompts, *answer_columns = zip(*rows, strict=True)
        reply_ids = [self._encode_replies(texts) for texts in answer_columns]
        for row, prompt, *answers in zip(rows, self.encode_prompts(prompts), *reply_ids, strict=True):
            _, *answer_texts = row
            yield tuple(
                # An empty answer has no targets, not even its end of text.
                Document(prompt + answer, [False] * len(prompt) + [bool(text.strip())] * len(answer))
                for text, answer in zip(answer_texts, answers, strict=True)
            )

    def _encode_judged_messages(self, rows: list[tuple[Any, ...]]) -> Iterator[tuple[Document, ...]]:
        self.check_template("a preference with lists of {role, content}", "model.base")
        return (self._encode_judged_example(*row) for row in rows)

    def _encode_judged_example(self, prompt: Any, *answers: Any) -> tuple[Document, ...]:
        """Encode an example in which the prompt or the answers are messages.

        A text prompt is the user's message. Answers may start with the messages of the prompt.
        """
        prompt_messages = to_messages(prompt, "user", str(self.columns.prompt))
        replies = (
            extract_reply(prompt_messages, to_messages(answer, "assistant", name), name)
            for answer, name in zip(answers, self._judged_columns, strict=True)
        )
        return tuple(self._encode_answer(prompt_messages, reply) for reply in replies)

    def _encode_answer(
        self, prompt: list[chat_messages.Message], reply: list[chat_messages.Message]
    ) -> Document:
        """Encode a prompt and the answer to it; the document is empty if the answer is blank."""
        if all(chat_messages.is_blank(message) for message in reply):
            return Document([], [])
        messages, weights = split_weights([*prompt, *reply], str(self.columns.prompt), chat_messages.WEIGHT)
        learned = [turn for turn in loss_mask.find_answers(messages) if turn >= len(prompt)]
        if not all(weights[turn] for turn in learned):
            raise RowError(
                "MessageWeight",
                f"the preference of {A_ROW} has an answer with {chat_messages.WEIGHT} 0, but preferences compare whole answers: remove "
                "the weight, or such rows",
            )
        return self._encode_conversation(messages, learned, answers_only=True)

    @property
    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def encode_prompts(self, prompts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the token ids of prompts that are texts."""
        # NB: prompt and answer are tokenized separately: the prompt gets the same tokens as at inference.
        return (self._without_end(ids) for ids in encode(self.tokenizer, prompts, special=True))

    def _encode_replies(self, responses: Iterable[str]) -> Iterator[list[int]]:
        return ([*ids, self._end] for ids in encode(self.tokenizer, responses, special=False))

    def _without_end(self, ids: list[int]) -> list[int]:
        """Return token ids without the end of text, which some tokenizers append."""
        return ids[:-1] if ids and ids[-1] == self._end else ids

    def _encode_conversation(
        self,
        messages: list[chat_messages.Message],
        learned: list[int],
        answers_only: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> Document:
        """Render and encode a conversation; `learned`: the turns of the assistant that are targets if `answers_only` is set."""
        if not messages:
            return Document([], [])
        text = self.render(messages, tools)
        # Without an encoding, either all tokens are targets, or the tokenizer does not report offsets and there is no mask.
        encoding = encode_with_offsets(self._chat, text) if answers_only else None
        if encoding is None:
            (ids,) = encode(self.tokenizer, [text], special=False)
            return Document(ids, None if answers_only else [True] * len(ids))
        spans = loss_mask.find_spans(self._chat, messages, tools, learned, text, day=self.day)
        return Document(
            encoding.ids, None if spans is None else loss_mask.find_overlaps(encoding.offsets, spans)
        )

    def render(
        self,
        messages: list[chat_messages.Message],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return a conversation as the chat template renders it, without its weights.

        Raises:
            DataError: the template refuses it.
        """
        plain = chat_messages.without(messages, self._weight_field)
        return loss_mask.render(
            self._chat, plain, tools, day=self.day, add_generation_prompt=add_generation_prompt
        )

"""Which part of a rendered conversation the loss is on.

The chat template says it with {% generation %} blocks. For a template without them, an answer is what the template adds to the
conversation before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer import chat_templates
from finetune_trainer.outcome import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.turns import Message

    Tools = list[dict[str, Any]] | None
    Span = tuple[int, int]


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Tools,
    *,
    add_generation_prompt: bool = False,
    is_whole: bool = True,
) -> str:
    """Return a conversation as its chat template renders it; `is_whole`: see `chat_templates.render`.

    Raises:
        DataError: the template does not take it.
    """
    try:
        return chat_templates.render(
            tokenizer, messages, tools, add_generation_prompt=add_generation_prompt, is_whole=is_whole
        )
    except chat_templates.FAILURES as error:
        raise _refused(error) from error


def answers(messages: Sequence[Message]) -> list[int]:
    """Return the turns of the assistant."""
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, learned: list[int], text: str
) -> list[Span] | None:
    """Return where in the rendered text the loss is, (begin, end) in characters, in order.

    Args:
        learned: those turns of the assistant that the loss is on, in order.
        text: as `rendered` returns it.

    Returns:
        None: a template without {% generation %} blocks renders what comes before or through one of these turns differently once
        the conversation goes on.

    Raises:
        DataError: the template does not take the conversation; or it is not known which of its blocks belongs to which turn.
    """
    try:
        blocks = chat_templates.marked(tokenizer, messages, tools)
    except chat_templates.FAILURES as error:
        raise _refused(error) from error
    if blocks is None:
        return _added(tokenizer, messages, tools, learned, text)
    said = answers(messages)
    if learned == said:
        return blocks
    if len(blocks) != len(said):
        blocks = _joined(blocks)
    if len(blocks) != len(said):
        raise DataError(
            "ChatTemplate",
            f"the chat template has {len(blocks)} {{% generation %}} blocks for {len(said)} turns of the assistant, so those of "
            "some of the turns are not known: set model.chatTemplate to one with a block for each turn",
        )
    return [block for turn, block in zip(said, blocks, strict=True) if turn in learned]


def _joined(blocks: list[Span]) -> list[Span]:
    """Blocks of which none begins where another ends: a template may have one for an answer, and one for its end."""
    found: list[Span] = []
    for begin, end in blocks:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _added(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, learned: list[int], text: str
) -> list[Span] | None:
    """What the template adds with each of some turns."""
    found = []
    for turn in learned:
        try:
            before = rendered(tokenizer, messages[:turn], tools, add_generation_prompt=True, is_whole=False)
            through = rendered(tokenizer, messages[: turn + 1], tools, is_whole=False)
        except DataError:
            return None
        if not text.startswith(through):
            # Phi's template ends a conversation, and not each answer, with the end of a text.
            through = through.removesuffix(str(tokenizer.eos_token))
        if not (text.startswith(through) and through.startswith(before)):
            return None
        found.append((len(before), len(through)))
    return found


def touched(places: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Whether each place shares a character with one of the spans, which are in order and apart."""
    if not spans or not places:
        return [False] * len(places)
    begins, ends = np.asarray(places).T
    span_begins, span_ends = np.asarray(spans).T
    first = np.searchsorted(span_ends, begins, side="right")
    found = (first < len(spans)) & (span_begins[np.minimum(first, len(spans) - 1)] < ends)
    touched: list[bool] = found.tolist()
    return touched


def _refused(error: Exception) -> DataError:
    return DataError("ChatTemplate", f"the chat template cannot render a conversation of the data: {error}")

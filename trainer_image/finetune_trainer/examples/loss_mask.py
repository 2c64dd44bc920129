"""Finds the part of a rendered conversation that the loss covers.

The chat template marks it with {% generation %} blocks. With a template without such blocks, an answer is what the template adds to the
text of the conversation before the answer.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer.examples import answer_end, chat_templates, template_input
from finetune_trainer.examples.refused_rows import A_ROW, TEMPLATE_FAILED, RowError
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import date

    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.examples.chat_messages import Message

    Tools = list[dict[str, Any]] | None
    Span = tuple[int, int]

# How many roles of a conversation an error message shows, and how much of each.
_MAX_ROLES = 8
_MAX_ROLE_CHARS = 20


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Tools,
    *,
    day: date | None = None,
    add_generation_prompt: bool = False,
    is_whole: bool = True,
) -> str:
    """Return a conversation as its chat template renders it; `day` and `is_whole`: see `chat_templates.render`.

    Raises:
        RowError: the template refuses it.
    """
    try:
        return chat_templates.render(
            tokenizer,
            messages,
            tools,
            day=day,
            add_generation_prompt=add_generation_prompt,
            is_whole=is_whole,
        )
    except template_input.FAILURES as error:
        raise _template_error(error, messages) from error


def find_answers(messages: Sequence[Message]) -> list[int]:
    """Return the turns of the assistant, each as the index of its message."""
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def find_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Tools,
    learned: list[int],
    text: str,
    *,
    day: date | None = None,
) -> list[Span] | None:
    """Return the spans of the rendered text that the loss covers: (begin, end) in characters, in order.

    Args:
        learned: the turns of the assistant that the loss covers, in order.
        text: the conversation as `render` returns it.
        day: the date with which `text` was rendered.

    Returns:
        None: the template has no {% generation %} blocks, and one of these turns cannot be located. That is so if the template refuses the
        conversation up to the turn, renders it differently if the conversation continues, or does not begin the turn with its generation
        prompt.

    Raises:
        RowError: the template refuses the conversation, or it is unknown which block belongs to which turn.
    """
    try:
        blocks = chat_templates.find_marked_spans(tokenizer, messages, tools, day=day)
    except template_input.FAILURES as error:
        raise _template_error(error, messages) from error
    if blocks is None:
        render_beginning = partial(render, tokenizer, tools=tools, day=day, is_whole=False)
        return _find_added_spans(tokenizer, messages, learned, text, render_beginning)
    answer_turns = find_answers(messages)
    if learned == answer_turns:
        return blocks
    if len(blocks) != len(answer_turns):
        blocks = _join_blocks(blocks)
    if len(blocks) != len(answer_turns):
        raise RowError(
            "ChatTemplate",
            f"the chat template has {len(blocks)} {{% generation %}} blocks for the {len(answer_turns)} turns of the assistant in {A_ROW}, so "
            "the blocks of some turns cannot be identified: set model.chatTemplate to a template with a block for each turn",
        )
    return [block for turn, block in zip(answer_turns, blocks, strict=True) if turn in learned]


def _join_blocks(blocks: list[Span]) -> list[Span]:
    """Join adjacent blocks: a template may have one block for an answer, and another for its end."""
    joined: list[Span] = []
    for begin, end in blocks:
        last_begin, last_end = joined[-1] if joined else (0, None)
        if last_end == begin:
            joined[-1] = (last_begin, end)
        else:
            joined.append((begin, end))
    return joined


def _find_added_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    learned: list[int],
    text: str,
    render_beginning: Callable[..., str],
) -> list[Span] | None:
    """Return the span that the template adds with each learned turn, or None, see `find_spans`."""
    added = []
    for turn in learned:
        try:
            # The conversation up to the answer, with the generation prompt; and the conversation up to and with the answer.
            request = render_beginning(messages[:turn], add_generation_prompt=True)
            answered = render_beginning(messages[: turn + 1])
            begin = len(request) if answered.startswith(request) else None
            if begin is None:
                begin = _find_end_of_header(tokenizer, render_beginning(messages[:turn]), request, answered)
        except DataError:
            return None
        if begin is None:
            return None
        if not text.startswith(answered) and not _ends_with_eos_alone(tokenizer, tokenizer.chat_template):
            # Phi's template writes the end-of-text token once, after the whole conversation, so `text` does not have it here if the
            # conversation continues. If it is the only end of an answer, it is not removed, and the next condition is met: None is
            # returned, because the loss would not include any end.
            answered = answered.removesuffix(str(tokenizer.eos_token))
        if not text.startswith(answered):
            return None
        added.append((begin, len(answered)))
    return added


def _find_end_of_header(
    tokenizer: PreTrainedTokenizerBase, before: str, request: str, answered: str
) -> int | None:
    """Return where an answer begins if the generation prompt adds a special token, such as DeepSeek's <think>, to the header of an answer.

    For example, the generation prompt is `<|Assistant|><think>`, and the answer begins after `<|Assistant|>`. The header must itself end
    with a special token. None for any other generation prompt.

    Args:
        before: the conversation up to the answer.
        request: `before`, with the generation prompt.
        answered: the conversation up to and with the answer.
    """
    if not request.startswith(before):
        return None
    special = _special_texts(tokenizer, len(tokenizer))
    # The header ends with the last special token up to which the generation prompt and the answered conversation are the same.
    ends = (end for end in range(len(request), len(before), -1) if request[:end].endswith(special))
    header_end = next((end for end in ends if answered.startswith(request[:end])), None)
    if header_end is None:
        return None
    text_added_to_header = request[header_end:].strip()
    return header_end if text_added_to_header in special else None


@lru_cache(maxsize=4)
def _special_texts(tokenizer: PreTrainedTokenizerBase, _size: int) -> tuple[str, ...]:
    """Return the texts of a tokenizer's added tokens; `_size`: the size of the vocabulary, as a key of the cache: it may grow."""
    return tuple(added.content for added in tokenizer.added_tokens_decoder.values())


@lru_cache(maxsize=4)
def _ends_with_eos_alone(tokenizer: PreTrainedTokenizerBase, _template: str) -> bool:
    """Return whether a template ends the last answer only with the end-of-text token, as gpt-oss's does.

    _template: the template, as a key of the cache: it may be replaced.
    """
    return answer_end.find_end_text(tokenizer) == str(tokenizer.eos_token)


def check_template(tokenizer: PreTrainedTokenizerBase, base: str) -> None:
    """Check that a chat template lets answers and their ends be learned.

    Args:
        base: the model whose template it is, for messages.

    Raises:
        RecipeRefusedError: answers or their ends would not be learned.
    """
    chat_templates.check_marks(tokenizer)
    # Some templates write the end of an answer at the beginning of the next message, and no end of the last answer: so the answer is
    # checked both as the last message and before another one.
    question = answer_end.QUESTION
    for messages in ([question, answer_end.ANSWER], [question, answer_end.ANSWER, question]):
        texts = _find_text_after_answer(tokenizer, messages)
        if texts is None:
            continue
        learned_text, whole_text = texts
        if not answer_end.has_end(tokenizer, learned_text):
            raise RecipeRefusedError(_explain_missing_end(tokenizer, messages, whole_text, base))


def _find_text_after_answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message]
) -> tuple[str, str] | None:
    """Return the text after the answer of a conversation: the learned part of this text, and all of it.

    None if the template refuses the conversation, or hides or changes the answer, or if `find_spans` does not find the answer.
    """
    try:
        text = render(tokenizer, messages, tools=None)
        # Turn 1 is the answer.
        learned_spans = find_spans(tokenizer, messages, tools=None, learned=[1], text=text)
    except DataError:
        return None
    answer = str(answer_end.ANSWER["content"])
    if not learned_spans or answer not in text:
        return None
    answer_stop = text.find(answer) + len(answer)
    learned_text = "".join(text[max(begin, answer_stop) : end] for begin, end in learned_spans)
    return learned_text, text[answer_stop:]


def _explain_missing_end(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], text_after_answer: str, base: str
) -> str:
    """Return what is wrong with a template whose end of an answer is not learned, and the remedy."""
    end = answer_end.find_end_text(tokenizer)
    if end and text_after_answer.lstrip().startswith(end):
        cause = f"writes {end!r} outside of {{% generation %}} and {{% endgeneration %}}"
        remedy = f"move {end!r} between them in model.chatTemplate.jinja"
    else:
        which = "the last answer" if messages[-1] is answer_end.ANSWER else "an answer"
        cause = f"writes nothing that ends {which}"
        remedy = f"set model.chatTemplate to one that writes, for example, {tokenizer.eos_token} at the end of each answer"
        if chat_templates.has_marks(tokenizer):
            remedy += ", before {% endgeneration %}"
    return (
        f"the chat template of {base} {cause}, so a model trained with it would not learn to stop: {remedy}"
    )


def find_overlaps(places: list[tuple[int, int]], targets: list[tuple[int, int]]) -> list[bool]:
    """Return whether each place shares a character with a target. All are (begin, end); the targets are in order and do not overlap.

    For example, [False, True] for the places (0, 2) and (2, 4) and the target (3, 5).
    """
    if not targets or not places:
        return [False] * len(places)
    begins, ends = np.asarray(places).T
    target_begins, target_ends = np.asarray(targets).T
    # The first target that ends after the place begins: if any target overlaps the place, this one does.
    first = np.searchsorted(target_ends, begins, side="right")
    is_inside = (first < len(targets)) & (target_begins[np.minimum(first, len(targets) - 1)] < ends)
    overlapping: list[bool] = is_inside.tolist()
    return overlapping


def _template_error(error: Exception, messages: Sequence[Message]) -> RowError:
    roles = [str(message["role"])[:_MAX_ROLE_CHARS] for message in messages[: _MAX_ROLES + 1]]
    if len(roles) > _MAX_ROLES:
        roles[-1] = "..."
    return RowError(
        TEMPLATE_FAILED,
        f"the chat template of the model fails on {A_ROW} with the roles {', '.join(roles)}: {str(error).rstrip('.')}",
    )

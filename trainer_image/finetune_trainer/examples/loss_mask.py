"""Which part of a rendered conversation the loss is on.

The chat template says it with {% generation %} blocks. For a template without them, an answer is what the template adds to the
conversation before it.
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

# What a message shows of a conversation.
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
        RowError: the template does not take it.
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
    """Return the turns of the assistant."""
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
    """Return where in the rendered text the loss is, (begin, end) in characters, in order.

    Args:
        learned: those turns of the assistant that the loss is on, in order.
        text: as `rendered` returns it.
        day: that of `text`.

    Returns:
        None: a template without {% generation %} blocks renders what comes before or through one of these turns differently once
        the conversation goes on.

    Raises:
        RowError: the template does not take the conversation; or it is not known which of its blocks belongs to which turn.
    """
    try:
        blocks = chat_templates.find_marked_spans(tokenizer, messages, tools, day=day)
    except template_input.FAILURES as error:
        raise _template_error(error, messages) from error
    if blocks is None:
        beginning = partial(render, tokenizer, tools=tools, day=day, is_whole=False)
        return _find_added_spans(tokenizer, messages, learned, text, beginning)
    answer_turns = find_answers(messages)
    if learned == answer_turns:
        return blocks
    if len(blocks) != len(answer_turns):
        blocks = _join_blocks(blocks)
    if len(blocks) != len(answer_turns):
        raise RowError(
            "ChatTemplate",
            f"the chat template has {len(blocks)} {{% generation %}} blocks for the {len(answer_turns)} turns of the assistant in {A_ROW}, so "
            "those of some turns cannot be identified: set model.chatTemplate to one with a block for each turn",
        )
    return [block for turn, block in zip(answer_turns, blocks, strict=True) if turn in learned]


def _join_blocks(blocks: list[Span]) -> list[Span]:
    """Blocks of which none begins where another ends: a template may have one for an answer, and one for its end."""
    joined: list[Span] = []
    for begin, end in blocks:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _find_added_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    learned: list[int],
    text: str,
    beginning: Callable[..., str],
) -> list[Span] | None:
    """What the template adds with each of some turns; `beginning` renders the beginning of a conversation."""
    added = []
    for turn in learned:
        try:
            request = beginning(messages[:turn], add_generation_prompt=True)
            through = beginning(messages[: turn + 1])
            begin = len(request) if through.startswith(request) else None
            if begin is None:
                begin = _find_end_of_header(tokenizer, beginning(messages[:turn]), request, through)
        except DataError:
            return None
        if not text.startswith(through) and not _ends_with_eos_alone(tokenizer, tokenizer.chat_template):
            # Phi's template ends a conversation, and not each answer, with the end of a text.
            through = through.removesuffix(str(tokenizer.eos_token))
        if begin is None or not text.startswith(through):
            return None
        added.append((begin, len(through)))
    return added


def _find_end_of_header(
    tokenizer: PreTrainedTokenizerBase, before: str, request: str, through: str
) -> int | None:
    """Where an answer begins in a template that asks for it with more than it writes before it, such as DeepSeek's with <think>.

    The header of an answer ends with a special token then, behind which the template writes nothing but another one in the request.

    Args:
        before: the conversation without the answer.
        request: the same, asking for the answer.
        through: the conversation with it.
    """
    if not request.startswith(before):
        return None
    special = _special_texts(tokenizer, len(tokenizer))
    ends = (end for end in range(len(request), len(before), -1) if request[:end].endswith(special))
    end = next((end for end in ends if through.startswith(request[:end])), None)
    return end if end is None or request[end:].strip() in special else None


@lru_cache(maxsize=4)
def _special_texts(tokenizer: PreTrainedTokenizerBase, _size: int) -> tuple[str, ...]:
    """The texts of the tokens that a tokenizer does not make of parts; `_size`: of its vocabulary, which may grow."""
    return tuple(added.content for added in tokenizer.added_tokens_decoder.values())


@lru_cache(maxsize=4)
def _ends_with_eos_alone(tokenizer: PreTrainedTokenizerBase, _template: str) -> bool:
    """Whether the end of a text is all that a template ends the last answer with, as gpt-oss's; without it, it has no end."""
    return answer_end.find_end_text(tokenizer) == str(tokenizer.eos_token)


def check_template(tokenizer: PreTrainedTokenizerBase, base: str) -> None:
    """Check that what is learned of answers, with a chat template, is something, and that it has their ends.

    Args:
        base: whose template it is, in messages.

    Raises:
        RecipeRefusedError: it is not, or has not.
    """
    chat_templates.check_marks(tokenizer)
    # Some templates write the end of an answer as the beginning of the next message, and of the last answer not at all.
    question = answer_end.QUESTION
    for messages in ([question, answer_end.ANSWER], [question, answer_end.ANSWER, question]):
        behind = _find_behind_answer(tokenizer, messages)
        if behind is not None and not answer_end.has_end(tokenizer, behind[0]):
            raise RecipeRefusedError(_explain_missing_end(tokenizer, messages, behind[1], base))


def _find_behind_answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message]
) -> tuple[str, str] | None:
    """What is learned behind the answer of a conversation, and all that is behind it.

    None where the template does not take the conversation, or hides or changes the answer.
    """
    try:
        text = render(tokenizer, messages, None)
        learned = find_spans(tokenizer, messages, None, [1], text)
    except DataError:
        return None
    answer = str(answer_end.ANSWER["content"])
    begin = text.find(answer) + len(answer)
    if not learned or answer not in text:
        return None
    return "".join(text[max(start, begin) : end] for start, end in learned), text[begin:]


def _explain_missing_end(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], behind: str, base: str
) -> str:
    end = answer_end.find_end_text(tokenizer)
    if end and behind.lstrip().startswith(end):
        cause = f"it writes {end!r} outside of {{% generation %}} and {{% endgeneration %}}"
        remedy = "move it between them in model.chatTemplate.jinja"
    else:
        which = "the last answer" if messages[-1] is answer_end.ANSWER else "an answer"
        cause = f"it writes nothing that ends {which}"
        remedy = f"set model.chatTemplate to one that writes, for example, {tokenizer.eos_token} at the end of each answer"
        if chat_templates.has_marks(tokenizer):
            remedy += ", before {% endgeneration %}"
    return (
        f"a model trained with the chat template of {base} would not learn to stop because {cause}: {remedy}"
    )


def find_overlaps(places: list[tuple[int, int]], targets: list[tuple[int, int]]) -> list[bool]:
    """Whether each place shares a character with one of the spans, which are in order and apart."""
    if not targets or not places:
        return [False] * len(places)
    begins, ends = np.asarray(places).T
    span_begins, span_ends = np.asarray(targets).T
    first = np.searchsorted(span_ends, begins, side="right")
    is_inside = (first < len(targets)) & (span_begins[np.minimum(first, len(targets) - 1)] < ends)
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

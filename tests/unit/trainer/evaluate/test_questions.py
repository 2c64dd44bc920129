"""What a model is asked, and where its answer ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.chat import ChatTemplate
from finetune_crds.data import Columns
from finetune_trainer.evaluate import questions
from finetune_trainer.examples import chat_templates
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.tokenizer import load_tokenizer
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

ASKED = {"role": "user", "content": "What is red?"}
ANSWER = {"role": "assistant", "content": "The house is red."}
AGAIN = {"role": "assistant", "content": "The door."}
CHAT = "<|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    """One whose chat template ends a turn with a text of several tokens."""
    model = networks.recipe(base_model).model.model_copy(
        update={"chat_template": ChatTemplate(type="ChatML")}
    )
    return load_tokenizer(model, base_model)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str] | None]]] = {
    "texts": ({"type": "Text"}, {"text": ["a", "b"]}, [None, None]),
    "prompts": (
        {"type": "PromptResponse", "prompt": "q", "response": "a"},
        {"q": ["What? ", "Who? "], "a": ["This.", "He."]},
        [("What? ", "This."), ("Who? ", "He.")],
    ),
    "preferences of texts": (
        {"type": "Preference"},
        {"prompt": ["What? "], "chosen": ["This."], "rejected": ["That."]},
        [("What? ", "This.")],
    ),
    "preferences of conversations, one of which repeats its prompt": (
        {"type": "Preference"},
        {
            "prompt": ["What is red?", [ASKED]],
            "chosen": [[ANSWER], [ASKED, ANSWER]],
            "rejected": [[AGAIN], [ASKED, AGAIN]],
        },
        [(CHAT, "The house is red.<|im_end|>\n")] * 2,
    ),
    "conversations: the last answer, and none": (
        {"type": "Messages"},
        {"messages": [[ASKED, ANSWER], [ASKED, ANSWER, ASKED, AGAIN, ASKED], [ASKED]]},
        [
            (CHAT, "The house is red.<|im_end|>\n"),
            (CHAT + "The house is red.<|im_end|>\n" + CHAT, "The door.<|im_end|>\n"),
            None,
        ],
    ),
    "conversations: those that begin with the assistant": (
        {"type": "Messages"},
        {"messages": [[AGAIN], [AGAIN, ASKED, ANSWER]]},
        [
            None,
            ("<|im_start|>assistant\nThe door.<|im_end|>\n" + CHAT, "The house is red.<|im_end|>\n"),
        ],
    ),
}


WRONG = {**ANSWER, "content": "The sky.", "weight": 0}


def list_answers(tokenizer: PreTrainedTokenizerBase, rows: dict[str, Any], **how: Any) -> list[str | None]:
    """The answers that are asked for."""
    kind = "Messages" if "messages" in rows else "Preference"
    documents = Documents(tokenizer, Columns.model_validate({"type": kind, **how}), answers_only=True)
    return [
        question.reference if question else None for question in questions.build_questions(documents, rows)
    ]


def test_an_answer_that_is_not_learned_is_no_reference(tokenizer: PreTrainedTokenizerBase) -> None:
    conversations: list[list[dict[str, Any]]] = [
        [ASKED, ANSWER, ASKED, WRONG],
        [ASKED, WRONG],
        [{**ASKED, "weight": 0}, ANSWER],
    ]
    right = "The house is red.<|im_end|>\n"
    assert list_answers(tokenizer, {"messages": conversations}) == [right, None, right]
    weighted_messages = [
        [{**turn, "weight": 0.5, "train": turn.get("weight")} for turn in turns] for turns in conversations
    ]
    assert list_answers(tokenizer, {"messages": weighted_messages}, messageWeight="train") == [
        right,
        None,
        right,
    ]
    # Training on last answers alone leaves out a conversation whose last one is not learned.
    columns = Columns.model_validate({"type": "Messages"})
    documents = Documents(tokenizer, columns, answers_only=True, last_only=True)
    references = [
        question is not None for question in questions.build_questions(documents, {"messages": conversations})
    ]
    assert references == [False, False, True]


def test_the_turns_of_a_prompt_are_no_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = [ASKED, WRONG, ASKED]
    rows = {"prompt": [prompt] * 2, "chosen": [[ANSWER], []], "rejected": [[AGAIN], [AGAIN]]}
    assert list_answers(tokenizer, rows) == ["The house is red.<|im_end|>\n", None]


def test_the_chat_template_is_checked_once_for_many_rows(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []
    monkeypatch.setattr(chat_templates, "check_marks", checked.append)
    rows = {"prompt": ["What?"] * 9, "chosen": [[ANSWER]] * 9, "rejected": [[AGAIN]] * 9}
    assert len(list_answers(tokenizer, rows)) == 9
    assert len(checked) == 1


@pytest.mark.parametrize("case", CASES)
def test_a_question_is_the_example_without_its_answer(tokenizer: PreTrainedTokenizerBase, case: str) -> None:
    columns, rows, expected = CASES[case]
    documents = Documents(tokenizer, Columns.model_validate(columns), answers_only=True)
    built = list(questions.build_questions(documents, rows))
    assert [each and (each.prompt, each.reference) for each in built] == expected
    # The prompt has the tokens that it has in training, where the loss begins behind it.
    for question, (document, *_) in zip(built, documents.of(rows), strict=True):
        if question is not None and "conversations:" not in case:
            assert document.loss_mask is not None
            begin = document.loss_mask.index(True)
            assert document.tokens[:begin] == question.tokens


def test_an_answer_ends_at_the_stops_of_the_model_and_nowhere_else(base_model: Path) -> None:
    tokenizer = load_tokenizer(networks.recipe(base_model).model, base_model)
    end = int(tokenizer.eos_token_id)
    ending = questions.Ending(tokenizer, frozenset([end]))
    ids = tokenizer("The house is red. ", add_special_tokens=False)["input_ids"]
    assert ending.text([*ids, end, *ids]) == "The house is red."
    assert ending.text(ids) == "The house is red."
    assert ending.cut(" The house .\n") == "The house ."
    assert questions.Ending(tokenizer, frozenset()).text([*ids, end, *ids]).count("The house") == 2


# Renders the beginning of a conversation otherwise once it goes on: how an answer is rendered cannot be told.
COUNTING = """\
{{ messages | length }}:
{%- for message in messages %}
{{ ' ' + message['role'] + ' ' + message['content'] | string + message['tool_calls'] | string }}
{%- endfor %}
"""


def test_an_answer_that_only_its_message_shows_is_its_text_or_none(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = COUNTING
    calls = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    answers: list[dict[str, Any]] = [
        {"content": "It is."},
        {"content": [{"type": "text", "text": "It is."}]},
        {"content": "", "tool_calls": calls},
        {"content": " "},
    ]
    rows = {"messages": [[ASKED, {"role": "assistant", **answer}] for answer in answers]}
    documents = Documents(tokenizer, Columns.model_validate({"type": "Messages"}), answers_only=False)
    built = [each and (each.prompt, each.reference) for each in questions.build_questions(documents, rows)]
    assert built == [("1: user What is red?", "It is.")] * 2 + [None] * 2

"""What a recipe asks of the preparation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.chat import Conversation
from finetune_trainer.examples import chat_messages
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError
from finetune_trainer.prep import counts
from finetune_trainer.prep.expressions.template import Template
from finetune_trainer.prep.plan import Form, build_plan, build_request
from unit.trainer.prep.recipes import recipe

PREFERENCES = {"type": "Preference", "prompt": "question", "chosen": "good", "rejected": "bad"}
UNPAIRED = {"type": "Unpaired", "prompt": "question", "completion": "good", "label": "thumb"}
TEXT = {"type": "Text", "text": "body"}
PAIR = {"type": "PromptResponse", "prompt": "question", "response": "answer"}
CHAT = {"type": "Messages", "messages": "chat"}


def column(name: str) -> Template:
    return Template.of_column(name)


FORMS: list[tuple[str, dict[str, Any], dict[str, Any], Form]] = [
    ("text", TEXT, {}, Form(("body",), ("body",), {"text": column("body")})),
    (
        "prompt and response",
        PAIR,
        {},
        Form(
            ("question", "answer"),
            ("question", "answer"),
            {"prompt": column("question"), "response": column("answer")},
            prompt="question",
        ),
    ),
    ("messages", CHAT, {}, Form(("chat",), ("chat",), {}, messages="chat")),
    (
        "preferences",
        PREFERENCES,
        {},
        Form(
            ("question", "good", "bad"),
            ("question", "good", "bad"),
            {"prompt": column("question"), "chosen": column("good"), "rejected": column("bad")},
            prompt="question",
        ),
    ),
    (
        "a template makes the prompt of preferences; the prompt's own column may be left out of it",
        PREFERENCES,
        {"promptTemplate": "{context} A:"},
        Form(
            ("question", "good", "bad"),
            ("context", "good", "bad"),
            {
                "prompt": Template((("", "context"), (" A:", None))),
                "chosen": column("good"),
                "rejected": column("bad"),
            },
            prompt="question",
        ),
    ),
    (
        "unpaired preferences, whose label is no part of their text",
        UNPAIRED,
        {"promptTemplate": "Q: {question}", "minPromptChars": 2},
        Form(
            ("question", "good", "thumb"),
            ("question", "good"),
            {"prompt": Template((("Q: ", "question"),)), "completion": column("good")},
            prompt="question",
            label="thumb",
        ),
    ),
    (
        "a template makes a text of a pair",
        PAIR,
        {"promptTemplate": "Q: {question} A: {answer}"},
        Form(
            ("question", "answer"),
            ("question", "answer"),
            {"text": Template((("Q: ", "question"), (" A: ", "answer")))},
            prompt="question",
        ),
    ),
    (
        "a template of the prompt alone, where the pair becomes a conversation",
        PAIR,
        {"promptTemplate": "Q: {question}", "conversation": {"system": "Be brief."}},
        Form(
            ("question", "answer"),
            ("question", "answer"),
            {"prompt": Template((("Q: ", "question"),)), "response": column("answer")},
            prompt="question",
            conversation=Conversation(system="Be brief."),
        ),
    ),
    (
        "two templates make a pair; a column that only a template names may be blank",
        PAIR,
        {"promptTemplate": "{context}\n{question}", "responseTemplate": " {answer}{{}}"},
        Form(
            ("question", "answer"),
            ("context", "question", "answer"),
            {
                "prompt": Template((("", "context"), ("\n", "question"))),
                "response": Template(((" ", "answer"), ("{", None), ("}", None))),
            },
            prompt="question",
        ),
    ),
]


# Columns of the source with conversations, the fields of these, and what the form has of both.
# What a source of JSON text shows when it was read.
NO_WEIGHTS = counts.Counts(
    examples=2,
    dropped={},
    rows={"train": 1, "validation": 1},
    tokens={"train": 9, "validation": 9},
    weighed=0,
    learned=2,
)
SPOKEN: list[tuple[str, dict[str, Any], dict[str, tuple[str, ...]], tuple[Any, ...]]] = [
    ("messages", CHAT, {"chat": ("name",)}, (("chat",), ("name",), ("messages",))),
    (
        "messages as JSON text, with tools",
        CHAT | {"tools": "functions"},
        {"other": ()},
        (("chat",), chat_messages.CARRIED, ("messages", "tools")),
    ),
    (
        "answers of preferences",
        PREFERENCES,
        {"good": ("tool_calls",), "bad": (), "other": ("name",)},
        (("good", "bad"), ("tool_calls",), ("prompt", "chosen", "rejected")),
    ),
    (
        "an answer of unpaired preferences",
        UNPAIRED,
        {"good": ("name",)},
        (("good",), ("name",), ("prompt", "completion")),
    ),
    ("a pair of texts", PAIR, {"other": ()}, ((), (), ("prompt", "response"))),
]


@pytest.mark.parametrize(
    ("columns", "source", "expected"), [row[1:] for row in SPOKEN], ids=[row[0] for row in SPOKEN]
)
def test_conversations_of_a_source(
    columns: dict[str, Any], source: dict[str, tuple[str, ...]], expected: tuple[Any, ...]
) -> None:
    form = build_plan(recipe(columns=columns), source).form
    assert (form.spoken, form.carried, form.columns) == expected


def test_a_field_of_weights_that_no_message_has_is_refused() -> None:
    job_recipe = recipe(columns=CHAT | {"messageWeight": "train"})
    form = build_plan(job_recipe, {"chat": ("weight",)})
    assert form.form.weight == "train"
    # Structures show it at once, JSON text when it was read.
    shown: list[dict[str, tuple[str, ...]]] = [{"chat": ("name",)}, {"other": ()}]
    for fields in shown:
        with pytest.raises(DataError) as refused:
            counts.require_examples(NO_WEIGHTS, build_plan(job_recipe, fields))
        assert f"{refused.value.reason}: {refused.value.message}" == (
            "MissingField: no message of column chat has the field train: correct data.columns.messageWeight, or remove it"
        )
    counts.require_examples(replace(NO_WEIGHTS, weighed=None), form)


@pytest.mark.parametrize(
    ("columns", "templates", "expected"), [row[1:] for row in FORMS], ids=[row[0] for row in FORMS]
)
def test_form_of_an_example(columns: dict[str, Any], templates: dict[str, Any], expected: Form) -> None:
    assert build_plan(recipe(columns=columns, **templates)).form == expected


def test_columns_that_the_source_must_have() -> None:
    plan = build_plan(
        recipe(
            notNull=["license"],
            minQuality=0.5,
            qualityColumn="score",
            dedupe={"columns": ["question", "title"]},
            splitRatios={"key": "thread", "stratifyBy": "language"},
        )
    )
    assert plan.columns == ("question", "answer", "license", "score", "title", "thread", "language")
    assert build_plan(recipe()).columns == ("question", "answer")


def test_a_recipe_without_columns_says_which_its_templates_name() -> None:
    templates: dict[str, Any] = {
        "promptTemplate": "{context} {question}",
        "responseTemplate": "{answer} {question}",
    }
    assert build_request(recipe(columns=None, **templates)).templates == ("context", "question", "answer")
    assert build_request(recipe(columns=None)).templates == ()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "open brace",
        {"promptTemplate": "{question"},
        "data.prepare.promptTemplate has an unmatched brace: write {column} for a column's value, and {{ and }} for "
        "braces",
    ),
    (
        "placeholder without a name",
        {"promptTemplate": "{question}", "responseTemplate": "{}"},
        "data.prepare.responseTemplate has a placeholder that is not a column name: write {column}, and {{ and }} for "
        "braces",
    ),
    (
        "placeholder with a format",
        {"promptTemplate": "{question:>10}"},
        "data.prepare.promptTemplate has a placeholder that is not a column name: write {column}, and {{ and }} for "
        "braces",
    ),
]


@pytest.mark.parametrize(
    ("changes", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        build_plan(recipe(**changes))
    assert refused.value.message == sentence


def test_nothing_to_prepare() -> None:
    job_recipe = recipe()
    data = job_recipe.data.model_copy(update={"source": None, "prepare": None})
    with pytest.raises(RecipeRefusedError) as refused:
        build_plan(job_recipe.model_copy(update={"data": data}))
    assert refused.value.message == (
        "a preparation requires data.source and data.prepare: without them, training starts directly"
    )


LISTS: dict[str, tuple[dict[str, tuple[str, ...]], dict[str, Any], str]] = {
    "a template of a prompt that is a list": (
        {"question": (), "good": (), "bad": ()},
        {"promptTemplate": "{question}"},
        "column question holds conversations, and data.prepare.promptTemplate renders text: remove data.prepare.promptTemplate",
    ),
    "a system turn before a prompt that is a list": (
        {"question": ()},
        {"conversation": {"system": "Be brief."}},
        "column question holds conversations, and data.prepare.conversation.system goes before prompts that are text: remove data.prepare.conversation.system",
    ),
    "texts that nothing can refuse": (
        {"other": ()},
        {"onTemplateError": "Drop"},
        "data.prepare.onTemplateError Drop requires a template that can fail: set data.columns.type to Messages, Preference or "
        "Unpaired, set data.prepare.conversation, or set data.prepare.templateSyntax to Jinja; the columns hold text",
    ),
}


@pytest.mark.parametrize(("conversations", "prepare", "sentence"), LISTS.values(), ids=LISTS)
def test_fields_for_text_beside_preferences_that_are_conversations(
    conversations: dict[str, tuple[str, ...]], prepare: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        build_plan(recipe(columns=PREFERENCES, **prepare), conversations)
    assert refused.value.message == sentence

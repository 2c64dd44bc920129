"""What a recipe asks of the preparation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.chat import Conversation
from finetune_trainer.examples import chat_messages
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError
from finetune_trainer.prep import funnel
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
NO_WEIGHTS = funnel.Counts(
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
            funnel.check(NO_WEIGHTS, build_plan(job_recipe, fields))
        assert f"{refused.value.reason}: {refused.value.message}" == (
            "MissingField: no message of column chat has the field train: correct data.columns.messageWeight, or remove it"
        )
    funnel.check(replace(NO_WEIGHTS, weighed=None), form)


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
        "Hub without a data set",
        {"source": {"type": "Hub"}},
        "data.source needs dataset for type Hub, and exactly one of path and table for the others",
    ),
    (
        "Hub in executor pods",
        {"source": {"type": "Hub", "dataset": "org/set"}, "spark": {"mode": "Kubernetes"}},
        "data.source.type Hub needs data.prepare.spark.mode Local: the data set is downloaded into the prep pod, where "
        "mode Kubernetes cannot read it",
    ),
    (
        "path and table",
        {"source": {"type": "Delta", "path": "/corpus", "table": "a.b"}},
        "data.source needs dataset for type Hub, and exactly one of path and table for the others",
    ),
    (
        "a mix without sources",
        {"source": {"type": "Mix"}},
        "data.source requires sources for type Mix, and allows them for no other type",
    ),
    (
        "output over a source of a mix",
        {
            "source": {"type": "Mix", "sources": [{"name": "a", "type": "CSV", "path": "/corpus"}]},
            "output": "/corpus",
        },
        "data.prepare.output /corpus is the source itself: write to another folder",
    ),
    (
        "near dedupe",
        {"dedupe": {"exact": False, "near": {}}},
        "data.prepare.dedupe.near needs dedupe.exact: exact duplicates are removed first",
    ),
    (
        "a template of both answers",
        {"columns": PREFERENCES, "promptTemplate": "{question}", "responseTemplate": "{good}"},
        "data.prepare.responseTemplate cannot be used with data.columns of type Preference: promptTemplate renders "
        "the prompt, and answers stay as they are",
    ),
    (
        "a template of judged answers",
        {"columns": UNPAIRED, "promptTemplate": "{question}", "responseTemplate": "{good}"},
        "data.prepare.responseTemplate cannot be used with data.columns of type Unpaired: promptTemplate renders the "
        "prompt, and answers stay as they are",
    ),
    (
        "template over messages",
        {"columns": CHAT, "promptTemplate": "{chat}"},
        "data.prepare.promptTemplate cannot be used with data.columns of type Messages, which the model's chat "
        "template renders: remove one",
    ),
    (
        "the prompt of a text",
        {"columns": TEXT, "maxPromptChars": 9},
        "data.prepare.minPromptChars and maxPromptChars need data.columns of type PromptResponse, Preference or Unpaired, "
        "and the examples are of type Text",
    ),
    (
        "turns of a text",
        {"columns": TEXT, "conversation": {}},
        "data.prepare.conversation needs data.columns of type PromptResponse, Preference or Unpaired, and the examples are of "
        "type Text",
    ),
    (
        "texts that no chat template renders",
        {"columns": TEXT, "onTemplateError": "Drop"},
        "data.prepare.onTemplateError needs what a template can refuse: conversations (data.columns of type Messages, Preference "
        "or Unpaired, or data.prepare.conversation), or data.prepare.templateSyntax Jinja; the examples are of type Text",
    ),
    (
        "Jinja without a template",
        {"templateSyntax": "Jinja"},
        "data.prepare.templateSyntax Jinja needs promptTemplate",
    ),
    (
        "an evaluation set that is a source of the mix",
        {
            "source": {"type": "Mix", "sources": [{"name": "a", "type": "Delta", "table": "m.s.t"}]},
            "decontaminate": {"sources": [{"name": "b", "type": "Delta", "table": "m.s.t", "version": 3}]},
        },
        "data.prepare.decontaminate.sources has data.source or data.prepare.output: name an evaluation set",
    ),
    (
        "response template alone",
        {"responseTemplate": "{answer}"},
        "data.prepare.responseTemplate requires data.prepare.promptTemplate",
    ),
    (
        "the answer of a text",
        {"columns": TEXT, "objective": {"lossOn": "Answer"}},
        "objective.lossOn Answer and LastAnswer need data.columns of type PromptResponse or Messages: a text has no answer",
    ),
    (
        "split",
        {"splitRatios": {"train": 0.9, "validation": 0.2, "test": 0.0}},
        "data.prepare.splitRatios adds up to 1.1: train, validation and test must add up to 1",
    ),
    (
        "output over the source",
        {"output": "/corpus"},
        "data.prepare.output /corpus is the source itself: write to another folder",
    ),
    (
        "an evaluation set that is the source, and a run that is shorter than short texts",
        {
            "decontaminate": {
                "sources": [{"name": "a", "type": "Parquet", "path": "/corpus"}],
                "ngram": 6,
                "minWords": 7,
            }
        },
        "data.prepare.decontaminate.minWords must not be above ngram: texts between the two are compared whole; "
        "data.prepare.decontaminate.sources has data.source or data.prepare.output: name an evaluation set",
    ),
    (
        "evaluation sets of the Hub in executor pods, and nowhere",
        {
            "decontaminate": {
                "sources": [{"name": "a", "type": "Hub", "dataset": "o/n"}, {"name": "b", "type": "CSV"}]
            },
            "spark": {"mode": "Kubernetes"},
        },
        "data.prepare.decontaminate.sources needs dataset for type Hub, and exactly one of path and table for the others; "
        "data.prepare.decontaminate.sources of type Hub need data.prepare.spark.mode Local: a data set is downloaded into "
        "the prep pod",
    ),
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
    (
        "two at once",
        {"responseTemplate": "{answer}", "dedupe": {"exact": False, "near": {}}},
        "data.prepare.dedupe.near needs dedupe.exact: exact duplicates are removed first; "
        "data.prepare.responseTemplate requires data.prepare.promptTemplate",
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
        "data.prepare.promptTemplate renders text, and column question holds conversations: remove it",
    ),
    "a system turn before a prompt that is a list": (
        {"question": ()},
        {"conversation": {"system": "Be brief."}},
        "data.prepare.conversation.system goes before prompts that are text, and column question holds conversations: remove it",
    ),
    "texts that nothing can refuse": (
        {"other": ()},
        {"onTemplateError": "Drop"},
        "data.prepare.onTemplateError needs what a template can refuse: conversations (data.columns of type Messages, Preference "
        "or Unpaired, or data.prepare.conversation), or data.prepare.templateSyntax Jinja; the columns hold text",
    ),
}


@pytest.mark.parametrize(("conversations", "prepare", "sentence"), LISTS.values(), ids=LISTS)
def test_fields_for_text_beside_preferences_that_are_conversations(
    conversations: dict[str, tuple[str, ...]], prepare: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        build_plan(recipe(columns=PREFERENCES, **prepare), conversations)
    assert refused.value.message == sentence

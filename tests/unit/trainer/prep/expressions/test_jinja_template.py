"""Templates in Jinja: what they see, what the sandbox closes, and what becomes of rows on which they fail."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.examples.refused_rows import RowError
from finetune_trainer.pod import exit_status
from finetune_trainer.prep.expressions import jinja_template
from finetune_trainer.prep.expressions.jinja_template import JinjaTemplate
from unit.trainer.prep.recipes import table_of

if TYPE_CHECKING:
    from unit.trainer.prep.recipes import Json, Preparer

FIELD = "data.prepare.promptTemplate"
ROW: dict[str, Any] = {
    "question": "Which <one>?",
    "choices": ["red", "blue"],
    "context": None,
    "meta": {"level": 3, "_id": "x"},
}


def template(text: str) -> JinjaTemplate:
    return JinjaTemplate.parse(text, FIELD)


RENDERED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "values": ("Q: {{ question }}\n", ("question",), "Q: Which <one>?\n"),
    "a loop": (
        "{{ question }}\n{% for one in choices %}\n{{ loop.index }}/{{ loop.length }} {{ one }}\n{% endfor %}\nA:",
        ("question", "choices"),
        "Which <one>?\n1/2 red\n2/2 blue\nA:",
    ),
    "null is nothing": ("[{{ context }}]", ("context",), "[]"),
    "null is false": (
        "{% if context %}{{ context }} {% endif %}{{ question }}",
        ("context", "question"),
        "Which <one>?",
    ),
    "a structure": ("{{ meta.level + 1 }}{{ meta['_id'] }}", ("meta",), "4x"),
    "JSON as it is": ("{{ question | tojson }}", ("question",), '"Which <one>?"'),
    "names of its own": (
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        (),
        "3",
    ),
    "a repetition": ("{{ '-' * 5 }}{{ 2 ** 3 }}", (), "-----8"),
    "the longest repetition": ("{{ ('-' * 1000000) | length }}", (), "1000000"),
}


@pytest.mark.parametrize(("text", "columns", "expected"), RENDERED.values(), ids=RENDERED)
def test_a_template_renders_a_row(text: str, columns: tuple[str, ...], expected: str) -> None:
    parsed = template(text)
    assert parsed.columns == columns
    assert jinja_template.render_text(parsed, {name: ROW[name] for name in columns}) == expected


REFUSED: dict[str, tuple[str, str]] = {
    "a tag that does not end": (
        "a\n{% for one in choices %}",
        "is not a valid Jinja template: line 2: Unexpected end of template",
    ),
    "a filter that is none": (
        "{{ question | shout }}",
        "is not a valid Jinja template: line 1: No filter named 'shout'",
    ),
    "a private attribute": ("{{ question.__class__ }}", "has the attribute __class__, which the sandbox"),
    "another file": ("{% include 'passwords' %}", "has a block of type Include, which the sandbox"),
    "a macro": (
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "has a block of type Macro, which the sandbox",
    ),
    "a recursive loop": (
        "{% for a in choices recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "has a recursive loop, which the sandbox",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_at_the_start(text: str, sentence: str) -> None:
    with pytest.raises(exit_status.RecipeRefusedError) as refused:
        template(text)
    assert refused.value.message.startswith(f"{FIELD} {sentence}")


# NB: none of these may take the time or the memory that it asks for.
FAILING: dict[str, tuple[str, str]] = {
    "a private attribute by a filter": (
        "{{ (question | attr('__class__')) ~ '' }}",
        "access to attribute '__class__'",
    ),
    "a field that is not there": ("{{ meta.missing }}", "has no attribute 'missing'"),
    "a wrong type": ("{{ question + 1 }}", "can only concatenate str"),
    "a division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "a long range": ("{% for i in range(1000000) %}{% endfor %}", "Range too big"),
    "loops in loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        "the loops of the template have more than 100,000 passes",
    ),
    "a long text": (
        "{% for a in range(9999) %}{{ 'a' * 1000 }}{% endfor %}",
        "the rendered text has more than 1,000,000 characters",
    ),
    "a long repetition": (
        "{{ 'a' * 1000000000 }}",
        "the template's * produces a string or list longer than 1,000,000",
    ),
    "a long repetition, the other way": (
        "{{ 1000000000 * choices }}",
        "the template's * produces a string or list longer than 1,000,000",
    ),
    "a large power": ("{{ 9 ** (9 ** 9) }}", "a power has more than 1,024 bits"),
    "a changed row": ("{{ choices.append(1) }}", "access to attribute 'append'"),
}


@pytest.mark.parametrize(("text", "sentence"), FAILING.values(), ids=FAILING)
def test_what_fails_on_a_row(text: str, sentence: str) -> None:
    parsed, began = template(text), time.monotonic()
    with pytest.raises(RowError, match=f"{FIELD} fails on a row: .*{re.escape(sentence)}"):
        jinja_template.render_text(parsed, ROW)
    assert time.monotonic() - began < 5


CHOICES: list[Json] = [
    {"question": "Sky?", "choices": ["red", "blue"], "stars": 5, "answer": "blue"},
    {"question": "Sea?", "choices": ["green"], "stars": 3, "answer": "green"},
    {"question": "Sand?", "choices": None, "stars": 4, "answer": "yellow"},
]
LETTERED = "{{ question }}{% for one in choices %} ({{ loop.index }}) {{ one }}{% endfor %}{% if stars > 4 %} *{% endif %}"


def build_changes(**prepare: Any) -> Json:
    return {"promptTemplate": LETTERED, "templateSyntax": "Jinja"} | prepare


def test_columns_are_what_they_are_in_the_source(prepare: Preparer) -> None:
    result = prepare(CHOICES[:2], **build_changes(responseTemplate=" {{ answer | upper }}"), partitions=2)
    responses = {row["prompt"]: row["response"] for row in table_of(result)}
    assert responses == {"Sky? (1) red (2) blue *": " BLUE", "Sea? (1) green": " GREEN"}


def test_a_row_on_which_a_template_fails_fails_the_preparation(prepare: Preparer) -> None:
    with pytest.raises(exit_status.DataError) as failed:
        prepare(CHOICES, **build_changes())
    assert (failed.value.reason, failed.value.message) == (
        "TemplateFailed",
        f"data.prepare.promptTemplate fails on row 3 of {prepare.folder}/corpus-0/0.parquet: 'NoneType' object is not iterable; to drop "
        "these rows, set "
        "data.prepare.onTemplateError: Drop",
    )


@pytest.mark.parametrize(
    "more",
    [{}, {"responseTemplate": "{{ answer }}"}, {"conversation": {}}],
    ids=["a text", "a pair", "a conversation"],
)
def test_or_is_dropped_and_counted(prepare: Preparer, more: Json) -> None:
    result = prepare(CHOICES, **build_changes(onTemplateError="Drop", maxTokens=1000, **more))
    assert (result.dropped, result.rows.train) == (
        {"notNull": 0, "dedupe": 0, "onTemplateError": 1, "maxTokens": 0},
        2,
    )
    assert all(None not in row.values() for row in table_of(result))


def test_the_prompt_of_a_preference(prepare: Preparer) -> None:
    rows = [
        {"prompt": "Sky?", "hint": hint, "chosen": "blue", "rejected": "red"} for hint in ("Look up.", None)
    ]
    result = prepare(
        rows,
        columns={"type": "Preference"},
        objective={"type": "DPO"},
        promptTemplate="{% if hint %}{{ hint }} {% endif %}{{ prompt }}",
        templateSyntax="Jinja",
    )
    assert sorted(row["prompt"] for row in table_of(result)) == ["Look up. Sky?", "Sky?"]


WRONG: dict[str, tuple[Json, type[exit_status.PodFailure], str]] = {
    "a variable that is no column": (
        {"promptTemplate": "{{ question }} {{ contxt }}"},
        exit_status.DataError,
        "has no column contxt: it has answer, choices, question and stars",
    ),
    "a list in which values are to be replaced": (
        {"redact": ["Email"]},
        exit_status.DataError,
        "holds array<string>: remove the column from the templates, or convert it to text in the source",
    ),
}


@pytest.mark.parametrize(("change", "kind", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_refused_before_a_row_is_read(
    prepare: Preparer, change: Json, kind: type[exit_status.PodFailure], sentence: str
) -> None:
    with pytest.raises(kind) as refused:
        prepare(CHOICES[:1], **build_changes(**change))
    assert refused.value.message.endswith(sentence)


def test_values_are_replaced_before_a_template_sees_them_and_booleans_stay_what_they_are(
    prepare: Preparer,
) -> None:
    row = {"question": "Who is jane@example.com?", "card": 4111111111111111, "answer": "Jane."}
    result = prepare(
        [row | {"flag": flag} for flag in (True, False)],
        promptTemplate="{{ question }} {{ card }} {% if flag %}yes{% else %}no{% endif %}",
        templateSyntax="Jinja",
        redact=["Email", "CardNumber"],
    )
    assert sorted(example["text"] for example in table_of(result)) == [
        "Who is <EMAIL>? <CARD_NUMBER> no",
        "Who is <EMAIL>? <CARD_NUMBER> yes",
    ]


def test_lists_with_the_same_text_are_no_duplicates(prepare: Preparer) -> None:
    rows = [{"question": "a", "answer": "b", "words": words} for words in (["a, b"], ["a", "b"])]
    result = prepare(rows, promptTemplate="{{ words | length }}", templateSyntax="Jinja")
    assert sorted(row["text"] for row in table_of(result)) == ["1", "2"]

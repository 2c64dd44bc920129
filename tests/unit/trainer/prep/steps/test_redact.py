"""Redaction in a whole preparation: where placeholders stand, what is counted, and what counts as a duplicate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unit.trainer.prep.recipes import PAIR_TOKENS, Preparer, prepare_quickly, prepared, table_of

Json = dict[str, Any]
ALL = ["Phone", "Email", "Secret", "CardNumber"]
KEY = "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"


TURNS = [
    {"role": "user", "content": "I am jane@example.com"},
    {"role": "assistant", "content": "Call +49 30 1234567"},
]
CLEAN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
# Fields that messages in JSON text may have.
NOTHING = dict.fromkeys(
    ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking", "weight")
)
# Columns, a row, the texts of the example in the table, and what is counted beside zeros.
ROLES: dict[str, tuple[Json, Json, Json, Json]] = {
    "text": (
        {"type": "Text", "text": "body"},
        {"body": f"{KEY} of jane@example.com", "mail": "jane@example.com"},
        {"text": "<SECRET> of <EMAIL>"},
        {"Secret": 1, "Email": 1},
    ),
    "prompt and response": (
        {"type": "PromptResponse", "prompt": "q", "response": "a"},
        {"q": "Who is jane@example.com or j@example.org?", "a": "Call +49 30 1234567."},
        {"prompt": "Who is <EMAIL> or <EMAIL>?", "response": "Call <PHONE>."},
        {"Email": 2, "Phone": 1},
    ),
    "messages": (
        {"type": "Messages", "messages": "chat"},
        {"chat": TURNS},
        {
            "messages": [
                {"role": "user", "content": "I am <EMAIL>"},
                {"role": "assistant", "content": "Call <PHONE>"},
            ]
        },
        {"Email": 1, "Phone": 1},
    ),
    "messages as JSON text": (
        {"type": "Messages", "messages": "chat"},
        {"chat": json.dumps(CLEAN[:1] + TURNS[1:])},
        {"messages": [CLEAN[0] | NOTHING, {"role": "assistant", "content": "Call <PHONE>"} | NOTHING]},
        {"Phone": 1},
    ),
    "names of speakers": (
        {"type": "Messages", "messages": "chat"},
        {"chat": [CLEAN[0] | {"name": "jane@example.com"}, CLEAN[1] | {"name": "it"}]},
        {"messages": [CLEAN[0] | {"name": "<EMAIL>"}, CLEAN[1] | {"name": "it"}]},
        {"Email": 1},
    ),
    "preferences": (
        {"type": "Preference", "prompt": "p", "chosen": "c", "rejected": "r"},
        {"p": "mail?", "c": "jane@example.com", "r": "4111 1111 1111 1111"},
        {"prompt": "mail?", "chosen": "<EMAIL>", "rejected": "<CARD_NUMBER>"},
        {"Email": 1, "CardNumber": 1},
    ),
}


# Tables with other columns than those of test_pipeline and test_conversations.
COMMITTED = ("text", "messages", "preferences")


@pytest.mark.parametrize("case", ROLES)
def test_every_text_of_an_example_gets_placeholders(prepare: Preparer, case: str) -> None:
    columns, row, texts, counted = ROLES[case]
    prepare.run = prepared if case in COMMITTED else prepare_quickly
    result = prepare([row], columns=columns, redact=ALL)
    (table_row,) = table_of(result)
    token_columns = PAIR_TOKENS if "rejected" in texts else ("input_ids", "loss_mask")
    assert list(table_row) == ["id", *texts, *token_columns, "tokens", "split"]
    assert {name: table_row[name] for name in texts} == texts
    assert result.redacted == dict.fromkeys(ALL, 0) | counted


def test_values_of_all_columns_of_a_template_are_replaced_and_its_own_text_is_not(
    prepare: Preparer,
) -> None:
    row = {"question": "Whose is it?", "answer": "Mine.", "card": 4111111111111111}
    template = "Ask help@example.com. {question} {card}"
    result = prepare([row], promptTemplate=template, responseTemplate="{answer}", redact=ALL)
    (table_row,) = table_of(result)
    assert table_row["prompt"] == "Ask help@example.com. Whose is it? <CARD_NUMBER>"
    assert result.redacted == dict.fromkeys(ALL, 0) | {"CardNumber": 1}


def corpus() -> list[Json]:
    """Forty different questions; every second one asks for an address, and ten of them for another one of the same."""
    rows = [
        {
            "question": f"What of {number}{f' and u{number}@example.com' if number % 2 else ''}?",
            "answer": f"So {number}.",
        }
        for number in range(40)
    ]
    again = [
        row | {"question": row["question"].replace("@example.com", "@example.org")} for row in rows[1:20:2]
    ]
    return rows + again + [{"question": "Who is at a@example.com?", "answer": None}]


def test_redaction_comes_behind_the_filters_and_before_duplicates(
    prepare: Preparer,
) -> None:
    """A filter sees addresses; examples that differ in an address alone are duplicates; a dropped row counts nothing."""
    result = prepare(
        corpus(),
        filter="question NOT LIKE '%u39@%'",
        redact=["Email", "Phone"],
    )
    assert result.dropped == {"notNull": 1, "filter": 1, "dedupe": 10}
    assert result.redacted == {"Email": 29, "Phone": 0}
    assert sum("<EMAIL>" in row["prompt"] for row in table_of(result)) == 19


def test_a_key_decides_on_the_split_as_it_is(prepare: Preparer) -> None:
    rows = [
        {"question": f"{number}@example.com asks", "answer": "so", "from": f"{number}@example.com"}
        for number in range(60)
    ]
    ratios = {"train": 0.5, "validation": 0.25, "test": 0.25, "key": "from"}
    result = prepare(
        rows,
        redact=["Email"],
        splitRatios=ratios,
        promptTemplate="{from}: {question}",
        dedupe={"exact": False},
    )
    assert min(result.rows.to_json().values()) > 0
    assert {row["text"] for row in table_of(result)} == {"<EMAIL>: <EMAIL> asks"}

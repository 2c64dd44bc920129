"""The signature is that of the requests and answers that the data hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from finetune_crds.data import Columns, Splits
from finetune_crds.recipe import Recipe
from finetune_trainer.train.delivery import signature
from finetune_trainer.train.delivery.signature import Examples, read_examples

TEXT = {"type": "string", "required": True}
ASKED = [{"role": "user", "content": "Is it red?"}]
ANSWERED: list[dict[str, Any]] = [*ASKED, {"role": "assistant", "content": "Yes."}]
CALL = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
SENT = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
CALLED = {"role": "assistant", "tool_calls": json.dumps([CALL])}
RETURNED = {"role": "tool", "content": "red", "tool_call_id": "a1"}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Is it red?"}]}]


def table(folder: Path, **columns: list[Any]) -> Splits:
    """Two rows for validation behind one for training."""
    write_deltalake(str(folder), pa.table({"split": ["train", "validation", "validation"], **columns}))
    return Splits(type="Delta", path=str(folder), version=0)


CASES: dict[str, tuple[Columns, dict[str, list[Any]], Examples]] = {
    "prompts": (
        Columns(type="PromptResponse"),
        {"prompt": ["a", "b", "c"], "response": ["1", "2", "3"]},
        Examples(requests=["b", "c"], answers=["2", "3"]),
    ),
    "texts": (
        Columns(type="Text"),
        {"text": ["a", "b", "c"]},
        Examples(requests=["b", "c"], answers=["b", "c"]),
    ),
    "preferences": (
        Columns(type="Preference"),
        {"prompt": ["a", "b", "c"], "chosen": ["1", "2", "3"], "rejected": ["4", "5", "6"]},
        Examples(requests=["b", "c"], answers=["2", "3"]),
    ),
    "unpaired preferences, without their labels": (
        Columns(type="Unpaired"),
        {"prompt": ["a", "b", "c"], "completion": ["1", "2", "3"], "label": [True, False, True]},
        Examples(requests=["b", "c"], answers=["2", "3"]),
    ),
    "preferences with messages": (
        Columns(type="Preference"),
        {"prompt": ["a", "b", "c"], "chosen": [ANSWERED[1:]] * 3, "rejected": [ASKED] * 3},
        Examples(
            chat=True,
            requests=[{"messages": [{"role": "user", "content": content}]} for content in "bc"],
            answers=["Yes.", "Yes."],
        ),
    ),
    "calls of tools, as JSON text of a preparation": (
        Columns(type="Messages", tools="tools"),
        {"messages": [[*ASKED, CALLED, RETURNED, ANSWERED[1]]] * 3, "tools": ["[]"] * 3},
        Examples(
            chat=True,
            requests=[{"messages": [*ASKED, {**CALLED, "content": "", "tool_calls": [SENT]}, RETURNED]}] * 2,
            answers=["Yes."] * 2,
        ),
    ),
    "answers with weights and thoughts": (
        Columns(type="Messages", message_weight="train"),
        {
            "messages": [
                [
                    *ASKED,
                    ANSWERED[1] | {"train": True, "weight": "0", "thinking": "Red?"},
                    *ASKED,
                    ANSWERED[1],
                ]
            ]
            * 3
        },
        Examples(chat=True, requests=[{"messages": [*ANSWERED, *ASKED]}] * 2, answers=["Yes."] * 2),
    ),
    "contents of parts": (
        Columns(type="Messages"),
        {"messages": [[*PARTS, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}]] * 3},
        Examples(chat=True, requests=[{"messages": ASKED}] * 2, answers=["Yes."] * 2),
    ),
    "conversations": (
        Columns(type="Messages"),
        # A field that some messages have stands as null in the others.
        {"messages": [ANSWERED, ANSWERED, [*ASKED, {"role": "user", "content": "Well?", "name": "Kim"}]]},
        Examples(
            chat=True,
            requests=[
                {"messages": ASKED},
                {"messages": [*ASKED, {"role": "user", "content": "Well?", "name": "Kim"}]},
            ],
            answers=["Yes.", ""],
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_examples_are_those_of_the_validation_split(name: str, tmp_path: Path) -> None:
    columns, values, expected = CASES[name]
    assert read_examples(table(tmp_path / "table", **values), columns) == expected


def test_examples_of_the_training_split_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "response": "1"}\n')
    splits = Splits(type="JSONLines", train=str(tmp_path / "train.jsonl"))
    examples = read_examples(splits, Columns(type="PromptResponse"))
    assert examples == Examples(requests=["a"], answers=["1"])


PAIR, INSTRUCTION = {"type": "PromptResponse"}, {"type": "PromptResponse", "prompt": "instruction"}
SOURCE = {"type": "Parquet", "path": "/data"}
# What a recipe says of its data, the columns that the preparation read, those of the splits, and the name of a prompt.
NAMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], str]] = {
    "splits with a column of their own": ({"columns": INSTRUCTION}, None, INSTRUCTION, "instruction"),
    "splits whose columns are found": ({}, None, INSTRUCTION, "instruction"),
    "a column of the source": (
        {"columns": INSTRUCTION, "source": SOURCE, "prepare": {}},
        INSTRUCTION,
        PAIR,
        "instruction",
    ),
    "a column that the preparation found": (
        {"source": SOURCE, "prepare": {}},
        INSTRUCTION,
        PAIR,
        "instruction",
    ),
    "a rendered prompt": (
        {
            "columns": INSTRUCTION,
            "source": SOURCE,
            "prepare": {"promptTemplate": "[INST] {instruction} [/INST]"},
        },
        INSTRUCTION,
        {"type": "Text"},
        "prompt",
    ),
    "texts": ({"columns": {"type": "Text"}}, None, {"type": "Text"}, "prompt"),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_prompt_has_the_name_of_its_column(case: str, recipe: dict[str, Any]) -> None:
    data, prepared, columns, name = NAMES[case]
    splits = recipe["data"]["splits"]
    case_recipe = Recipe.model_validate(
        {**recipe, "data": {**data, "splits": splits}, "prepared": prepared and {"columns": prepared}}
    )
    assert signature.name_prompt(case_recipe, Columns.model_validate(columns)) == name


@pytest.mark.usefixtures("mlflow_imported")
def test_prompts_are_a_column_of_texts() -> None:
    inferred = signature.infer_signature(Examples(requests=["b", "c"], answers=["2", "3"], prompt="question"))
    assert inferred.inputs.to_dict() == [{**TEXT, "name": "question"}]
    assert inferred.outputs.to_dict() == [TEXT]


@pytest.mark.usefixtures("mlflow_imported")
@pytest.mark.parametrize("chat", [True, False])
def test_parameters_are_settings_of_transformers(*, chat: bool) -> None:
    from transformers import GenerationConfig

    parameters = signature.infer_signature(Examples(chat)).params.params
    assert {parameter.name for parameter in parameters} <= set(GenerationConfig().to_dict())
    assert [parameter.name for parameter in parameters if parameter.default] == []


@pytest.mark.usefixtures("mlflow_imported")
@pytest.mark.parametrize("fits", [True, False])
def test_conversations_are_those_of_a_chat_model(*, fits: bool) -> None:
    """Messages of another shape keep it; the parameters of a request, and the answer, are those of every chat model."""
    from mlflow.models import infer_signature, validate_schema
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA

    request = {"messages": ASKED if fits else PARTS}
    inferred = signature.infer_signature(Examples(chat=True, requests=[request], answers=["Yes."]))
    chat_columns, columns = CHAT_MODEL_INPUT_SCHEMA.input_dict(), inferred.inputs.input_dict()
    messages = (
        chat_columns["messages"] if fits else infer_signature([request]).inputs.input_dict()["messages"]
    )
    assert (columns, inferred.outputs) == ({**chat_columns, "messages": messages}, CHAT_MODEL_OUTPUT_SCHEMA)
    validate_schema(request | {"temperature": 0.5}, inferred.inputs)


def test_rows_without_tools_are_read(tmp_path: Path) -> None:
    rows = [{"messages": ANSWERED, "tools": [{"type": "function"}]}, {"messages": ANSWERED}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = Splits(type="JSONLines", train=str(tmp_path / "rows.jsonl"))
    examples = read_examples(splits, Columns(type="Messages", tools="tools"))
    assert examples.requests == [{"messages": ASKED}] * 2


@pytest.mark.usefixtures("mlflow_imported")
def test_calls_of_tools_fit_a_chat_model() -> None:
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA

    request = {"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [SENT]}, RETURNED]}
    inferred = signature.infer_signature(Examples(chat=True, requests=[request], answers=["Yes."]))
    assert inferred.inputs == CHAT_MODEL_INPUT_SCHEMA


@pytest.mark.usefixtures("mlflow_imported")
def test_conversations_of_several_shapes_are_all_accepted() -> None:
    from mlflow.models import validate_schema

    requests = [{"messages": turns} for turns in (ASKED, PARTS)]
    inferred = signature.infer_signature(Examples(chat=True, requests=requests, answers=["Yes.", "No."]))
    for request in requests:
        validate_schema(request, inferred.inputs)

"""Conversations: made of prompts and answers, and what becomes of those that the chat template refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from finetune_trainer.pod import exit_status
from unit.trainer.prep.recipes import WITHOUT_SAMPLES, prepare_quickly, recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from finetune_crds.contract import PrepResult
    from finetune_trainer.prep.report.report import Facts

ROLES = [("user", "assistant"), ("assistant", "user"), ("user", "assistant", "user")]
CHATS = [
    {"messages": [{"role": role, "content": f"{number} of {index}"} for number, role in enumerate(roles)]}
    for index, roles in enumerate(ROLES)
]
PAIRS = [{"question": "What is the table?", "context": "a", "answer": "The answer."}]
PLAIN = "{% for turn in messages %}{{ turn['content'] }}{{ eos_token }}{% endfor %}"
USER_FIRST = f"{{% if messages[0]['role'] != 'user' %}}{{{{ raise_exception('Roles must alternate.') }}}}{{% endif %}}{PLAIN}"
ALL_TRAIN = {"train": 1.0, "validation": 0.0, "test": 0.0}


@pytest.fixture
def shown() -> list[Facts]:
    """What the reports of the preparations show."""
    return []


@pytest.fixture
def prepare(
    spark: SparkSession, tokenizer_folder: Path, tmp_path: Path, shown: list[Facts]
) -> Callable[..., PrepResult]:
    """Prepares rows with changes to a good recipe; all examples are for training."""

    def run(rows: Sequence[dict[str, Any]], template: str | None = PLAIN, **changes: Any) -> PrepResult:
        model = tmp_path / "model"
        shutil.copytree(tokenizer_folder, model)
        (model / "chat_template.jinja").unlink()
        if template is not None:
            (model / "chat_template.jinja").write_text(template)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"type": "JSONLines", "path": str(tmp_path / "rows.jsonl")}
        changes = {
            "source": source,
            "base": str(model),
            "splitRatios": ALL_TRAIN,
            **WITHOUT_SAMPLES,
        } | changes
        job_recipe = recipe(output=str(tmp_path / "table"), **changes)
        return prepare_quickly(spark, job_recipe, shown.append)

    return run


def test_a_prompt_and_its_answer_become_turns(prepare: Callable[..., PrepResult]) -> None:
    result = prepare(PAIRS, conversation={"system": "Be brief."}, promptTemplate="{context}: {question}")
    table = DeltaTable(result.path).to_pyarrow_table()
    assert table["messages"].to_pylist() == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a: What is the table?"},
            {"role": "assistant", "content": "The answer."},
        ]
    ]
    assert {"prompt", "response", "text"} & {*table.column_names} == set()
    # Turns count as the chat template renders them. The tokenizer has a token for each byte, and some for parts of words.
    assert 10 < result.tokens.train < len("Be brief.a: What is the table?The answer.")


def test_a_conversation_that_the_chat_template_refuses_fails_the_preparation(
    prepare: Callable[..., PrepResult], tmp_path: Path
) -> None:
    with pytest.raises(exit_status.DataError) as failed:
        prepare(CHATS, template=USER_FIRST, columns=None)
    assert (failed.value.reason, failed.value.message) == (
        "TemplateFailed",
        f"the chat template of the model fails on line 2 of {tmp_path}/rows.jsonl with the roles assistant, user: Roles must "
        "alternate; to drop these rows, set data.prepare.onTemplateError: Drop",
    )
    assert not (tmp_path / "table").exists()


def test_or_is_dropped_and_counted_and_shown(prepare: Callable[..., PrepResult], shown: list[Facts]) -> None:
    result = prepare(
        CHATS, template=USER_FIRST, columns=None, onTemplateError="Drop", maxTokens=100, reportSamples=3
    )
    assert (result.dropped, result.rows.train) == (
        {"notNull": 0, "dedupe": 0, "onTemplateError": 1, "maxTokens": 0},
        2,
    )
    assert shown[0].samples == {"onTemplateError": ["assistant: 0 of 1\nuser: 1 of 1"]}


def test_a_program_that_fails_is_told_as_one_that_refuses(prepare: Callable[..., PrepResult]) -> None:
    result = prepare(
        CHATS, template="{{ messages[2]['content'] + 'a' }}", columns=None, onTemplateError="Drop"
    )
    assert result.dropped["onTemplateError"] == 2


def test_a_tokenizer_without_a_chat_template_is_refused(
    prepare: Callable[..., PrepResult], tmp_path: Path
) -> None:
    with pytest.raises(exit_status.RecipeRefusedError) as refused:
        prepare(CHATS, template=None, columns=None)
    assert refused.value.message == (
        f"the tokenizer of {tmp_path / 'model'} has no chat template, which conversations require: set "
        "model.chatTemplate"
    )

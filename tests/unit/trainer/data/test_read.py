"""The schema of splits, and the columns that training finds in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds.data import Splits
from finetune_crds.recipe import Recipe
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod.exit_status import DataError, PodFailure
from finetune_trainer.train.data import corpus, read

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_trainer.train.runtime.distributed import World
    from support.pods import Pod

TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
FIELDS = [
    ("messages", pa.list_(TURN)),
    ("text", pa.large_string()),
    ("tags", pa.list_(pa.string())),
    ("split", pa.string()),
    ("score", pa.int64()),
]
ROW: dict[str, Any] = {"messages": CHAT, "text": "hi", "tags": ["a"], "split": "train", "score": 1}
KINDS = {"messages": "messages", "text": "text", "tags": "other", "split": "text", "score": "label"}


def kinds(splits: Splits) -> dict[str, str]:
    return {column.name: column.kind for column in read.read_schema(splits)}


def test_a_delta_table_and_a_parquet_file_have_a_schema(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    table = pa.Table.from_pylist([ROW], pa.schema(FIELDS))
    write_deltalake(str(tmp_path / "table"), table)
    (tmp_path / "train").mkdir()
    pq.write_table(table, tmp_path / "train/part-0.parquet")
    (tmp_path / "train/_SUCCESS").touch()
    assert kinds(Splits(type="Delta", path=str(tmp_path / "table"))) == KINDS
    assert kinds(Splits(type="Parquet", train=str(tmp_path / "train"))) == KINDS


def test_a_schema_is_that_of_all_parquet_files(tmp_path: Path) -> None:
    parts = [
        pa.table({"text": pa.array([None], pa.null()), "a": ["x"]}),
        pa.table({"text": pa.array(["hi"]).dictionary_encode(), "b": [1]}),
        pa.table({"text": pa.array([None], pa.null())}),
    ]
    for number, part in enumerate(parts):
        pq.write_table(part, tmp_path / f"{number}.parquet")
    assert kinds(Splits(type="Parquet", train=str(tmp_path))) == {"text": "text", "a": "text", "b": "label"}


def test_tools_of_one_file_are_found_and_rows_of_others_have_none(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b", "tools": "[]"}]
    for number, row in enumerate(rows):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    for kind in ("Parquet", "JSONLines"):
        folder = tmp_path / kind
        folder.mkdir()
        for file in tmp_path.glob("*.parquet" if kind == "Parquet" else "*.jsonl"):
            file.rename(folder / file.name)
        splits = Splits.model_validate({"type": kind, "train": str(folder)})
        assert kinds(splits) == {"text": "text", "tools": "text"}
        assert list(read.read(splits, "train", ["text", "tools"], may_be_null=["tools"])) == [
            {"text": ["a"], "tools": [None]},
            {"text": ["b"], "tools": ["[]"]},
        ]
    with pytest.raises(DataError, match="has no column calls"):
        list(
            read.read(
                Splits(type="Parquet", train=str(tmp_path / "Parquet")),
                "train",
                ["text", "calls"],
                may_be_null=["calls"],
            )
        )


def test_a_schema_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    for path, reason in (("nowhere", "MissingFile"), ("broken.parquet", "CorruptData")):
        with pytest.raises(DataError) as refused:
            read.read_schema(Splits(type="Parquet", train=str(tmp_path / path)))
        assert refused.value.reason == reason


def loaded(pod: Pod, world: World, **changes: Any) -> corpus.Corpus:
    recipe = Recipe.model_validate(pod.but(changes).recipe)
    tokenizer = load_tokenizer(recipe.model, pod.recipe["model"]["base"])
    folder = pod.folder / "tokens"
    return corpus.load(recipe, tokenizer, world, folder, version=None, on_counts=lambda _: None)


def test_training_finds_the_columns_that_the_recipe_does_not_name(
    pod: Pod, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    data = loaded(pod, world, **{"data.columns": None})
    assert "columns prompt, response\n" in capsys.readouterr().out
    assert data.train.digest == loaded(pod, world).train.digest


def test_what_is_found_must_fit_the_objective(pod: Pod, world: World, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "hi"}\n')
    splits = {"type": "JSONLines", "train": str(tmp_path / "texts.jsonl")}

    def sentence(objective: dict[str, Any]) -> str:
        with pytest.raises(PodFailure) as refused:
            loaded(pod, world, data={"splits": splits}, objective=objective)
        message = refused.value.message.replace(str(tmp_path), "")
        return f"{refused.value.exit_code} {refused.value.reason}: {message}"

    assert sentence({"type": "DPO"}) == (
        "65 ColumnsUnknown: /texts.jsonl does not have the columns prompt, chosen and rejected, which "
        "objective DPO requires: it has text (str); name the columns of an example in data.columns"
    )
    assert sentence({"lossOn": "Answer"}) == (
        "64 RecipeRefused: objective.lossOn Answer and LastAnswer require data.columns.type PromptResponse or Messages without "
        "data.prepare.promptTemplate, or data.prepare.responseTemplate; the data has columns of type Text"
    )


def test_a_row_may_have_no_value_in_a_column_of_tools(tmp_path: Path) -> None:
    rows = [{"text": "a", "tools": "[]"}, {"text": "b", "tools": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_text('{"text": "a", "tools": "[]"}\n{"text": "b"}\n')
    kinds = {"Parquet": "train.parquet", "JSONLines": "train.jsonl"}
    for kind, file in kinds.items():
        splits = Splits.model_validate({"type": kind, "train": str(tmp_path / file)})
        batches = list(read.read(splits, "train", ["text", "tools"], may_be_null=("tools",)))
        assert batches == [{"text": ["a", "b"], "tools": ["[]", None]}]
        with pytest.raises(DataError, match="column tools has rows without a value"):
            list(read.read(splits, "train", ["text", "tools"]))

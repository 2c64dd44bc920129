"""The place of a row of splits that training or evaluation refuses."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from finetune_crds.data import Columns, Splits
from finetune_trainer.examples.documents import Documents
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.train.data import dataset
from finetune_trainer.train.data.encode import Encoder
from finetune_trainer.train.data.row_places import find_place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    Json = dict[str, Any]

TEMPLATE = "{% for turn in messages %}{{ turn['content'] }}{{ eos_token }}{% endfor %}"
TEXT = [{"type": "text", "text": "a"}]
IMAGE = [{"type": "image"}]


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def chat(content: Any) -> Json:
    answer = content if isinstance(content, str) else TEXT
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def save_lines(folder: Path) -> Splits:
    (folder / "sub").mkdir(parents=True)
    rows = [json.dumps(chat(content)) for content in ("a", "b", IMAGE)]
    (folder / "a.jsonl").write_text("\n\n".join(rows[:2]) + "\n")
    (folder / "sub/b.jsonl.gz").write_bytes(gzip.compress("\n \n".join(rows).encode()))
    return Splits(type="JSONLines", train=str(folder))


def save_parquet(folder: Path) -> Splits:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([chat(TEXT)] * 3), folder / "a.parquet")
    pq.write_table(pa.Table.from_pylist([chat(TEXT), chat(IMAGE)]), folder / "b.parquet")
    return Splits(type="Parquet", train=str(folder))


def save_table(folder: Path) -> Splits:
    """A table in whose file rows of two splits are mixed."""
    rows = [
        (chat(TEXT), "train"),
        (chat(IMAGE), "validation"),
        (chat(IMAGE), "train"),
    ]
    write_deltalake(str(folder), pa.Table.from_pylist([row | {"split": name} for row, name in rows]))
    (file,) = folder.glob("*.parquet")
    file.rename(folder / "a.parquet")
    for log in (folder / "_delta_log").glob("*.json"):
        log.write_text(log.read_text().replace(file.name, "a.parquet"))
    return Splits(type="Delta", path=str(folder))


@pytest.mark.parametrize(
    ("save", "place"),
    [
        (save_lines, "line 5 of {folder}/sub/b.jsonl.gz"),
        (save_parquet, "row 2 of {folder}/b.parquet"),
        (save_table, "row 3 of a.parquet of the Delta table {folder}"),
    ],
)
def test_a_row_that_is_refused_is_named(
    save: Callable[[Path], Splits],
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    splits = save(tmp_path / "splits")
    encoder = Encoder(Documents(tokenizer, Columns(type="Messages"), answers_only=True), 100, "Fail")
    with pytest.raises(DataError) as refused:
        dataset.tokenize(splits, "train", encoder, tmp_path / "tokens")
    assert (refused.value.reason, refused.value.message) == (
        "MessageShape",
        f"column messages of {place.format(folder=tmp_path / 'splits')} is invalid, message 1 has a part of type image, but only text "
        "parts can be trained on: correct or remove such rows",
    )


def test_the_label_of_a_row_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """All labels of a batch are read before its rows are."""
    rows = [{"prompt": "a", "completion": "b", "label": number == 1} for number in range(1500)]
    rows[1400]["label"] = "good"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = Encoder(Documents(tokenizer, Columns(type="Unpaired"), answers_only=True), 100, "Fail")
    with pytest.raises(
        DataError, match=f"^column label of line 1401 of {tmp_path}/a.jsonl holds 'good': labels are"
    ):
        dataset.tokenize(Splits(type="JSONLines", train=str(tmp_path)), "train", encoder, tmp_path / "tokens")


def test_a_row_behind_the_last_one_has_no_place(tmp_path: Path) -> None:
    assert find_place(save_parquet(tmp_path / "splits"), "train", 5) is None

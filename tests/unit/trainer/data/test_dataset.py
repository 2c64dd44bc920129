"""From tables and files to tokens on disk."""

from __future__ import annotations

import gzip
import io
import json
import re
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from finetune_crds.data import Columns, Splits
from finetune_trainer.examples.documents import Documents
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.train.data import dataset, encode, parquet_files, read, split_columns, split_files

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

PROMPT_RESPONSE = Columns(type="PromptResponse", prompt="prompt", response="response")
PAIRS = Columns(type="Preference", prompt="prompt", chosen="chosen", rejected="rejected")
UNPAIRED = Columns(type="Unpaired", label="thumb")


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def encoder_of(tokenizer: PreTrainedTokenizerBase, columns: Columns = PROMPT_RESPONSE) -> encode.Encoder:
    return encode.Encoder(Documents(tokenizer, columns, answers_only=True), max_length=64, truncation="Drop")


def tokenized(
    splits: Splits, encoder: encode.Encoder, folder: Path, name: str = "train"
) -> dataset.Split | None:
    return dataset.Split.load(folder) if dataset.tokenize(splits, name, encoder, folder) else None


def test_a_delta_table_gives_its_splits(
    tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    splits, encoder = Splits(type="Delta", path=str(table)), encoder_of(tokenizer)
    sizes = {
        name: tokenized(splits, encoder, tmp_path / name, name) for name in ("train", "validation", "test")
    }
    assert {name: len(split) if split else 0 for name, split in sizes.items()} == {
        "train": 72,
        "validation": 8,
        "test": 0,
    }
    assert read.pin_versions(splits).version == 0
    # Nothing is left of what was written on the way, nor of the split that does not exist.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "validation"]


@pytest.mark.parametrize("kind", ["Parquet", "JSONLines"])
def test_files_give_the_same_examples_in_the_same_order(
    kind: Literal["Parquet", "JSONLines"], tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    rows = [row for row in DeltaTable(str(table)).to_pyarrow_table().to_pylist() if row["split"] == "train"]
    place = tmp_path / "train"
    place.mkdir()
    for part, begin in enumerate((40, 0)):
        some = rows[begin : begin + 40 if begin == 0 else None]
        if kind == "Parquet":
            import pyarrow as pa

            pq.write_table(pa.Table.from_pylist(some), place / f"{part}.parquet")
        else:
            (place / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))

    for litter in ("_SUCCESS", ".0.parquet.crc", "_temporary/0/part"):
        (place / litter).parent.mkdir(parents=True, exist_ok=True)
        (place / litter).write_text("not data")

    encoder = encoder_of(tokenizer)
    from_files = tokenized(Splits(type=kind, train=str(place)), encoder, tmp_path / "a")
    from_table = tokenized(Splits(type="Delta", path=str(table)), encoder, tmp_path / "b")
    assert from_files is not None
    assert from_table is not None
    for name in ("tokens", "loss_mask", "offsets"):
        np.testing.assert_array_equal(getattr(from_files, name), getattr(from_table, name))


def test_bad_data_is_refused_in_a_sentence(
    tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    from deltalake import write_deltalake

    tables = {
        "nulls": [
            {"split": "train", "prompt": "a", "response": None},
            {"split": "train", "prompt": "", "response": ""},
        ],
        "other columns": [{"split": "train", "question": "a"}],
        "no split column": [{"prompt": "a", "response": "b"}],
        "bytes": [{"split": "train", "prompt": "a", "response": b"1"}],
        "no training rows": [{"split": "test", "prompt": "a", "response": "b"}],
        "all too long": [{"split": "train", "prompt": "a" * 200, "response": "b"}],
        "no answers": [{"split": "train", "prompt": "", "response": ""}],
    }
    import pyarrow as pa

    for name, rows in tables.items():
        write_deltalake(str(tmp_path / name), pa.Table.from_pylist(rows))

    def sentence(splits: Splits) -> str:
        with pytest.raises(DataError) as refused:
            tokenized(splits, encoder_of(tokenizer), tmp_path / "tokens")
        return f"{refused.value.reason}: {refused.value.message}".replace(str(tmp_path), "")

    sentences = {
        name: sentence(Splits(type="Delta", path=str(tmp_path / name))) for name in (*tables, "nowhere")
    }
    assert sentences == {
        "nulls": "NullValue: column response has rows without a value in the split train of /nulls: remove these rows",
        "other columns": "MissingColumn: the Delta table /other columns has no column prompt and response: "
        "it has question and split",
        "no split column": "MissingColumn: the Delta table /no split column has no column split: "
        "it has prompt and response",
        "bytes": "ColumnType: column response of the Delta table /bytes holds bytes: write them as text",
        "no training rows": "EmptySplit: /no training rows has no rows of the split train: "
        "check how the splits were written",
        "all too long": "EmptySplit: every example of the split train in /all too long was dropped "
        "(1 read, 1 too long): raise training.maxLength above 64",
        "no answers": "EmptySplit: every example of the split train in /no answers was dropped "
        "(1 read, 1 without an answer): put answers into prompt, response of the rows",
        "nowhere": "MissingTable: data.splits.path /nowhere is not a Delta table: correct the path",
    }
    missing_version = sentence(Splits(type="Delta", path=str(table), version=7)).replace(str(table), "T")
    assert missing_version == "MissingVersion: the Delta table T has no version 7: set an existing version"
    missing_file = sentence(Splits(type="Parquet", train=str(tmp_path / "gone")))
    assert missing_file == "MissingFile: /gone does not exist: mount the volume or correct data.splits"


def test_tokens_are_those_of_the_encoder_in_the_order_of_their_fingerprints(
    tmp_path: Path, table: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    # So little that the examples are put in order in many parts.
    monkeypatch.setattr(dataset, "_TOKENS_PER_WRITE", 50)
    splits, encoder = Splits(type="Delta", path=str(table)), encoder_of(tokenizer)
    split = tokenized(splits, encoder, tmp_path / "tokens")
    assert split is not None
    examples = [
        example
        for rows in read.read(splits, "train", ["prompt", "response"])
        for example in encoder.encode(rows)
    ]
    examples.sort(key=lambda example: example.fingerprint)
    np.testing.assert_array_equal(split.tokens, np.concatenate([example.tokens for example in examples]))
    np.testing.assert_array_equal(
        split.loss_mask, np.concatenate([example.loss_mask for example in examples])
    )
    assert split.lengths.tolist() == [len(example.tokens) for example in examples]
    kinds = {name: getattr(split, name).dtype.name for name in ("tokens", "loss_mask", "offsets")}
    assert kinds == {"tokens": "int32", "loss_mask": "bool", "offsets": "int64"}
    assert isinstance(split.tokens, np.memmap)


def rows_of(kind: str) -> list[dict[str, Any]]:
    if kind == "pairs":
        return [{"prompt": f"is {n} odd", "chosen": f"it is {n}", "rejected": f"no {n}"} for n in range(20)]
    if kind == "unpaired":
        return [{"prompt": f"is {n} odd", "completion": f"it is {n}", "thumb": n % 2} for n in range(20)]
    return [{"prompt": f"what is {n}", "response": f"it is {n}"} for n in range(20)]


COLUMNS = {"answers": PROMPT_RESPONSE, "pairs": PAIRS, "unpaired": UNPAIRED}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_digest_is_of_the_examples_and_not_of_their_order(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows, encoder = rows_of(kind), encoder_of(tokenizer, COLUMNS[kind])
    last = list(rows[0])[-1]
    otherwise = {
        "as they came": rows,
        "the other way round": rows[::-1],
        "one word changed": [*rows[:-1], rows[-1] | {last: 0 if kind == "unpaired" else "it was 19"}],
        "one left out": rows[:-1],
        "one twice": [*rows, rows[0]],
    }
    digests = {}
    for number, (name, some) in enumerate(otherwise.items()):
        splits = write_rows(tmp_path / f"{number}.parquet", "Parquet", some)
        split = tokenized(splits, encoder, tmp_path / str(number))
        assert split is not None
        digests[name] = split.digest
    assert digests["the other way round"] == digests["as they came"]
    assert (len(set(digests.values())), {len(digest) for digest in digests.values()}) == (4, {32})


def test_a_digest_tells_what_is_learned(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    splits = write_rows(tmp_path / "rows.parquet", "Parquet", rows_of("answers"))
    digests = set()
    for on_answer in (True, False):
        documents = Documents(tokenizer, PROMPT_RESPONSE, on_answer)
        encoder = encode.Encoder(documents, max_length=64, truncation="Drop")
        split = tokenized(splits, encoder, tmp_path / str(on_answer))
        assert split is not None
        digests.add(split.digest)
    assert len(digests) == 2


def write_rows(place: Path, kind: str, rows: list[dict[str, Any]]) -> Splits:
    """The rows as the one file, or the Delta table, of a training split: one row group with small pages."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import WriterProperties, write_deltalake

    if kind == "Delta":
        table = pa.Table.from_pylist([{"split": "train", **row} for row in rows])
        pages = WriterProperties(
            data_page_size_limit=8192, dictionary_page_size_limit=8192, write_batch_size=64
        )
        write_deltalake(str(place), table, writer_properties=pages)
        return Splits(type="Delta", path=str(place))
    if kind == "Parquet":
        pages = {"data_page_size": 8192, "dictionary_pagesize_limit": 8192, "write_batch_size": 64}
        pq.write_table(pa.Table.from_pylist(rows), place, **pages)
        return Splits(type="Parquet", train=str(place))
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Splits(type="JSONLines", train=str(place))


def test_pairs_come_back_as_two_documents_each(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": f"What is {n}? ", "chosen": f"It is {n}.", "rejected": "No" * n} for n in range(1, 9)]
    splits = write_rows(tmp_path / "rows.jsonl", "JSONLines", rows)
    split = tokenized(splits, encoder_of(tokenizer, PAIRS), tmp_path / "tokens")
    assert split is not None
    documents = [
        tokenizer.decode(split.tokens[begin:end])
        for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True)
    ]
    expected = {(f"What is {n}? It is {n}.<eos>", f"What is {n}? {'No' * n}<eos>") for n in range(1, 9)}
    assert set(zip(documents[::2], documents[1::2], strict=True)) == expected
    assert (len(split), split.documents, len(split.lengths)) == (8, 2, 8)
    assert int(split.lengths.sum()) == len(split.tokens)


@pytest.mark.parametrize("kind", ["JSONLines", "Parquet", "Delta"])
def test_a_pair_keeps_its_margin(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whatever the type of the column: JSON lines may have whole numbers beside others."""
    rows = [
        {
            "split": "train", "prompt": f"What is {n}? ", "chosen": f"It is {n}.", "rejected": "No" * n,
            "gap": n if kind == "JSONLines" and n % 2 else n / 4,
        }
        for n in range(1, 9)
    ]  # fmt: skip
    columns = Columns(type="Preference", margin="gap")
    splits = write_rows(tmp_path / "rows", kind, rows)
    split = tokenized(splits, encoder_of(tokenizer, columns), tmp_path / "tokens")
    assert split is not None
    assert split.margins is not None
    chosen = [
        tokenizer.decode(split.tokens[begin:end])
        for begin, end in zip(split.offsets[:-1:2], split.offsets[1::2], strict=True)
    ]
    expected = {f"{row['prompt']}{row['chosen']}<eos>": row["gap"] for row in rows}
    assert dict(zip(chosen, split.margins.tolist(), strict=True)) == expected


@pytest.mark.parametrize("kind", ["JSONLines", "Parquet", "Delta"])
def test_an_unpaired_preference_has_a_document_with_the_answer_of_the_next(
    *, kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several parts, and examples that end one.
    monkeypatch.setattr(dataset, "_TOKENS_PER_WRITE", 50)
    as_kind = {"JSONLines": int, "Parquet": bool, "Delta": str}[kind]
    rows = [
        {"prompt": f"What is {n}? ", "completion": f"It is {n}" + " or so" * n, "thumb": as_kind(n % 3 == 0)}
        for n in range(1, 9)
    ]
    splits = write_rows(tmp_path / "rows", kind, rows)
    encoder = encode.Encoder(Documents(tokenizer, UNPAIRED, answers_only=True), 40, "Truncate")
    split = tokenized(splits, encoder, tmp_path / "tokens")
    assert split is not None
    assert split.labels is not None
    ends = zip(split.offsets[:-1], split.offsets[1:], strict=True)
    documents = [(split.tokens[begin:end], split.loss_mask[begin:end]) for begin, end in ends]
    texts = [tokenizer.decode(tokens) for tokens, _ in documents]
    learned = [tokenizer.decode(tokens[mask]) for tokens, mask in documents]
    judged = dict(zip(texts[::2], split.labels.tolist(), strict=True))
    expected_labels = {
        f"{row['prompt']}{row['completion']}<eos>": row["thumb"] in (True, "True") for row in rows
    }
    assert judged == {
        tokenizer.decode(tokenizer(text)["input_ids"][:40]): good for text, good in expected_labels.items()
    }
    prompts = [text.removesuffix(answer) for text, answer in zip(texts[::2], learned[::2], strict=True)]
    answers = [*learned[2::2], learned[0]]
    next_answers = [
        tokenizer.decode(tokenizer(prompt + answer)["input_ids"][:40])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert texts[1::2] == next_answers
    assert [prompt + answer for prompt, answer in zip(prompts, learned[1::2], strict=True)] == next_answers
    assert max(len(tokens) for tokens, _ in documents[1::2]) == 40
    assert (len(split), split.documents, int(split.lengths.sum())) == (8, 2, len(split.tokens))


def test_an_unpaired_preference_that_is_alone_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    splits = write_rows(tmp_path / "rows.jsonl", "JSONLines", rows_of("unpaired")[:1])
    with pytest.raises(DataError) as refused:
        tokenized(splits, encoder_of(tokenizer, UNPAIRED), tmp_path / "tokens")
    assert f"{refused.value.reason}: {refused.value.message}".replace(str(tmp_path), "") == (
        "EmptySplit: the split train in /rows.jsonl has one example (1 read, 1 kept), but objective KTO requires "
        "at least two: prepare more examples"
    )


@pytest.mark.parametrize("kind", ["JSONLines", "Parquet"])
def test_a_field_of_weights_that_no_message_has_is_refused(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    )
    question = {"role": "user", "content": "a"}
    answers = [{"role": "assistant", "content": content, "train": content == "b"} for content in ("b", "c")]
    rows = [{"messages": [question, answer]} for answer in answers]
    splits = write_rows(tmp_path / "rows", kind, rows)
    weighing_encoder = encoder_of(tokenizer, Columns(type="Messages", message_weight="train"))
    split = tokenized(splits, weighing_encoder, tmp_path / "tokens")
    assert (len(split or []), weighing_encoder.summary()) == (
        1,
        "2 with weights, 2 read, 1 kept, 1 without an answer",
    )
    mistaken_encoder = encoder_of(tokenizer, Columns(type="Messages", message_weight="trained"))
    with pytest.raises(DataError) as refused:
        tokenized(splits, mistaken_encoder, tmp_path / "others")
    assert f"{refused.value.reason}: {refused.value.message}" == (
        "MissingField: no message of column messages has the field trained: correct data.columns.messageWeight, or remove it"
    )


@pytest.mark.parametrize("kind", ["JSONLines", "Parquet"])
def test_scores_are_no_labels(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    splits = write_rows(tmp_path / "rows", kind, [row | {"thumb": 0.5} for row in rows_of("unpaired")])
    with pytest.raises(DataError) as refused:
        tokenized(splits, encoder_of(tokenizer, UNPAIRED), tmp_path / "tokens")
    name = {"JSONLines": "float", "Parquet": "double"}[kind]
    assert refused.value.message.replace(str(tmp_path), "") == (
        f"column thumb of /rows holds {name}: labels are booleans, 1 and 0, or the texts true and false"
    )


def corpus(count: int) -> list[dict[str, Any]]:
    """Rows that no compression makes small: about 80 tokens each."""
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, (count, 80)).astype(np.uint8)
    return [
        {"prompt": row[:20].tobytes().decode(), "response": row[20:].tobytes().decode()} for row in letters
    ]


def peak_memory(act: Any) -> tuple[int, int]:
    """Bytes that Python and NumPy, and that Arrow, had at once while `act` ran."""
    import pyarrow as pa

    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1], pool.max_memory() or 0
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)


FEW, MANY = 600, 4_800


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, buffers and parts of which even the smaller corpus has several."""
    monkeypatch.setattr(split_columns, "BATCH_ROWS", 128)
    monkeypatch.setattr(split_files, "_BUFFER_BYTES", 1 << 13)
    monkeypatch.setattr(dataset, "_TOKENS_PER_WRITE", 1 << 13)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("kind", ["Delta", "Parquet", "JSONLines"])
def test_reading_takes_no_more_memory_for_a_larger_corpus(kind: str, tmp_path: Path) -> None:
    def read_all(splits: Splits) -> None:
        assert all(len(rows["prompt"]) <= 128 for rows in read.read(splits, "train", ["prompt", "response"]))

    few, many = (write_rows(tmp_path / str(count), kind, corpus(count)) for count in (FEW, MANY))
    read_all(few)
    (few_python, few_arrow), (many_python, many_arrow) = (
        peak_memory(partial(read_all, splits)) for splits in (few, many)
    )
    # Every corpus has batches that happen to be a little larger; the many rows themselves are 500,000 bytes.
    assert many_python - few_python < 50_000
    assert many_arrow - few_arrow < 50_000


@pytest.mark.usefixtures("small_steps")
def test_tokenizing_takes_no_more_memory_than_the_bookkeeping_for_a_larger_corpus(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    documents = Documents(tokenizer, PROMPT_RESPONSE, answers_only=True)
    encoder = encode.Encoder(documents, max_length=128, truncation="Drop")
    few, many = (write_rows(tmp_path / f"{count}.jsonl", "JSONLines", corpus(count)) for count in (FEW, MANY))
    assert dataset.tokenize(few, "train", encoder, tmp_path / "warm")
    few_python, many_python = (
        peak_memory(partial(dataset.tokenize, splits, "train", encoder, tmp_path / f"{at}"))[0]
        for at, splits in enumerate((few, many))
    )
    assert many_python - few_python < 64 * (MANY - FEW)


def test_a_partitioned_table_gives_its_splits(tmp_path: Path, table: Path) -> None:
    from deltalake import DeltaTable, write_deltalake

    place = tmp_path / "partitioned"
    write_deltalake(str(place), DeltaTable(str(table)).to_pyarrow_table(), partition_by=["split"])
    counted = {
        name: sum(
            len(rows["prompt"])
            for rows in read.read(Splits(type="Delta", path=str(place)), name, ["prompt", "response"])
        )
        for name in ("train", "validation", "test")
    }
    assert counted == {"train": 72, "validation": 8, "test": 0}


def test_json_lines_may_be_compressed_and_have_empty_files(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "response": "b"}).encode()
    (tmp_path / "0.jsonl").write_bytes(b"")
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
    (tmp_path / "2.jsonl").write_bytes(b"\n" + line)
    batches = list(read.read(Splits(type="JSONLines", train=str(tmp_path)), "train", ["prompt", "response"]))
    assert batches == [{"prompt": ["a"], "response": ["b"]}] * 2


def overwrite(path: Path, begin: int, content: bytes) -> None:
    """Damage a file."""
    original = path.read_bytes()
    path.write_bytes(original[:begin] + content + original[begin + len(content) :])


def test_broken_files_are_named(tmp_path: Path) -> None:
    rows = corpus(300)
    good = json.dumps(rows[0])

    def json_lines(name: str, *lines: str) -> Splits:
        (tmp_path / name).write_text("\n".join(lines))
        return Splits(type="JSONLines", train=str(tmp_path / name))

    def parquet(name: str) -> tuple[Splits, Path]:
        return write_rows(tmp_path / name, "Parquet", rows), tmp_path / name

    def table(name: str, pattern: str) -> tuple[Splits, Path]:
        splits = write_rows(tmp_path / name, "Delta", rows)
        return splits, next((tmp_path / name).glob(pattern))

    no_footer, footer = parquet("no-footer")
    footer.write_bytes(footer.read_bytes()[:-40])
    bad_page, page = parquet("bad-page")
    overwrite(page, 4000, bytes(400))
    damaged, part = table("damaged", "*.parquet")
    overwrite(part, 4000, bytes(400))
    incomplete, lost = table("incomplete", "*.parquet")
    lost.unlink()
    bad_log, log = table("bad-log", "_delta_log/*.json")
    log.write_text("{")
    gap, _ = table("gap", "*.parquet")
    for _ in range(2):
        write_deltalake(tmp_path / "gap", pa.table({"split": ["train"]}), mode="append", schema_mode="merge")
    (tmp_path / "gap/_delta_log/00000000000000000001.json").unlink()
    no_protocol, log = table("no-protocol", "_delta_log/*.json")
    log.write_text("\n".join(line for line in log.read_text().splitlines() if "protocol" not in line))
    feature, log = table("feature", "_delta_log/*.json")
    features = ["teleportation"]
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": features,
        "writerFeatures": features,
    }
    lines = [line for line in log.read_text().splitlines() if "protocol" not in line]
    log.write_text("\n".join([*lines, json.dumps({"protocol": protocol})]))
    (tmp_path / "broken.gz").write_bytes(gzip.compress(good.encode() * 50)[:-20])
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "_SUCCESS").touch()
    sentences = {}
    for name, splits in {
        "cut off": json_lines("cut.jsonl", good, good[:-10]),
        "no object": json_lines("list.jsonl", "[1]"),
        "no text": json_lines("object.jsonl", '{"prompt": "a", "response": {}}'),
        "null": json_lines("null.jsonl", good, '{"prompt": "a", "response": null}'),
        "other columns": json_lines("other.jsonl", '{"question": "a"}'),
        "broken gzip": Splits(type="JSONLines", train=str(tmp_path / "broken.gz")),
        "nothing": Splits(type="Parquet", train=str(tmp_path / "nothing")),
        "no footer": no_footer,
        "bad page": bad_page,
        "damaged": damaged,
        "incomplete": incomplete,
        "bad log": bad_log,
        "gap": gap,
        "gap before a version": gap.model_copy(update={"version": 2}),
        "no protocol": no_protocol,
        "feature": feature,
    }.items():
        with pytest.raises(DataError) as refused:
            list(read.read(splits, "train", ["prompt", "response"]))
        assert refused.value.exit_code == 65
        sentence = f"{refused.value.reason}: {refused.value.message}".replace(str(tmp_path), "")
        # What the library says of it, and names that Delta makes up, are theirs to choose.
        sentences[name] = re.sub(r"part-\S+", "PART", re.sub(r"\(.*\)", "(...)", sentence))
    assert sentences == {
        "cut off": "CorruptData: line 2 of /cut.jsonl cannot be read (...): correct the line, or write the file again",
        "no object": "CorruptData: line 1 of /list.jsonl cannot be read (...): convert the file with jq -c '.[]'",
        "no text": "ColumnType: column response of /object.jsonl holds structures: examples are text, numbers, booleans, dates or times, "
        "or lists of {role, content}",
        "null": "NullValue: column response has rows without a value in /null.jsonl: remove these rows",
        "other columns": "MissingColumn: /other.jsonl has no column prompt and response: it has question",
        "broken gzip": "CorruptData: line 1 of /broken.gz cannot be read (...): correct the line, or write the file again",
        "nothing": "MissingFile: /nothing has no files: check how the splits were written",
        "no footer": "CorruptData: /no-footer cannot be read (...): write it again",
        "bad page": "CorruptData: /bad-page cannot be read (...): write it again",
        "damaged": "CorruptData: PART of the Delta table /damaged cannot be read (...): restore the table",
        "incomplete": "CorruptData: PART of the Delta table /incomplete is missing from the storage: restore the table",
        "bad log": "CorruptData: the log of the Delta table /bad-log cannot be read (...): restore the table",
        "gap": "CorruptData: the log of the Delta table /gap cannot be read (...): restore the table",
        "gap before a version": "CorruptData: the log of the Delta table /gap cannot be read (...): restore the table",
        "no protocol": "CorruptData: the log of the Delta table /no-protocol cannot be read (...): restore the table",
        "feature": "UnsupportedTable: the Delta table /feature uses features that the trainer cannot read (...): rewrite it without them",
    }


# Values of a column in the years 10000 and 0, also in lists and structures.
TIMES: dict[str, pa.Array] = {
    "a time": pa.array([253402300800 * 10**6], pa.timestamp("us")),
    "a time in UTC": pa.array([253402300800], pa.timestamp("s", "UTC")),
    "a time that is in another year in UTC": pa.array([253402300800], pa.timestamp("s", "America/New_York")),
    "a date": pa.array([2932897], pa.date32()),
    "a date before the year 1": pa.array([-719163], pa.date32()),
    "a list": pa.array([[2932897]], pa.list_(pa.date32())),
    "a structure": pa.array([{"at": 253402300800 * 10**6}], pa.struct([("at", pa.timestamp("us"))])),
}


@pytest.mark.parametrize("case", TIMES)
def test_a_time_that_python_does_not_have(case: str) -> None:
    batch = pa.RecordBatch.from_arrays([TIMES[case]], names=["response"])
    with pytest.raises(DataError) as refused:
        list(parquet_files.convert_batch(batch, "a.parquet", "write it again", (), None))
    assert (refused.value.reason, refused.value.message) == (
        "InvalidTime",
        "column response of a.parquet has a date or a time outside of the years 1 to 9999 in UTC: correct or remove such rows",
    )


def test_a_storage_that_fails_is_not_called_corrupt(tmp_path: Path, monkeypatch: Any) -> None:
    from fsspec.implementations.local import LocalFileSystem

    class Failing(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise OSError("the connection was reset")

    splits = write_rows(tmp_path / "rows", "Parquet", corpus(10))
    content = (tmp_path / "rows").read_bytes()
    monkeypatch.setattr(LocalFileSystem, "_open", lambda *_, **__: Failing(content))
    with pytest.raises(OSError, match="the connection was reset"):
        list(read.read(splits, "train", ["prompt", "response"]))

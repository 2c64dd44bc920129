"""The steps of the preparation on tiny frames."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.pod.exit_status import DataError, PodFailure, RecipeRefusedError
from finetune_trainer.prep.plan import build_plan
from finetune_trainer.prep.steps import conversations, split, steps
from unit.trainer.prep.recipes import recipe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.recipe import Recipe

Row = dict[str, Any]
SCHEMA = "question string, answer string, quality string, thread string"
NAN = "NaN"


def pair(
    question: str | None = "what", answer: str | None = "that", quality: str | None = "1", **columns: Any
) -> Row:
    return {"question": question, "answer": answer, "quality": quality, "thread": None, **columns}


def frame(spark: SparkSession, rows: list[Row], schema: str = SCHEMA, partitions: int = 1) -> DataFrame:
    return spark.createDataFrame(rows, schema).repartition(partitions)


def dropped_by(
    spark: SparkSession, rows: list[Row], job_recipe: Recipe, schema: str = SCHEMA
) -> list[str | None]:
    """The verdict on each row, in the order of the rows."""
    numbered = [row | {"n": number} for number, row in enumerate(rows)]
    plan = build_plan(job_recipe)
    source = conversations.parse(frame(spark, numbered, f"{schema}, n int"), plan.form)
    verdicts = steps.flag_rows(source, plan).orderBy("n").collect()
    return [row[steps.DROPPED_BY] for row in verdicts]


FILTERS: list[tuple[str, dict[str, Any], list[tuple[Row, str | None]]]] = [
    (
        "null and blank",
        {"notNull": ["thread"]},
        [
            (pair(thread="t"), None),
            (pair(thread=" "), "notNull"),
            (pair(thread=None), "notNull"),
            (pair(question=None, thread="t"), "notNull"),
            (pair(question="", thread="t"), "notNull"),
            (pair(answer=" \t\n\u00a0\u3000", thread="t"), "notNull"),
        ],
    ),
    (
        "dirty scores",
        {"minQuality": 0.5},
        [
            (pair(quality="0.5"), None),
            (pair(quality=" 7e-1 "), None),
            (pair(quality="0.49"), "minQuality"),
            (pair(quality="good"), "minQuality"),
            (pair(quality=""), "minQuality"),
            (pair(quality=None), "minQuality"),
            (pair(quality=NAN), "minQuality"),
            (pair(quality="Infinity"), None),
        ],
    ),
    (
        "lengths count characters of both columns, not bytes",
        {"minChars": 5, "maxChars": 8},
        [
            (pair("äöü", "é"), "minChars"),
            (pair("äöü", "éé"), None),
            (pair("äöüß", "éééé"), None),
            (pair("äöüß", "ééééé"), "maxChars"),
        ],
    ),
    (
        "lengths of the prompt alone",
        {"minPromptChars": 2, "maxPromptChars": 4},
        [
            (pair("ä", "éééé"), "minPromptChars"),
            (pair("äö", "é"), None),
            (pair("äöüß", "éééé"), None),
            (pair("äöüßx", "é"), "maxPromptChars"),
        ],
    ),
    (
        "SQL, where null means no",
        {"filter": "length(question) > 3 AND try_cast(quality AS int) > 0"},
        [
            (pair("long", quality="1"), None),
            (pair("no", quality="1"), "filter"),
            (pair("long", quality="x"), "filter"),
        ],
    ),
    (
        "the first filter in order is the one that is named; later ones do not see the row",
        {"minQuality": 0.5, "minChars": 3, "filter": "1 / (length(question) - 1) > 0"},
        [
            (pair(None, quality="x"), "notNull"),
            (pair("q", "a", quality="0"), "minQuality"),
            (pair("q", "a", quality="1"), "minChars"),
            (pair("qq", "aa", quality="1"), None),
        ],
    ),
]


@pytest.mark.parametrize(("changes", "table"), [row[1:] for row in FILTERS], ids=[row[0] for row in FILTERS])
def test_filters(spark: SparkSession, changes: dict[str, Any], table: list[tuple[Row, str | None]]) -> None:
    rows = [row for row, _ in table]
    verdicts = dropped_by(spark, rows, recipe(**changes))
    assert list(zip(rows, verdicts, strict=True)) == table


CHAT: list[dict[str, str | None]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
]
CONVERSATIONS: list[tuple[list[dict[str, str | None]] | None, str | None]] = [
    (CHAT, None),
    ([], "notNull"),
    (None, "notNull"),
    ([{"role": "user", "content": None}], "notNull"),
    ([{"role": None, "content": "hi"}], "notNull"),
    ([{"role": "user", "content": " "}, {"role": "assistant", "content": ""}], "notNull"),
    ([{"role": "user", "content": "much too long"}], "maxChars"),
]


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "JSON text"])
def test_conversations(spark: SparkSession, as_text: bool) -> None:
    job_recipe = recipe(columns={"type": "Messages", "messages": "chat"}, maxChars=10)
    kind = "string" if as_text else "array<struct<content: string, role: string, weight: int>>"
    rows = [{"chat": json.dumps(chat) if as_text and chat is not None else chat} for chat, _ in CONVERSATIONS]
    expected = [verdict for _, verdict in CONVERSATIONS]
    if as_text:
        rows += [{"chat": "{not JSON"}, {"chat": '"a text"'}]
        expected += ["notNull", "notNull"]
    assert dropped_by(spark, rows, job_recipe, f"chat {kind}") == expected


def test_conversations_become_lists_of_role_and_content(spark: SparkSession) -> None:
    source = frame(spark, [{"chat": CHAT}], "chat array<struct<content: string, role: string, weight: int>>")
    examples = identified(source, recipe(columns={"type": "Messages", "messages": "chat"})).first()
    assert examples is not None
    assert [turn.asDict() for turn in examples["messages"]] == CHAT


WRONG: list[tuple[str, dict[str, Any], type[PodFailure], str]] = [
    (
        "filter names an unknown column",
        {"filter": "language = 'en'"},
        DataError,
        "data.prepare.filter `language = 'en'` names a column that /corpus does not have: it has answer, quality, "
        "question and thread",
    ),
    (
        "filter is no SQL",
        {"filter": "language = = 'en'"},
        RecipeRefusedError,
        "data.prepare.filter `language = = 'en'` is not an SQL condition: [PARSE_SYNTAX_ERROR] Syntax error at or near '='. "
        "SQLSTATE: 42601 (line 1, pos 11)",
    ),
    (
        "messages in a text column of another type",
        {"columns": {"type": "Messages", "messages": "size"}},
        DataError,
        "column size holds int: conversations are lists of {role, content}, or the same as JSON text",
    ),
]


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_wrong(spark: SparkSession, changes: dict[str, Any], kind: type[PodFailure], sentence: str) -> None:
    plan = build_plan(recipe(**changes))
    schema = "size int" if "columns" in changes else SCHEMA
    source = frame(spark, [], schema)
    with pytest.raises(kind) as failed:
        steps.flag_rows(conversations.parse(source, plan.form), plan)
    assert failed.value.message == sentence


def identified(source: DataFrame, job_recipe: Recipe) -> DataFrame:
    plan = build_plan(job_recipe)
    flagged = steps.flag_rows(conversations.parse(source, plan.form), plan)
    return steps.identify_examples(steps.select_passed(flagged, plan), plan)


def test_templates_render(spark: SparkSession) -> None:
    job_recipe = recipe(
        columns={"type": "Text", "text": "question"},
        promptTemplate="{{{thread}}} Q: {question}\nA:",
        responseTemplate=" {answer}",
    )
    rows = [pair("why", None, thread="t"), pair("how {answer}", "so")]
    examples = identified(frame(spark, rows), job_recipe).select("prompt", "response").collect()
    assert sorted(map(tuple, examples)) == [("{t} Q: why\nA:", " "), ("{} Q: how {answer}\nA:", " so")]


def test_of_duplicates_the_same_one_stays_however_the_rows_lie(spark: SparkSession) -> None:
    spellings = ["What  is it?", "what is it?", " WHAT IS\tIT? ", "what is\u00a0it?"]
    rows = [pair(text, "that") for text in spellings] + [pair("what is it", "that")]
    survivors = []
    for partitions, order in ((1, rows), (4, rows), (6, rows[::-1])):
        examples = steps.drop_duplicates(identified(frame(spark, order, partitions=partitions), recipe()))
        survivors.append(sorted(row["prompt"] for row in examples.collect()))
    assert survivors[0] == survivors[1] == survivors[2]
    assert len(survivors[0]) == 2
    assert "what is it" in survivors[0]


def test_of_rows_with_one_id_the_same_one_stays_however_they_lie(spark: SparkSession) -> None:
    """The id is that of the text and the key: rows that have one may still be of several strata and sources."""
    rows = [
        pair(f"what {number}", thread=stratum, source=source)
        for number in range(10)
        for stratum in ("en", "de")
        for source in ("b", "a")
    ]
    plan = build_plan(recipe(splitRatios={"train": 1, "validation": 0, "test": 0, "stratifyBy": "thread"}))
    first_rows, few = [], []
    for partitions, order in ((1, rows), (1, rows[::-1]), (4, rows)):
        read = frame(spark, order, f"{SCHEMA}, source string", partitions)
        read = read.withColumnRenamed("source", steps.MIXED_FROM)
        examples = steps.identify_examples(steps.select_passed(steps.flag_rows(read, plan), plan), plan)
        columns = ("prompt", steps.STRATUM, steps.SOURCE)
        first_rows.append(sorted(map(tuple, steps.drop_duplicates(examples).select(*columns).collect())))
        few.append(sorted(map(tuple, steps.limit_rows(examples, 13, seed=7).select(*columns).collect())))
    assert first_rows == [[(f"what {number}", "de", "a") for number in range(10)]] * 3
    assert few == [few[0]] * 3
    # Three examples are whole, and of the fourth the row that comes first.
    assert sorted(Counter(prompt for prompt, *_ in few[0]).values()) == [1, 4, 4, 4]
    assert ("de", "a") in {(stratum, source) for _, stratum, source in few[0]}


def fold(text: str) -> str:
    """A text with one space in place of white space inside lines, and none at their ends and around it; indentation stays."""
    lines = [(line[: len(line) - len(line.lstrip())], line.split()) for line in text.strip().split("\n")]
    return "\n".join(indent + " ".join(words) if words else "" for indent, words in lines)


def test_white_space_inside_lines_counts_as_one_space(spark: SparkSession) -> None:
    texts = ["".join(parts) for length in range(5) for parts in product(" \n\u00a0a", repeat=length)]
    around = [f"b{text}c" for text in texts] + [f"{text}b{text}" for text in texts]
    examples = identified(frame(spark, [pair(text, "that") for text in around]), recipe())
    folded: dict[str, set[str]] = {}
    for row in examples.collect():
        folded.setdefault(row["fingerprint"], set()).add(fold(row["prompt"]))
    assert len(folded) == len({fold(text) for text in around})
    assert {len(same) for same in folded.values()} == {1}


PROGRAM = "for a in b:\n    print(a)\n    print(b)"


def test_programs_that_differ_in_their_indentation_are_no_duplicates(spark: SparkSession) -> None:
    programs = [PROGRAM.replace("    print(b)", "print(b)"), PROGRAM.replace("\n", "\n\n", 1)]
    same = [PROGRAM.replace("\n", "\r\n"), PROGRAM.replace("a in", "a  in"), PROGRAM + " ", PROGRAM + "\n"]
    rows = [pair("b?", answer) for answer in (PROGRAM, *programs, *same)]
    examples = identified(frame(spark, rows), recipe())
    assert steps.drop_duplicates(examples).count() == 3
    # But none of them is evaluated on where another is learned.
    assert examples.select("group").distinct().count() == 1


def test_rows_that_differ_in_one_column_of_the_example_are_no_duplicates(spark: SparkSession) -> None:
    rows = [pair("a b", "c"), pair("a", "b c"), pair("a", "b c", quality="0", thread="other")]
    examples = steps.drop_duplicates(identified(frame(spark, rows), recipe()))
    assert sorted((row["prompt"], row["response"]) for row in examples.collect()) == [
        ("a", "b c"),
        ("a b", "c"),
    ]


def test_duplicates_in_the_columns_that_the_recipe_names(spark: SparkSession) -> None:
    rows = [
        pair("one", "x", thread="A"),
        pair("two", "y", thread=" a"),
        pair("two", "z", thread="b"),
        pair("two", "z"),
    ]

    def count_remaining(*columns: str) -> int:
        job_recipe = recipe(dedupe={"columns": [*columns]})
        return int(steps.drop_duplicates(identified(frame(spark, rows), job_recipe)).count())

    assert [
        count_remaining("thread"),
        count_remaining("question"),
        count_remaining("question", "thread"),
        count_remaining("answer"),
    ] == [3, 2, 4, 3]


def prepared(spark: SparkSession, rows: list[Row], partitions: int, **changes: Any) -> dict[str, str]:
    """The split of each prompt that is left."""
    job_recipe = recipe(**changes)
    examples = steps.drop_duplicates(identified(frame(spark, rows, partitions=partitions), job_recipe))
    prepare = build_plan(job_recipe).prepare
    examples = split.with_split(
        steps.limit_rows(examples, prepare.limit, prepare.split_ratios.seed), prepare.split_ratios
    )
    return {row["prompt"]: row["split"] for row in examples.collect()}


MANY = [pair(f"question {number}", "answer", thread=f"thread {number % 40}") for number in range(400)]


def test_limit_and_split_do_not_depend_on_partitions(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "limit": 200,
        "splitRatios": {"train": 0.5, "validation": 0.3, "test": 0.2, "seed": 7},
    }
    four, six = prepared(spark, MANY, 4, **changes), prepared(spark, MANY[::-1], 6, **changes)
    assert four == six
    assert len(four) == 200
    monkeypatch.setattr(steps, "_MAX_ROWS_IN_MEMORY", 199)
    assert prepared(spark, MANY, 6, **changes) == four
    changes["splitRatios"]["seed"] = 8
    on_four_partitions = prepared(spark, MANY, 4, **changes)
    assert set(on_four_partitions) != set(four)
    both = set(on_four_partitions) & set(four)
    assert any(on_four_partitions[prompt] != four[prompt] for prompt in both)


def test_splits_have_about_their_ratios(spark: SparkSession) -> None:
    splits = list(
        prepared(spark, MANY, 2, splitRatios={"train": 0.7, "validation": 0.3, "test": 0.0}).values()
    )
    # Four standard deviations of a fair draw of 400.
    assert abs(splits.count("train") - 280) < 37
    assert splits.count("train") + splits.count("validation") == 400


def test_each_split_has_its_share_of_a_column(spark: SparkSession) -> None:
    ratios = {"train": 0.5, "validation": 0.3, "test": 0.2, "stratifyBy": "thread"}
    splits = prepared(spark, MANY, 2, splitRatios=ratios)
    train = Counter(row["thread"] for row in MANY if splits[row["question"]] == "train")
    assert {*train.values()} <= {4, 5, 6}
    assert len(train) == 40


def test_what_has_one_key_is_in_one_split(spark: SparkSession) -> None:
    ratios = {"train": 0.4, "validation": 0.3, "test": 0.3}
    splits = prepared(spark, MANY, 2, splitRatios={**ratios, "key": "thread"})
    of_thread = {
        thread: {splits[row["question"]] for row in MANY if row["thread"] == thread}
        for thread in {row["thread"] for row in MANY}
    }
    assert [thread for thread, splits in of_thread.items() if len(splits) != 1] == []
    assert set.union(*of_thread.values()) == {"train", "validation", "test"}


def test_duplicates_that_are_kept_share_a_split(spark: SparkSession) -> None:
    rows = [
        row | {"question": text} for row in MANY[:50] for text in (row["question"], row["question"].upper())
    ]
    job_recipe = recipe(splitRatios={"train": 0.5, "validation": 0.5, "test": 0.0})
    examples = split.with_split(
        identified(frame(spark, rows), job_recipe), build_plan(job_recipe).prepare.split_ratios
    ).collect()
    splits: dict[str, set[str]] = {}
    for row in examples:
        splits.setdefault(row["prompt"].lower(), set()).add(row["split"])
    assert len(examples) == 100
    assert [len(splits) for splits in splits.values()] == [1] * 50

"""Which rows are evaluated, and what they are comparable on."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.chat import ChatTemplate
from finetune_trainer.evaluate import rows
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod.exit_status import DataError, PodFailure, RecipeRefusedError
from support.evaluations import recipe, rows_of_splits, save_splits
from support.training import split_of

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.recipe import Recipe
    from finetune_trainer.evaluate.rows import Rows
    from support.pods import Pod


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_splits(tmp_path_factory.mktemp("evaluated") / "splits")


def load(recipe: Recipe) -> Rows:
    from pathlib import Path

    assert recipe.evaluation is not None
    return rows.load(recipe, recipe.evaluation, load_tokenizer(recipe.model, Path(recipe.model.base)))


def test_the_rows_are_those_of_the_split(base_model: Path, splits: Path) -> None:
    loaded = load(recipe(base_model, splits))
    expected = {(row["prompt"], row["response"]) for row in rows_of_splits() if row["split"] == "test"}
    assert {(question.prompt, question.reference) for question in loaded.questions} == expected
    assert (len(loaded), loaded.summary) == (8, "8 read, 8 kept")
    validation = load(recipe(base_model, splits, {"split": "Validation"}))
    assert len(validation) == 8
    assert not {question.prompt for question in validation.questions} & {prompt for prompt, _ in expected}
    assert validation.digest != loaded.digest


def test_the_tokens_and_targets_are_those_of_training(base_model: Path, splits: Path, pod: Pod) -> None:
    split = load(recipe(base_model, splits, {"split": "Validation"})).split
    trained = split_of(pod.but({"data.splits.path": str(splits)}), "validation")
    for name in ("tokens", "loss_mask", "offsets"):
        assert (getattr(split, name) == getattr(trained, name)).all()


def test_a_limit_takes_the_same_rows_in_any_order(base_model: Path, splits: Path, tmp_path: Path) -> None:
    all_rows = load(recipe(base_model, splits))
    some = load(recipe(base_model, splits, {"limit": 3}))
    turned = load(recipe(base_model, save_splits(tmp_path / "turned", rows_of_splits()[::-1]), {"limit": 3}))
    prompts = [question.prompt for question in some.questions]
    assert prompts == [question.prompt for question in all_rows.questions][:3]
    assert ([question.prompt for question in turned.questions], turned.digest) == (prompts, some.digest)
    assert all_rows.digest != some.digest


def test_numbers_are_comparable_on_equal_rows_and_equal_lengths_of_answers(
    base_model: Path, splits: Path
) -> None:
    usual = load(recipe(base_model, splits)).digest
    assert (len(usual), load(recipe(base_model, splits, {"metrics": ["Bleu"], "batchSize": 3})).digest) == (
        12,
        usual,
    )
    assert load(recipe(base_model, splits, {"maxNewTokens": 8})).digest != usual


def without_test() -> list[dict[str, Any]]:
    return [row for row in rows_of_splits() if row["split"] != "test"]


def test_a_table_without_the_split_is_wrong_data(base_model: Path, tmp_path: Path) -> None:
    table = save_splits(tmp_path / "splits", without_test())
    with pytest.raises(
        DataError, match=r"has no rows of the split test.*splitRatios.test above 0, or set eval"
    ) as error:
        load(recipe(base_model, table))
    assert (error.value.exit_code, error.value.reason) == (65, "EmptySplit")


def test_files_without_the_split_are_wrong_data(base_model: Path, tmp_path: Path) -> None:
    data = {"columns": {"type": "PromptResponse"}, "splits": {"type": "JSONLines", "train": str(tmp_path)}}
    with pytest.raises(DataError, match=r"data.splits.test is not set: set it, or set evaluation.split: Val"):
        load(recipe(base_model, tmp_path, data=data))


def test_files_of_the_test_split_are_read(base_model: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"prompt": "What? ", "response": "This."}\n')
    splits = {"type": "JSONLines", "train": str(tmp_path), "test": str(tmp_path / "test.jsonl")}
    loaded = load(
        recipe(base_model, tmp_path, data={"columns": {"type": "PromptResponse"}, "splits": splits})
    )
    assert [(question.prompt, question.reference) for question in loaded.questions] == [("What? ", "This.")]


@pytest.mark.parametrize(
    ("columns", "parts", "sentence"),
    [
        (
            {"type": "Text", "text": "response"},
            {"metrics": ["Loss", "Accuracy", "Bleu"]},
            "evaluation.metrics Accuracy, Bleu compare answers, but the rows are texts without answers",
        ),
        (
            {"type": "Unpaired"},
            {},
            "the built-in evaluation does not support data.columns.type Unpaired, whose answers can be bad",
        ),
    ],
)
def test_answers_need_rows_that_have_them(
    base_model: Path, splits: Path, columns: dict[str, Any], parts: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RecipeRefusedError, match=sentence) as refused:
        load(recipe(base_model, splits, parts, columns=columns))
    failure: PodFailure = refused.value
    assert failure.exit_code == 64


def test_texts_have_a_loss_on_all_tokens(base_model: Path, splits: Path) -> None:
    loaded = load(recipe(base_model, splits, columns={"type": "Text", "text": "response"}))
    assert (len(loaded), len(loaded.questions), bool(loaded.split.loss_mask.all())) == (8, 0, True)


def build_message(role: str, content: str = "The house is red.") -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(
    base: Path,
    folder: Path,
    parts: dict[str, Any],
    *messages: list[dict[str, str]],
    loss_on: str = "All",
    **training: Any,
) -> Recipe:
    """A recipe that evaluates on some conversations."""
    table = save_splits(folder / "splits", [{"messages": each, "split": "test"} for each in messages])
    parts_of_recipe: dict[str, Any] = {
        "columns": {"type": "Messages"},
        "model": {"base": str(base), "chatTemplate": {"type": "ChatML"}},
        "objective": {"lossOn": loss_on},
        "training": {"maxLength": 256, "precision": "FP32", **training},
    }
    return recipe(base, table, parts, **parts_of_recipe)


def test_rows_without_a_question_have_a_loss_and_are_counted(base_model: Path, tmp_path: Path) -> None:
    of = (
        [build_message("user"), build_message("assistant")],
        [build_message("assistant")],
        [build_message("user")],
    )
    loaded = load(conversations(base_model, tmp_path / "asked", {}, *of))
    assert (len(loaded), len(loaded.questions)) == (3, 1)
    assert loaded.summary == "3 read, 3 kept, 2 without a question"
    # Where no model is asked anything, no row needs a question.
    loss = load(conversations(base_model, tmp_path / "loss", {"metrics": ["Loss"], "generations": 0}, *of))
    assert (len(loss), loss.questions, loss.summary) == (3, [], "3 read, 3 kept")
    assert loss.digest == loaded.digest


DATED = (
    "{{ strftime_now('%Y-%m-%d') }}\n{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_jobs_of_other_days_evaluate_the_same_rows(base_model: Path, tmp_path: Path) -> None:
    of = [
        [build_message("user", f"{number}?"), build_message("assistant", f"{number}!")]
        for number in range(12)
    ]
    job = conversations(base_model, tmp_path, {"limit": 4}, *of)
    dated = job.model.model_copy(update={"chat_template": ChatTemplate(type="Jinja", jinja=DATED)})
    job = job.model_copy(update={"model": dated})
    before, after = (load(job.on_day(day)) for day in (date(2026, 11, 24), date(2026, 11, 25)))
    references = [[question.reference for question in loaded.questions] for loaded in (before, after)]
    assert (len(before), references[0], before.digest) == (4, references[1], after.digest)
    assert before.questions[0].prompt.startswith("2026-11-24\nuser: ")
    assert after.questions[0].prompt.startswith("2026-11-25\nuser: ")


def test_a_row_that_the_template_refuses_is_named(base_model: Path, tmp_path: Path) -> None:
    two = [
        [build_message("user"), build_message("assistant")],
        [build_message("assistant"), build_message("user")],
    ]
    job = conversations(base_model, tmp_path, {}, *two)
    user_first = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate.') }}{% endif %}" + DATED
    )
    model = job.model.model_copy(update={"chat_template": ChatTemplate(type="Jinja", jinja=user_first)})
    (file,) = (tmp_path / "splits").rglob("*.parquet")
    with pytest.raises(DataError) as refused:
        load(job.model_copy(update={"model": model}))
    assert (refused.value.reason, refused.value.message) == (
        "TemplateFailed",
        f"the chat template of the model fails on row 2 of {file.relative_to(tmp_path / 'splits')} of the Delta table "
        f"{tmp_path / 'splits'} with the roles assistant, user: Roles must alternate",
    )


def test_metrics_of_answers_need_a_row_with_an_answer(base_model: Path, tmp_path: Path) -> None:
    refused = conversations(
        base_model, tmp_path, {"metrics": ["Loss", "Accuracy", "F1"]}, [build_message("user")]
    )
    with pytest.raises(
        DataError,
        match=r"^no row of the split test has an answer .*\(1 read, 1 kept, 1 without a question\).* Accuracy, F1 compare",
    ) as error:
        load(refused)
    assert (error.value.exit_code, error.value.reason) == (65, "NoAnswers")


NONE_LEFT: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "too long": (
        ["user", "assistant"],
        {"maxLength": 8, "truncation": "Drop"},
        "(1 read, 1 too long): raise training.maxLength above 8",
    ),
    "cut before the answer": (
        ["user", "assistant"],
        {"maxLength": 8, "truncation": "Truncate"},
        "(1 read, 1 truncated, 57 tokens cut, 1 without an answer): raise training.maxLength above 8",
    ),
    "without an answer": (
        ["user"],
        {},
        "(1 read, 1 without an answer): put answers into messages of the rows",
    ),
}


@pytest.mark.parametrize("case", NONE_LEFT)
def test_rows_of_which_none_is_left_are_wrong_data(base_model: Path, tmp_path: Path, case: str) -> None:
    roles, training, remedy = NONE_LEFT[case]
    some = [build_message(role) for role in roles]
    refused = conversations(base_model, tmp_path, {}, some, loss_on="Answer", **training)
    with pytest.raises(DataError) as error:
        load(refused)
    assert str(error.value) == f"no row of the split test is left {remedy}"
    assert (error.value.exit_code, error.value.reason) == (65, "EmptySplit")

"""Tokenized splits that a later attempt finds beside the checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from finetune_crds.data import Splits
from finetune_crds.recipe import Recipe
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod.exit_status import PodFailure, SupersededError
from finetune_trainer.train.data import corpus, dataset
from finetune_trainer.train.data.encode import Encoder
from finetune_trainer.train.data.token_cache import TokenCache, compute_digest
from support import networks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune_trainer.train.runtime.distributed import World
    from support.pods import Pod


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as lone_world:
        yield lone_world


def loaded(
    pod: Pod,
    world: World,
    attempt: str,
    version: int | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> corpus.Corpus:
    recipe = Recipe.model_validate(pod.recipe)
    tokenizer = load_tokenizer(recipe.model, Path(recipe.model.base))
    folder = pod.folder / attempt
    return corpus.load(
        recipe, tokenizer, world, folder, version=version, on_counts=lambda _: None, confirm=confirm
    )


def arrays(data: corpus.Corpus) -> list[Any]:
    assert data.validation is not None
    return [
        [
            split.digest,
            split.documents,
            *(part.tolist() for part in (split.tokens, split.loss_mask, split.offsets)),
        ]
        for split in (data.train, data.validation.split)
    ]


@pytest.fixture
def stored(pod: Pod) -> Pod:
    return pod.but({"checkpoint": {"uri": str(pod.folder / "checkpoints")}})


def test_a_second_attempt_tokenizes_nothing(
    stored: Pod, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = loaded(stored, world, "first")
    assert "earlier attempt" not in capsys.readouterr().out

    def again(*_args: Any) -> bool:
        raise AssertionError("a split is tokenized again")

    monkeypatch.setattr(dataset, "tokenize", again)
    second = loaded(stored, world, "second", version=first.splits.version)
    assert arrays(second) == arrays(first)
    assert second.plan.sequences == first.plan.sequences
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: using the tokens of an earlier attempt" for name in ("train", "validation")
    ]


def cut_short(train: Path) -> None:
    (train / "tokens.npy").write_bytes((train / "tokens.npy").read_bytes()[:-4])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an attempt that was killed": (lambda train: (train / "COMPLETE").unlink(), ""),
    "a missing file": (lambda train: (train / "offsets.npy").unlink(), "offsets.npy is missing"),
    "a short file": (cut_short, "tokens.npy has "),
    "a marker that is none": (lambda train: (train / "COMPLETE").write_text("{"), "Expecting property name"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_not_whole_is_tokenized_and_stored_again(
    stored: Pod, world: World, capsys: pytest.CaptureFixture[str], damage: Any, reason: str
) -> None:
    first = loaded(stored, world, "first")
    (train,) = stored.folder.glob("checkpoints/*/tokens-*/train")
    damage(train)
    capsys.readouterr()
    assert arrays(loaded(stored, world, "second")) == arrays(first)
    output = capsys.readouterr().out
    expected_line = f"cannot read the stored tokens of split train; tokenizing the split again: {reason}"
    assert (expected_line in output) is bool(reason), output
    loaded(stored, world, "third")
    assert "train: using the tokens of an earlier attempt" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../evil.npy", "/evil.npy", "..\\evil.npy", "sub//evil.npy"])
def test_a_marker_names_no_file_outside_of_the_split(
    stored: Pod, world: World, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    first = loaded(stored, world, "first")
    (train,) = stored.folder.glob("checkpoints/*/tokens-*/train")
    sizes = json.loads((train / "COMPLETE").read_text())
    evil = Path(f"{train}/{name}")
    evil.parent.mkdir(exist_ok=True)
    evil.write_bytes(b"evil")
    (train / "COMPLETE").write_text(json.dumps({name: 4, **sizes}))
    capsys.readouterr()
    assert arrays(loaded(stored, world, "second")) == arrays(first)
    output = capsys.readouterr().out
    assert (
        f"cannot read the stored tokens of split train; tokenizing the split again: {name!r}, which "
        in output
    )
    assert not list((stored.folder / "second").rglob("*evil*"))


def test_a_storage_that_fails_stops_no_attempt(
    stored: Pod, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored.folder / "checkpoints").write_text("a file where the folder would be")
    assert len(loaded(stored, world, "first").train) > 0
    assert (
        "cannot store the tokens of split train; later attempts tokenize the split again: "
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("calls", [1, 2])
def test_pods_that_newer_ones_have_replaced_store_no_split(stored: Pod, world: World, calls: int) -> None:
    """They look before they write, and before the marker."""
    confirmations = iter([*[None] * (calls - 1), SupersededError("newer pods claimed the folder")])

    def confirm() -> None:
        error = next(confirmations)
        if error is not None:
            raise error

    with pytest.raises(PodFailure) as caught:
        loaded(stored, world, "first", confirm=confirm)
    assert (caught.value.exit_code, caught.value.reason) == (75, "Superseded")
    checkpoints = stored.folder / "checkpoints"
    assert [*checkpoints.rglob("COMPLETE")] == []
    assert bool([*checkpoints.rglob("*.npy")]) == (calls == 2)


def test_without_checkpoints_or_a_version_nothing_is_stored(pod: Pod, stored: Pod) -> None:
    for job, version in ((pod, 0), (stored, None)):
        recipe = Recipe.model_validate(job.recipe)
        assert recipe.data.splits is not None
        splits = recipe.data.splits.model_copy(update={"version": version})
        encoder = Encoder.of(recipe, load_tokenizer(recipe.model, Path(recipe.model.base)))
        assert TokenCache.of(recipe, splits, encoder) is None


def test_what_decides_on_the_tokens_is_in_the_digest(pod: Pod) -> None:
    recipe = Recipe.model_validate(pod.recipe)
    splits = Splits(type="Delta", path="/table", version=1)
    encoder = Encoder.of(recipe, load_tokenizer(recipe.model, Path(recipe.model.base)))
    other_documents = replace(encoder.documents, answers_only=not encoder.documents.answers_only)
    different = [
        compute_digest(splits, encoder),
        compute_digest(splits.model_copy(update={"version": 2}), encoder),
        compute_digest(splits.model_copy(update={"path": "/other"}), encoder),
        compute_digest(splits, replace(encoder, documents=other_documents)),
        compute_digest(splits, replace(encoder, max_length=encoder.max_length + 1)),
        compute_digest(splits, replace(encoder, truncation="Truncate")),
    ]
    assert len(set(different)) == len(different)
    again = Encoder.of(recipe, load_tokenizer(recipe.model, Path(recipe.model.base)))
    assert compute_digest(splits, again) == different[0]
    assert np.unique([len(digest) for digest in different]).tolist() == [16]

"""The claim on a checkpoint folder: only the newest generation of pods keeps it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod.exit_status import SupersededError
from finetune_trainer.storage import filesystems
from finetune_trainer.train.checkpoint.claim import MANIFEST, Claim, build_token

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsspec import AbstractFileSystem


def claim_of(folder: Path, attempt: int) -> Claim:
    """The claim of new pods of an attempt."""
    return Claim(str(folder), attempt, build_token(attempt))


def manifest(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / MANIFEST).read_text())
    return content


def refusal(call: Callable[[], None]) -> tuple[int, str, str]:
    with pytest.raises(SupersededError) as caught:
        call()
    return caught.value.exit_code, caught.value.reason, caught.value.message


def test_a_claim_names_the_attempt_and_the_pods(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    holder = claim_of(folder, 2)
    holder.confirm()
    holder.confirm()
    content = manifest(folder)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(content.pop("claimed")))
    assert content == {"attempt": 2, "token": holder.token}
    assert [path.name for path in folder.iterdir()] == [MANIFEST]


@pytest.mark.parametrize("later", [1, 2])
def test_an_equal_or_higher_attempt_takes_the_folder_over(tmp_path: Path, later: int) -> None:
    first, second = claim_of(tmp_path, 1), claim_of(tmp_path, later)
    first.confirm()
    second.confirm()
    claimed = manifest(tmp_path)["claimed"]
    assert refusal(first.confirm) == (
        75,
        "Superseded",
        f"newer pods of the job, of attempt {later}, claimed the checkpoint folder {tmp_path} at {claimed}: these pods, of attempt 1, "
        "publish nothing more and end",
    )
    second.confirm()
    assert manifest(tmp_path)["token"] == second.token


def test_each_start_has_a_token_of_its_own() -> None:
    assert build_token(7) != build_token(7)


def test_a_lower_attempt_is_refused(tmp_path: Path) -> None:
    later = claim_of(tmp_path, 10)
    later.confirm()
    assert refusal(claim_of(tmp_path, 9).confirm)[:2] == (75, "Superseded")
    assert manifest(tmp_path)["token"] == later.token


@pytest.mark.parametrize("content", ["", "[]", '{"attempt": 3}'])
def test_a_manifest_that_cannot_be_read_or_is_gone_is_written_again(tmp_path: Path, content: str) -> None:
    holder = claim_of(tmp_path, 2)
    holder.confirm()
    (tmp_path / MANIFEST).write_text(content)
    holder.confirm()
    assert manifest(tmp_path)["token"] == holder.token
    (tmp_path / MANIFEST).unlink()
    holder.confirm()
    assert manifest(tmp_path)["token"] == holder.token


def interrupt(monkeypatch: pytest.MonkeyPatch, other: Claim, *, before: bool) -> None:
    """Let another generation claim the folder between the reading and the writing of a claim, or right after the writing."""
    write = filesystems.write_atomically

    def write_with_rival(files: AbstractFileSystem, path: str, content: bytes) -> None:
        monkeypatch.setattr(filesystems, "write_atomically", write)
        if before:
            other.confirm()
        write(files, path, content)
        if not before:
            other.confirm()

    monkeypatch.setattr(filesystems, "write_atomically", write_with_rival)


@pytest.mark.parametrize("attempt", [1, 2])
def test_of_two_that_claim_at_once_the_last_to_write_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    first, second = claim_of(tmp_path, 1), claim_of(tmp_path, attempt)
    interrupt(monkeypatch, second, before=False)
    assert refusal(first.confirm)[:2] == (75, "Superseded")
    second.confirm()


def test_a_higher_attempt_takes_back_a_folder_that_a_lower_one_overwrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower, higher = claim_of(tmp_path, 1), claim_of(tmp_path, 2)
    interrupt(monkeypatch, higher, before=True)
    lower.confirm()
    assert manifest(tmp_path)["token"] == lower.token
    higher.confirm()
    assert refusal(lower.confirm)[:2] == (75, "Superseded")


def test_a_storage_that_fails_stops_no_training_and_a_newer_claim_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = claim_of(tmp_path, 1)
    with monkeypatch.context() as patch:

        def away(*_: object) -> None:
            raise ConnectionRefusedError(111, "Connection refused")

        patch.setattr(filesystems, "write_atomically", away)
        first.try_to_confirm("the next save will claim the folder")
    assert capsys.readouterr().out == (
        f"the claim on the checkpoint folder {tmp_path} cannot be confirmed; the next save will claim the folder: Connection refused\n"
    )
    claim_of(tmp_path, 2).confirm()
    assert refusal(lambda: first.try_to_confirm("the next save will claim the folder"))[0] == 75

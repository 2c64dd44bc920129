"""The file with the tenancy: what is a mistake in it, and when it is read again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from finetune_operator import metrics
from finetune_operator.installation_files import InstallationFileError
from finetune_operator.tenancy.file import TenancyFile

if TYPE_CHECKING:
    from pathlib import Path

VALID = "tenants: [{namespaces: [team-a]}]"
MISTAKES = {
    "a field that is spelled wrong": (
        "tenants: [{namespaces: [a], model: [x]}]",
        "is invalid at tenants.0.model: unknown field",
    ),
    "no tenants": ("{}", "is invalid at tenants: Field required"),
    "an empty file": ("", "is invalid at tenants: Field required"),
    "no namespaces": (
        "tenants: [{namespaces: []}]",
        "is invalid at tenants.0.namespaces: List should have at least 1 item after validation, not 0",
    ),
    "a tenant without a kind of credentials": (
        "tenants: [{namespaces: [a], tracking: [{uri: 'http://m'}]}]",
        "is invalid at tenants.0.tracking.0.credentials: Field required",
    ),
    "no YAML": ("tenants: [", "is not YAML at line 1"),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_and_keeps_the_rules(case: tuple[str, str], tmp_path: Path) -> None:
    text, message = case
    path = tmp_path / "tenancy.yaml"
    path.write_text(VALID)
    file = TenancyFile(str(path))
    assert file.read()
    before = file.tenancy
    path.write_text(text)
    with pytest.raises(InstallationFileError) as caught:
        file.read()
    assert str(caught.value).startswith(f"{path} {message}")
    assert file.tenancy is before
    # It is reported once.
    assert not file.read()


def test_a_missing_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(InstallationFileError, match="cannot be read"):
        TenancyFile(str(tmp_path / "none")).read()


async def test_a_file_that_was_missing_for_a_moment_is_not_outdated(tmp_path: Path) -> None:
    path = tmp_path / "tenancy.yaml"
    path.write_text(VALID)
    outdated: list[float] = []
    steps = iter((path.unlink, lambda: path.write_text(VALID), lambda: None))

    async def pause(_seconds: float) -> None:
        outdated.append(metrics.tenancy_outdated._value.get())
        step = next(steps, None)
        if step is None:
            raise asyncio.CancelledError
        step()

    metrics.tenancy_outdated.set(0)
    file = TenancyFile(str(path), pause)
    file.read()
    with pytest.raises(asyncio.CancelledError):
        await file.follow(lambda: None)
    assert outdated == [0, 1, 0, 0]


async def test_a_change_takes_effect_and_a_mistake_does_not(tmp_path: Path) -> None:
    path = tmp_path / "tenancy.yaml"
    path.write_text(VALID)
    pauses: asyncio.Queue[float] = asyncio.Queue()
    goes_on = asyncio.Semaphore(0)

    async def pause(seconds: float) -> None:
        pauses.put_nowait(seconds)
        await goes_on.acquire()

    file, changes = TenancyFile(str(path), pause), []
    file.read()
    following = asyncio.create_task(file.follow(lambda: changes.append(file.tenancy)))
    seen = []
    for text in (VALID, "tenants: []", "tenants: 1", "tenants: 1", VALID):
        await pauses.get()
        path.write_text(text)
        goes_on.release()
        await pauses.get()
        pauses.put_nowait(0)
        assert file.tenancy
        outdated = metrics.tenancy_outdated._value.get()
        seen.append((len(file.tenancy.tenants), len(changes), outdated))
    following.cancel()
    assert seen == [(1, 0, 0), (0, 1, 0), (0, 1, 1), (0, 1, 1), (1, 2, 0)]

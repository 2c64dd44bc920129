"""Asking a server of Git for the commit of a job, with the login of a Secret, and again after a problem."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.finetunejob.model import CodeFound, FineTuneJob
from finetune_operator.finetunejob.revisions import RevisionReader
from standins.git import git_server
from standins.kube import StandIn
from worlds.memory.decisions import ftj

Json = dict[str, Any]


def secret(**values: str) -> Json:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {"kind": "Secret", "metadata": {"name": "login"}, "data": data}


def job(url: str, revision: str = "main") -> FineTuneJob:
    code = {"git": {"url": url, "revision": revision, "secretRef": {"name": "login"}}}
    return ftj(trainer={"command": ["torchrun", "train.py"], "code": code})


def why(found: CodeFound | None) -> tuple[str | None, float | None]:
    """The reason of the problem, and when the server is asked again."""
    assert found
    return found.problem.reason if found.problem else None, found.again_seconds


async def test_the_login_and_the_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with git_server(tmp_path) as server:
        context = ssl.create_default_context(cafile=server.authority)
        monkeypatch.setattr(bounded, "trusted", lambda: context)
        server.create("code")
        commit = server.commit("code", {"train.py": "1"})
        server.logins["code"] = ("git", "token")
        now = 0.0
        kube = StandIn(secret(password="wrong", other="x"))
        reader = RevisionReader(kube, lambda: now)
        wanted = job(server.url("code"))
        assert why(await reader.read(wanted)) == (ConditionReason.GIT_FORBIDDEN, 1)
        now = 0.75
        asked = len(server.asked)
        assert why(await reader.read(wanted)) == (ConditionReason.GIT_FORBIDDEN, 0.25)
        assert len(server.asked) == asked
        for start, delay in ((1, 2), (3, 4), (7, 8), (15, 16), (31, 30), (61, 30)):
            now = start
            assert why(await reader.read(wanted)) == (ConditionReason.GIT_FORBIDDEN, delay)
        now = 91
        reader.kube = StandIn(secret(password="token\n"))
        assert await reader.read(wanted) == CodeFound(commit, "main")
        assert await reader.read(job(server.url("code"), commit)) is None


NO_LOGIN: dict[str, tuple[StandIn, str]] = {
    "there is none": (
        StandIn(),
        "Secret login of spec.trainer.code.git.secretRef does not exist in namespace team: create it",
    ),
    "no password": (
        StandIn(secret(username="me", token="t")),
        "Secret login of spec.trainer.code.git.secretRef has no key password: add it, and username",
    ),
}


@pytest.mark.parametrize(("kube", "message"), NO_LOGIN.values(), ids=NO_LOGIN)
async def test_a_secret_without_a_login(kube: StandIn, message: str) -> None:
    found = await RevisionReader(kube, lambda: 0).read(job("https://127.0.0.1:1/code"))
    assert found
    assert found.problem
    assert (found.problem.reason, found.problem.message) == (ConditionReason.CREDENTIALS_MISSING, message)

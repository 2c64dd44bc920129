"""The attempt of a pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_crds.contract import ENV_ATTEMPT
from finetune_trainer.pod.attempt import read_attempt

if TYPE_CHECKING:
    import pytest


def test_without_the_operator_each_start_is_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_ATTEMPT, raising=False)
    assert read_attempt() == 1
    monkeypatch.setenv(ENV_ATTEMPT, "7")
    assert read_attempt() == 7

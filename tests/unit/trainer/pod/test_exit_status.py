"""The exit code of a pod whose code ends the process."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from finetune_crds.contract import TerminationMessage
from finetune_trainer.pod.exit_status import ENV_TERMINATION_PATH, describe, run

# What the code gives to sys.exit; then the exit code, and what standard error says.
ENDS: dict[str, tuple[int | str | None, int, str]] = {
    "a success, such as that of --help": (0, 0, ""),
    "a code": (3, 3, ""),
    "a text": ("no such file", 1, "no such file\n"),
    "nothing, before the work is done": (None, 1, "the process ended before its work was done\n"),
}


@pytest.mark.parametrize(("argument", "code", "text"), ENDS.values(), ids=ENDS)
def test_code_that_ends_the_process(
    argument: int | str | None, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reports: list[int] = []

    def main() -> TerminationMessage | None:
        raise SystemExit(argument)

    assert run(main, lambda reported_code, _: reports.append(reported_code)) == code
    assert (reports, capsys.readouterr().err) == ([], text)


def test_the_termination_message_has_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients quote their logins, in any form."""
    monkeypatch.setenv("WANDB_API_KEY", "key-of-the-team")
    monkeypatch.setenv("MY_PASSWORD", "a b/c=d+e f")
    monkeypatch.setenv(ENV_TERMINATION_PATH, str(tmp_path / "message"))
    encoded = base64.b64encode(b"user:key-of-the-team").decode()

    def main() -> TerminationMessage | None:
        raise ValueError(
            f"401 for https://me:pa55word@host?p=a+b%2Fc%3Dd%2Be+f with key-of-the-team, Basic {encoded}"
        )

    assert run(main) == 1
    message = TerminationMessage.parse((tmp_path / "message").read_text())
    assert message is not None
    assert message.error is not None
    assert message.error.message == "ValueError: 401 for https://me:***@host?p=*** with ***, Basic ***"
    assert "ValueError: 401 for https://me:***@host" in capsys.readouterr().err


def test_a_credential_is_masked_before_the_message_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cr3t-" * 10)
    _, message = describe(ValueError("x" * 2000 + " " + "s3cr3t-" * 10))
    assert message.error is not None
    assert "s3cr3t" not in message.error.message

"""The exit code of a pod whose code ends the process."""

from __future__ import annotations

import pytest

from finetune_crds.contract import TerminationMessage
from finetune_trainer.pod.exit_status import run

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

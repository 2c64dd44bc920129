"""One process at a time brings a demo up or down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo.__main__ import alone, main


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_second_process_is_refused(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    holder = "import sys; from demo.__main__ import alone\nwith alone('other'):\n    print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        # Without the holder, a demo would begin.
        assert process.stdout.readline() == b"\n"
        assert main([verb, "--name", "other"]) == 1
    told = "another `make demo` or `make demo-down` is at work on other: wait until it ends, or end it with Ctrl-C"
    assert capsys.readouterr().err == f"error: {told}\n"
    with alone("other"):
        pass

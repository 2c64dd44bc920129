from __future__ import annotations

import subprocess
import sys

from support import ports

_RESERVE = "import sys; from support.ports import reserve; print(reserve(int(sys.argv[1])), flush=True); sys.stdin.read()"


def test_a_port_of_another_process_is_not_given() -> None:
    port = ports.free_port()
    with subprocess.Popen(
        [sys.executable, "-c", _RESERVE, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        printed, _ = other.communicate()
    assert printed == "False\n"


def test_a_port_is_free_again_when_its_process_has_ended() -> None:
    code = "from support.ports import free_port; print(free_port())"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60
    ).stdout
    assert ports.reserve(int(printed))

"""How the calls of a pod fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finetune_trainer.pod.exit_status import PodFailure


def refusal(call: Callable[[], object]) -> tuple[int, str, str]:
    """The exit code, the reason and the message of the failure of a call, which must fail."""
    with pytest.raises(PodFailure) as caught:
        call()
    return caught.value.exit_code, caught.value.reason, caught.value.message

"""The process that suggests values of trials."""

from __future__ import annotations

import subprocess
import sys

import pytest

from finetune_operator.finetunejob.observe.suggestions import SuggestionError, suggest_values
from finetune_operator.finetunejob.sweep.sampler import suggest

REQUEST = {
    "distributions": {"training.learningRate": {"type": "Float", "low": 1e-5, "high": 1e-3, "log": True}},
    "trials": [],
    "startup_trials": 3,
    "seeds": {"1": 7},
}


async def test_a_process_answers_as_the_sampler_does() -> None:
    assert await suggest_values(REQUEST) == suggest(REQUEST)


async def test_its_error_is_reported() -> None:
    with pytest.raises(SuggestionError, match="Optuna failed to suggest values of trials: KeyError: 'seeds'"):
        await suggest_values({"distributions": {}, "trials": []})


def test_the_operator_itself_does_not_import_optuna() -> None:
    code = "import sys, finetune_operator.__main__; print('optuna' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

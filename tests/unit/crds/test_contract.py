"""What pods and the operator say to each other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_crds import contract
from finetune_crds.contract import PodError, PrepResult, TerminationMessage, TrainResult
from finetune_crds.status import SplitCounts

RESULT = TerminationMessage(train=TrainResult(step=3, eval_loss=2.0), checkpoint_step=2)


def test_exit_codes_are_those_that_people_were_told() -> None:
    codes = {name: value for name, value in vars(contract).items() if name.startswith("EXIT_")}
    assert codes == {
        "EXIT_OK": 0,
        "EXIT_RECIPE": 64,
        "EXIT_DATA": 65,
        "EXIT_UNAVAILABLE": 69,
        "EXIT_PREEMPTED": 75,
    }


MESSAGES: dict[str, tuple[TerminationMessage, dict[str, object]]] = {
    "training": (RESULT, {"train": {"step": 3, "evalLoss": 2.0}, "checkpointStep": 2}),
    "preparation": (
        TerminationMessage(
            prep=PrepResult(rows=SplitCounts(train=9), tokens=SplitCounts(), path="/p", version=1)
        ),
        {
            "prep": {
                "rows": {"train": 9, "validation": 0, "test": 0},
                "tokens": {"train": 0, "validation": 0, "test": 0},
                "path": "/p",
                "version": 1,
                "dropped": {},
            }
        },
    ),
    "an error": (
        TerminationMessage(error=PodError(reason="Boom", message="it blew up", rank=3)),
        {"error": {"reason": "Boom", "message": "it blew up", "rank": 3}},
    ),
}


@pytest.mark.parametrize(("message", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_a_message_is_json_and_comes_back(message: TerminationMessage, expected: dict[str, object]) -> None:
    assert json.loads(message.dump()) == expected
    assert TerminationMessage.parse(message.dump()) == message


@given(st.text(max_size=2048))
def test_a_message_always_fits_and_can_always_be_read(text: str) -> None:
    message = TerminationMessage(
        error=PodError(reason="R" * 64, message=text, rank=4095), checkpoint_step=10**9
    )
    dumped = message.dump()
    assert len(dumped.encode()) <= contract.TERMINATION_MAX_BYTES
    read = TerminationMessage.parse(dumped)
    assert read is not None
    assert read.error is not None
    assert text.startswith(read.error.message)
    assert read.checkpoint_step == 10**9


def test_a_long_result_does_without_what_only_informs() -> None:
    commit = "a" * 40
    sets = [{"name": f"s{number}" * 16, "examples": 10**9, "revision": commit} for number in range(8)]
    sources = [{"name": f"s{number:03}" * 8, "rows": 10**9, "revision": commit} for number in range(16)]
    result = PrepResult.model_validate(
        {
            "rows": {"train": 10**9},
            "tokens": {"train": 10**12},
            "path": "s3://" + "p" * 1000,
            "version": 7,
            "evaluationSets": sets,
            "sources": sources,
            "dropped": {"notNull": 10**9},
            "columns": {"type": "PromptResponse", "prompt": "q" * 253, "response": "r" * 253},
        }
    )
    dumped = TerminationMessage(prep=result).dump()
    assert len(dumped.encode()) <= contract.TERMINATION_MAX_BYTES
    read = TerminationMessage.parse(dumped)
    assert read is not None
    assert read.prep == result.model_copy(update={"evaluation_sets": None})


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u4e2d", "\U0001f600", "\n", '"', "\x00"])
def test_a_long_message_fits_in_every_script(character: str) -> None:
    dumped = TerminationMessage(error=PodError(reason="Boom", message=character * 2048)).dump()
    read = TerminationMessage.parse(dumped)
    assert len(dumped.encode()) <= contract.TERMINATION_MAX_BYTES
    assert read is not None
    assert read.error is not None
    assert len(read.error.message) >= 500


_PREPARED = '{"prep": {"rows": {}, "tokens": {}, "path": "/p", "version": 1, "dropped": {}}}'

NO_MESSAGES = {
    "nothing": None,
    "empty": "",
    "the end of a log": "Traceback (most recent call last):\n  ...\nKeyError: 'a'",
    "JSON of something else": '{"level": "info", "message": "done"}',
    "a list": "[1, 2]",
    "a number": "3",
    "a message that was cut": RESULT.dump()[:-5],
    "a step without a name": _PREPARED.replace('"dropped": {}', '"dropped": {"": 1}'),
    "fewer than no rows dropped": _PREPARED.replace('"dropped": {}', '"dropped": {"limit": -1}'),
    "a result with a field missing": '{"prep": {"path": "/p"}}',
}


@pytest.mark.parametrize("text", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_log_text_is_no_message(text: str | None) -> None:
    assert TerminationMessage.parse(text) is None


def test_a_result_whose_steps_have_names_is_one() -> None:
    assert TerminationMessage.parse(_PREPARED) is not None


def test_fields_of_a_later_version_are_tolerated() -> None:
    assert TerminationMessage.parse('{"train": {"step": 3, "later": 1}, "more": 2}') == TerminationMessage(
        train=TrainResult(step=3)
    )


def test_each_job_has_its_own_folder_of_checkpoints() -> None:
    first = contract.job_folder("s3://b/c/", namespace="team", name="tune", uid="0123456789")
    assert first == "s3://b/c/team-tune-01234567"
    assert contract.checkpoint_uri(first, 40) == "s3://b/c/team-tune-01234567/step-00000040"

"""The lines of the operator's log."""

from __future__ import annotations

import inspect
import json
import logging
import re
from importlib import import_module

import pytest

from finetune_operator.log_setup import configure_logging
from finetune_operator.notifications.sender import AUDIT_LOGGER
from finetune_operator.settings import Settings

pytestmark = pytest.mark.usefixtures("restored_loggers")
LOGGER = "finetune_operator.controller.status"


def test_a_line_of_the_log_names_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings())
    logging.getLogger(LOGGER).warning("demo/nobase is %s", "Failed")
    line = capsys.readouterr().err
    assert re.sub(r"^\[[-:, 0-9]+\]", "[TIME]", line) == f"[TIME] {LOGGER} [WARNING] demo/nobase is Failed\n"


def test_a_line_of_the_log_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json"))
    logging.getLogger(LOGGER).warning("demo/nobase is %s", "Failed")
    line = json.loads(capsys.readouterr().err)
    del line["timestamp"]
    assert line == {"message": "demo/nobase is Failed", "severity": "warn"}


@pytest.mark.parametrize("log_level", ["DEBUG", "INFO", "WARNING", "ERROR"])
def test_a_line_about_a_move_is_written_at_each_level(
    log_level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(Settings(log_format="json", log_level=log_level))
    logging.getLogger(AUDIT_LOGGER).info("a move")
    logging.getLogger(LOGGER).info("another line")
    messages = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert messages == (["a move", "another line"] if log_level in ("DEBUG", "INFO") else ["a move"])


@pytest.mark.parametrize(
    ("log_level", "severities"), [("INFO", ["info", "warn", "error", "error"]), ("ERROR", ["error", "error"])]
)
def test_a_request_that_kopf_repeats_is_no_error(
    log_level: str, severities: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "failed; will retry: " in inspect.getsource(import_module("kopf._cogs.clients.api"))
    configure_logging(Settings(log_format="json", log_level=log_level))
    kopf_log = logging.getLogger("kopf._cogs.clients.watching")
    for line in (
        "Request attempt #1/9 failed; will retry: GET /apis -> APITooManyRequestsError('storage is (re)initializing')",
        "Request attempt #1/9 failed; will retry: GET /apis -> APIServerError('')",
        "Request attempt #9/9 failed; escalating: GET /apis -> APITooManyRequestsError('')",
        "Watching failed",
    ):
        kopf_log.error(line)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["severity"] for line in lines] == severities

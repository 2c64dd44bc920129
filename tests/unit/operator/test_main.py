"""The lines of the operator's log, and how its process starts."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from finetune_operator.__main__ import configure_logging, main
from finetune_operator.notifications.sender import AUDIT_LOGGER
from finetune_operator.settings import Settings

LOGGER = "finetune_operator.controller.status"
CHATTY = ("kopf.objects", "aiohttp.access", "urllib3")


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Put the handlers and levels of the loggers back."""
    root, asyncio_logger = logging.getLogger(), logging.getLogger("asyncio")
    handlers, asyncio_handlers = root.handlers[:], asyncio_logger.handlers[:]
    levels = {name: logging.getLogger(name).level for name in (None, AUDIT_LOGGER, *CHATTY)}
    propagates = asyncio_logger.propagate
    yield
    root.handlers[:], asyncio_logger.handlers[:] = handlers, asyncio_handlers
    asyncio_logger.propagate = propagates
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


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


def test_an_unknown_option_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune-operator", "--poll"])
    assert (main(), capsys.readouterr().err) == (
        64,
        "finetune-operator: unknown option --poll: run `finetune-operator --help` for the options\n",
    )


def test_without_a_cluster_the_process_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    path.write_text("apiVersion: v1\nkind: Config\n")
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.setattr(sys, "argv", ["finetune-operator", "--metrics-port", "0"])
    assert (main(), capsys.readouterr().err) == (
        64,
        "finetune-operator: no cluster is configured: run the operator in a pod, or set KUBECONFIG (Invalid kube-config file. Expected key "
        f"current-context in {path})\n",
    )


def test_help_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune-operator", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: finetune-operator")

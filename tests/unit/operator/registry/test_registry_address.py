"""Addresses of servers: which ones mean the same, and those that are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.text import normalize_address

WRITTEN = {
    "http://mlflow:5000": "http://mlflow:5000",
    " http://MLflow:5000/ ": "http://mlflow:5000",
    "https://Mlflow/Path/": "https://mlflow/Path",
    "https://mlflow:443": "https://mlflow",
    "http://mlflow:80/path": "http://mlflow/path",
    "https://[::1]:443": "https://[::1]",
    "https://mlflow:80": "https://mlflow:80",
    "http://mlflow:443": "http://mlflow:443",
    "http://mlflow:8080": "http://mlflow:8080",
    "databricks-uc": "databricks-uc",
    "": "",
    " http://[x ": "http://[x",
    "http://mlflow:port": "http://mlflow:port",
    "//[": "//[",
}


@pytest.mark.parametrize(("written", "expected"), WRITTEN.items())
def test_the_address_as_everybody_would_write_it(written: str, expected: str) -> None:
    assert normalize_address(written) == expected


ASKED: dict[str, Callable[[str], object]] = {
    "a model": lambda uri: MlflowRegistry(uri, uri).model("m"),
    "a version": lambda uri: MlflowRegistry(uri, uri).version("m", "1"),
    "to set an alias": lambda uri: MlflowRegistry(uri, uri).set_alias("m", "a", "1"),
    "a run": lambda uri: Server(uri, uri).find_run("uid", "experiment"),
}


@pytest.mark.parametrize("uri", ["http://[x", "http://mlflow:port"])
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_what_is_no_address(uri: str, ask: Callable[[str], object]) -> None:
    with pytest.raises(ExternalError) as raised:
        ask(uri)
    problem = raised.value.problem
    assert (problem.reason, problem.message) == (
        ConditionReason.MLFLOW_ERROR,
        f"{uri} is not a valid address of an MLflow server: use an address like http://mlflow:5000",
    )

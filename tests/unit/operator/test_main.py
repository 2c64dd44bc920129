"""How the operator's process starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from finetune_operator.__main__ import main

pytestmark = pytest.mark.usefixtures("restored_loggers")


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

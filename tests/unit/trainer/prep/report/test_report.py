"""The report of a preparation: what it shows, and what becomes of one that cannot be written or uploaded."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.prep.report import report
from finetune_trainer.prep.report.lengths import EDGES
from finetune_trainer.prep.steps.near import Pair

if TYPE_CHECKING:
    from pathlib import Path

    from support.training import Mlflow

AT_16 = [7 if edge == 16 else 0 for edge in EDGES]
FACTS = report.Facts(
    title="team/support-chat",
    source="s3://corpora/support at version 3",
    output="s3://splits/support",
    examples=20,
    dropped={"notNull": 4, "dedupe": 1, "near": 2, "maxTokens": 0},
    rows={"train": 12, "validation": 1, "test": 0},
    tokens={"train": 3400, "validation": 20, "test": 0},
    lengths=([10 * number for number in AT_16], AT_16),
    clusters={2: 2},
    crowded="60,000 examples share part of their text",
    pairs=[Pair("b" * 32, "c" * 32, 0.8125, "a" * 32, "=text, with a comma", "another\nline")],
    warnings=["dedupe.near drops 2 of 3 examples"],
    samples={"notNull": ["", "<script>alert(1)</script>"], "near": ["one\n\nlike:\nanother"]},
)
PNG = b"\x89PNG\r\n"


def test_the_funnel_ends_with_what_is_in_the_table() -> None:
    assert FACTS.funnel == [
        ("source", 0, 20),
        ("notNull", 4, 16),
        ("dedupe", 1, 15),
        ("near", 2, 13),
        ("maxTokens", 0, 13),
    ]


def test_the_page_has_its_pictures_in_it_and_shows_text_as_text(tmp_path: Path) -> None:
    report.write(FACTS, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "funnel.png",
        "tokens.png",
        "near-duplicates.png",
        "near-duplicates.csv",
    }
    assert {path.read_bytes()[:6] for path in tmp_path.glob("*.png")} == {PNG}
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "<pre>(empty)</pre>" in page
    assert "<p>60,000 examples share part of their text.</p>" in page
    assert "<p><strong>Warning:</strong> dedupe.near drops 2 of 3 examples.</p>" in page
    assert "(pairs: 1)" in page
    assert "http" not in page


def test_the_pairs_are_a_table(tmp_path: Path) -> None:
    report.write(FACTS, tmp_path)
    with (tmp_path / report.PAIRS).open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {
                "removed": "b" * 32,
                "closest": "c" * 32,
                "similarity": "0.8125",
                "kept": "a" * 32,
                "text": "=text, with a comma",
                "closest text": "another\nline",
            }
        ]
    (tmp_path / "none").mkdir()
    report.write(replace(FACTS, pairs=[]), tmp_path / "none")
    assert not (tmp_path / "none" / report.PAIRS).exists()


@pytest.mark.parametrize(
    ("changes", "pictures"),
    [
        ({"clusters": None}, {"funnel.png", "tokens.png"}),
        ({"clusters": {}}, {"funnel.png", "tokens.png"}),
        (
            {"examples": 0, "rows": {}, "tokens": {}, "lengths": ([0] * len(EDGES),) * 2, "samples": {}},
            {"funnel.png", "tokens.png", "near-duplicates.png"},
        ),
    ],
    ids=["near duplicates were not searched", "there are none", "nothing is left"],
)
def test_a_report_of_less(tmp_path: Path, changes: dict[str, Any], pictures: set[str]) -> None:
    report.write(replace(FACTS, **changes), tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == pictures


def test_it_is_in_the_runs_artifacts(tmp_path: Path, mlflow: Mlflow) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    with Tracker(mlflow.run_id, connect=mlflow.client) as tracker:
        report.publish(FACTS, tracker=tracker, folder=folder)
    artifacts = {file.path for file in mlflow.client().list_artifacts(mlflow.run_id, "preparation")}
    assert artifacts == {
        f"preparation/{name}"
        for name in ("report.html", "funnel.png", "tokens.png", "near-duplicates.png", "near-duplicates.csv")
    }


def test_what_cannot_be_written_or_uploaded_is_told_and_stops_nothing(
    tmp_path: Path, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed:
        def log_artifact(self, *_: Any, **__: Any) -> None:
            raise PermissionError("the store is closed")

        def __getattr__(self, name: str) -> Any:
            return getattr(mlflow.client(), name)

    with Tracker(mlflow.run_id, connect=Closed) as tracker:
        report.publish(FACTS, tracker=tracker, folder=tmp_path / "missing")
        report.publish(FACTS, tracker=tracker, folder=tmp_path)
        tracker.tags({"later": "yes"})
    assert mlflow.client().get_run(mlflow.run_id).data.tags["later"] == "yes"
    output = capsys.readouterr().out
    assert "cannot write the report of the preparation: " in output
    assert "preparation was not uploaded to the run's artifacts: the store is closed" in output

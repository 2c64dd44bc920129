"""Which tests run for a mutant, and in which order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from long.mutants.coverage import Coverage, is_mirror, limit_tests, order_tests, read_coverage
from long.mutants.listing import Mutant
from long.mutants.probes import insert_probes

SECONDS = {
    "tests/unit/trainer/prep/steps/test_steps.py::test_slow": 9.0,
    "tests/unit/trainer/prep/steps/test_steps.py::test_quick": 2.0,
    "tests/unit/trainer/prep/steps/test_near.py::test_near": 5.0,
    "tests/unit/trainer/test_plan.py::test_plan": 1.0,
}


def test_a_recording_names_the_tests_of_each_mutant(tmp_path: Path) -> None:
    for name in ("hits", "fixtures", "tests"):
        (tmp_path / name).mkdir()
    outcomes = {"crds::a": "passed", "trainer::b": "passed", "trainer::c": "failed", "trainer::d": "skipped"}
    results = {
        f"tests/unit/{name}": {"seconds": 1.5, "outcome": outcome} for name, outcome in outcomes.items()
    }
    results["tests/unit/crds/x.py::e"] = {"seconds": 0.5, "outcome": "passed"}
    (tmp_path / "tests" / "1.json").write_text(json.dumps(results), encoding="utf-8")
    users = {"fixture x::run": ["tests/unit/trainer::b", "tests/unit/trainer::c"]}
    (tmp_path / "fixtures" / "1.json").write_text(json.dumps(users), encoding="utf-8")
    (tmp_path / "hits" / "m001").write_text("fixture x::run\ntests/unit/trainer::d\n", encoding="utf-8")
    (tmp_path / "hits" / "m002").write_text("import\ntests/unit/crds::a\n", encoding="utf-8")
    modules = {"m001": "finetune_trainer.plan", "m002": "finetune_crds.schema", "m003": "finetune_crds.base"}
    mutants = [Mutant(name, f"{module}:f", "add-one", "1") for name, module in modules.items()]
    assert read_coverage(tmp_path, mutants) == Coverage(
        tests={
            "m001": frozenset({"tests/unit/trainer::b"}),
            "m002": frozenset({"tests/unit/crds::a", "tests/unit/crds/x.py::e"}),
            "m003": frozenset(),
        },
        seconds={"tests/unit/crds::a": 1.5, "tests/unit/trainer::b": 1.5, "tests/unit/crds/x.py::e": 0.5},
        failed=frozenset({"tests/unit/trainer::c"}),
    )


def test_the_last_killer_comes_first_then_the_modules_own_file_and_then_the_shortest() -> None:
    slow, quick, near, plan = SECONDS
    mutant = Mutant("m001", "finetune_trainer.prep.steps.steps:f", "add-one", "1")
    assert order_tests(mutant, SECONDS, SECONDS) == [quick, slow, plan, near]
    assert order_tests(replace(mutant, by=near), SECONDS, SECONDS) == [near, quick, slow, plan]


def test_tests_that_exceed_the_limit_are_left_out() -> None:
    slow, quick, near, plan = SECONDS
    assert limit_tests([slow, quick, near, plan], SECONDS, 12) == [slow, quick, plan]


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("test_attempt", "finetune_operator.finetunejob.decide.attempt"),
        ("test_near", "finetune_trainer.prep.steps.near"),
        ("test_main", "finetune_trainer.prep.__main__"),
        ("test_download_cache", "finetune_trainer.models.download"),
    ],
)
def test_a_file_of_tests_mirrors_a_module(file: str, module: str) -> None:
    assert is_mirror(f"tests/unit/{file}.py::test_x", module)
    assert not is_mirror(f"tests/unit/{file}.py::test_x", "finetune_crds.schema")


PROBED = '''\
"""A module."""

from __future__ import annotations


def plain(a: int) -> int:
    """A function."""
    return a


def short(): return 1


def outer() -> int:
    @staticmethod
    def inner() -> int:
        if True:
            return plain(2)
    return inner()
'''


def test_a_probe_notes_the_test_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hits").mkdir()
    names = {"m001": "plain", "m002": "short", "m003": "outer", "m004": "outer.inner", "m005": "plain"}
    module: dict[str, int] = {"__name__": "probed"}  # type: ignore[dict-item]
    exec(insert_probes(PROBED, names, str(tmp_path)), module)  # noqa: S102 - the source is above
    monkeypatch.setenv("MUTANTS_CURRENT_TEST", str(tmp_path / "current"))
    for test, call in (("one", "plain(3)"), ("two", "short() + short()"), ("three", "outer()")):
        (tmp_path / "new").write_text(test, encoding="utf-8")
        (tmp_path / "new").replace(tmp_path / "current")
        eval(call, module)  # noqa: S307 - the calls are above
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "hits").iterdir()} == {
        "m001": "one\nthree\n",
        "m002": "two\n",
        "m003": "three\n",
        "m004": "three\n",
        "m005": "one\nthree\n",
    }

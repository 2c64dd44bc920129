"""The workflows of GitHub run targets of the Makefile that exist, and every tier of `make test`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load_jobs(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return jobs


def test_every_tier_is_a_job() -> None:
    """`make test` and the workflow run the same tiers in the same order."""
    prerequisites = re.search(r"^test: (.*?) ##", MAKEFILE, re.MULTILINE)
    assert prerequisites
    matrix = load_jobs(ROOT / ".github" / "workflows" / "test.yml")["test"]["strategy"]["matrix"]
    assert matrix == {"tier": prerequisites[1].split()}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_targets_exist(workflow: Path) -> None:
    commands = [step.get("run", "") for job in load_jobs(workflow).values() for step in job["steps"]]
    targets = {target for command in commands for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert targets <= {*re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE)}


def test_the_registry_is_written_once() -> None:
    """Whoever moves the published chart changes one line."""
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    assert re.findall(r"vars\.REGISTRY\b", release) == ["vars.REGISTRY"]

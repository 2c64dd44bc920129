"""Every link of README.md and of the documentation leads somewhere, on the site and in the repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from posixpath import normpath

import pytest
import yaml

from support.documents import PAGES, ROOT, Page

BY_NAME = {page.name: page for page in PAGES}


def dead(page: Page) -> Iterator[str]:
    """Each dead link of a page, with its line."""
    for line, target in page.links():
        if wrong := problem(page, target):
            yield f"{page.name}:{line}: {target} {wrong}"


def problem(page: Page, target: str) -> str | None:
    """What is wrong with a link; None when nothing is."""
    if target.startswith("https://"):
        return None
    path, _, fragment = target.partition("#")
    name = normpath(str(PurePosixPath(page.name).parent / path)) if path else page.name
    if not (ROOT / name).exists():
        return "does not exist"
    if page.name.startswith("docs/") and not name.startswith("docs/"):
        return "is not on the site: name the file by its path instead"
    if fragment and (name not in BY_NAME or fragment not in BY_NAME[name].anchors):
        return "has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Page) -> None:
    assert [*dead(page)] == []


@pytest.mark.parametrize(
    ("page", "target", "said"),
    [
        ("docs/gitops.md", "finetunejobs/index.md", "does not exist"),
        ("docs/gitops.md", "finetunejob/index.md#phase", "has no such heading"),
        ("docs/gitops.md", "#flux-cd", "has no such heading"),
        (
            "docs/gitops.md",
            "../crds/samples/lora.yaml",
            "is not on the site: name the file by its path instead",
        ),
        ("README.md", "crds/samples/loras.yaml", "does not exist"),
        ("README.md", "docs/images/overview.png", "does not exist"),
    ],
)
def test_a_dead_link_is_found(page: str, target: str, said: str) -> None:
    assert problem(BY_NAME[page], target) == said


def test_every_page_is_in_the_navigation_once() -> None:
    def leaves(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield f"docs/{node}"
        elif isinstance(node, list):
            for item in node:
                yield from leaves(item)
        elif isinstance(node, dict):
            for item in node.values():
                yield from leaves(item)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(leaves(navigation)) == sorted(page.name for page in PAGES if page.name != "README.md")


def test_the_readme_is_a_door() -> None:
    assert len(BY_NAME["README.md"].text.splitlines()) <= 150

"""The chart's README.md, which helm-docs makes from the comments in values.yaml."""

from __future__ import annotations

import re

from cluster import binaries
from cluster.paths import REPOSITORY, ClusterError
from cluster.process import run

CHARTS = REPOSITORY / "charts"
FILE = CHARTS / "finetune-operator" / "README.md"


def text() -> str:
    """What the README should be.

    Raises:
        ClusterError: a value has no comment.
    """
    options = ("--dry-run", "--sort-values-order", "file", "--log-level", "warning")
    readme = run(str(binaries.path("helm-docs")), "--chart-search-root", str(CHARTS), *options)
    undescribed = re.findall(r"^\| (\S+) \|.*\|  \|$", readme, re.MULTILINE)
    if undescribed:
        raise ClusterError(f"values.yaml has no comment `# -- ...` at {', '.join(undescribed)}")
    return readme.strip() + "\n"


def check() -> None:
    """Compare it with the file.

    Raises:
        ClusterError: it is stale.
    """
    if not FILE.exists() or FILE.read_text(encoding="utf-8") != text():
        raise ClusterError(f"{FILE.relative_to(REPOSITORY)} is stale: run `make generate`")


def write() -> None:
    """Write the file."""
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(REPOSITORY)}")

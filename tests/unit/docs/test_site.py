"""The site as `mkdocs.yml` has it built: dead links end the build, and a page loads nothing from other servers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from support.documents import PAGES, ROOT, Page

SITE = "build/site"


def build(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Build a small site with the settings of the documentation, as `make docs` does."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings | {"nav": [*pages]}), encoding="utf-8")
    for name, text in pages.items():
        path = folder / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_page_loads_nothing_from_other_servers(tmp_path: Path) -> None:
    page = "# A page\n\n```yaml\na: 1\n```\n\n[Another](https://example.com)\n"
    done = build(tmp_path, {"index.md": page})
    assert done.returncode == 0, done.stdout + done.stderr
    html = (tmp_path / SITE / "index.html").read_text(encoding="utf-8")
    styles = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / SITE).rglob("*.css"))
    loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', html)
    loaded += re.findall(r'<link[^>]* href="([^"]+)"', html)
    loaded += re.findall(r"url\(['\"]?([^)'\"]+)", styles) + re.findall(r"@import ['\"]([^'\"]+)", styles)
    assert any(name.endswith(".css") for name in loaded)
    assert [name for name in loaded if re.match(r"(https?:)?//", name)] == []


def test_no_picture_comes_from_another_server() -> None:
    assert [*pictures()]
    assert [target for _, target in pictures() if ":" in target] == []


def pictures() -> Iterator[tuple[Page, str]]:
    """Each picture of a page: in Markdown, and in HTML with one for narrow screens."""
    for page in PAGES:
        for found in re.findall(r'!\[[^\]]*\]\(([^)]+)\)|\s(?:src|srcset)="([^"]+)"', page.prose):
            yield page, "".join(found)


def test_every_picture_is_there() -> None:
    assert [
        target for page, target in pictures() if not (ROOT / page.name).parent.joinpath(target).exists()
    ] == []


def in_braces(page: Page) -> Iterator[str]:
    """Cells of tables with braces outside of inline code: where a cell ends in them, the site takes them for attributes."""
    for number, line in enumerate(page.prose.splitlines(), start=1):
        if line.startswith("|"):
            cells = re.sub(r"`[^`]*`", "", line).split("|")
            yield from (f"{page.name}:{number}: {cell.strip()}" for cell in cells if re.search("[{}]", cell))


def test_no_cell_of_a_table_has_braces_outside_of_code() -> None:
    assert [found for page in PAGES for found in in_braces(page)] == []


def test_a_cell_that_ends_in_braces_loses_them(tmp_path: Path) -> None:
    page = "# A page\n\n| Old | New |\n|---|---|\n| rollbackTo: {version} | `{type}` |\n"
    assert build(tmp_path, {"index.md": page}).returncode == 0
    html = (tmp_path / SITE / "index.html").read_text(encoding="utf-8")
    assert ("{version}" in html, "{type}" in html) == (False, True)


def test_dead_links_and_anchors_end_the_build(tmp_path: Path) -> None:
    done = build(tmp_path, {"index.md": "# A page\n\n[Nowhere](none.md), [nor here](#none)\n"})
    assert done.returncode == 1
    assert "page does not exist" in done.stdout + done.stderr
    assert "anchor does not exist" in done.stdout + done.stderr

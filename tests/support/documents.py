"""README.md and the pages of the documentation, as the tests see them: links, headings, blocks of code, inline code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from finetune_crds.reference import anchor

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"(?<!`)`(?P<code>[^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its title, its text, and where it stands."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page of Markdown, named by its path in the repository."""

    name: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.name).read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text with its blocks of code blanked out, line for line."""
        return _FENCE.sub(lambda match: re.sub(r"[^\n]+", "", match[0]), self.text)

    @property
    def is_generated(self) -> bool:
        return self.text.startswith("<!-- Generated")

    @property
    def anchors(self) -> set[str]:
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {*(anchor(heading.replace("`", "")) for heading in headings), *self.ids}

    @property
    def ids(self) -> list[str]:
        """The anchors that are written out, in order."""
        return re.findall(r'<a id="([^"]+)"></a>', self.prose)

    def links(self) -> Iterator[tuple[int, str]]:
        """Line and target of each link and picture."""
        for match in _LINK.finditer(self.prose):
            yield self._line(match.start()), match["target"]

    def codes(self) -> Iterator[tuple[int, str]]:
        """Line and text of each piece of inline code."""
        for match in _CODE.finditer(self.prose):
            yield self._line(match.start()), match["code"]

    def blocks(self, language: str) -> Iterator[Block]:
        for match in _FENCE.finditer(self.text):
            block_language, _, attributes = match["info"].partition(" ")
            title = re.search(r'title="([^"]+)"', attributes)
            if block_language == language:
                body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
                yield Block(
                    self.name, self._line(match.start()), block_language, title[1] if title else "", body
                )

    def _line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1


def pages() -> list[Page]:
    """README.md and every page of the documentation."""
    paths = (path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return [Page(name) for name in ("README.md", *sorted(paths))]


PAGES = pages()


def blocks(language: str) -> list[Block]:
    """Every block of a language."""
    return [block for page in PAGES for block in page.blocks(language)]

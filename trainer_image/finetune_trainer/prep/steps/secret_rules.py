"""The rules of gitleaks: what keys and tokens of some 200 services look like.

They are data, in `gitleaks.toml` (MIT, see gitleaks.LICENSE). Their expressions are of RE2, whose time is linear in the text. A rule
applies to a text that has one of its keywords. A match is a secret if it has the rule's entropy and no allowlist allows it.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import re2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Span = tuple[int, int]

# Shorter keywords are in most texts: `build_hint` uses the expressions of their rules instead.
_MIN_KEYWORD = 4


class Allowlist(NamedTuple):
    """Matches of a rule that are not secrets.

    target: what the expressions are searched in: the secret, the whole match, or its line.
    needs_all: whether both an expression and a stop word must match, in a list that has both.
    """

    target: str
    expressions: tuple[Any, ...]
    stopwords: tuple[str, ...]
    needs_all: bool

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Allowlist | None:
        """Parse an allowlist; None for one that requires a path, which texts do not have."""
        needs_all = entry.get("condition", "OR").upper() == "AND"
        if needs_all and entry.get("paths"):
            return None
        expressions = tuple(map(re2.compile, entry.get("regexes", ())))
        stopwords = tuple(word.lower() for word in entry.get("stopwords", ()))
        return cls(entry.get("regexTarget", "secret"), expressions, stopwords, needs_all)

    def allows(self, secret: str, match: str, line: str) -> bool:
        """Return whether a match is not a secret."""
        target = {"match": match, "line": line}.get(self.target, secret)
        has_expression = any(expression.search(target) for expression in self.expressions)
        has_stopword = any(word in secret.lower() for word in self.stopwords)
        if self.needs_all and self.expressions and self.stopwords:
            return has_expression and has_stopword
        return has_expression or has_stopword


class SecretRule(NamedTuple):
    """The pattern of a service's secrets.

    group: the group with the secret; 0: the first group that matches, or the whole match if no group matches.
    entropy: minimum entropy of a secret, in bits per character.
    """

    name: str
    expression: Any
    keywords: tuple[str, ...]
    group: int
    entropy: float
    allowlists: tuple[Allowlist, ...]

    def find(self, text: str) -> Iterator[Span]:
        """Yield the positions of secrets in a text."""
        for match in self.expression.finditer(text):
            groups = range(1, self.expression.groups + 1)
            group = self.group or next((index for index in groups if match.group(index)), 0)
            secret = match.group(group)
            line = _find_line(text, *match.span())
            if secret and entropy(secret) >= self.entropy and not self._allows(secret, match.group(), line):
                yield match.span(group)

    def _allows(self, secret: str, match: str, line: str) -> bool:
        return any(allowlist.allows(secret, match, line) for allowlist in self.allowlists)


def find(text: str) -> Iterator[Span]:
    """Yield the positions of secrets in a text, by all rules. Spans may overlap."""
    keywords, rules_by_keyword = _index_keywords()
    # NB: one pass for all keywords; a search for each takes 40 times as long.
    keyword_indices = keywords.Match(text.lower()) or ()
    rule_indices = {index for keyword in keyword_indices for index in rules_by_keyword[keyword]}
    for index in rule_indices:
        yield from _load_rules()[index].find(text)


def build_hint() -> str:
    """Return an expression of RE2; a text without a match has no secret."""
    keywords = {
        keyword for rule in _load_rules() for keyword in rule.keywords if len(keyword) >= _MIN_KEYWORD
    }
    rules_of_short = [
        rule for rule in _load_rules() if any(len(keyword) < _MIN_KEYWORD for keyword in rule.keywords)
    ]
    # The expression of a keyword also finds every keyword that contains it.
    shortest = [
        keyword
        for keyword in sorted(keywords)
        if not any(part != keyword and part in keyword for part in keywords)
    ]
    words = "|".join(map(re2.escape, shortest))
    return "|".join([f"(?i:{words})", *(f"(?:{rule.expression.pattern})" for rule in rules_of_short)])


@cache
def _index_keywords() -> tuple[Any, list[list[int]]]:
    """Return the set of all keywords, whose `Match` returns indices of keywords, and for each keyword the indices of its rules."""
    keywords = sorted({keyword for rule in _load_rules() for keyword in rule.keywords})
    searched = re2.Set.SearchSet()
    for keyword in keywords:
        searched.Add(re2.escape(keyword))
    searched.Compile()
    return searched, [
        [number for number, rule in enumerate(_load_rules()) if keyword in rule.keywords]
        for keyword in keywords
    ]


def entropy(text: str) -> float:
    """Return the Shannon entropy of a text, in bits per character."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _find_line(text: str, begin: int, end: int) -> str:
    """Return the lines that a part of a text is in."""
    after = text.find("\n", end)
    return text[text.rfind("\n", 0, begin) + 1 : after if after >= 0 else len(text)]


@cache
def _load_rules() -> tuple[SecretRule, ...]:
    """Load the rules that apply to text without a path."""
    file = resources.files("finetune_trainer.prep.steps") / "gitleaks.toml"
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    everywhere = [config["allowlist"]]
    rules = []
    for entry in config["rules"]:
        if "regex" not in entry or "path" in entry:
            continue
        parsed = map(Allowlist.parse, [*everywhere, *entry.get("allowlists", ())])
        rules.append(
            SecretRule(
                name=entry["id"],
                expression=re2.compile(entry["regex"]),
                keywords=tuple(keyword.lower() for keyword in entry["keywords"]),
                group=entry.get("secretGroup", 0),
                entropy=entry.get("entropy", 0.0),
                allowlists=tuple(allowlist for allowlist in parsed if allowlist is not None),
            )
        )
    return tuple(rules)

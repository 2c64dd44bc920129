"""`python -m bench.prep.near_duplicates`: how fast near duplicates are removed, and whether they are the right ones.

The corpus is labelled: each text is an original or an edited copy of one. Half of the originals share an instruction, a letter or a
licence with thousands of others.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import accumulate, islice, product
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from bench.trainer import machine

_SYLLABLES = [
    first + last for first, last in product("bdfgklmnprstvz", ("a", "e", "i", "o", "u", "an", "el", "or"))
]
_VOCABULARY = [first + last for first, last in product(_SYLLABLES, _SYLLABLES[:50])]
# The frequencies of words in texts (Zipf's law).
_WEIGHTS = [*accumulate(1 / (rank + 10) for rank in range(len(_VOCABULARY)))]
_ROWS_PER_FILE = 10_000


class Row(NamedTuple):
    """A text, and the id of the text that it is a copy of: its own id for an original."""

    id: str
    text: str
    origin: str


def rows(number: int, seed: int = 7) -> Iterator[Row]:
    """Yield texts; a third are copies, of which one to three words are changed, added or left out."""
    chance = random.Random(seed)  # noqa: S311
    instructions = [words(chance, 200) for _ in range(3)]
    letter, licence = words(chance, 40), words(chance, 60)

    def original(kind: int) -> tuple[list[str], list[str], list[str]]:
        """What comes before a text of its own, that text, and what comes behind it."""
        return (
            ([], words(chance, chance.randint(60, 200)), []),
            (chance.choice(instructions), words(chance, chance.randint(24, 48)), []),
            (letter[:30], words(chance, chance.randint(24, 48)), letter[30:]),
            (licence, words(chance, chance.randint(60, 100)), []),
        )[max(kind - 2, 0) % 4]

    def texts() -> Iterator[Row]:
        kind = 0
        while True:
            kind = (kind + 1) % 6
            before, answer, behind = original(kind)
            name = f"{chance.getrandbits(128):032x}"
            yield Row(name, " ".join([*before, *answer, *behind]), name)
            for _ in range(chance.choice((0, 0, 0, 0, 0, 1, 1, 2))):
                # NB: three words of 24 that change are less than 0.7 alike.
                copy = edited(answer, chance, most=min(3, len(answer) // 24))
                yield Row(f"{chance.getrandbits(128):032x}", " ".join([*before, *copy, *behind]), name)

    return islice(texts(), number)


def words(chance: random.Random, number: int) -> list[str]:
    """Return words as frequent as in texts."""
    return chance.choices(_VOCABULARY, cum_weights=_WEIGHTS, k=number)


def edited(text: list[str], chance: random.Random, most: int) -> list[str]:
    """Return a copy with one to `most` words changed, added or left out."""
    copy = list(text)
    for _ in range(chance.randint(1, most)):
        place = chance.randrange(len(copy))
        change = chance.choice(("change", "add", "leave out"))
        copy[place : place + (change != "add")] = [] if change == "leave out" else ["other"]
    return copy


class Score(NamedTuple):
    """precision: of the removed texts, the share that are alike a text of the same original. recall: of the copies, the share removed."""

    precision: float
    recall: float


def score(corpus: Iterable[Row], pairs: Iterable[tuple[str, str]]) -> Score:
    """Return how right the pairs of a removed text and the one that is most similar to it are."""
    origins = {row.id: row.origin for row in corpus}
    alike = [origins[removed] == origins[closest] for removed, closest in pairs]
    copies = len(origins) - len(set(origins.values()))
    return Score(sum(alike) / max(len(alike), 1), sum(alike) / max(copies, 1))


def main(arguments: list[str]) -> int:
    """Measure, and print a line a round."""
    from bench.prep.__main__ import JARS
    from finetune_crds.prepare import NearDedupe
    from finetune_crds.spark import Spark
    from finetune_trainer.prep.spark import session
    from finetune_trainer.prep.steps import near

    parser = argparse.ArgumentParser(
        prog="bench.prep.near_duplicates", description="Remove near duplicates from a labelled corpus."
    )
    parser.add_argument("--rows", type=int, default=200_000, help="texts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    options = parser.parse_args(arguments)
    described = machine.describe()
    print(f"{described['cpu']}, {described['cores']} cores, load {described['load']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-near-") as folder:
        corpus = [*rows(options.rows)]
        for part in range(0, len(corpus), _ROWS_PER_FILE):
            several = corpus[part : part + _ROWS_PER_FILE]
            table = pa.table({"id": [row.id for row in several], near.TEXT: [row.text for row in several]})
            pq.write_table(table, Path(folder, f"{part:09}.parquet"))
        os.environ.setdefault(session.ENV_JARS, str(JARS))
        spark = session.start(Spark())
        near.MAX_PAIRS = options.rows
        for _ in range(options.rounds):
            began, used = time.monotonic(), _cpu_seconds()
            with ExitStack() as caches:
                deduplicated, clusters = near.remove_near_duplicates(
                    spark.read.parquet(folder), NearDedupe(), caches
                )
                kept_rows = deduplicated.count()
            seconds, used = time.monotonic() - began, _cpu_seconds() - used
            right = score(corpus, ((pair.removed, pair.closest) for pair in clusters.pairs))
            print(
                f"{options.rows:,} documents, {options.rows - kept_rows:,} removed in {seconds:.1f} s, {used:.1f} s of CPU: "
                f"{options.rows / used:,.0f} documents a second of CPU, precision {right.precision:.4f}, recall {right.recall:.4f}",
                flush=True,
            )
        spark.stop()
    return 0


def _cpu_seconds() -> float:
    """Return the CPU time of this process, of those that it started and of those that these started.

    NB: a machine that does other work beside the benchmark gives it a part of each second.
    """
    spent = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        times = process.cpu_times()
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

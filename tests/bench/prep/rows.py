"""The corpus: docstrings of this machine's Python, varied until there are enough of them and in no order, and a tokenizer made from them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from demo.scripts import base_model, corpus

_AT_ONCE = 50_000
# A prime: with it, each place of a corpus that is not a multiple of it is taken once.
_STRIDE = 7_368_787


def make(number: int, folder: Path) -> None:
    """Write the corpus to `folder`/corpus and the tokenizer to `folder`/tokenizer.

    A tenth of the rows are exact duplicates, and the others differ from each other.
    """
    answered_rows = [row for row in islice(corpus.rows(corpus.roots()), corpus.ROWS) if row.answer]
    (folder / "corpus").mkdir(parents=True)
    rows = _varied(answered_rows, number)
    for part in range(-(-number // _AT_ONCE)):
        several = [*islice(rows, _AT_ONCE)]
        pq.write_table(pa.Table.from_pylist(several), folder / "corpus" / f"part-{part:05}.parquet")
    base_model.train_tokenizer([row.answer for row in answered_rows]).save_pretrained(folder / "tokenizer")


def _varied(originals: list[corpus.Row], number: int) -> Iterator[dict[str, object]]:
    for place in range(number):
        # NB: neighbors of one module share their words, and a tokenizer that has just seen a word is faster: no real corpus is
        # in such an order.
        at = place * _STRIDE % number
        # The tenth of ten repeats the first of them.
        which = at - 9 if at % 10 == 9 else at
        row, neighbor = (
            originals[which % len(originals)],
            originals[(which * 7 + which // len(originals)) % len(originals)],
        )
        begin = neighbor.answer.partition(".")[0]
        yield {
            "instruction": f"{row.instruction} ({which // len(originals)})",
            "answer": f"{row.answer}\n{begin}." if which >= len(originals) else row.answer,
            "quality": row.quality,
        }

"""The same preparation with datatrove: `python trove.py CORPUS TOKENIZER OUTPUT CORES` writes Parquet files, a folder for each split.

It runs in an environment of its own: see `make bench-prep`. Duplicates are found by a first pass over the rows, as datatrove's
documentation has it. The token ids are counted and not written.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from datatrove.data import Document, DocumentsPipeline
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import ExactDedupFilter, ExactDedupSignature, ExactFindDedups
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import TokensCounter
from datatrove.pipeline.writers import ParquetWriter


def main(corpus: str, tokenizer: str, output: str, cores: int) -> None:
    """Prepare the corpus: sign the rows, find duplicates, and write the others with their number of tokens."""
    scratch = Path(f"{output}-scratch")
    signatures, duplicates = str(scratch / "signatures"), str(scratch / "duplicates")
    config = ExactDedupConfig(content_getter=_plain)

    def rows() -> list[Any]:
        return [ParquetReader(corpus, adapter=_document), LambdaFilter(_is_good)]

    def run(name: str, steps: list[Any], tasks: int) -> None:
        LocalPipelineExecutor(steps, tasks=tasks, workers=cores, logging_dir=str(scratch / name)).run()

    run("sign", [*rows(), ExactDedupSignature(signatures, config, finder_workers=cores)], 4 * cores)
    run("find", [ExactFindDedups(signatures, duplicates, config)], cores)
    counted = [TokensCounter(str(Path(tokenizer, "tokenizer.json"))), LambdaFilter(_is_short), _with_split]
    written = ParquetWriter(output, "${split}/${rank}.parquet", expand_metadata=True)
    run("write", [*rows(), ExactDedupFilter(duplicates, config), *counted, written], 4 * cores)


def _document(_: object, row: dict[str, Any], path: str, place: int | str) -> dict[str, Any]:
    text = (
        f"Question: {row['instruction']}\nAnswer: {row['answer']}"
        if row["instruction"] and row["answer"]
        else ""
    )
    length = len(row["instruction"] or "") + len(row["answer"] or "")
    return {
        "text": text,
        "id": f"{path}/{place}",
        "metadata": {"quality": row["quality"] or 0.0, "characters": length},
    }


def _is_good(document: Document) -> bool:
    metadata = document.metadata
    return bool(metadata["quality"] >= 0.5 and 40 <= metadata["characters"] <= 4000)


def _plain(document: Document) -> str:
    return " ".join(document.text.lower().split())


def _is_short(document: Document) -> bool:
    return bool(document.metadata["token_count"] <= 1024)


def _with_split(documents: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
    for document in documents:
        bucket = int.from_bytes(hashlib.blake2b(_plain(document).encode(), digest_size=4).digest()) % 100
        document.metadata["split"] = "train" if bucket < 90 else "validation" if bucket < 95 else "test"
        yield document


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))

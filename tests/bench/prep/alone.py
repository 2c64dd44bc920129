"""The tokenizer alone, on one core: `python alone.py CORPUS TOKENIZER` prints documents, tokens and seconds as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

_DOCUMENTS = 100_000
_AT_ONCE = 1_000


def main(corpus: str, tokenizer: str) -> None:
    """Encode documents, batch after batch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer.encode_batch_fast
    texts: list[str] = []
    for file in sorted(Path(corpus).glob("*.parquet")):
        table = pq.read_table(file, columns=["instruction", "answer"]).to_pylist()
        texts += [f"Question: {row['instruction']}\nAnswer: {row['answer']}" for row in table]
        if len(texts) >= _DOCUMENTS:
            break
    began, tokens = time.monotonic(), 0
    for start in range(0, len(texts), _AT_ONCE):
        tokens += sum(len(encoding.ids) for encoding in encode(texts[start : start + _AT_ONCE]))
    seconds = time.monotonic() - began
    print(json.dumps({"documents": len(texts), "tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])

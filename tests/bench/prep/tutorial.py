"""The preparation that tutorials show: a Python function a row, an arbitrary duplicate, a split by chance, pandas at the end.

`python tutorial.py CORPUS TOKENIZER OUTPUT JARS` writes a Parquet file for each split.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(corpus: str, tokenizer: str, output: str, jars: str) -> None:
    """Prepare the corpus."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sf
    from pyspark.sql.types import IntegerType

    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.driver.memory", "2g")
        .config("spark.jars", ",".join(map(str, Path(jars).glob("*.jar"))))
        .config("spark.driver.maxResultSize", "0")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    loaded: list[object] = []

    def tokens(text: str) -> int:
        from transformers import AutoTokenizer

        if not loaded:
            loaded.append(AutoTokenizer.from_pretrained(tokenizer))
        return len(loaded[0](text)["input_ids"])  # type: ignore[operator]

    frame = spark.read.parquet(corpus).dropna(subset=["instruction", "answer"])
    frame = frame.where("quality >= 0.5").where("length(instruction) + length(answer) BETWEEN 40 AND 4000")
    frame = frame.dropDuplicates(["instruction", "answer"])
    text = sf.concat(sf.lit("Question: "), "instruction", sf.lit("\nAnswer: "), "answer")
    frame = frame.select(text.alias("text"))
    frame = frame.withColumn("tokens", sf.udf(tokens, IntegerType())("text")).where("tokens <= 1024")
    Path(output).mkdir()
    parts = frame.randomSplit([0.9, 0.05, 0.05], seed=42)
    for name, part in zip(("train", "validation", "test"), parts, strict=True):
        part.toPandas().to_parquet(f"{output}/{name}.parquet")
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`python -m unit.trainer.prep.class_archive`: keeps the classes of Spark as the JVM has them in memory (AppCDS).

Without it, a JVM spends half of the CPU time of its first preparation on classes, which it unpacks, parses and verifies. The archive is for
the JVM, the folders and the jars of its name, which the JVM checks again: if they differ, the JVM reads the jars as usual.
"""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from finetune_trainer.prep.spark import session
from support import quick_session
from support.jars import jars_folder
from support.small_tokenizer import save_tokenizer
from support.spark_jvm import COMPILES_QUICKLY, SUBMIT_OPTIONS, find_archive
from unit.trainer.prep.corpus import STEPS, Asker, write_corpus
from unit.trainer.prep.recipes import prepared

# Steps of which no default preparation has classes.
_OTHER_STEPS = {
    "redact": ["Email"],
    "dedupe": {"near": {}},
    "languages": ["en"],
    "filter": "length(answer) > 2",
}
# Sessions with Hive have its classes besides; their metastore is in this process.
_HIVE = {
    "spark.sql.catalogImplementation": "hive",
    "spark.hadoop.javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
    "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
    "spark.hadoop.hive.metastore.schema.verification": "false",
}


def create() -> None:
    """Create the archive of this environment unless it exists, and remove those of other jars."""
    jars = jars_folder()
    archive = find_archive(jars)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        print(f"== keeping the classes of Spark in {archive}", flush=True)
        for stale in archive.parent.glob("*.jsa"):
            stale.unlink()
        unfinished = archive.with_suffix(".unfinished")
        with tempfile.TemporaryDirectory() as folder:
            _load_classes(Path(folder), jars, unfinished)
        unfinished.rename(archive)


def _load_classes(folder: Path, jars: Path, archive: Path) -> None:
    """Prepare corpora in a JVM that writes its classes to an archive when it ends."""
    tokenizer, corpus = folder / "tokenizer", folder / "corpus"
    save_tokenizer(tokenizer)
    corpus.mkdir()
    write_corpus(corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(session.ENV_JARS, str(jars))
        patch.setenv("JDK_JAVA_OPTIONS", COMPILES_QUICKLY)
        patch.setenv(
            SUBMIT_OPTIONS,
            f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable -Dderby.stream.error.file={folder}/derby.log",
        )
        patch.setattr("tempfile.tempdir", str(folder))
        spark = quick_session.start(settings=_HIVE)
    prepare = Asker(spark, corpus, tokenizer, folder / "table")
    prepare.run = prepared
    source = {"type": "Delta", "path": str(corpus / "delta"), "version": 0}
    prepare(**STEPS, **_OTHER_STEPS, source=source)
    spark.read.json(str(corpus / "lines.jsonl")).count()
    spark.sql("CREATE DATABASE support")
    spark.sql("CREATE TABLE support.rows STORED AS PARQUET AS SELECT id FROM range(3)")
    spark.sql("SELECT * FROM support.rows").collect()
    quick_session.stop(spark)


if __name__ == "__main__":
    create()

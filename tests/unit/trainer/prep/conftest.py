"""One Spark session for all tests of the preparation, and a small tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.spark import Spark
from finetune_trainer.prep.spark import session
from support.jars import jars_folder
from support.small_tokenizer import save_tokenizer
from unit.trainer.prep.corpus import Asker, write_corpus
from unit.trainer.prep.recipes import INTERPRETED, QUICK, QUICK_JVM, Preparer, compiled, prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def jars() -> Path:
    """The folder with the jars of Delta and of stores, fetched if they are not there."""
    return jars_folder()


@pytest.fixture(scope="session")
def spark(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as the prep pod starts it, but that it does not compile plans, see `compiled`, and `worker_daemon` forks its workers."""
    scratch, settings = tmp_path_factory.mktemp("spark"), session.build_settings

    def with_daemon(*arguments: Any, **keywords: Any) -> dict[str, str]:
        return settings(*arguments, **keywords) | {
            "spark.python.daemon.module": "unit.trainer.prep.worker_daemon"
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(session.ENV_JARS, str(jars))
        for name, value in QUICK_JVM.items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", str(scratch))
        patch.setattr(session, "build_settings", with_daemon)
        started = session.start(Spark(driver_memory="1Gi", conf=QUICK))
    for name, value in INTERPRETED.items():
        started.conf.set(name, value)
    yield started
    gateway = started.sparkContext._gateway
    started.stop()
    gateway.shutdown()
    # NB: the JVM ends when its standard input does; what is left of it must not outlive the tests.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)


@pytest.fixture
def compiled_plans(spark: SparkSession) -> Iterator[None]:
    """Lets the session compile plans during a test."""
    with compiled(spark):
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a token before a text, as Llama's does, and has a chat template."""
    folder = tmp_path_factory.mktemp("model") / "tokenizer"
    save_tokenizer(folder)
    return folder


@pytest.fixture
def prepare(spark: SparkSession, tokenizer_folder: Path, tmp_path: Path) -> Preparer:
    """Prepares rows of a test in the session of all tests."""
    return Preparer(spark, tokenizer_folder, tmp_path)


@pytest.fixture
def prepare_and_commit(prepare: Preparer) -> Preparer:
    """The same, and the table is written as a preparation does."""
    prepare.run = prepared
    return prepare


@pytest.fixture
def preparing(spark: SparkSession, tokenizer_folder: Path, tmp_path: Path) -> Callable[[str], Preparer]:
    """Makes what prepares rows for a model with a chat template."""

    def build_preparer(template: str) -> Preparer:
        model = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
        (model / "chat_template.jinja").write_text(template)
        return Preparer(spark, model, tmp_path)

    return build_preparer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


@pytest.fixture
def ask(spark: SparkSession, corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> Asker:
    return Asker(spark, corpus, tokenizer_folder, tmp_path / "table")


@pytest.fixture
def ask_and_commit(ask: Asker) -> Asker:
    """Prepares the corpus, and writes the table as a preparation does."""
    ask.run = prepared
    return ask

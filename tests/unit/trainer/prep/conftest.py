"""One Spark session for all tests of the preparation, and a small tokenizer."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.plan import build_request
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.steps import decontaminate
from support import quick_session, spark_jvm
from support.jars import jars_folder
from support.small_tokenizer import save_tokenizer
from unit.trainer.prep.corpus import Asker, write_corpus
from unit.trainer.prep.recipes import Compared, Preparer, prepared, recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from unit.trainer.prep.recipes import Comparing, Json


@pytest.fixture(scope="session")
def jars() -> Path:
    """The folder with the jars of Delta and of stores, fetched if they are not there."""
    return jars_folder()


@pytest.fixture(scope="session")
def spark(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(session.ENV_JARS, str(jars))
        for name, value in spark_jvm.build_environment().items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("spark")))
        session_of_tests = quick_session.start()
    yield session_of_tests
    quick_session.stop(session_of_tests)


@pytest.fixture
def compiled_plans(spark: SparkSession) -> Iterator[None]:
    """Lets the session compile plans during a test."""
    with quick_session.compiled(spark):
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


@pytest.fixture
def compare(spark: SparkSession, tmp_path: Path) -> Comparing:
    """Compares texts, by id, with evaluation sets as a preparation with these `decontaminate.sources` does."""

    def run(sources: list[Json], texts: dict[str, str]) -> Compared:
        request = build_request(recipe(decontaminate={"sources": sources}))
        examples = spark.createDataFrame([*texts.items()], f"id string, {decontaminate.TEXT} string")
        with spark_errors.translate_errors(request), ExitStack() as kept_frames:
            sets = decontaminate.read(spark, request.evaluation, tmp_path)
            clean, shared = decontaminate.remove_contaminated(examples, sets, request.prepare, kept_frames)
            return Compared(sorted(row["id"] for row in clean.collect()), shared.examples)

    return run


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

"""One Spark session for all tests of the preparation, and a small tokenizer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from finetune_crds.data import Spark
from finetune_trainer.prep import session
from unit.trainer.prep.recipes import QUICK, QUICK_JVM, Preparer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

REPOSITORY = Path(__file__).parents[4]
CHAT_TEMPLATE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="session")
def jars() -> Path:
    """The folder with the jars of Delta and S3A, fetched if they are not there."""
    cache = os.environ.get("FINETUNE_CACHE", str(Path.home() / ".cache" / "finetune-operator"))
    folder = Path(cache) / "jars"
    subprocess.run([REPOSITORY / "trainer_image" / "jars.sh", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def spark(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as the prep pod starts it."""
    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(session.ENV_JARS, str(jars))
        for name, value in QUICK_JVM.items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", str(scratch))
        started = session.start(Spark(driver_memory="1Gi", conf=QUICK))
    yield started
    gateway = started.sparkContext._gateway
    started.stop()
    gateway.shutdown()
    # NB: the JVM ends when its standard input does; what is left of it must not outlive the tests.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=30)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a token before a text, as Llama's does, and has a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the answer to the question is in the table"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    # NB: truncation saved in tokenizer.json must not shorten what is counted.
    tokenizer.enable_truncation(8)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("model") / "tokenizer"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def prepare(spark: SparkSession, tokenizer_folder: Path, tmp_path: Path) -> Preparer:
    """Prepares rows of a test in the session of all tests."""
    return Preparer(spark, tokenizer_folder, tmp_path)

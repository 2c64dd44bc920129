"""Answers that models generate: greedily, and each as if its question were the only one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.evaluate import model
from finetune_trainer.evaluate.answers import Decoding
from finetune_trainer.evaluate.questions import Ending, Question
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models.download import fetch
from support import networks
from support.cells import WARNINGS
from support.evaluations import save_adapter, save_model
from support.pods import examples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.model.network.trained_network import Network

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """A model with weights so large that it says something else to each prompt."""
    return save_model(base_model, tmp_path_factory.mktemp("talker"), width=32, deviation=1.0)


@pytest.fixture
def network(talker: Path) -> Iterator[Network]:
    """The talker."""
    with loaded(talker, talker) as loaded_network:
        yield loaded_network


def loaded(folder: Path, base: Path) -> Any:
    return model.load_model(
        fetch(str(folder), base / "unused"),
        networks.recipe(base).model,
        "the version",
        CPU,
        dtype=torch.float32,
    )


def build_questions(base: Path, prompts: list[str]) -> tuple[list[Question], Ending]:
    tokenizer = load_tokenizer(networks.recipe(base).model, base)
    ending = Ending(tokenizer, frozenset([int(tokenizer.eos_token_id)]))
    return [Question(tokenizer(prompt)["input_ids"], prompt, "") for prompt in prompts], ending


def prompts() -> list[str]:
    """Some of them are longer than others."""
    short = [row["prompt"] for row in examples()[::9]]
    return [*short, "What is the large red new old house? ", "What? ", short[0] * 3]


def test_answers_are_those_of_plain_greedy_generation(network: Network, talker: Path) -> None:
    some, ending = build_questions(talker, prompts())
    answers = Decoding(ending, max_new_tokens=12, batch_size=4).answers(network, some, CPU)
    plain: Any = network.model
    for question, answer in zip(some, answers, strict=True):
        alone = plain.generate(torch.tensor([question.tokens]), do_sample=False, max_new_tokens=12)
        assert answer == ending.text(alone[0, len(question.tokens) :].tolist())
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize("kind", ["LoRA", "PromptTuning", "PrefixTuning"])
def test_answers_do_not_depend_on_the_batch_size(talker: Path, tmp_path: Path, kind: str) -> None:
    some, ending = build_questions(talker, prompts())
    with loaded(save_adapter(talker, tmp_path / "adapter", kind), talker) as network:
        by_size = [
            Decoding(ending, max_new_tokens=10, batch_size=size).answers(network, some, CPU)
            for size in (1, 3, 16)
        ]
    assert by_size[1:] == by_size[:1] * 2
    assert len(set(by_size[0])) == len(some)


def test_the_models_own_settings_of_sampling_do_not_count(network: Network, talker: Path) -> None:
    some, ending = build_questions(talker, prompts()[:4])
    decoding = Decoding(ending, max_new_tokens=12, batch_size=4)
    usual = decoding.answers(network, some, CPU)
    config = network.base.generation_config
    config.repetition_penalty, config.no_repeat_ngram_size, config.do_sample = 9.0, 1, True
    assert decoding.answers(network, some, CPU) == usual


def test_an_answer_has_the_room_that_the_context_leaves(network: Network, talker: Path) -> None:
    some, ending = build_questions(talker, ["What is the red house? "])
    network.base.config.max_position_embeddings = len(some[0].tokens) + 3
    short = Decoding(ending, max_new_tokens=12, batch_size=4).answers(network, some, CPU)
    assert short == Decoding(ending, max_new_tokens=3, batch_size=4).answers(network, some, CPU)
    network.base.config.max_position_embeddings = len(some[0].tokens)
    assert Decoding(ending, max_new_tokens=12, batch_size=4).answers(network, some, CPU) == [""]


@pytest.mark.parametrize(("bos", "begin"), [(9, 9), (None, 0)])
def test_an_empty_prompt_is_the_beginning_of_a_text(
    network: Network, talker: Path, bos: int | None, begin: int
) -> None:
    """Or the end of one, where the tokenizer has no token for the beginning."""
    (other_question,), ending = build_questions(talker, ["What is the red house? "])
    tokenizer = ending.tokenizer
    tokenizer.bos_token = None if bos is None else tokenizer.convert_ids_to_tokens(bos)
    assert tokenizer.eos_token_id == 0
    empty, begun = Question([], "", ""), Question([begin], "", "")
    expected = Decoding(ending, 12, 1).answers(network, [begun, other_question], CPU)
    assert all(expected)
    for size in (1, 2):
        assert Decoding(ending, 12, size).answers(network, [empty, other_question], CPU) == expected

"""Greedy generation in batches; the other questions of a batch do not change an answer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from finetune_trainer.examples.tokenizer import pad_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune_trainer.evaluate.questions import Ending, Question
    from finetune_trainer.train.model.network.trained_network import Network


@dataclass(frozen=True)
class Decoding:
    """The generation of answers: greedy, until each answer ends.

    ending: what ends an answer.
    max_new_tokens: maximum length of an answer in tokens; less if the model's context has less room.
    batch_size: questions at once.
    """

    ending: Ending
    max_new_tokens: int
    batch_size: int

    def answers(self, network: Network, questions: Sequence[Question], device: torch.device) -> list[str]:
        """Return a model's answer to each question; empty if the question leaves no room for an answer in the model's context."""
        answers = [""] * len(questions)
        prompts = [question.tokens or self._begin for question in questions]
        for room, batch in self._group_by_length(network, prompts):
            token_lists = self._generate_tokens(network, [prompts[index] for index in batch], room, device)
            for index, tokens in zip(batch, token_lists, strict=True):
                answers[index] = self.ending.text(tokens)
        return answers

    @property
    def _begin(self) -> list[int]:
        """The tokens that replace an empty prompt, which a model cannot continue: the beginning-of-text or end-of-text token."""
        tokenizer = self.ending.tokenizer
        begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return [int(begin)]

    def _group_by_length(
        self, network: Network, prompts: Sequence[list[int]]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield batches of prompts of similar length: the number of tokens that each answer may have, and the indices of the prompts."""
        virtual_tokens = _count_virtual_tokens(network)
        context = getattr(network.base.config.get_text_config(), "max_position_embeddings", None)

        def batch_key(index: int) -> tuple[int, int]:
            """The tokens that the answer may have, and the length if only prompts of equal length may share a batch, otherwise 0."""
            length = len(prompts[index])
            remaining = self.max_new_tokens if context is None else context - virtual_tokens - length
            # NB: with virtual tokens, peft drops position ids, and padding would move the prompt away from these tokens.
            return min(remaining, self.max_new_tokens), length if virtual_tokens else 0

        # `groupby` needs prompts with the same key next to each other: the key depends only on the length. The longest come first, so that
        # a lack of memory shows in the first batch.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        for (room, _), group in groupby(order, batch_key):
            # Without room, the answers stay empty.
            if room <= 0:
                continue
            group_indices = list(group)
            for begin in range(0, len(group_indices), self.batch_size):
                yield room, group_indices[begin : begin + self.batch_size]

    def _generate_tokens(
        self, network: Network, prompts: list[list[int]], room: int, device: torch.device
    ) -> list[list[int]]:
        """Return the tokens after each prompt; tokens after the end of an answer are arbitrary."""
        # Padded at the left, all prompts end at the same position, where their answers begin.
        padding, width = pad_id(self.ending.tokenizer), max(map(len, prompts))
        ids = [[padding] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        model: Any = network.model
        # NB: replaces the model's own settings, such as a penalty on repeated tokens, which are for sampling.
        network.base.generation_config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=room,
            pad_token_id=padding,
            eos_token_id=sorted(self.ending.stops),
        )
        with torch.inference_mode():
            output_ids = model.generate(
                input_ids=torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
            )
        answers: list[list[int]] = output_ids[:, width:].tolist()
        return answers


def _count_virtual_tokens(network: Network) -> int:
    """Return the number of virtual tokens that a soft prompt puts before a text."""
    config = getattr(network.model, "peft_config", {}).get("default")
    return int(config.num_virtual_tokens) if config is not None and config.is_prompt_learning else 0

"""What all contenders train on: rows with the lengths of alpaca's, and a model with random weights."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.trainer.work import MAX_LENGTH, SEED
from demo.scripts import corpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

    from bench.trainer.shapes import Shape

SHORTEST, LONGEST = 100, 300
# The vocabulary that there is text for; a model may have room for more.
VOCABULARY = 8192
BOS, EOS, PAD = "<s>", "</s>", "<pad>"


@dataclass(frozen=True)
class Texts:
    """Rows, and the tokens in each, the end-of-sequence token counted."""

    texts: list[str]
    lengths: list[int]

    def distribution(self) -> dict[str, Any]:
        """How long the rows are, in tokens, and what padding them to the maximum length would leave useful."""
        at = (0, 10, 50, 90, 100)
        percentiles = np.percentile(self.lengths, at, method="nearest").tolist()
        return {
            "rows": len(self.lengths),
            "tokens": sum(self.lengths),
            "mean": round(self.mean, 1),
            "percentiles": {str(percent): int(value) for percent, value in zip(at, percentiles, strict=True)},
            "maxLength": MAX_LENGTH,
            "usefulWhenPadded": round(float(np.mean(self.lengths)) / MAX_LENGTH, 4),
        }

    @property
    def mean(self) -> float:
        """Tokens of a row, the mean."""
        return float(np.mean(self.lengths))

    def that_fit(self, tokens: int) -> Texts:
        """The first rows, as many as have so many tokens together."""
        count = int(np.searchsorted(np.cumsum(self.lengths), tokens, side="right"))
        return Texts(self.texts[:count], self.lengths[:count])

    def save(self, path: Path) -> None:
        """Write the rows as JSON lines with a `text`."""
        lines = (json.dumps({"text": text}) for text in self.texts)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def enough(packs: int) -> int:
    """Rows that fill so many packs of the maximum length, with some to spare; at least a thousand."""
    mean = (SHORTEST + LONGEST) / 2
    return max(1000, int(1.1 * packs * MAX_LENGTH / mean))


def pieces() -> list[str]:
    """Questions with their answers, out of the docstrings of Python's standard library."""
    corpus_rows = corpus.rows(corpus.roots()[:1])
    return [f"Question: {row.instruction}\nAnswer: {row.answer}" for row in corpus_rows if row.answer]


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def compose(passages: Sequence[str], lengths: Sequence[int], count: int) -> Texts:
    """So many rows, each of passages drawn at random until it is as long as was drawn between 100 and 300 tokens.

    Args:
        passages: to draw from.
        lengths: tokens in each of them.
        count: rows to make.
    """
    draw = random.Random(SEED)  # noqa: S311 - nothing secret
    texts: list[str] = []
    totals: list[int] = []
    while len(texts) < count:
        least_tokens, parts, total = draw.randint(SHORTEST, LONGEST), [], 1
        while total < least_tokens:
            at = draw.randrange(len(passages))
            parts.append(passages[at])
            total += lengths[at] + 1
        if total <= LONGEST:
            texts.append("\n".join(parts))
            totals.append(total)
    return Texts(texts, totals)


def make(tokenizer: Tokenizer, passages: Sequence[str], count: int) -> Texts:
    """The rows, with their lengths as the contenders will see them."""
    composed = compose(passages, [len(each.ids) for each in tokenizer.encode_batch(list(passages))], count)
    return Texts(composed.texts, [len(each.ids) + 1 for each in tokenizer.encode_batch(composed.texts)])


def save_model(tokenizer: Tokenizer, shape: Shape, folder: Path) -> None:
    """Save a model of a shape with random weights, and its tokenizer, as transformers does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=MAX_LENGTH
    )
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        max_position_embeddings=131_072 if shape.rope else MAX_LENGTH,
        rope_parameters=shape.rope or {"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=shape.tied,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="bfloat16" if shape.precision == "BF16" else "float32",
    )
    torch.manual_seed(SEED)
    # A billion random numbers take a CPU minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if shape.precision == "BF16" else torch.float32)
    parameters = sum(each.numel() for each in model.parameters())
    if parameters != shape.parameters:
        raise AssertionError(
            f"the shape {shape.name} has {parameters:,} parameters, not {shape.parameters:,}"
        )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)

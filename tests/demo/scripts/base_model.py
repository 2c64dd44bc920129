"""The model that the demo fine-tunes: a BPE tokenizer and a small Llama, made from the corpus's own text.

`python base_model.py CORPUS URL [--steps 110]` trains a byte-level tokenizer on the corpus, then the model on the
answers as plain text for so many steps, so that it knows the language and not yet the task; 0 leaves it initialized.
Both are saved as transformers saves them, to a folder or to s3://bucket/folder. The same corpus gives the same model on
machines of the same kind; 110 steps take half a minute on two cores.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import fsspec
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 4096
# As long as training.maxLength is by default, so that a job needs not set it.
CONTEXT = 2048
WIDTH, LAYERS, HEADS = 128, 4, 4
BATCH, LENGTH = 8, 256
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
SEED = 0
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Answer: {{ message['content'] }}" + EOS + "\n"
    "{% else %}Question: {{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def main(arguments: list[str]) -> int:
    """Make the base model, or leave the one that is there."""
    parser = argparse.ArgumentParser(description="Make the demo's base model from its corpus.")
    parser.add_argument("corpus", help="folder or s3://bucket/folder that corpus.py wrote")
    parser.add_argument("url", help="where the model goes: a folder, or s3://bucket/folder")
    parser.add_argument(
        "--steps", type=int, default=110, help="steps to pre-train for (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    texts = read_texts(options.corpus)
    tokenizer = train_tokenizer(texts)
    model = LlamaForCausalLM(configuration(tokenizer))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"base model: {parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens in the vocabulary",
        flush=True,
    )
    pretrain(model, tokenizer, texts, options.steps)
    save(model, tokenizer, options.url)
    print(f"base model: saved to {options.url}", flush=True)
    return 0


def read_texts(corpus: str) -> list[str]:
    """The distinct answers of the corpus."""
    filesystem, folder = fsspec.core.url_to_fs(corpus)
    texts: dict[str, None] = {}
    for file in sorted(filesystem.glob(f"{folder}/*.parquet")):
        with filesystem.open(file, "rb") as opened:
            texts |= dict.fromkeys(text for text in pq.read_table(opened)["answer"].to_pylist() if text)
    return list(texts)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions = ["Question: What does Class.method do?\nAnswer: Return", "What is the module for?"] * 100
    tokenizer.train_from_iterator([*texts, *questions], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=CONTEXT
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def configuration(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of about 1.3 million parameters."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        # NB: with the usual 0.02, so narrow a model is never sure of a token after so few steps: its embedding is the output layer.
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    steps: int,
) -> None:
    """Train on the texts as one stream, for so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    stream = batches(tokenizer, texts)
    began = printed_at = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = (
                LEARNING_RATE
                * min(1.0, step / WARMUP_STEPS)
                * (0.1 + 0.9 * math.cos(step / steps * math.pi / 2))
            )
        batch = next(stream)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == steps or time.monotonic() - printed_at > 10:
            printed_at = time.monotonic()
            print(f"base model: step {step}, loss {loss.item():.2f}, {printed_at - began:.0f} s", flush=True)


def batches(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Iterator[torch.Tensor]:
    """Batches of BATCH x LENGTH tokens, epoch after epoch, each in another order of the texts."""
    backend = tokenizer.backend_tokenizer
    encoded = [each.ids for each in backend.encode_batch_fast([text + EOS for text in texts])]
    order = random.Random(SEED)  # noqa: S311
    waiting: list[int] = []
    while True:
        order.shuffle(encoded)
        for ids in encoded:
            waiting += ids
            if len(waiting) >= BATCH * LENGTH:
                yield torch.tensor(waiting[: BATCH * LENGTH]).view(BATCH, LENGTH)
                waiting = waiting[BATCH * LENGTH :]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, url: str) -> None:
    """Save model and tokenizer, the weights last: where they are, the rest is too."""
    filesystem, folder = fsspec.core.url_to_fs(url)
    with tempfile.TemporaryDirectory() as local:
        model.eval().save_pretrained(local)
        tokenizer.save_pretrained(local)
        files = sorted(
            fsspec.filesystem("file").ls(local, detail=False), key=lambda file: file.endswith(".safetensors")
        )
        filesystem.makedirs(folder, exist_ok=True)
        for file in files:
            filesystem.put_file(file, f"{folder}/{file.rsplit('/', 1)[1]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

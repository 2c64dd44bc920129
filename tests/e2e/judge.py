"""The loss of a registered model in plain transformers: `python judge.py models:/NAME@ALIAS TABLE VERSION QUESTION`.

It is the mean over the tokens of the answers of the validation split, each answer's end included, as anybody would
compute it who has loaded the model by its alias. Prints it after the word LOSS and, unless the question is empty, what the
model answers to it after the word ANSWER.
"""

from __future__ import annotations

import os
import sys

import mlflow
import torch
from deltalake import DeltaTable
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from demo.scripts import ask


def main(arguments: list[str]) -> int:
    """Load the model and the split, and print the loss."""
    uri, table, version, question = arguments
    storage = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    rows = (
        DeltaTable(table, version=int(version), storage_options=storage)
        .to_pyarrow_table(columns=["prompt", "response"], filters=[("split", "=", "validation")])
        .to_pylist()
    )
    pipeline = mlflow.transformers.load_model(uri)
    print("LOSS", loss(pipeline.model.eval(), pipeline.tokenizer, rows), flush=True)
    if question:
        print("ANSWER", ask.answer(pipeline, question), flush=True)
    return 0


def loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> float:
    """Mean cross-entropy of the answers' tokens, in nats."""
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        prompt = prompt[:-1] if prompt[-1] == tokenizer.eos_token_id else prompt
        answer = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(answer), reduction="sum")
        total, count = total + losses.item(), count + len(answer)
    return total / count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Ask a registered model a question: `python ask.py models:/NAME@ALIAS "What does json.loads do?"`.

The model is loaded as anybody would load it: by its alias, from MLflow, as a transformers pipeline.
"""

from __future__ import annotations

import logging
import os
import sys

os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"

import mlflow
from transformers import Pipeline
from transformers.utils.logging import disable_progress_bar

# In tokens. A model that was hardly trained would rather say nothing.
SHORTEST_ANSWER, LONGEST_ANSWER = 8, 64


def main(arguments: list[str]) -> int:
    """Print the answer, after the word ANSWER."""
    uri, question = arguments
    disable_progress_bar()
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    print(f"ask: loading {uri}", flush=True)
    print("ANSWER", answer(mlflow.transformers.load_model(uri), question), flush=True)
    return 0


def answer(pipeline: Pipeline, question: str) -> str:
    """What a model answers, always the same, in one line."""
    generated = pipeline(
        prompt(question),
        min_new_tokens=SHORTEST_ANSWER,
        max_new_tokens=LONGEST_ANSWER,
        do_sample=False,
        repetition_penalty=1.2,
        return_full_text=False,
    )
    return " ".join(generated[0]["generated_text"].split())


def prompt(question: str) -> str:
    """The question as crds/samples/quickstart.yaml has it in its promptTemplate."""
    return f"Question: {question}\nAnswer:"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The numbers of an evaluation, by the names that they have as metrics of the run and as tags of the version."""

from __future__ import annotations

import math
import re
import string
import warnings
from typing import TYPE_CHECKING

from finetune_crds.evaluation import NUMBER_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune_crds.evaluation import Metric

# exp() of a larger number overflows.
_MAX_EXPONENT = 700.0
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_loss_metrics(requested_metrics: Sequence[Metric], loss: float) -> dict[str, float]:
    """Return Loss, in nats per token, and Perplexity, exp(loss), if they are requested.

    Args:
        requested_metrics: the metrics to compute.
        loss: mean negative log-likelihood of the targets.
    """
    values: dict[Metric, float] = {"Loss": loss, "Perplexity": math.exp(min(loss, _MAX_EXPONENT))}
    numbers: dict[str, float] = {}
    for metric, value in values.items():
        if metric in requested_metrics:
            (name,) = NUMBER_NAMES[metric]
            numbers[name] = value
    return numbers


def compute_answer_metrics(
    requested_metrics: Sequence[Metric], answers: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
    """Return the requested metrics of generated answers, from 0 to 1; Bleu is from 0 to 100.

    Args:
        requested_metrics: the metrics to compute.
        answers: the answers of a model, at least one.
        references: the expected answers of the rows.
    """
    # Each function returns a number for each name of its metric in NUMBER_NAMES.
    measures = {
        "ExactMatch": compute_exact_match,
        "Accuracy": compute_accuracy,
        "F1": compute_macro_f1,
        "Rouge": compute_rouge,
        "Bleu": compute_bleu,
    }
    values: dict[str, float] = {}
    for metric, names in NUMBER_NAMES.items():
        if metric in requested_metrics and metric in measures:
            values |= dict(zip(names, measures[metric](answers, references), strict=True))
    return values


def normalize(answer: str) -> str:
    """Return an answer in lower case, without ASCII punctuation, the articles a, an and the, and extra white space.

    Source: `normalize_answer` of the official evaluation script of SQuAD 1.1 and 2.0 (Rajpurkar et al., arXiv:1606.05250,
    section 6).
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def compute_exact_match(answers: Sequence[str], references: Sequence[str]) -> tuple[float]:
    """Return the share of answers that are equal to their references, after `normalize`."""
    pairs = zip(answers, references, strict=True)
    return (sum(normalize(answer) == normalize(reference) for answer, reference in pairs) / len(answers),)


def compute_accuracy(answers: Sequence[str], references: Sequence[str]) -> tuple[float]:
    """Return the share of answers that are exactly their references, apart from white space around both."""
    from sklearn.metrics import accuracy_score

    with warnings.catch_warnings():
        _allow_many_classes()
        return (float(accuracy_score(_strip_all(references), _strip_all(answers))),)


def compute_macro_f1(answers: Sequence[str], references: Sequence[str]) -> tuple[float]:
    """Return the mean F1 score over the classes, where each distinct reference is a class.

    An answer that equals no reference belongs to no class: it only lowers the recall of the class of its row.
    """
    from sklearn.metrics import f1_score

    truth = _strip_all(references)
    with warnings.catch_warnings():
        _allow_many_classes()
        score = f1_score(
            truth, _strip_all(answers), labels=sorted(set(truth)), average="macro", zero_division=0.0
        )
    return (float(score),)


def compute_rouge(answers: Sequence[str], references: Sequence[str]) -> tuple[float, ...]:
    """Return the means of the F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), without stemming.

    Words are runs of letters and digits of any script, in lower case. For ASCII these are the words of rouge-score, which
    supports no other letters.
    """
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(kinds, tokenizer=_Words())
    scores = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]

    def mean(kind: str) -> float:
        return sum(float(score[kind].fmeasure) for score in scores) / len(scores)

    return tuple(mean(kind) for kind in kinds)


def compute_bleu(answers: Sequence[str], references: Sequence[str]) -> tuple[float]:
    """Return BLEU of the corpus as sacrebleu computes it by default (Post, arXiv:1804.08771), from 0 to 100."""
    import sacrebleu

    return (float(sacrebleu.corpus_bleu(list(answers), [list(references)]).score),)


class _Words:
    """The words of a text, for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def _strip_all(texts: Sequence[str]) -> list[str]:
    return [text.strip() for text in texts]


def _allow_many_classes() -> None:
    # With many classes, scikit-learn warns that the task may be a regression, not a classification.
    warnings.filterwarnings("ignore", "The number of unique classes is greater than", UserWarning)

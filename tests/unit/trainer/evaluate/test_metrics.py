"""The numbers of answers, each beside what can be counted by hand."""

from __future__ import annotations

import math

import pytest

from finetune_crds.evaluation import NUMBER_NAMES
from finetune_trainer.evaluate import metrics

REFERENCES = ["Paris", "the red house", "Paris", "Rome"]


def test_the_metrics_of_a_loss_are_nats_and_their_exponential() -> None:
    assert metrics.compute_loss_metrics(["Loss", "Perplexity", "Bleu"], 2.0) == {
        "evaluation_loss": 2.0,
        "evaluation_perplexity": math.exp(2.0),
    }
    assert metrics.compute_loss_metrics(["Perplexity"], 1e9) == {"evaluation_perplexity": math.exp(700.0)}
    assert metrics.compute_loss_metrics(["Accuracy"], 2.0) == {}


def test_the_right_answers_have_the_best_numbers() -> None:
    texts = ["The old house is red.", "The new river is not cold.", "A letter is on the garden window."]
    values = metrics.compute_answer_metrics(tuple(NUMBER_NAMES), texts, texts)
    assert values == pytest.approx(
        {
            "eval_exact_match": 1.0,
            "eval_accuracy": 1.0,
            "eval_f1": 1.0,
            "eval_rouge1": 1.0,
            "eval_rouge2": 1.0,
            "eval_rougeL": 1.0,
            "eval_bleu": 100.0,
        }
    )


def test_only_what_is_wanted_is_measured() -> None:
    assert metrics.compute_answer_metrics(["Loss", "Accuracy"], ["a"], ["b"]) == {"eval_accuracy": 0.0}


def test_an_exact_match_does_not_see_case_punctuation_and_articles() -> None:
    answers = ["paris.", "A red  house", "an \n Paris", "in Rome"]
    assert metrics.compute_exact_match(answers, REFERENCES) == (0.75,)
    assert metrics.normalize("The cat, an ANIMAL's  theory") == "cat animals theory"


def test_accuracy_sees_all_but_the_white_space_around_an_answer() -> None:
    assert metrics.compute_accuracy([" Paris\n", "the red house", "paris", "in Rome"], REFERENCES) == (0.5,)


def test_f1_is_the_mean_over_the_classes_of_the_references() -> None:
    # yes: precision 2/3, recall 1; no: precision 1, recall 1/3; "maybe" is no class.
    answers, references = ["yes", "yes", "yes", "no", "maybe"], ["yes", "yes", "no", "no", "no"]
    assert metrics.compute_macro_f1(answers, references)[0] == pytest.approx((0.8 + 0.5) / 2)


def test_rouge_counts_words_and_pairs_of_words() -> None:
    # Four of five and of six words; of pairs "the old" and "house is"; the longest common subsequence has four words.
    scores = metrics.compute_rouge(["the old house is cold"], ["the old red house is warm"])
    expected = [2 * p * r / (p + r) for p, r in ((4 / 5, 4 / 6), (2 / 4, 2 / 5), (4 / 5, 4 / 6))]
    assert scores == pytest.approx(tuple(expected))


def test_rouge_knows_the_letters_of_any_script() -> None:
    assert metrics.compute_rouge(["Дом красный", "Ä"], ["дом старый", "ä"])[0] == pytest.approx(0.75)


def test_bleu_is_that_of_the_corpus() -> None:
    import sacrebleu

    answers = ["the old house is red", "the new river was cold and deep"]
    references = ["the old house is red", "the new river is cold and deep"]
    corpus_score = sacrebleu.corpus_bleu(answers, [references]).score
    assert metrics.compute_bleu(answers, references) == (corpus_score,)
    assert 50 < corpus_score < 100

"""When a question is asked again that was answered with a refusal."""

from __future__ import annotations

from finetune_operator.finetunejob.observe import retry_backoff
from finetune_operator.finetunejob.observe.retry_backoff import Retries


def test_the_delay_doubles_until_the_question_is_answered() -> None:
    now = 0.0
    known = Retries[str](lambda: now, last_seconds=5)
    assert (known.held("a"), known.left("a")) == (None, 0)
    for delay in (1, 2, 4, 5, 5):
        assert known.note("a", f"no {delay}") == delay
        assert (known.held("a"), known.left("a")) == (f"no {delay}", delay)
        now += delay
        assert (known.held("a"), known.left("a")) == (f"no {delay}", 0)
    known.forget("a")
    assert (known.held("a"), known.note("a", "no")) == (None, 1)


def test_what_is_left_is_what_has_not_passed() -> None:
    now = 0.0
    known = Retries[str](lambda: now, last_seconds=5)
    known.note("a", "no")
    now = 0.75
    assert (known.left("a"), known.left("b")) == (0.25, 0)


def test_jobs_that_went_away_do_not_fill_the_memory() -> None:
    known = Retries[int](lambda: 0, last_seconds=5)
    for number in range(retry_backoff._MOST_JOBS + 1):
        known.note(str(number), number)
    assert (known.held("0"), known.held(str(retry_backoff._MOST_JOBS))) == (None, retry_backoff._MOST_JOBS)

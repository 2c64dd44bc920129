"""When a question is asked again that was answered with a refusal."""

from __future__ import annotations

from finetune_operator.finetunejob.observe import negative_cache
from finetune_operator.finetunejob.observe.negative_cache import NegativeCache


def test_the_delay_doubles_until_the_question_is_answered() -> None:
    now = 0.0
    backoff = NegativeCache[str](lambda: now, max_delay_seconds=5)
    assert (backoff.last_answer("a"), backoff.seconds_left("a")) == (None, 0)
    for delay in (1, 2, 4, 5, 5):
        assert backoff.record("a", f"no {delay}") == delay
        assert (backoff.last_answer("a"), backoff.seconds_left("a")) == (f"no {delay}", delay)
        now += delay
        assert (backoff.last_answer("a"), backoff.seconds_left("a")) == (f"no {delay}", 0)
    backoff.forget("a")
    assert (backoff.last_answer("a"), backoff.record("a", "no")) == (None, 1)


def test_what_is_left_is_what_has_not_passed() -> None:
    now = 0.0
    backoff = NegativeCache[str](lambda: now, max_delay_seconds=5)
    backoff.record("a", "no")
    now = 0.75
    assert (backoff.seconds_left("a"), backoff.seconds_left("b")) == (0.25, 0)


def test_jobs_that_went_away_do_not_fill_the_memory() -> None:
    backoff = NegativeCache[int](lambda: 0, max_delay_seconds=5)
    for number in range(negative_cache._MAX_JOBS + 1):
        backoff.record(str(number), number)
    assert (backoff.last_answer("0"), backoff.last_answer(str(negative_cache._MAX_JOBS))) == (
        None,
        negative_cache._MAX_JOBS,
    )

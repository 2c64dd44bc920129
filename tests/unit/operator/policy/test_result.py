from __future__ import annotations

from finetune_operator.policy.result import Continue, Outcome, Stop, run_policies


def test_policies_run_in_order_until_one_stops() -> None:
    ran: list[str] = []

    def policy(name: str, outcome: Outcome) -> Outcome:
        ran.append(name)
        return outcome

    policies = [("accept", Continue), ("suspend", Stop), ("train", Continue)]
    run_policies([lambda _, each=each: policy(*each) for each in policies], None)  # type: ignore[misc]
    assert ran == ["accept", "suspend"]

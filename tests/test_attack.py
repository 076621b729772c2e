"""Try a few hundred damaged tickets in each run; `python -m tests.attack` tries many more."""

import attack
import pytest


@pytest.mark.timeout(600, method="thread")  # the attack uses the alarm signal itself
def test_a_damaged_ticket_is_refused_or_the_same_model():
    results = list(attack.campaign(300, seed=1))
    assert not [result for result in results if result.failed]
    assert {result.kind for result in results} == {*attack.DAMAGES}
    outcomes = [outcome for result in results for outcome in result.outcomes.values()]
    assert outcomes.count("refused") > len(outcomes) / 2
    assert "same" in outcomes

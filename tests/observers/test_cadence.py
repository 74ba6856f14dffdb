"""When to measure."""

import pytest
import torch
from rpt.observers.cadence import Cadence

A, B = torch.zeros(2), torch.zeros(2)


def run(cadence: Cadence, steps: int, coherence=None) -> list[bool]:
    """Whether A was due in each step, measuring whatever is due."""
    due = []
    for step in range(steps):
        due.append(cadence.due(A))
        measured = [p for p in (A, B) if cadence.due(p)]
        cadence.advance(measured, (coherence or {}).get(step, {}))
    return due


def test_every_kth_step_beginning_with_the_first():
    assert run(Cadence([A, B], 1, 0.0), 4) == [True] * 4
    assert run(Cadence([A, B], 3, 0.0), 8) == [True, False, False] * 2 + [True, False]


def test_unmeasured_stays_due():
    cadence = Cadence([A], 3, 0.0)
    for _ in range(5):
        assert cadence.due(A)
        cadence.advance([], {})
    cadence.advance([A], {})
    assert not cadence.due(A)


def test_a_turned_frame_forces_a_measurement_of_that_parameter_alone():
    cadence = Cadence([A, B], 4, 0.1)
    turned = {1: {A: torch.tensor(0.05), B: torch.tensor(0.9)}}
    assert run(cadence, 7, turned) == [True, False, True, False, False, False, True]
    cadence = Cadence([A, B], 4, 0.1)
    cadence.advance([A, B], {A: torch.tensor(-1.0), B: torch.tensor(1.0)})
    assert cadence.due(A)
    assert not cadence.due(B)


def test_a_frame_that_stays_turned_forces_one_measurement_only():
    low, high = {A: torch.tensor(-0.9)}, {A: torch.tensor(0.9)}
    cadence = Cadence([A, B], 4, -0.5)
    assert run(cadence, 5, dict.fromkeys(range(5), low)) == [True, True, False, False, False]
    cadence.advance([A], high)
    cadence.advance([], low)
    assert cadence.due(A)
    resumed = Cadence([A], 4, -0.5)
    cadence.advance([A], low)
    resumed.restore(cadence.ages())
    resumed.advance([], low)
    assert not resumed.due(A)


def test_ages_continue_the_phase():
    cadence = Cadence([A, B], 4, 0.0)
    run(cadence, 2)
    ages = cadence.ages()
    assert ages == {A: 2, B: 2}
    resumed = Cadence([A, B], 4, 0.0)
    resumed.restore(ages)
    assert run(resumed, 4) == run(cadence, 4) == [False, False, True, False]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "4"])
def test_bad_cadence_is_named(every):
    with pytest.raises(ValueError, match="observe_every"):
        Cadence([A], every, 0.0)

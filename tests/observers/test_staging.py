"""What waits between a backward and the step, and what must not survive a skipped one."""

import copy
import math
import pickle

import pytest
import torch
from rpt.observers import ObserverSettings, entropy_rank
from rpt.observers.rank import statistics
from rpt.observers.staging import ObservationStage
from torch import nn

SETTINGS = ObserverSettings()


def observation(seed: int, n: int = 6, m: int = 5):
    generator = torch.Generator().manual_seed(seed)
    x, delta = torch.randn(40, n, generator=generator), torch.randn(40, m, generator=generator)
    return statistics(x, delta, SETTINGS), float(entropy_rank(x, delta, settings=SETTINGS))


def test_commit_averages_per_parameter_and_empties_the_stage():
    stage, first, second = ObservationStage(SETTINGS), nn.Parameter(torch.ones(5, 6)), torch.ones(3)
    a, rank_a = observation(1)
    b, rank_b = observation(2, 9, 4)
    stage.add(first, a)
    stage.add(first, b)
    stage.add_rank(0.25, first)
    stage.add_rank(0.5, second)
    stage.add_rank(0.2)
    stage.add_rank(0.4)
    assert len(stage) == 6
    committed = stage.commit()
    assert float(committed.ranks[first]) == pytest.approx((rank_a + rank_b + 0.25) / 3, abs=1e-6)
    assert float(committed.ranks[second]) == 0.5
    assert float(committed.global_rank) == pytest.approx(0.3, abs=1e-15)
    assert committed.counts == {first: 3, second: 1}
    assert len(stage) == 0
    empty = stage.commit()
    assert empty.ranks == {}
    assert empty.global_rank is None
    assert empty.counts == {}


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, math.inf])
def test_numbers_outside_the_unit_interval_are_refused(bad):
    stage = ObservationStage()
    with pytest.raises(ValueError, match="entropy rank"):
        stage.add_rank(bad)
    assert len(stage) == 0


def test_rank_tensors_are_taken_without_reading_them():
    stage, parameter = ObservationStage(), nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="single number"):
        stage.add_rank(torch.ones(2))
    stage.add_rank(torch.tensor([0.75]), parameter)
    stage.add_rank(torch.tensor(math.nan))
    committed = stage.commit()
    assert float(committed.ranks[parameter]) == 0.75
    assert float(committed.global_rank) == 1.0


def test_drop_and_clear():
    stage, first, second = ObservationStage(), torch.ones(2, 2), torch.ones(2, 2)
    stage.add_rank(0.5, first)
    stage.add_rank(0.5, second)
    stage.add_rank(0.5)
    stage.drop(first)
    stage.drop(first)
    assert set(stage.commit().ranks) == {second}
    stage.add_rank(0.5, first)
    stage.add_rank(0.5)
    stage.clear()
    assert len(stage) == 0
    assert stage.commit().global_rank is None


def test_copies_and_pickles_are_empty():
    stage = ObservationStage(ObserverSettings(dim=7))
    stage.add_rank(0.5)
    for twin in (copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        assert len(twin) == 0
        assert twin.settings.dim == 7
    assert len(stage) == 1


def test_hand_staged_observations_outlive_a_new_backward():
    stage, parameter = ObservationStage(SETTINGS), nn.Parameter(torch.ones(5, 6))
    stage.add(parameter, observation(1)[0])
    stage.add_from_backward(parameter, observation(2)[0])
    assert stage.commit().counts == {parameter: 2}

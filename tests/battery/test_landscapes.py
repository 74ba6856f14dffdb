"""The landscapes example: minima, paths, and its picture."""

import sys

import pytest
import torch

pytest.importorskip("matplotlib")

from examples import landscapes


@pytest.mark.parametrize("landscape", landscapes.LANDSCAPES, ids=lambda scape: scape.name)
def test_the_minimum_is_one(landscape):
    point = torch.tensor(landscape.minimum, requires_grad=True)
    value = landscape.function(point)
    assert value.item() == pytest.approx(0, abs=1e-5)
    assert torch.autograd.grad(value, point)[0].norm() < 1e-4


def test_the_best_rate_comes_closest(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_optimizer", None)  # as where it is not installed
    makers = landscapes.optimizers()
    assert set(makers) == {"RPT", "RPT, paper preset", "AdamW"}
    results = {}
    for name, make in makers.items():
        results[name] = {}
        for scape in landscapes.LANDSCAPES:
            distance, rate, path = landscapes.best_path(make, scape, [1e-4, 5e-2], "cosine", 60)
            assert path.shape == (61, 2)
            assert path[0].tolist() == list(scape.start)
            end = (path[-1] - torch.tensor(scape.minimum)).norm()
            assert distance == pytest.approx(end.item())
            results[name][scape.name] = (distance, rate, path)
        assert results[name]["Rosenbrock"][1] == 5e-2
    landscapes.plot(results, str(tmp_path / "l.png"))
    assert (tmp_path / "l.png").stat().st_size > 1000

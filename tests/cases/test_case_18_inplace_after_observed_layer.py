"""Case 18: an in-place operation right after an observed linear layer."""

import pytest
import torch
from rpt.observers import tap
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import nn


def run(strategy: str, inplace: bool, residual: bool, needs_input_gradient: bool, monkeypatch):
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    stage = ObservationStage()
    attach(layer, layer.parameters(), stage, strategy=strategy)
    recorded = []
    original = tap.TapSite.record

    def record(self, sketched, cotangents, *weight):
        recorded.append((sketched.clone(), cotangents.clone()))
        original(self, sketched, cotangents, *weight)

    monkeypatch.setattr(tap.TapSite, "record", record)
    x = torch.tensor([[1.0, -2.0]], requires_grad=needs_input_gradient)
    y = layer(x)
    if residual:
        extra = torch.tensor([[0.0, 0.0]])
        y = y.add_(extra) if inplace else y + extra
    y = torch.nn.functional.relu(y, inplace=inplace)
    y.sum().backward()
    monkeypatch.setattr(tap.TapSite, "record", original)
    ((activations, cotangents),) = recorded
    return activations, cotangents, layer.weight.grad


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("needs_input_gradient", [False, True])
def test_case_18_recorded_values_and_gradients_match_the_copying_run(
    strategy, residual, needs_input_gradient, monkeypatch
):
    results = [
        run(strategy, inplace, residual, needs_input_gradient, monkeypatch)
        for inplace in (True, False)
    ]
    for activations, cotangents, _ in results:
        assert activations.tolist() == [[1.0, -2.0]]
        assert cotangents.tolist() == [[1.0, 0.0]]
    assert torch.equal(results[0][2], results[1][2])

"""Case 19: a module whose weight is used functionally, so that no hook of it ever fires."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rpt import ResidualPolarTransport


def train(model, forward, steps=12):
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.attach_model(model)
        for _ in range(steps):
            optimizer.zero_grad()
            forward().square().mean().backward()
            optimizer.step()
    return optimizer, [str(w.message) for w in caught]


def test_case_19_multihead_attention():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(4, 3, 8)
    before = {name: p.detach().clone() for name, p in attention.named_parameters()}
    optimizer, messages = train(attention, lambda: attention(x, x, x, need_weights=False)[0])
    for name in ("in_proj_weight", "out_proj.weight"):
        weight = attention.get_parameter(name)
        assert torch.isfinite(weight).all()
        assert not torch.equal(weight, before[name])
    assert len(messages) == 1
    assert "'out_proj'" in messages[0]
    assert "observations" not in optimizer.state[attention.out_proj.weight] or (
        optimizer.state[attention.out_proj.weight]["observations"] == 0
    )


def test_case_19_functional_linear_beside_a_normal_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.normal = nn.Linear(8, 8)
            self.functional = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(torch.tanh(self.normal(x)), self.functional.weight)

    net = Net()
    x = torch.randn(16, 8)
    _, messages = train(net, lambda: net(x))
    assert len(messages) == 1
    assert "'functional'" in messages[0]
    assert "'normal'" not in messages[0]


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_case_19_eval_output_is_the_same_with_hooks(strategy):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(4, 3, 8)
    with torch.no_grad():
        plain = attention(x, x, x, need_weights=False)[0]
        optimizer = ResidualPolarTransport(attention.parameters(), lr=1e-2)
        optimizer.attach_model(attention, strategy=strategy)
        hooked = attention(x, x, x, need_weights=False)[0]
    assert (plain - hooked).abs().max() <= 1e-6

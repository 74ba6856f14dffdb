"""Attached or not: the same bits where no observation may lower a weight, and other ones where it may."""

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport

STEPS = 30


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.table(tokens)
        seen = (self.query(x), self.key(x), self.value(x))
        x = x + nn.functional.scaled_dot_product_attention(*seen, is_causal=True)
        return self.head(x + self.feed(self.norm(x)))


def mlp():
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)
    )


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )


MODELS = {
    "mlp": (mlp, lambda g: torch.randn(16, 6, generator=g), None),
    "transformer": (Transformer, lambda g: torch.randint(11, (4, 7), generator=g), None),
    "conv": (conv, lambda g: torch.randn(8, 2, 6, 6, generator=g), ["0", "2", "5"]),
}


def by_hand(optimizer, model, names):
    """Hooks of a caller's own, who hands over what a layer read and its output's cotangent."""
    for name in names:
        layer = model.get_submodule(name)

        def observe(layer, inputs, output):
            x = inputs[0].detach()
            output.register_hook(lambda d: optimizer.observe_residual(x, d, layer.weight) and None)

        layer.register_forward_hook(observe)


def trained(kind, strategy, **options):
    """The model's weights after training, and the observed matrices' states."""
    make, draw, sites = MODELS[kind]
    torch.manual_seed(0)
    model = make()
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2, **options)
    if strategy == "explicit":
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        by_hand(optimizer, model, linear)
    elif strategy is not None:
        optimizer.attach_model(model, strategy=strategy, observe_every=1, sites=sites)
    run = torch.compile(model, backend="eager") if strategy == "compiled" else model
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        run(draw(generator)).square().mean().backward()
        optimizer.step()
    weights = [p.detach() for p in model.parameters()]
    return weights, [s for s in optimizer.state.values() if int(s.get("observations", 0))]


def same(one, two):
    return all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


@pytest.mark.parametrize("strategy", ["hook", "compiled", "explicit"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_observing_alone_changes_no_bit(kind, strategy):
    alone, none = trained(kind, None, polar_release_beta=1.0)
    observed, states = trained(kind, strategy, polar_release_beta=1.0)
    assert same(alone, observed)
    assert not none
    assert len(states) >= (1 if kind == "conv" else 3)
    for state in states:
        assert int(state["observations"]) == STEPS
        assert 0 < float(state["residual_entropy_rank"]) <= 1
        assert float(state["polar_weight"]) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"preset": "paper"}, {"polar_prior": 0.0}],
    ids=["default", "paper", "prior 0"],
)
def test_an_observation_that_may_count_does(options):
    alone, _ = trained("mlp", None, **options)
    observed, states = trained("mlp", "hook", **options)
    assert not same(alone, observed)
    assert all(0 < float(state["polar_weight"]) < 1 for state in states)

"""Observation end to end, through the optimizer."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from rpt.geometry.self_context import ContextMLP
from rpt.observers import derive_sites, entropy_rank
from torch import nn

from rpt import ResidualPolarTransport


def make(**options):
    torch.manual_seed(0)
    model = ContextMLP(3, 2, 8)
    return model, ResidualPolarTransport(model.named_parameters(), lr=1e-3, **options)


def batch(step):
    return torch.randn(32, 3, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps):
    for index in steps:
        optimizer.zero_grad()
        model(batch(index)).square().mean().backward()
        optimizer.step()


def equal_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_declared_sites_adapt_and_the_rest_keep_the_prior():
    model, optimizer = make(polar_prior=0.5)
    assert optimizer.attach_model(model) == ["down.base", "down.metric"]
    x = batch(0)
    hidden = model.activation(model.up(model.embed(x)))
    train(model, optimizer, [0])
    state = optimizer.state
    site = model.down.base.weight
    rank = float(state[site]["residual_entropy_rank"])
    assert 0 < rank < 1
    assert float(state[site]["polar_weight"]) == pytest.approx(0.9 * 0.5 + 0.1 * (1 - rank))
    assert float(state[model.embed.weight]["polar_weight"]) == 0.5
    # The same by hand, from what plain autograd says.
    twin, _ = make()
    hidden = twin.activation(twin.up(twin.embed(x))).detach()
    base = twin.down.base(hidden)
    out = twin.output(twin.down(hidden) - twin.down.base(hidden) + base)
    delta = torch.autograd.grad(out.square().mean(), base)[0]
    assert rank == pytest.approx(float(entropy_rank(hidden, delta)), abs=1e-5)


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_observations_that_may_not_lower_a_weight_change_no_bit_of_training(strategy):
    """Ranks are recorded; `polar_release_beta=1` keeps every weight at its prior of 1."""
    plain, unattached = make(polar_release_beta=1.0)
    train(plain, unattached, range(30))
    model, optimizer = make(polar_release_beta=1.0)
    sites = optimizer.attach_model(model, lambda m: isinstance(m, nn.Linear), strategy=strategy)
    train(model, optimizer, range(30))
    assert equal_weights(model, plain)
    ranks = [
        float(optimizer.state[p]["residual_entropy_rank"])
        for p in model.parameters()
        if p.ndim == 2
    ]
    assert sum(0 < rank < 1 for rank in ranks) >= len(sites)
    adapting, usual = make()
    usual.attach_model(adapting, lambda m: isinstance(m, nn.Linear), strategy=strategy)
    train(adapting, usual, range(30))
    assert not equal_weights(adapting, plain)


def test_derived_sites_attach():
    model, optimizer = make()
    sites = derive_sites(model, batch(0))
    assert set(optimizer.attach_model(model, sites=sites)) == {"down.base", "down.metric"}


def test_leaving_the_context_removes_every_hook():
    model, optimizer = make()
    with optimizer.observing(model):
        train(model, optimizer, [0])
    assert all(not module._forward_hooks for module in model.modules())


def test_attaching_again_replaces_the_old_taps():
    model, optimizer = make()
    optimizer.attach_model(model)
    optimizer.attach_model(model, sites=["embed"])
    assert [name for name, m in model.named_modules() if m._forward_hooks] == ["embed"]


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
@pytest.mark.parametrize("attach_first", [True, False])
def test_a_resumed_run_keeps_weights_and_cadence(strategy, attach_first):
    model, optimizer = make()
    optimizer.attach_model(model, strategy=strategy, observe_every=3)
    train(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, range(4, 9))
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed, second = make()
    resumed.load_state_dict(weights)
    if attach_first:
        second.attach_model(resumed, strategy=strategy, observe_every=3)
        second.load_state_dict(state)
    else:
        second.load_state_dict(state)
        second.attach_model(resumed, strategy=strategy, observe_every=3)
    train(resumed, second, range(4, 9))
    assert equal_weights(model, resumed)
    site, again = model.down.base.weight, resumed.down.base.weight
    assert optimizer.state[site]["observations"] == second.state[again]["observations"] >= 3


@pytest.mark.parametrize(("preset", "expected"), [("drop_in", 2), ("paper", 5)])
def test_the_cadence_of_a_preset(preset, expected):
    """Every fourth step by default, every step under the published rule; said so, as said."""
    for told, count in ((None, expected), (1, 5), (3, 2)):
        model, optimizer = make(preset=preset)
        optimizer.attach_model(model, **({} if told is None else {"observe_every": told}))
        assert copy.deepcopy(optimizer)._observe_every == optimizer._observe_every
        train(model, optimizer, range(5))
        assert optimizer.state[model.down.base.weight]["observations"] == count


def test_copies_of_optimizer_and_model_are_independent():
    model, optimizer = make()
    optimizer.attach_model(model)
    train(model, optimizer, range(2))
    model(batch(5)).square().mean().backward()
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(optimizer))
    copy.deepcopy(optimizer)
    twin(batch(6)).square().mean().backward()
    before = len(optimizer._observing.stage)
    twin(batch(7)).square().mean().backward()
    assert len(optimizer._observing.stage) == before


def test_observation_never_changes_gradients():
    model, optimizer = make()
    plain, _ = make()
    optimizer.attach_model(model)
    model(batch(0)).square().mean().backward()
    plain(batch(0)).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_fused_modules_are_served_by_hand():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    optimizer = ResidualPolarTransport(attention.named_parameters(), lr=1e-3)
    optimizer.attach_model(attention)
    x = torch.randn(4, 3, 8)
    attention(x, x, x, need_weights=False)[0].square().mean().backward()
    rank = optimizer.observe_residual(
        torch.randn(12, 8), torch.randn(12, 8), attention.out_proj.weight
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    state = optimizer.state[attention.out_proj.weight]
    assert float(state["residual_entropy_rank"]) == pytest.approx(float(rank), abs=1e-6)


@pytest.mark.parametrize("null", ["none", "shuffle", "analytic"])
def test_every_null_trains(null):
    model, optimizer = make(observer_null=null)
    optimizer.attach_model(model)
    train(model, optimizer, range(3))
    rank = float(optimizer.state[model.down.base.weight]["residual_entropy_rank"])
    assert 0 < rank <= 1

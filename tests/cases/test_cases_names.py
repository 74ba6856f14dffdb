"""Parameters and their names on both sides of a checkpoint."""

import copy
import warnings

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport

# -- case 40: names on both sides ----------------------------------------------------------------------------


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def give(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        p.grad = torch.randn(p.shape, generator=generator)


def split(named):
    named = list(named)
    return [{"params": named[:2], "lr": 1e-3}, {"params": named[2:], "lr": 2e-3}]


@pytest.mark.parametrize("groups", [list, split])
def test_states_are_matched_by_name(groups):
    """Case 40: another order on the other side, within a group and across groups."""
    model = two_layers(0)
    whole = ResidualPolarTransport(groups(model.named_parameters()), max_root_staleness=1)
    for seed in range(3):
        give(model, seed)
        whole.step()
    saved = copy.deepcopy(whole.state_dict())
    order = [list(group["params"]) for group in saved["param_groups"]]
    twin = two_layers(1)
    twin.load_state_dict(model.state_dict())
    turned = list(twin.named_parameters())[::-1]
    other = ResidualPolarTransport(groups(turned), max_root_staleness=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    assert [group["params"] for group in saved["param_groups"]] == order
    for name, p in twin.named_parameters():
        mine = other.state[p]["momentum"]
        assert torch.equal(mine, whole.state[model.get_parameter(name)]["momentum"])
    names = [
        other.parameter_name(g, i)
        for g, group in enumerate(other.param_groups)
        for i in range(len(group["params"]))
    ]
    assert names == [f"{name} {tuple(p.shape)}" for name, p in turned]
    for group in (*whole.param_groups, *other.param_groups):
        group["lr"] = 1e-2
    give(model, 9)
    give(twin, 9)
    whole.step()
    other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_wrappers_do_not_change_a_name():
    """Case 40: DDP and torch.compile prefix every name."""
    model = two_layers(0)
    plain = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    give(model, 0)
    plain.step()
    wrapped = nn.ModuleDict({"module": torch.compile(model)})
    other = ResidualPolarTransport(list(wrapped.named_parameters())[::-1], lr=1e-2)
    other.load_state_dict(plain.state_dict())
    for p in model.parameters():
        assert torch.equal(other.state[p]["momentum"], plain.state[p]["momentum"])


def test_names_that_occur_twice_match_within_their_group():
    """Case 40: two models in two groups share their names; twice in one group, they say nothing."""
    nets = [two_layers(0), two_layers(1)]
    groups = [{"params": list(net.named_parameters())} for net in nets]
    turned = [{"params": list(net.named_parameters())[::-1]} for net in nets]
    whole, other = ResidualPolarTransport(groups), ResidualPolarTransport(turned)
    for seed, net in enumerate(nets):
        give(net, seed)
    whole.step()
    other.load_state_dict(whole.state_dict())
    for p in (*nets[0].parameters(), *nets[1].parameters()):
        assert torch.equal(other.state[p]["momentum"], whole.state[p]["momentum"])
    weights = [("weight", net[0].weight) for net in nets]
    one, two = ResidualPolarTransport(weights), ResidualPolarTransport(weights[::-1])
    one.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.load_state_dict(one.state_dict())
    assert torch.equal(
        two.state[nets[1][0].weight]["momentum"], one.state[nets[0][0].weight]["momentum"]
    )


def test_names_that_differ_are_warned_of():
    """Case 40: then order counts, as in torch; states without names are matched in silence."""
    model = two_layers(0)
    whole = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    give(model, 0)
    whole.step()
    renamed = [(f"net.{name}", p) for name, p in two_layers(1).named_parameters()]
    other = ResidualPolarTransport(renamed, lr=1e-2)
    with pytest.warns(UserWarning, match=r"'0.weight'.*by order, not by name") as caught:
        other.load_state_dict(whole.state_dict())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert other.parameter_name(0, 0).startswith("net.0.weight")
    for (_, p), q in zip(renamed, model.parameters(), strict=True):
        assert torch.equal(other.state[p]["momentum"], whole.state[q]["momentum"])
    unnamed = ResidualPolarTransport(two_layers(1).parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unnamed.load_state_dict(whole.state_dict())
        whole.load_state_dict(unnamed.state_dict())

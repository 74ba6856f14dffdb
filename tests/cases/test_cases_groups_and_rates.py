"""Acceptance cases 12 to 14: groups, AdamW's keywords, rates that are tensors."""

import copy
import warnings

import pytest
import torch
from optimizer_states import assert_bitwise, cosine, through_a_file
from torch import nn
from torch.optim import lr_scheduler

from rpt import ResidualPolarTransport

BACKENDS = ["auto", "full", "blocked", "low_rank"]


# -- 12: the caller's groups -----------------------------------------------------------------------


def test_case_12_group_options_are_kept():
    weight, bias, other = (nn.Parameter(torch.full(s, 3.0)) for s in ((4, 4), (4,), (4, 4)))
    groups = [
        {"params": [weight], "lr": 1e-3, "weight_decay": 0.1, "tag": "mine"},
        {"params": [bias, other], "lr": 1e-4, "weight_decay": 0.0},
    ]
    optimizer = ResidualPolarTransport(groups, lr=5e-4, weight_decay=0.01)
    everything = [weight, bias, other]
    for p in everything:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full((4, 4), 2.9997), rtol=1e-6, atol=0)
    assert torch.equal(bias, torch.full((4,), 3.0))
    assert torch.equal(other, torch.full((4, 4), 3.0))
    assert len(optimizer.param_groups) == 2
    assert optimizer.param_groups[0]["tag"] == "mine"
    assert optimizer.param_groups[1]["params"] == [bias, other]

    schedule = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [5e-4, 5e-5]
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(weight, before * (1 - 5e-4 * 0.1), rtol=1e-6, atol=0)
    schedule.step()

    added = nn.Parameter(torch.zeros(2, 3))
    optimizer.add_param_group({"params": added, "lr": 7e-4})
    added.grad = torch.randn(2, 3)
    optimizer.step()
    rms = float(added.detach().square().mean().sqrt())
    assert rms == pytest.approx(1.2 * 7e-4, rel=1e-5)

    twins = [nn.Parameter(p.detach().clone()) for p in (*everything, added)]
    loaded = ResidualPolarTransport(
        [{"params": twins[:1], "tag": ""}, {"params": twins[1:3]}, {"params": twins[3:]}], lr=9.0
    )
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    assert [g["lr"] for g in loaded.param_groups] == [5e-4, 5e-5, 7e-4]
    assert loaded.param_groups[0]["tag"] == "mine"
    twins[3].grad = added.grad.clone()
    loaded.step()
    optimizer.step()
    assert torch.equal(twins[3], added)


# -- 13: AdamW's keywords and momentum cycling ------------------------------------------------------


def test_case_13_one_cycle_moves_beta1_and_it_is_used():
    weight, bias = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.zeros(3))
    optimizer = ResidualPolarTransport([weight, bias], lr=1e-3)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    betas = []
    for _ in range(10):
        betas.append(optimizer.param_groups[0]["betas"][0])
        weight.grad, bias.grad = torch.ones(3, 3), torch.ones(3)
        before = optimizer.state[bias]["momentum"].clone() if bias in optimizer.state else None
        optimizer.step()
        after = optimizer.state[bias]["momentum"]
        if before is not None:  # constant gradient: request 1, nothing turns
            beta = betas[-1]
            torch.testing.assert_close(after, beta * before + (1 - beta), rtol=1e-5, atol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step() if len(betas) < 10 else None
    assert betas[:3] == pytest.approx([0.95, 0.90, 0.85], abs=1e-6)
    assert betas[9] == pytest.approx(0.95, abs=1e-6)


def test_case_13_a_keyword_that_adamw_has_not():
    """In the constructor: unknown keys of a group are the caller's own and are kept."""
    with pytest.raises(TypeError, match="momentum"):
        ResidualPolarTransport([nn.Parameter(torch.zeros(3, 3))], momentum=0.9)


@pytest.mark.parametrize(
    ("keyword", "value", "outcome"),
    [
        ("lr", 1e-3, "honoured"),
        ("betas", (0.8, 0.9), "honoured"),
        ("eps", 1e-8, "honoured"),
        ("weight_decay", 0.1, "honoured"),
        ("maximize", True, "honoured"),
        ("amsgrad", False, "honoured"),
        ("foreach", True, "warned"),
        ("fused", True, "warned"),
        ("foreach", None, "honoured"),
        ("fused", False, "honoured"),
        ("capturable", False, "honoured"),
        ("differentiable", False, "honoured"),
        ("amsgrad", True, "refused"),
        ("capturable", True, "honoured"),
        ("differentiable", True, "refused"),
    ],
)
@pytest.mark.parametrize("place", ["constructor", "group"])
def test_case_13_every_keyword_of_adamw(keyword, value, outcome, place):
    weight = nn.Parameter(torch.zeros(3, 3))

    def build():
        if place == "constructor":
            return ResidualPolarTransport([weight], **{keyword: value})
        return ResidualPolarTransport([{"params": [weight], keyword: value}])

    if outcome == "refused":
        with pytest.raises((ValueError, TypeError), match=keyword):
            build()
        return
    if outcome == "warned":
        with pytest.warns(UserWarning, match=keyword):
            optimizer = build()
    else:
        optimizer = build()
    weight.grad = torch.randn(3, 3)
    optimizer.step()
    assert weight.isfinite().all()
    if keyword in ("lr", "betas", "eps", "weight_decay", "maximize"):
        assert optimizer.param_groups[0][keyword] == value


@pytest.mark.parametrize("preset", ["drop_in", "paper"])
def test_case_13_maximize_flips_the_first_step(preset):
    torch.manual_seed(13)
    start, gradient = torch.randn(4, 3), torch.randn(4, 3)
    ends = []
    for maximize in (False, True):
        weight = nn.Parameter(start.double())
        optimizer = ResidualPolarTransport(
            [weight], lr=0.1, preset=preset, weight_decay=0.0, maximize=maximize
        )
        weight.grad = gradient.double()
        optimizer.step()
        ends.append(weight.detach() - start.double())
    torch.testing.assert_close(ends[0], -ends[1], rtol=1e-12, atol=1e-15)


# -- 14: tensor learning rates; zero-gradient starts ------------------------------------------------


def run_with_lr(lr, schedule, in_place=False):
    torch.manual_seed(14)
    weight, bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    optimizer = ResidualPolarTransport([weight, bias], lr=lr)
    scheduler = lr_scheduler.LinearLR(optimizer) if schedule else None
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        for p in (weight, bias):
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if in_place and isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
            optimizer.param_groups[0]["lr"].mul_(0.5)
        elif in_place:
            optimizer.param_groups[0]["lr"] *= 0.5
    return torch.cat([weight.detach().flatten(), bias.detach()])


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("lr", [torch.tensor(0.01), torch.tensor([0.01])])
def test_case_14_tensor_learning_rates(lr, schedule):
    expected = run_with_lr(0.01, schedule)
    torch.testing.assert_close(run_with_lr(lr.clone(), schedule), expected, rtol=0, atol=1e-7)


def test_case_14_a_tensor_rate_changed_in_place_takes_effect():
    expected = run_with_lr(0.01, False, in_place=True)
    actual = run_with_lr(torch.tensor(0.01), False, in_place=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    assert not torch.allclose(actual, run_with_lr(0.01, False), atol=1e-4)


@pytest.mark.parametrize("preset", ["drop_in", "paper"])
@pytest.mark.parametrize(
    "roots", [*BACKENDS, "full(drift_from='age')", "none", "auto(full_side=1, long_side=1)"]
)
def test_case_14_a_start_with_zero_gradients(roots, preset):
    torch.manual_seed(14)
    start = [torch.randn(6, 5), torch.randn(5), torch.tensor(2.0)]
    gradients = [1e-3 * torch.randn_like(p) for p in start]

    def build():
        parameters = [nn.Parameter(p.clone()) for p in start]
        options = {"lr": 1e-2, "weight_decay": 0.1, "roots": roots, "preset": preset}
        return parameters, ResidualPolarTransport(parameters, **options)

    def real_step(parameters, optimizer):
        before = [p.detach().clone() for p in parameters]
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
        return [p.detach() - (1 - 1e-3) * b for p, b in zip(parameters, before, strict=True)]

    parameters, optimizer = build()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step(closure=None)
    for p, b in zip(parameters, start, strict=True):
        assert torch.equal(p, b)
        assert optimizer.state[p]["step"] == 1  # a zero gradient is a gradient: the step counts
        for value in optimizer.state[p].values():
            assert not isinstance(value, torch.Tensor) or value.isfinite().all()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    after_zero = real_step(parameters, optimizer)
    fresh = real_step(*build())
    for a, b in zip(after_zero, fresh, strict=True):
        assert a.isfinite().all()
        assert cosine(a.flatten(), b.flatten()) >= 0.99
        # The zero step counts in the bias corrections, no more: the same order of length.
        assert 0.3 < float(a.norm() / b.norm()) < 3


def test_case_14_distributed_checkpointing_initialises_a_fresh_optimizer():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    torch.manual_seed(14)
    model = nn.Linear(4, 3)
    start = copy.deepcopy(model.state_dict())
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2, weight_decay=0.1)
    saved = get_optimizer_state_dict(model, optimizer)
    assert_bitwise(dict(model.state_dict()), dict(start))
    assert "weight" in saved["state"]
    for record in saved["state"].values():
        for value in record.values():
            assert not isinstance(value, torch.Tensor) or value.isfinite().all()
    other = ResidualPolarTransport(model.parameters(), lr=1e-2, weight_decay=0.1)
    set_optimizer_state_dict(model, other, saved)
    model.weight.grad, model.bias.grad = torch.randn(3, 4), torch.randn(3)
    other.step()
    assert model.weight.isfinite().all()

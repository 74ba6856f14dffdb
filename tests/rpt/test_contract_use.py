"""Asked of an optimizer beyond torch's contract: errors, descent, groups, layouts, dtypes, edits.

`torch.optim.AdamW` runs through the same tests: a test that it fails is a wrong test.
"""

import io

import numpy as np
import pytest
import torch
from optimizer_contract import (
    all_optimizers,
    few_optimizers,
    give_gradients,
    our_optimizers,
    parameters,
    train,
    weights,
)
from optimizer_states import assert_bitwise, snapshot
from torch import nn

from rpt import ResidualPolarTransport

# -- errors ----------------------------------------------------------------------------------------


@few_optimizers
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1e-2}, "learning rate|lr"),
        ({"lr": torch.tensor([1e-2, 1e-3])}, "Tensor lr|lr"),
        ({"betas": (1.0, 0.9)}, "beta"),
        ({"betas": (0.9, -0.1)}, "beta"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_constructor_refuses_bad_options(build, options, word):
    with pytest.raises((ValueError, TypeError), match=word):
        build(parameters((2, 2)), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": "fast"}, r"lr='fast' must be a number"),
        ({"lr": True}, r"lr=True must be a number"),
        ({"lr": float("nan")}, r"lr=nan"),
        ({"betas": 0.9}, r"betas=0.9 must be a pair"),
        ({"betas": (0.9, 0.95, 0.99)}, r"betas=.* must be a pair"),
        ({"betas": (torch.tensor(0.9), 0.99)}, r"beta1 is a tensor"),
        ({"preset": "fast"}, r"preset='fast' is unknown: choose one of 'drop_in', 'paper'"),
        ({"roots": "sparse"}, r"roots='sparse' is unknown: choose one of full"),
        ({"roots": "low_rank(width=3)"}, r"low_rank takes the options rank"),
        ({"roots": 3}, r"roots=3 is a int"),
        ({"update_rms": 0.0}, r"update_rms=0.0 must be above 0"),
        ({"polar_prior": 1.5}, r"polar_prior=1.5 must be at least 0"),
        ({"polar_beta": 1.0}, r"polar_beta=1.0"),
        ({"polar_steps": 0}, r"polar_steps=0 must be a positive whole number"),
        ({"polar_dtype": torch.float16}, r"polar_dtype='float16' must be 'auto' or 'float32' or"),
        ({"polar_dtype": 16}, r"polar_dtype=16 must be 'auto' or 'float32' or 'bfloat16'"),
        ({"max_root_staleness": 2.5}, r"max_root_staleness=2.5 must be a positive whole number"),
        ({"min_gain": 3.0, "max_gain": 2.0}, r"min_gain=3.0 is above max_gain"),
        ({"nonfinite": "ignore"}, r"nonfinite='ignore' must be 'skip' or 'raise'"),
        ({"rounding": "up"}, r"rounding='up' must be 'nearest' or 'stochastic'"),
    ],
)
@pytest.mark.parametrize("place", ["constructor", "group"])
def test_every_option_is_checked_in_words(options, says, place):
    if place == "constructor":
        with pytest.raises((ValueError, TypeError), match=says):
            ResidualPolarTransport(parameters((2, 2)), **options)
        return
    with pytest.raises((ValueError, TypeError), match=says):
        ResidualPolarTransport(
            [{"params": parameters((2, 2))}, {"params": parameters(3), **options}]
        )
    optimizer = ResidualPolarTransport(parameters((2, 2)))
    with pytest.raises((ValueError, TypeError), match=says):
        optimizer.add_param_group({"params": parameters((3, 3)), **options})
    assert len(optimizer.param_groups) == 1


def test_an_unknown_keyword_is_refused():
    """In the constructor: unknown keys of a group are the caller's own and are kept."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        ResidualPolarTransport(parameters((2, 2)), learning_rate=0.1)


@few_optimizers
def test_sparse_gradients_are_refused_before_any_change(build):
    params = parameters((4, 3), (3,))
    optimizer = build(params)
    train(optimizer, params, 2)
    before = snapshot(optimizer)
    give_gradients(params, 5)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    if build is not torch.optim.AdamW:
        assert_bitwise(snapshot(optimizer), before)
        with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 \(4, 3\).*SparseAdam"):
            optimizer.step()


@our_optimizers
def test_complex_parameters_are_refused_before_any_change(build):
    good, bad = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(2, 2, dtype=torch.cfloat))
    optimizer = build([("good", good), ("bad", bad)])
    good.grad, bad.grad = torch.randn(3, 3), torch.randn(2, 2, dtype=torch.cfloat)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"bad \(2, 2\) is complex.*view_as_real"):
        optimizer.step()
    assert_bitwise(snapshot(optimizer), before)


# -- descent ---------------------------------------------------------------------------------------


def distance(weight, bias, x):
    return (weight.mv(x) + bias).square().sum()


@all_optimizers
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("maximize", [False, True])
def test_descent(build, contiguous, maximize):
    torch.manual_seed(0)
    weight = torch.randn(10, 5)
    if not contiguous:
        weight = torch.randn(10, 5, 2)[..., 0]
    weight, bias = nn.Parameter(weight), nn.Parameter(torch.randn(10))
    assert weight.is_contiguous() == contiguous
    x = torch.randn(5)
    optimizer = build([weight, bias], lr=1e-2, maximize=maximize)

    def closure():
        optimizer.zero_grad()
        loss = distance(weight, bias, x)
        loss.backward()
        return loss

    first = closure().item()
    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[0] == pytest.approx(first)
    last = closure().item()
    assert last > 1.2 * first if maximize else last < 0.8 * first
    assert weight.is_contiguous() == contiguous


# -- groups, layouts, dtypes ------------------------------------------------------------------------


@all_optimizers
def test_groups_have_their_own_rate_and_decay(build):
    a, b = parameters((4, 3), (4, 3))
    with torch.no_grad():
        b.copy_(a)
    optimizer = build(
        [{"params": [a], "lr": 1e-2, "weight_decay": 0.0}, {"params": [b]}],
        lr=1e-3,
        weight_decay=0.5,
    )
    start = a.detach().clone()
    gradient = torch.randn(4, 3)
    a.grad, b.grad = gradient, gradient.clone()
    optimizer.step()
    step = start - a.detach()
    expected = start * (1 - 1e-3 * 0.5) - step / 10
    torch.testing.assert_close(b.detach(), expected, rtol=1e-4, atol=1e-6)


@all_optimizers
def test_batched_equals_one_parameter_at_a_time(build):
    shapes = [(4, 3), (3, 4), (4, 3), (5,), (7,), (), (2, 3, 2), (70,)]
    together = parameters(*shapes)
    apart = [nn.Parameter(p.detach().clone()) for p in together]
    # The gain is a group's own; one parameter alone would move its own.
    options = {} if build is torch.optim.AdamW else {"gain_rate": 0.0, "root_drift_threshold": None}
    if options:
        options["max_root_staleness"] = 1
    one = build(together, lr=1e-2, **options)
    many = [build([p], lr=1e-2, **options) for p in apart]
    for t in range(6):
        give_gradients(together, t)
        give_gradients(apart, t)
        one.step()
        for optimizer in many:
            optimizer.step()
    for p, q in zip(together, apart, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@all_optimizers
def test_missing_gradients_leave_the_others_alone(build):
    shapes = [(4, 3), (4, 3), (5,), (6,)]
    some, reference = parameters(*shapes), parameters(*shapes)
    options = {} if build is torch.optim.AdamW else {"gain_rate": 0.0}
    optimizer = build(some, lr=1e-2, **options)
    twin = build([reference[0], reference[2]], lr=1e-2, **options)
    train(optimizer, some, 1)
    train(twin, reference, 1)
    for p in (reference[1], reference[3]):
        p.grad = None
    for t in range(1, 8):
        give_gradients(some, t)
        give_gradients(reference, t)
        some[1].grad = some[3].grad = None
        optimizer.step()
        twin.step()
    torch.testing.assert_close(some[0], reference[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(some[2], reference[2], rtol=1e-5, atol=1e-6)
    assert int(optimizer.state[some[1]]["step"]) == 1
    assert int(optimizer.state[some[0]]["step"]) == 8


@all_optimizers
def test_mixed_dtypes_in_one_group(build):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    params = [p for d in dtypes for p in parameters((4, 3), (3,), dtype=d)]
    optimizer = build(params, lr=1e-2)
    before = weights(params)
    train(optimizer, params, 4)
    for p, b in zip(params, before, strict=True):
        assert p.dtype == b.dtype
        assert p.isfinite().all()
        assert not torch.equal(p, b)


@few_optimizers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_float32(build, dtype):
    low = parameters((8, 6), (6,), dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in low]
    optimizers = build(low, lr=1e-2), build(wide, lr=1e-2)
    for t in range(5):
        give_gradients(low, t)
        for p, q in zip(low, wide, strict=True):
            q.grad = p.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(low, wide, strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0, atol=0.04)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@all_optimizers
def test_mixed_devices(build):
    here = parameters((4, 3), (3,), (4, 3), (3,))
    there = [nn.Parameter(p.detach().clone().cuda()) for p in here[2:]]
    mixed, reference = here[:2] + there, [nn.Parameter(p.detach().clone()) for p in here]
    optimizers = build(mixed, lr=1e-2), build(reference, lr=1e-2)
    for t in range(5):
        give_gradients(reference, t)
        for p, q in zip(mixed, reference, strict=True):
            p.grad = q.grad.to(p.device)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(mixed, reference, strict=True):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-3, atol=1e-4)


# -- no-ops ----------------------------------------------------------------------------------------


@all_optimizers
def test_zero_gradients_only_decay(build):
    params = parameters((4, 3), (3,), ())
    still, decayed = build(params, lr=1e-2, weight_decay=0.0), None
    before = weights(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        still.step()
    assert_bitwise(weights(params), before)
    decayed = build(params, lr=1e-2, weight_decay=0.1)
    decayed.step()
    for p, b in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), b * (1 - 1e-3), rtol=1e-6, atol=0)


# -- edits between steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("betas", (0.9, 1.5), "beta2=1.5"),
        ("roots", "dense", "roots='dense' is unknown"),
        ("update_rms", -1, "update_rms=-1"),
        ("polar_steps", 0, "polar_steps=0"),
    ],
)
def test_a_wrong_edit_of_a_group_is_refused_before_any_change(option, value, says):
    params = parameters((4, 3), (3,))
    optimizer = ResidualPolarTransport(params)
    train(optimizer, params, 2)
    kept = optimizer.param_groups[0][option]
    before = snapshot(optimizer)
    optimizer.param_groups[0][option] = value
    give_gradients(params, 3)
    with pytest.raises(ValueError, match=f"parameter group 0: {says}"):
        optimizer.step()
    optimizer.param_groups[0][option] = kept
    assert_bitwise(snapshot(optimizer), before)
    optimizer.step()


def test_roots_can_be_changed_between_steps():
    from rpt.roots import LowRankRoots

    params = parameters((6, 5), (5, 4), (3,))
    optimizer = ResidualPolarTransport(params, lr=1e-2)
    for t, roots in enumerate(["full", LowRankRoots(2), "none", "blocked(block_size=2)", "auto"]):
        optimizer.param_groups[0]["roots"] = roots
        train(optimizer, params, 2, start=2 * t)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
        for p in params:
            assert p.isfinite().all()
            assert optimizer.state[p]["step"] == 2 * t + 2


@pytest.mark.parametrize("preset", ["drop_in", "paper"])
def test_a_metric_that_starts_anew_is_corrected_anew(preset):
    # Late in training a fresh covariance under an old bias correction would give steps 30 times too long.
    params = parameters((6, 5))
    optimizer = ResidualPolarTransport(params, lr=1e-2, preset=preset, roots="full", gain_rate=0.0)
    lengths = []
    for t in range(45):
        if t == 40:
            optimizer.param_groups[0]["roots"] = "low_rank(rank=3)"
        before = params[0].detach().clone()
        train(optimizer, params, 1, start=t)
        lengths.append((params[0].detach() - before).norm().item())
    assert max(lengths[40:]) < 2 * max(lengths[30:40])
    momentum = optimizer.state[params[0]]["momentum"]
    assert momentum.square().mean().sqrt().item() < 2


def test_a_parameter_may_change_its_dtype_between_steps():
    model = nn.Linear(4, 3)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    train(optimizer, list(model.parameters()), 2)
    momentum = optimizer.state[model.weight]["momentum"].clone()
    model.double()
    assert optimizer.state[model.weight]["step"] == 2
    train(optimizer, list(model.parameters()), 1)
    assert optimizer.state[model.weight]["momentum"].dtype == torch.float64
    assert float(momentum.abs().sum()) > 0
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("kind", [torch.tensor, np.float64])
@pytest.mark.parametrize("preset", ["drop_in", "paper"])
def test_numbers_of_other_libraries_are_options(preset, kind):
    def after(kind):
        params = parameters((6, 4), (5,), ())
        numbers = {"eps": 1e-6, "transport_eps": 1e-6, "update_rms": 0.5, "matrix_ridge": 1e-4}
        optimizer = ResidualPolarTransport(
            params,
            preset=preset,
            **{name: kind(value) for name, value in numbers.items()},
            betas=(0.9, 0.99) if kind is torch.tensor else (kind(0.9), kind(0.99)),
        )
        train(optimizer, params, 3)
        return params

    for a, b in zip(after(kind), after(float), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (8, 40)])
def test_a_gradient_that_all_but_vanishes_leaves_weights_finite(shape, capturable):
    (weight,) = parameters(shape)
    optimizer = ResidualPolarTransport([weight], capturable=capturable)
    (gradient,) = parameters(shape, seed=1)
    for t in range(30):
        weight.grad = gradient.detach() * (1.0 if t < 20 else 1e-7)
        optimizer.step()
    assert weight.isfinite().all()


def test_a_vector_forgets_at_once_where_beta2_is_zero():
    """A gradient far below the one before it was lost in rounding, and the weight became NaN."""
    p = nn.Parameter(torch.zeros(()))
    optimizer = ResidualPolarTransport([p], lr=1e-2, preset="paper", weight_decay=0.0)
    for size in (1e18, 1.0, 1e12):
        p.grad = torch.tensor(size)
        optimizer.step()
    before = p.item()
    optimizer.param_groups[0]["betas"] = (0.5, 0.0)
    p.grad = torch.tensor(8e11)
    optimizer.step()
    assert 0 < before - p.item() <= 0.03

"""hypothesis looks for inputs that break what the optimizer promises for all of them.

Example counts here are small; `python -m pytest -m slow tests/rpt/test_fuzz.py` runs many more.
"""

import copy
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from rpt import ResidualPolarTransport
from rpt.rule.length import HIGHEST

BACKENDS = ["auto", "full", "blocked(block_size=3)", "low_rank(rank=2)", "none"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def fuzz(examples):
    return settings(max_examples=examples, suppress_health_check=RELAXED)


def quick_and_slow(examples, many):
    """Two tests from one property: a quick one, and a slow one with many more examples."""

    def decorate(check):
        name = check.__name__.removeprefix("check_")
        globals()[f"test_{name}"] = fuzz(examples)(given(st.data())(check))
        slow = fuzz(many)(given(st.data())(lambda data: check(data)))
        slow.__name__ = f"test_{name}_often"
        globals()[f"test_{name}_often"] = pytest.mark.slow(slow)
        return check

    return decorate


small = st.sampled_from([1, 2, 3, 4, 5, 7, 8])
shapes = st.one_of(
    st.lists(small, max_size=5).filter(lambda s: math.prod(s) <= 600).map(tuple),
    st.sampled_from([(), (0,), (0, 3), (3, 0), (2, 0, 3), (1, 1), (1, 97), (97, 1), (2, 301),
                     (301, 2), (13, 11), (1, 1, 1, 1, 1), (3, 1, 2, 1, 2), (1,), (127,)]),
)  # fmt: skip
scales = st.integers(-30, 30).map(lambda e: 10.0**e)
layouts = st.sampled_from(["contiguous", "transposed", "strided", "expanded", "offset"])


def laid_out(tensor, layout):
    """The same values behind other strides."""
    if layout == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.ndim >= 1:
        wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "offset":
        flat = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
        flat[3:] = tensor.reshape(-1)
        return flat[3:].view(tensor.shape)
    return tensor


def drawn(data, shape, dtype, seed, scale=1.0):
    """A gradient of some kind: dense, low-rank, sparse in rows, constant, zero."""
    generator = torch.Generator().manual_seed(seed)
    kind = data.draw(st.sampled_from(["dense", "one", "rows", "constant", "zero"]))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "constant":
        values = torch.ones(shape, dtype=torch.float64)
    elif kind == "zero":
        values = torch.zeros(shape, dtype=torch.float64)
    elif len(shape) >= 2 and kind == "one":
        values = values[:1].expand(shape).clone()
    elif shape and kind == "rows":
        values[1:] = 0
    largest = torch.finfo(dtype).max / 64
    return (values * scale).clamp(-largest, largest).to(dtype)


def build(data, params, **options):
    options.setdefault("preset", data.draw(st.sampled_from(["drop_in", "paper"])))
    options.setdefault("roots", data.draw(st.sampled_from(BACKENDS)))
    options.setdefault("lr", 1e-2)
    return ResidualPolarTransport(params, **options)


def all_finite(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert p.isfinite().all()
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    assert value.isfinite().all(), key


def frozen(optimizer):
    params = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    return params, copy.deepcopy(optimizer.state_dict())


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@quick_and_slow(60, 400)
def check_everything_stays_finite_and_bounded(data):
    """Any shapes, dtypes, strides, scales, missing and non-finite gradients, edits and observations."""
    count = data.draw(st.integers(1, 4))
    params = []
    for i in range(count):
        shape, dtype = data.draw(shapes), data.draw(st.sampled_from(DTYPES))
        values = drawn(data, shape, dtype, i)
        params.append(nn.Parameter(laid_out(values, data.draw(layouts))))
    optimizer = build(data, params, weight_decay=0.0)
    scale = data.draw(scales)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(data.draw(st.integers(1, 6))):
            if data.draw(st.integers(0, 3)) == 0:
                scale = data.draw(scales)
            skipped = []
            for i, p in enumerate(params):
                kind = data.draw(st.sampled_from(["grad"] * 6 + ["none", "nan", "inf"]))
                p.grad = None if kind == "none" else laid_out(
                    drawn(data, tuple(p.shape), p.dtype, 100 * t + i, scale), data.draw(layouts)
                )  # fmt: skip
                if kind in ("nan", "inf") and p.numel():
                    p.grad.view(-1) if p.grad.is_contiguous() else None
                    p.grad[(0,) * p.ndim] = float(kind)
                if kind in ("nan", "inf", "none"):
                    skipped.append(i)
            act(data, optimizer, params)
            before = [p.detach().clone() for p in params]
            group = optimizer.param_groups[0]
            gain = float(group["gain"])
            optimizer.step()
            all_finite(optimizer)
            for i, (p, b) in enumerate(zip(params, before, strict=True)):
                if i in skipped:
                    assert torch.equal(p, b)
                elif p.numel() > (not group["signal_length"]) and group["update_rms"]:
                    moved = (p.detach().double() - b.double()).square().mean().sqrt()
                    rounding = torch.finfo(p.dtype).eps * b.double().abs().max()
                    longest = HIGHEST if group["signal_length"] else 1.0
                    limit = group["lr"] * group["update_rms"] * longest * (1 + 1e-3) * gain
                    assert moved <= limit + rounding


def act(data, optimizer, params):
    """One of the things a caller may do between a backward and a step, in any order."""
    action = data.draw(st.sampled_from(
        ["nothing", "lr", "betas", "roots", "rank", "own rank", "observe", "clear", "remove",
         "save", "add", "preset", "telemetry", "copy"]))  # fmt: skip
    group = optimizer.param_groups[0]
    if action == "lr":
        group["lr"] = data.draw(st.sampled_from([0.0, 1e-3, 0.1, torch.tensor(1e-2)]))
    elif action == "betas":
        group["betas"] = data.draw(st.sampled_from([(0.0, 0.9), (0.95, 0.99), (0.5, 0.0)]))
    elif action == "roots":
        group["roots"] = data.draw(st.sampled_from(BACKENDS))
    elif action == "rank":
        optimizer.set_residual_entropy_rank(data.draw(st.floats(0, 1)))
    elif action == "own rank":
        optimizer.set_residual_entropy_rank(
            data.draw(st.floats(0, 1)), data.draw(st.sampled_from(params))
        )
    elif action == "observe":
        rows = data.draw(st.integers(1, 6))
        optimizer.observe_residual(torch.randn(rows, 3), torch.randn(rows, 2) * data.draw(scales))
    elif action == "clear":
        optimizer.clear_observations()
    elif action == "remove":
        optimizer.remove_observers()
    elif action == "save":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif action == "add":
        params.append(nn.Parameter(torch.ones(2, 3)))
        optimizer.add_param_group({"params": params[-1], "lr": 1e-3})
        params[-1].grad = None
        # It has no gradient yet: the caller's loop gives it one in the next step.
        params.pop()
    elif action == "preset":
        group["update_rms"] = data.draw(st.sampled_from([None, 0.92, 0.2]))
        group["signal_length"] = data.draw(st.booleans())
        group["thin_as_vector"] = data.draw(st.booleans())
        group["max_relative_step"] = data.draw(st.sampled_from([None, 0.07, 1e-3]))
    elif action == "telemetry":
        str(optimizer.telemetry())
    elif action == "copy":
        copy.deepcopy(optimizer)


@quick_and_slow(40, 500)
def check_the_update_never_opposes_the_gradient(data):
    shape = data.draw(shapes.filter(lambda s: math.prod(s) > 0))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = build(data, [weight], lr=1.0, weight_decay=0.1, gain_rate=0.0)
    scale = data.draw(st.integers(-12, 12).map(lambda e: 10.0**e))
    for t in range(6):
        weight.grad = drawn(data, shape, dtype, t, scale)
        with torch.no_grad():
            weight.zero_()  # what the step leaves is then -u, unrounded
        optimizer.step()
        update, gradient = -weight.detach().double(), weight.grad.double()
        length = update.norm() * gradient.norm() / gradient.abs().max().clamp_min(1e-300)
        inner = (update * (gradient / gradient.abs().max().clamp_min(1e-300))).sum()
        assert inner >= -4 * torch.finfo(dtype).eps * length


@quick_and_slow(25, 200)
def check_equivariance_under_changes_of_basis(data):
    """Full backend: turning rows and columns of all gradients turns the whole trajectory."""
    rows, cols = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    seed = data.draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left, right = (torch.linalg.qr(random(n, n)).Q for n in (rows, cols))
    start, gradients = random(rows, cols), random(5, rows, cols)
    preset = data.draw(st.sampled_from(["drop_in", "paper"]))
    # In float64 a peak jump cannot be told apart from a turn: refresh at every step.
    options = {"lr": 1e-2, "roots": "full", "preset": preset, "max_root_staleness": 1}
    one = nn.Parameter(start.clone())
    two = nn.Parameter(left @ start @ right)
    first, second = (ResidualPolarTransport([p], **options) for p in (one, two))
    ranks = [data.draw(st.none() | st.floats(0, 1)) for _ in range(5)]
    for gradient, rank in zip(gradients, ranks, strict=True):
        one.grad, two.grad = gradient, left @ gradient @ right
        for optimizer in (first, second):
            if rank is not None:
                optimizer.set_residual_entropy_rank(rank)
            optimizer.step()
    torch.testing.assert_close(two.detach(), left @ one.detach() @ right, rtol=1e-6, atol=1e-7)


@quick_and_slow(40, 300)
def check_scale_invariance(data):
    """Default preset: all gradients times any constant give the same trajectory."""
    shape = data.draw(shapes.filter(lambda s: math.prod(s) > 0))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    scale = data.draw(scales)
    roots = data.draw(st.sampled_from(BACKENDS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    start = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    gradients = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
    ends = []
    for factor in (1.0, scale):
        weight = nn.Parameter(start.clone())
        optimizer = ResidualPolarTransport([weight], lr=1e-2, roots=roots)
        for gradient in gradients:
            weight.grad = (gradient * factor).to(dtype)
            optimizer.step()
        ends.append(weight.detach())
    moved = (ends[0] - start).abs().max()
    tolerance = 2e-2 if dtype == torch.float32 else 1e-5
    assert (ends[1] - ends[0]).abs().max() <= tolerance * moved + 1e-6


@quick_and_slow(30, 200)
def check_powers_of_two_change_no_bit(data):
    shape = data.draw(shapes.filter(lambda s: math.prod(s) > 0))
    exponent = data.draw(st.integers(-80, 80))
    roots = data.draw(st.sampled_from(BACKENDS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    gradients = torch.randn(4, *shape, generator=generator)
    ends = []
    for factor in (1.0, 2.0**exponent):
        weight = nn.Parameter(torch.ones(shape))
        optimizer = ResidualPolarTransport([weight], lr=1e-2, roots=roots)
        for gradient in gradients:
            weight.grad = gradient * factor
            optimizer.step()
        ends.append(weight.detach())
    assert torch.equal(*ends)


@quick_and_slow(40, 300)
def check_a_rejected_call_changes_nothing(data):
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    optimizer = build(data, params, nonfinite="raise")
    for t in range(data.draw(st.integers(0, 3))):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    for p in params:
        p.grad = torch.randn(p.shape)
    group = optimizer.param_groups[0]
    stranger = nn.Parameter(torch.randn(2, 2))
    before = frozen(optimizer)

    def sparse():
        params[0].grad = params[0].grad.to_sparse()
        optimizer.step()

    def non_finite():
        params[1].grad[0] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        optimizer.step()

    def edited(**options):
        kept = {key: group[key] for key in options}
        group.update(options)
        try:
            optimizer.step()
        finally:
            group.update(kept)

    def raising():
        raise ZeroDivisionError

    calls = {
        "sparse": sparse,
        "non-finite": non_finite,
        "betas": lambda: edited(betas=(2.0, 0.9)),
        "roots": lambda: edited(roots="nothing"),
        "rms": lambda: edited(update_rms=-1.0),
        "closure": lambda: optimizer.step(raising),
        "rank": lambda: optimizer.set_residual_entropy_rank(
            data.draw(st.sampled_from([1.5, -1.0, math.nan]))
        ),
        "stranger": lambda: optimizer.set_residual_entropy_rank(0.5, stranger),
        "no one": lambda: optimizer.set_residual_entropy_rank(0.5, []),
        "shapes": lambda: optimizer.observe_residual(torch.randn(3, 2), torch.randn(4, 2)),
        "observe stranger": lambda: optimizer.observe_residual(
            torch.randn(3, 2), torch.randn(3, 2), stranger
        ),
        "group": lambda: optimizer.add_param_group({"params": stranger, "lr": -1.0}),
        "group twice": lambda: optimizer.add_param_group({"params": params[0]}),
        "load": lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        "strategy": lambda: optimizer.attach_model(nn.Linear(2, 2), strategy="magic"),
        "cadence": lambda: optimizer.attach_model(nn.Linear(2, 2), observe_every=0),
    }  # fmt: skip
    call = data.draw(st.sampled_from(sorted(calls)))
    with pytest.raises((ValueError, RuntimeError, TypeError, ZeroDivisionError)) as caught:
        calls[call]()
    assert str(caught.value) or call == "closure"
    assert equal(frozen(optimizer), before)


@quick_and_slow(25, 200)
def check_layouts_change_nothing(data):
    shape = data.draw(shapes.filter(lambda s: math.prod(s) > 0))
    roots = data.draw(st.sampled_from(BACKENDS))
    layout, gradient_layout = data.draw(layouts), data.draw(layouts)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    start = torch.randn(shape, generator=generator)
    gradients = torch.randn(4, *shape, generator=generator)
    plain, other = nn.Parameter(start.clone()), nn.Parameter(laid_out(start.clone(), layout))
    assume(other.is_leaf)
    optimizers = [ResidualPolarTransport([p], lr=1e-2, roots=roots) for p in (plain, other)]
    strides = other.stride()
    for gradient in gradients:
        plain.grad, other.grad = gradient, laid_out(gradient, gradient_layout)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, other)
    assert other.stride() == strides

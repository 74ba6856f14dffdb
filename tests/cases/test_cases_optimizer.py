"""Acceptance cases of the optimizer, each named after its number and holding the right values."""

import copy
import io
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from rpt import ResidualPolarTransport
from rpt.roots import BlockedRoots, FullRoots, LowRankRoots, inverse_root

BACKENDS = ["auto", "full", "blocked", "low_rank"]


def snapshot(optimizer):
    """Deep copies of all parameters and of all state, to compare bit for bit."""
    parameters = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    return parameters, copy.deepcopy(optimizer.state_dict())


def assert_bitwise(left, right, where="root"):
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_bitwise(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_bitwise(a, b, f"{where}[{i}]")
    else:
        assert left == right, where


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # weights_only is torch's default


# -- 1: loss scaling -------------------------------------------------------------------------------


class Scaled:
    """Case 1's model, trained plainly or through a GradScaler."""

    def __init__(self, scaled):
        torch.manual_seed(1)
        self.x, self.y = torch.randn(8, 3), torch.randn(8, 2)
        self.model = nn.Linear(3, 2, bias=False)
        self.optimizer = ResidualPolarTransport(self.model.parameters(), lr=1e-2)
        self.optimizer.attach_model(self.model, observe_every=1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=scaled)
        self.ranks = []

    def step(self, spoil=False):
        self.optimizer.zero_grad()
        loss = (self.model(self.x) - self.y).square().mean()
        self.scaler.scale(loss).backward()
        if spoil:
            self.model.weight.grad[0, 0] = math.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        state = self.optimizer.state[self.model.weight]
        self.ranks.append(float(state["residual_entropy_rank"]))


def test_case_01_loss_scaling_changes_nothing():
    plain, scaled = Scaled(False), Scaled(True)
    for _ in range(5):
        plain.step()
        scaled.step()
    assert 0 < plain.ranks[-1] < 1
    np.testing.assert_allclose(scaled.ranks, plain.ranks, atol=1e-6)
    torch.testing.assert_close(scaled.model.weight, plain.model.weight, rtol=1e-5, atol=0)


def test_case_01_an_overflowed_step_leaves_no_trace():
    seen, never = Scaled(True), Scaled(True)
    for run in (seen, never):
        for _ in range(5):
            run.step()
    before = snapshot(seen.optimizer)
    seen.step(spoil=True)
    assert_bitwise(snapshot(seen.optimizer), before)
    assert seen.scaler.get_scale() == 32768.0
    seen.step()
    never.step()
    assert seen.optimizer.state[seen.model.weight]["observations"] == 6
    assert_bitwise(snapshot(seen.optimizer), snapshot(never.optimizer))


# -- 2: a non-finite gradient without a scaler -----------------------------------------------------


class FiniteOnly(FullRoots):
    """Full roots that refuse to be called with anything but finite matrices."""

    def accumulate(self, state, gradient, beta2):
        assert gradient.isfinite().all()
        super().accumulate(state, gradient, beta2)

    def apply(self, state, gradient):
        assert gradient.isfinite().all()
        return super().apply(state, gradient)


class Spoiled:
    def __init__(self, **options):
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        options.setdefault("roots", FiniteOnly())
        self.optimizer = ResidualPolarTransport(
            self.model.named_parameters(), lr=1e-2, max_root_staleness=1, **options
        )
        self.x = torch.randn(3, 16, 4)

    def step(self, i, spoil=None, clip=False, take=True):
        self.optimizer.zero_grad()
        self.model(self.x[i]).square().mean().backward()
        if spoil is not None:
            self.model[0].weight.grad[0, 0] = spoil
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if take:
            self.optimizer.step()


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_case_02_one_spoiled_parameter_is_skipped(spoil):
    run = Spoiled()
    run.step(0)
    weight = run.model[0].weight
    before, state = weight.detach().clone(), copy.deepcopy(run.optimizer.state[weight])
    with pytest.warns(UserWarning, match=r"non-finite.*0\.weight"):
        run.step(1, spoil)
    assert torch.equal(weight, before)
    after = dict(run.optimizer.state[weight])
    assert after.pop("skipped") == state.pop("skipped") + 1
    assert_bitwise(after, state)
    assert run.optimizer.state[run.model[2].weight]["step"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.step(1, spoil)  # the warning comes once
        run.step(2)
    for tensor in run.model.parameters():
        assert tensor.isfinite().all()
        for value in run.optimizer.state[tensor].values():
            assert not isinstance(value, torch.Tensor) or value.isfinite().all()
    assert run.optimizer.telemetry()["total"]["skipped"] == 2


def test_case_02_after_clipping_all_are_skipped():
    run, reference = Spoiled(), Spoiled()
    run.step(0)
    reference.step(0)
    with pytest.warns(UserWarning, match="non-finite"):
        run.step(1, math.nan, clip=True)
    run.step(2)
    reference.step(2)
    for a, b in zip(run.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(a, b)
        ours, theirs = dict(run.optimizer.state[a]), dict(reference.optimizer.state[b])
        assert (ours.pop("skipped"), theirs.pop("skipped")) == (1, 0)
        assert_bitwise(ours, theirs)


def test_case_02_raising_is_an_option_and_changes_nothing():
    run = Spoiled(nonfinite="raise")
    run.step(0)
    before = snapshot(run.optimizer)
    with pytest.raises(RuntimeError, match=r"non-finite gradient in 0\.weight \(8, 4\)"):
        run.step(1, math.nan)
    assert_bitwise(snapshot(run.optimizer), before)


# -- 3: decompositions of low-rank and NaN factors -------------------------------------------------


def test_case_03_damped_low_rank_factor():
    u = torch.ones(512) / 512**0.5
    a = torch.outer(u, u)
    expected = 10 * (torch.eye(512) - a) + 1.0001**-0.25 * a
    # The library damps by a floor under the eigenvalues, where float32's rounding cannot reach it.
    floored = inverse_root(a, ridge=0.0, absolute=1e-4).root
    assert (floored - expected).abs().max() <= 2e-3
    assert (inverse_root(a, ridge=1e-4 * 512).root - expected).abs().max() <= 2e-3
    # Added to the matrix, it is what 511 eigenvalues are, less than float32's rounding apart.
    added = a + 1e-4 * torch.eye(512)
    assert (inverse_root(added.double()).root - expected).abs().max() <= 2e-3
    assert (inverse_root(added).root - expected).abs().max() <= 2e-3
    both = torch.stack([torch.eye(512), added])
    assert (inverse_root(both).root[1] - expected).abs().max() <= 2e-3
    assert float(expected[0, 0]) == pytest.approx(9.982422, abs=1e-5)
    assert float(expected[0, 1]) == pytest.approx(-0.0175782, abs=1e-6)


def test_case_03_undamped_low_rank_factor_is_finite():
    u = torch.ones(512) / 512**0.5
    for ridge in (0.0, 1e-4):
        result = inverse_root(torch.outer(u, u), ridge=ridge)
        assert result.root.isfinite().all()
        assert not result.failed


def test_case_03_nan_matrix_is_reported_and_never_solved(monkeypatch):
    solved = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: solved.append(m.clone()) or original(m))
    result = inverse_root(torch.full((4, 4), math.nan))
    assert result.failed
    assert all(m.isfinite().all() for m in solved)


@pytest.mark.parametrize("roots", BACKENDS)
def test_case_03_a_failed_root_keeps_the_previous_one(monkeypatch, roots):
    weight = nn.Parameter(torch.randn(6, 5))
    optimizer = ResidualPolarTransport([weight], lr=1e-2, roots=roots, max_root_staleness=1)
    gradients = torch.randn(4, 6, 5)
    weight.grad = gradients[0]
    optimizer.step()
    held = {k: v.clone() for k, v in optimizer.state[weight].items() if "root" in k and "." in k}

    def broken(*_, **__):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", broken)
        weight.grad = gradients[1]
        with pytest.warns(UserWarning, match="keeps its previous root"):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            weight.grad = gradients[2]
            optimizer.step()
    for key, value in held.items():
        assert torch.equal(optimizer.state[weight][key], value), key
    assert optimizer.telemetry()["total"]["root_failures"] == 2
    weight.grad = gradients[3]
    optimizer.step()
    assert weight.isfinite().all()
    assert optimizer.telemetry()["total"]["root_failures"] == 2


# -- 4: the right power ----------------------------------------------------------------------------


def planted():
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    return q, torch.tensor([1.0, 16.0, 81.0, 256.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("power", "expected"), [(-0.25, (1, 1 / 2, 1 / 3, 1 / 4)), (-0.5, (1, 1 / 4, 1 / 9, 1 / 16))]
)
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_case_04_inverse_root_has_the_right_power(power, expected, scale):
    q, values = planted()
    matrix = (scale * (q * values) @ q.T).float()
    root = inverse_root(matrix, power, ridge=0.0).root.double()
    wanted = scale**power * (q * torch.tensor(expected, dtype=torch.float64)) @ q.T
    assert torch.linalg.norm(root - wanted) / torch.linalg.norm(wanted) <= 1e-3


@pytest.mark.parametrize("backend", [FullRoots(), BlockedRoots(4), LowRankRoots(4)])
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_case_04_every_backend_applies_the_right_power(backend, scale):
    # Planted so that L = M·scale; the wide side R is isotropic on its range.
    q, values = planted()
    gradient = (scale**0.5 * (q * values.sqrt()) @ q.T * 2).float()
    state = backend.create(1, 4, 4, dtype=torch.float32, device=gradient.device)
    from rpt.roots import Damping

    for _ in range(4):  # low_rank warms its basis up from one refresh to the next
        backend.accumulate(state, gradient[None], 0.9)
        refreshed = backend.refresh(state, (4, 4), torch.ones(1), Damping(0.0, torch.zeros(1)))
    assert not refreshed.failed.any()
    count = 1 - 0.9**4
    request = backend.apply(state, gradient[None])[0].double()
    # L = R = count·M·scale, so L^-1/4 G R^-1/4 = 2 √scale M^1/2 (count M scale)^-1/2.
    expected = 2 / count**0.5 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(request, expected, rtol=0, atol=2e-3)


# -- 6: bf16 parameters meet float32-only linear algebra -------------------------------------------


def bf16_run(model, autocast=False):
    torch.manual_seed(6)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-3, max_root_staleness=5)
    optimizer.attach_model(model, observe_every=1)
    first = [p.detach().clone().float() for p in model.parameters()]
    direction = None
    for _ in range(12):
        optimizer.zero_grad()
        parameter = next(model.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x if autocast else x.to(parameter.dtype))
            loss = (out.float() - y).square().mean()
        loss.backward()
        optimizer.step()
        if direction is None:
            direction = [
                optimizer.state[p]["momentum"].clone().flatten() for p in model.parameters()
            ]
    assert len(first) == len(direction)
    return optimizer, direction


def float32_state(optimizer):
    for record in optimizer.state.values():
        for key, value in record.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert value.dtype == torch.float32, key
                assert value.isfinite().all(), key


def linear32():
    torch.manual_seed(60)
    return nn.Linear(32, 32)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear32().bfloat16(), linear32()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).float())


def cosine(a, b):
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


def test_case_06_bf16_parameters():
    reference_model = linear32()
    low = linear32().bfloat16()
    reference_model.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    _, reference = bf16_run(reference_model)
    optimizer, direction = bf16_run(low)
    assert all(p.dtype == torch.bfloat16 for p in low.parameters())
    float32_state(optimizer)
    for a, b in zip(direction, reference, strict=True):
        assert cosine(a, b) >= 0.999
    assert optimizer.state[low.weight]["observations"] == 12


def test_case_06_bf16_autocast():
    _, reference = bf16_run(linear32())
    model = linear32()
    optimizer, direction = bf16_run(model, autocast=True)
    assert model.weight.dtype == torch.float32
    float32_state(optimizer)
    for a, b in zip(direction, reference, strict=True):
        assert cosine(a, b) >= 0.999


def test_case_06_mixed_dtypes_in_one_group():
    model = MixedDtypes()
    optimizer, _ = bf16_run(model)
    assert model.first.weight.dtype == torch.bfloat16
    assert model.second.weight.dtype == torch.float32
    float32_state(optimizer)


# -- 7: checkpoints keep dtypes ---------------------------------------------------------------------


def train_16(model, optimizer, start, steps):
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("roots", BACKENDS)
def test_case_07_loading_keeps_every_dtype(dtype, roots):
    torch.manual_seed(7)
    model = nn.Linear(16, 16).to(dtype)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2, roots=roots)
    train_16(model, optimizer, 0, 6)
    factor = next(k for k in optimizer.state[model.weight] if k.startswith("metric.left"))
    entry = (0,) * optimizer.state[model.weight][factor].ndim
    optimizer.state[model.weight][factor][entry] = 1.001
    saved = through_a_file(optimizer.state_dict())

    twin = copy.deepcopy(model)
    loaded = ResidualPolarTransport(twin.parameters(), lr=1e-2, roots=roots)
    loaded.load_state_dict(saved)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_bitwise(dict(loaded.state[q]), dict(optimizer.state[p]))
    assert float(loaded.state[twin.weight][factor][entry]) == pytest.approx(1.001, abs=1e-7)
    assert loaded.state[twin.weight]["step"] == 6
    assert loaded.state[twin.weight]["step"].dtype == torch.int64
    train_16(model, optimizer, 6, 2)
    train_16(twin, loaded, 6, 2)
    assert_bitwise(snapshot(loaded), snapshot(optimizer))


def test_case_07_the_file_holds_plain_tensors_and_numbers():
    model = nn.Linear(16, 16)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()

    def plain(value):
        if isinstance(value, dict):
            return all(plain(k) and plain(v) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return type(value) in (int, float, bool, str, type(None), torch.Tensor)

    assert plain(optimizer.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_case_07_across_devices(saved_on, loaded_on):
    torch.manual_seed(7)
    model = nn.Linear(16, 16).to(saved_on)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    model(torch.randn(4, 16, device=saved_on)).square().sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model).to(loaded_on)
    loaded = ResidualPolarTransport(twin.parameters(), lr=1e-2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, map_location=saved_on))
    for p in twin.parameters():
        for value in loaded.state[p].values():
            assert not isinstance(value, torch.Tensor) or value.device.type == loaded_on
    twin(torch.randn(4, 16, device=loaded_on)).square().sum().backward()
    loaded.step()
    assert twin.weight.isfinite().all()


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
        ("momentum", 0.9, "refused"),
    ],
)
@pytest.mark.parametrize("place", ["constructor", "group"])
def test_case_13_every_keyword_of_adamw(keyword, value, outcome, place):
    weight = nn.Parameter(torch.zeros(3, 3))

    def build():
        if place == "constructor":
            return ResidualPolarTransport([weight], **{keyword: value})
        return ResidualPolarTransport([{"params": [weight], keyword: value}])

    if place == "group" and keyword == "momentum":
        pytest.skip("unknown keys of a group are the caller's own and are kept")
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


# -- 15: memory layouts and the shape zoo -----------------------------------------------------------


def twelve_steps(parameter, gradient, **options):
    optimizer = ResidualPolarTransport([parameter], lr=1e-2, **options)
    for t in range(12):
        parameter.grad = gradient(t)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("roots", BACKENDS)
def test_case_15_channels_last_equals_contiguous(roots):
    torch.manual_seed(15)
    start, gradients = torch.randn(32, 16, 3, 3), torch.randn(12, 32, 16, 3, 3)
    plain = nn.Parameter(start.clone())
    last = nn.Parameter(start.clone().to(memory_format=torch.channels_last))
    reference = twelve_steps(plain, lambda t: gradients[t], roots=roots)
    actual = twelve_steps(
        last, lambda t: gradients[t].to(memory_format=torch.channels_last), roots=roots
    )
    assert last.stride() == (144, 1, 48, 16)
    torch.testing.assert_close(last, plain, rtol=1e-5, atol=1e-6)
    assert actual.state[last]["momentum"].shape == last.shape
    assert float(actual.state[last]["momentum"].abs().sum()) > 0
    if roots == "full":  # the flattened 32×144, not 32×16
        assert reference.state[plain]["metric.right_root"].shape == (1, 144, 144)


@pytest.mark.parametrize("roots", BACKENDS)
def test_case_15_transposed_weight_and_strange_gradient_strides(roots):
    torch.manual_seed(15)
    start, gradients = torch.randn(4, 8), torch.randn(12, 8, 4)
    plain = nn.Parameter(start.t().contiguous())
    view = nn.Parameter(start.clone().t())
    assert not view.is_contiguous()
    twelve_steps(plain, lambda t: gradients[t], roots=roots)
    optimizer = twelve_steps(view, lambda t: gradients[t], roots=roots)
    torch.testing.assert_close(view, plain, rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[view]["momentum"].abs().sum()) > 0

    strided = nn.Parameter(start.t().contiguous())
    storage = torch.zeros(12, 16, 8)

    def gradient(t):
        storage[t, ::2].copy_(gradients[t].reshape(8, 4).repeat(1, 2)[:, :8])
        return gradients[t].t().contiguous().t()

    twelve_steps(strided, gradient, roots=roots)
    torch.testing.assert_close(strided, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["drop_in", "paper"])
@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (0, 5), (7,), (1, 9), (9, 1), (3, 4, 5), (2, 3, 1, 1), (1, 1), (5, 0)]
)
def test_case_15_the_shape_zoo(shape, preset):
    parameter = nn.Parameter(torch.full(shape, 2.0))
    optimizer = twelve_steps(parameter, lambda t: torch.ones(shape), preset=preset)
    assert parameter.isfinite().all()
    assert parameter.shape == shape
    if parameter.numel():
        assert bool((parameter < 2.0).all())
        assert optimizer.state[parameter]["step"] == 12
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    parameter.grad = torch.ones(shape)
    optimizer.step()


def test_case_15_empty_parameters_beside_others():
    params = [nn.Parameter(torch.ones(s)) for s in ((0, 5), (3, 4), (0,), (5, 0), (4,))]
    optimizer = ResidualPolarTransport(params, lr=1e-2)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p in optimizer.state for p in params] == [False, True, False, False, True]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("preset", ["drop_in", "paper"])
def test_case_15_a_scalar_moves_by_the_rate(preset, shape):
    scalar = nn.Parameter(torch.full(shape, 2.0))
    optimizer = ResidualPolarTransport([scalar], lr=0.01, weight_decay=0.0, preset=preset)
    scalar.grad = torch.ones(shape)
    optimizer.step()
    # The default preset's `update_rms` times the rate.
    step = 0.012 if preset == "drop_in" else 0.01
    assert scalar.item() == pytest.approx(2.0 - step, abs=1e-6)


# -- 19: a weight that is used without calling its module -------------------------------------------


@pytest.mark.parametrize("observe", [False, True])
def test_case_19_attention_projection_is_updated(observe):
    torch.manual_seed(19)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    attention.out_proj.weight.data.normal_()
    x = torch.randn(4, 3, 8)
    optimizer = ResidualPolarTransport(attention.named_parameters(), lr=1e-3)
    if observe:
        optimizer.attach_model(attention, lambda m: m is attention.out_proj)
    before = {k: v.detach().clone() for k, v in attention.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            optimizer.zero_grad()
            attention(x, x, x, need_weights=False)[0].square().mean().backward()
            optimizer.step()
    ours = [str(w.message) for w in caught if "no statistics" in str(w.message)]
    assert len(ours) == (1 if observe else 0)
    assert not observe or "out_proj" in ours[0]
    for name in ("in_proj_weight", "out_proj.weight"):
        after = attention.get_parameter(name)
        assert after.isfinite().all()
        assert not torch.equal(after, before[name])
    assert attention.in_proj_weight.shape == (24, 8)


# -- 37: dead inputs ---------------------------------------------------------------------------------


def dead_digits(side):
    """Scikit-learn's digits in [0, 1], in the middle of a black `side`×`side` picture."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    factor = side // 8 - (1 if side % 8 == 0 else 0)
    images = images.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    low = (side - images.shape[-1]) // 2
    high = side - images.shape[-1] - low
    return F.pad(images, (low, high, low, high)).flatten(1), torch.tensor(digits.target)


class Float64Roots(FullRoots):
    """Full roots decomposed in float64 from float32 statistics."""

    def refresh(self, state, shape, correction, damping):
        wide = {k: v.double() for k, v in state.items()}
        damping = damping._replace(absolute=damping.absolute.double())
        refresh = super().refresh(wide, shape, correction.double(), damping)
        for key, value in wide.items():
            state[key].copy_(value)
        return refresh._replace(condition=refresh.condition.float())


def train_digits(roots, side, hidden, steps, constant_input=False, rounding=False):
    torch.manual_seed(37)
    x, y = dead_digits(side)
    if constant_input:
        x = torch.ones_like(x) * 0.5
    model = nn.Sequential(
        nn.Linear(side * side, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip
    if rounding:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 6e-8 * torch.randn_like(p))
    # Steps of one length: roots are compared here, and a length that follows the signal would turn
    # their rounding into different curves.
    optimizer = ResidualPolarTransport(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), roots=roots, max_root_staleness=10,
        update_rms=0.92, signal_length=False, max_relative_step=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(37)
    losses = []
    for _ in range(steps):
        pick = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[pick]), y[pick])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), optimizer


def smooth(losses, window=25):
    return losses.unfold(0, window, 1).mean(1)


def test_case_37_dead_inputs():
    losses, optimizer = train_digits(FullRoots(), 16, 32, 60)
    reference, _ = train_digits(Float64Roots(), 16, 32, 60)
    assert losses.isfinite().all()
    assert losses[-10:].mean() < 0.3 * losses[0]
    assert ((smooth(losses) - smooth(reference)).abs() <= 0.01 * smooth(reference)).all()
    assert optimizer.telemetry()["total"]["root_failures"] == 0


@pytest.mark.parametrize("roots", BACKENDS)
def test_case_37_constant_inputs(roots):
    losses, _ = train_digits(roots, 10, 16, 25, constant_input=True)
    assert losses.isfinite().all()


@pytest.mark.slow
def test_case_37_dead_inputs_in_full():
    losses, optimizer = train_digits(FullRoots(), 28, 128, 250)
    reference, _ = train_digits(Float64Roots(), 28, 128, 250)
    # At a constant rate any rounding grows: with float64 roots in both runs, weights that start one
    # rounding apart part by 1 % after some 16 steps and by 4 % of the first loss in the end. Float32
    # roots do what such a rounding does (one twin samples it within a small factor), plus 1 %.
    twin, _ = train_digits(Float64Roots(), 28, 128, 250, rounding=True)
    assert losses.isfinite().all()
    curve, expected, apart = smooth(losses), smooth(reference), smooth(twin)
    chaos = (apart - expected).abs().cummax(0).values
    assert ((curve - expected).abs() <= 0.01 * expected + 5 * chaos).all()
    assert curve.min() < 0.1 * losses[0]
    assert optimizer.telemetry()["total"]["root_failures"] == 0


def test_case_37_float64_is_tried_before_the_root_is_given_up(monkeypatch):
    original = torch.linalg.eigh
    tried = []

    def only_float64(matrix):
        tried.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge: ill-conditioned")
        return original(matrix)

    weight, twin = (nn.Parameter(torch.ones(6, 5)) for _ in range(2))
    first = ResidualPolarTransport([weight], lr=1e-2, roots="full")
    second = ResidualPolarTransport([twin], lr=1e-2, roots="full")
    gradients = torch.randn(3, 6, 5)
    for gradient in gradients:
        weight.grad = twin.grad = gradient
        second.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", only_float64)
            first.step()
    assert torch.float64 in tried
    torch.testing.assert_close(weight, twin, rtol=1e-4, atol=1e-5)
    assert first.telemetry()["total"]["root_failures"] == 0


# -- besides the cases: faults of the published implementation --------------------------------------


@pytest.mark.parametrize("roots", BACKENDS)
def test_deepcopy_then_step(roots):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2, roots=roots)
    optimizer.attach_model(model)
    x = torch.randn(7, 5)
    model(x).square().sum().backward()
    optimizer.step()
    twin_model, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (twin_model, twin)):
        o.zero_grad()
        o.remove_observers()
        m(x).square().sum().backward()
        o.step()
    assert_bitwise(snapshot(twin), snapshot(optimizer))
    # The copies share nothing: a further step of one leaves the other alone.
    before = snapshot(optimizer)
    twin.step()
    assert_bitwise(snapshot(optimizer), before)


@pytest.mark.parametrize("factor", [1e-6, 1e6, 1e-30, 2.0**-40])
@pytest.mark.parametrize("roots", BACKENDS)
def test_scaling_every_gradient_changes_nothing(factor, roots):
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 5), torch.randn(12, 6, 5)
    ends, refreshes = [], []
    for scale in (1.0, factor):
        weight = nn.Parameter(start.clone())
        optimizer = twelve_steps(weight, lambda t, s=scale: gradients[t] * s, roots=roots)
        ends.append(weight.detach())
        refreshes.append(optimizer.state[weight]["root_refreshes"])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    assert refreshes[0] == refreshes[1]


def test_a_forward_without_backward_leaks_nothing():
    import gc
    import weakref

    model = nn.Linear(8, 8)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model)
    alive = []
    for _ in range(5):
        x = torch.randn(4, 8)
        out = model(x)
        alive += [weakref.ref(x), weakref.ref(out)]
        del x, out
    gc.collect()
    assert all(ref() is None for ref in alive)
    assert len(optimizer._observing.stage) == 0


def test_inf_never_reaches_a_decomposition():
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = ResidualPolarTransport([weight], lr=1e-2)
    for value, t in itertools.product((1e38, 3e38), range(2)):
        weight.grad = torch.full((4, 3), value) * (-1) ** t
        optimizer.step()
        assert weight.isfinite().all()

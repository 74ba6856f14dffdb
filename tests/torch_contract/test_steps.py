"""One step: what it changes, what it leaves alone, and what it refuses."""

import pytest
import torch
from inputs import FEW, fill_gradients, make_parameters, over, run, same, values
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rpt import ResidualPolarTransport


@over("maximize")
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "channels_last"])
def test_it_descends_in_any_memory_layout(build, layout):
    torch.manual_seed(0)
    if layout == "channels_last":
        weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
        x, axes = torch.randn(3, 2, 2), 3
    else:
        weight, x, axes = torch.randn(6, 5), torch.randn(5), 1
        if layout == "strided":
            weight = torch.randn(6, 5, 2)[..., 0]
        elif layout == "transposed":
            weight = torch.randn(5, 6).mT
    weight, bias = nn.Parameter(weight), nn.Parameter(torch.randn(len(weight)))
    strides = weight.stride()
    optimizer = build([weight, bias])
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = (torch.tensordot(weight, x, axes) + bias).square().sum()
        loss.backward()
        weight.grad = weight.grad.mT.contiguous().mT if axes == 1 else weight.grad
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    assert weight.stride() == strides


@over()
def test_layout_does_not_change_the_step(build):
    plain, strided = make_parameters(), make_parameters()
    strided = [
        nn.Parameter(torch.stack([p.detach()] * 2, -1)[..., 0]) if p.ndim else p for p in strided
    ]
    one, other = build(plain), build(strided)
    for seed in range(3):
        fill_gradients(plain, seed)
        for p, q in zip(plain, strided, strict=True):
            q.grad = torch.stack([p.grad] * 2, -1)[..., 0] if p.ndim else p.grad.clone()
        one.step()
        other.step()
    assert same(values(plain), values(strided))


@over()
def test_a_closure_is_called_once_with_gradients_enabled(build):
    with_closure, without = make_parameters(), make_parameters()
    one, other = build(with_closure), build(without)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        fill_gradients(with_closure, 0)
        return torch.tensor(4.5)

    with torch.no_grad():
        assert one.step(closure) == 4.5
    run(other, without, 1)
    assert calls == [True]
    assert same(values(with_closure), values(without))
    assert other.step() is None


@over()
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "running"])
def test_a_step_without_gradients_changes_nothing(build, state):
    parameters = make_parameters()
    optimizer = build(parameters)
    if state:
        run(optimizer, parameters, 2)
    before, kept = values(parameters), optimizer.state_dict()["state"]
    kept = {key: dict(record) for key, record in kept.items()}
    if state:
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in parameters)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    optimizer.step()
    assert same(values(parameters), before)
    assert optimizer.state_dict()["state"].keys() == kept.keys()


@over("AdamW")
def test_zero_gradients_from_the_start_only_decay(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    group = optimizer.param_groups[0]
    shrink = 1 - float(group["lr"]) * group["weight_decay"]
    before = values(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, start in zip(parameters, before, strict=True):
        assert p.isfinite().all()
        ratio = (p.detach() / start).flatten()
        assert (ratio <= 1 + 1e-6).all()
        assert (ratio >= shrink**4 - 1e-6).all()


@over()
def test_a_missing_gradient_leaves_that_parameter_alone(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    fill_gradients(parameters, 0)
    parameters[0].grad = None
    before = values(parameters)
    optimizer.step()
    assert torch.equal(parameters[0], before[0])
    assert not optimizer.state.get(parameters[0])
    assert not any(map(torch.equal, parameters[1:], before[1:]))


@over()
def test_gradients_are_read_only(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    fill_gradients(parameters, 0)
    before = [p.grad for p in parameters]
    copies, versions = [g.clone() for g in before], [g._version for g in before]
    optimizer.step()
    assert [g._version for g in before] == versions
    assert all(p.grad is g for p, g in zip(parameters, before, strict=True))
    assert same(before, copies)


@over()
def test_every_parameter_has_a_state_after_its_step(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    assert len(optimizer.state) == 0
    run(optimizer, parameters, 2)
    for p in parameters:
        assert int(optimizer.state[p]["step"]) == 2
        assert any(isinstance(v, torch.Tensor) for v in optimizer.state[p].values())


@over()
def test_empty_parameters_are_carried_along(build):
    empty, full = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.randn(3, 4))
    optimizer = build([empty, full])
    for _ in range(2):
        empty.grad, full.grad = torch.empty(0, 4), torch.randn(3, 4)
        optimizer.step()
    assert full.isfinite().all()
    optimizer.load_state_dict(optimizer.state_dict())


@over()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_may_be_mixed(build, dtype):
    parameters = make_parameters() + make_parameters(dtype, seed=1)
    optimizer = build(parameters, lr=1e-2)
    before = values(parameters)
    run(optimizer, parameters, 3)
    for p, start in zip(parameters, before, strict=True):
        assert p.dtype == start.dtype
        assert p.isfinite().all()
        assert not torch.equal(p, start)


@over("AdamW")
def test_complex_and_sparse_are_refused_before_any_change(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    run(optimizer, parameters, 1)
    before, state = values(parameters), optimizer.state[parameters[1]]["step"]
    fill_gradients(parameters, 1)
    parameters[0].grad = parameters[0].grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    parameters[0].grad = None
    tangled = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
    tangled.grad = torch.randn(2, 2, dtype=torch.complex64)
    optimizer.add_param_group({"params": [tangled]})
    with pytest.raises(RuntimeError, match="complex"):
        optimizer.step()
    assert same(values(parameters), before)
    assert optimizer.state[parameters[1]]["step"] == state


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_forms_of_the_same_step_are_the_same_step(flag):
    results = []
    for value in (None, False):
        parameters = make_parameters()
        run(ResidualPolarTransport(parameters, **{flag: value}), parameters, 3)
        results.append(values(parameters))
    parameters = make_parameters()
    with pytest.warns(UserWarning, match="has no effect"):
        optimizer = ResidualPolarTransport(parameters, **{flag: True})
    run(optimizer, parameters, 3)
    assert same(results[0], results[1])
    assert same(results[0], values(parameters))


@over(only=FEW)
def test_the_profiler_names_step_and_zero_grad(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    fill_gradients(parameters, 0)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        optimizer.step()
        optimizer.zero_grad()
    names = {event.name for event in found.events()}
    kind = type(optimizer).__name__
    assert f"Optimizer.step#{kind}.step" in names
    assert f"Optimizer.zero_grad#{kind}.zero_grad" in names


@over()
def test_the_default_dtype_makes_no_difference(build):
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            parameters = make_parameters()
            run(build(parameters), parameters, 2)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append(values(parameters))
    assert same(*results)


@over("maximize", "AdamW")
def test_maximize_is_the_step_along_the_negated_gradient(build):
    up, down = make_parameters(), make_parameters()
    rising, falling = build(up, maximize=True), build(down)
    for seed in range(3):
        fill_gradients(up, seed)
        fill_gradients(down, seed)
        for p in down:
            p.grad.neg_()
        rising.step()
        falling.step()
    assert same(values(up), values(down))


@over()
def test_an_optimizer_per_parameter_may_step_inside_the_backward(build):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizers = {p: build([p]) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = values(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    assert not any(map(torch.equal, model.parameters(), before))


@over()
def test_a_loss_scaler_skips_what_overflowed(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    before = values(parameters)
    fill_gradients(parameters, 0)
    parameters[0].grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert same(values(parameters), before)
    fill_gradients(parameters, 1)
    scaler.step(optimizer)
    scaler.update()
    assert not any(map(torch.equal, parameters, before))

"""`step()` in a function that torch.compile takes: one graph for all steps, and the ordinary trajectory."""

import copy
import gc
import shutil
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from rpt import ResidualPolarTransport


class Mixed(nn.Module):
    """Wide, tall and square matrices, two of them alike, a convolution, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((12, 8), (8, 8), (8, 8), (8, 12)))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.conv(x.view(-1, 2, 4)).flatten(1)
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 1:
                x = self.norm(x)
        return x


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def pair(dtype=torch.float64, model=Mixed, **options):
    """Two models with the same weights, and an optimizer of each: to be compiled, and ordinary."""
    torch.manual_seed(0)
    models = [model().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    options = {"lr": 0.01, "weight_decay": 0.1} | options
    return models, [ResidualPolarTransport(m.parameters(), **options) for m in models]


def compiled(optimizer, backend="eager", fullgraph=True):
    @torch.compile(backend=backend, fullgraph=fullgraph)
    def step():
        optimizer.step()

    return step


def run(models, steps, count, start=0, spoilt=None):
    """Steps on equal gradients, those of the first model at its own weights."""
    first, second = models
    for i in range(start, start + count):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        first.zero_grad()
        first(x.to(first.norm.weight)).square().mean().backward()
        for name, parameter in first.named_parameters():
            if name in (spoilt or {}).get(i, ()):
                parameter.grad.view(-1)[0] = float("nan")
            if parameter.grad is not None:
                second.get_parameter(name).grad = parameter.grad.clone()
        for step in steps:
            step()


def apart(models, optimizers):
    """The largest relative difference of all weights and of all state."""
    states = [optimizer.state_dict()["state"].values() for optimizer in optimizers]
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys()
        pairs += [(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one]
    differences = []
    for a, b in pairs:
        a, b = a.detach().double(), b.detach().double()
        differences.append(float((a - b).norm() / b.norm().clamp_min(1e-3)))
    return max(differences)


@pytest.mark.filterwarnings("ignore:skipped non-finite")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fifty_steps_are_the_ordinary_ones_in_one_graph(backend):
    """Also with a rate that changes, weight decay, refreshes, and gradients that are not finite."""
    models, optimizers = pair()

    def lower_rates():
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.97

    steps = [compiled(optimizers[0], backend), optimizers[1].step, lower_rates]
    spoilt = {20: ("layers.1.weight", "layers.0.bias"), 21: ("conv.weight",)}
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(models, steps, 50, spoilt=spoilt)
    assert apart(models, optimizers) < 1e-6
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_scheduler_costs_one_break_and_no_recompilation():
    """torch wraps `step` of every optimizer with a scheduler in a function that it refuses to trace."""
    models, optimizers = pair()
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 30) for each in optimizers]
    steps = [compiled(optimizers[0], fullgraph=False), optimizers[1].step]
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(models, [*steps, *(each.step for each in schedules)], 10)
    assert apart(models, optimizers) < 1e-9
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 1


def test_float32_with_padded_stacks():
    """Rounding differs and grows from step to step; that it is the same step shows in the first few."""
    models, optimizers = pair(torch.float32)
    run(models, [compiled(optimizers[0], "aot_eager"), optimizers[1].step], 3)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_it_warns_of_a_gradient_that_is_not_finite_and_counts_it():
    models, optimizers = pair()
    optimizers[1].step = lambda: None
    with pytest.warns(UserWarning, match="skipped non-finite gradients in parameter 0"):
        run(models, [compiled(optimizers[0])], 2, spoilt={1: ("conv.weight",)})
    told = optimizers[0].telemetry()
    assert [int(record["skipped"]) for record in list(optimizers[0].state.values())[:2]] == [1, 0]
    assert "1 skipped updates" in str(told)


def test_what_changes_the_step_makes_another_graph():
    """An edited option, a loaded state, and ordinary steps in between are all noticed."""
    models, optimizers = pair()
    step = compiled(optimizers[0])
    run(models, [step, optimizers[1].step], 3)
    for optimizer in optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.5
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    run(models, [step, optimizers[1].step], 3, start=3)
    assert apart(models, optimizers) < 1e-9
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(models, [step, optimizers[1].step], 3, start=6)
    run(models, [optimizers[0].step, optimizers[1].step], 3, start=9)
    run(models, [step, optimizers[1].step], 3, start=12)
    assert apart(models, optimizers) < 1e-9
    assert not counters["graph_break"]


def test_gradients_that_come_and_go():
    models, optimizers = pair()
    step = compiled(optimizers[0], fullgraph=False)
    run(models, [step, optimizers[1].step], 2)
    idle = [model.layers[2].requires_grad_(False) for model in models]
    forwards = [layer.weight.clone() for layer in idle]
    for layer in idle:
        layer.zero_grad()
    run(models, [step, optimizers[1].step], 2, start=2)
    assert torch.equal(idle[0].weight, forwards[0])
    assert apart(models, optimizers) < 1e-9


@pytest.mark.parametrize(
    "options", [{"preset": "paper"}, {"roots": "low_rank"}, {"nonfinite": "raise"}]
)
def test_what_a_graph_cannot_hold_is_an_ordinary_step(options):
    models, optimizers = pair(**options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(models, [compiled(optimizers[0], fullgraph=False), optimizers[1].step], 6)
    assert apart(models, optimizers) == 0
    (times,) = counters["graph_break"].values()
    assert times <= 3  # once for each function around it


def test_an_observed_model_takes_ordinary_steps():
    models, optimizers = pair()
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.attach_model(model, module_filter=lambda m: isinstance(m, nn.Linear))
    step = compiled(optimizers[0], fullgraph=False)
    for model, take in zip(models, (step, optimizers[1].step), strict=True):
        for i in range(3):
            model.zero_grad()
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i)).double()
            model(x).square().mean().backward()
            take()
    assert apart(models, optimizers) == 0


def test_one_compiled_function_serves_several_optimizers():
    """Shapes stay numbers: no size is guessed to be dynamic."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(optimizer):
        optimizer.step()

    for width in (3, 4, 5):
        layers = [nn.Linear(6, width).double(), nn.Linear(6, width).double()]
        layers[1].load_state_dict(layers[0].state_dict())
        twins = [ResidualPolarTransport(layer.parameters(), lr=0.1) for layer in layers]
        for take in (step, ResidualPolarTransport.step):
            for layer, optimizer in zip(layers, twins, strict=True):
                layer.zero_grad()
                layer(torch.ones(2, 6).double()).square().sum().backward()
                (take if optimizer is twins[0] else ResidualPolarTransport.step)(optimizer)
        torch.testing.assert_close(layers[0].weight, layers[1].weight)


def test_two_optimizers_in_one_function_are_one_graph():
    models, _ = pair()
    optimizers = [
        [ResidualPolarTransport([p for p in m.parameters() if (p.ndim > 1) is matrices], lr=rate)
         for matrices, rate in ((True, 0.01), (False, 0.03))]
        for m in models
    ]  # fmt: skip

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both():
        for optimizer in optimizers[0]:
            optimizer.step()

    with torch._dynamo.config.patch(error_on_recompile=True):
        run(models, [both, *(each.step for each in optimizers[1])], 8)
    for twins in zip(*optimizers, strict=True):
        assert apart(models, twins) < 1e-9
    assert counters["stats"]["unique_graphs"] == 1


def learn(model, optimizer, step, scaler):
    """Four steps, the closure's where `scaler` is None; the third loss is infinite where it is not."""
    for i in range(4):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if scaler is None:
            assert step(closure) > 0
        else:
            optimizer.zero_grad()
            loss = model(x).square().mean() * (float("inf") if i == 2 else 1.0)
            scaler.scale(loss).backward()
            step()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_closure_and_a_grad_scaler_take_ordinary_steps(scaled):
    """torch refuses to trace either: with a break they are the steps of an uncompiled function."""
    models, optimizers = pair(model=lambda: nn.Linear(8, 4))
    for model, optimizer, wrap in zip(
        models,
        optimizers,
        (lambda f: torch.compile(f, backend="aot_eager"), lambda f: f),
        strict=True,
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None

        def scaled_step(scaler=scaler, optimizer=optimizer):
            scaler.step(optimizer)
            scaler.update()

        learn(model, optimizer, wrap(scaled_step if scaled else optimizer.step), scaler)
    assert apart(models, optimizers) < 1e-9
    steps = {int(record["step"]) for record in optimizers[0].state.values()}
    assert steps == {3 if scaled else 4}


def test_a_rate_out_of_range_is_refused_before_anything_changes():
    """The backend "eager" writes as it goes, which shows what a graph has done when it breaks off."""
    models, optimizers = pair()
    step = compiled(optimizers[0])
    run(models, [step, optimizers[1].step], 2)
    before = copy.deepcopy(optimizers[0].state_dict()["state"])
    optimizers[0].param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"parameter group 0: lr=-1\.0 must be at least 0"):
        step()
    torch.set_grad_enabled(True)  # torch's backend "eager" leaves it off
    torch.testing.assert_close(optimizers[0].state_dict()["state"], before, rtol=0, atol=0)
    optimizers[0].param_groups[0]["lr"] = 0.01
    run(models, [step, optimizers[1].step], 2, start=2)
    assert apart(models, optimizers) < 1e-9


def test_what_fails_in_the_middle_names_the_parameters_and_changes_no_weight(monkeypatch):
    models, optimizers = pair()
    step = compiled(optimizers[0], "aot_eager")
    run(models, [step, optimizers[1].step], 2)
    before = [parameter.clone() for parameter in models[0].parameters()]

    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("rpt.compiled._refresh", broken)
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0 .*no memory\. Already updated: n"
    ):
        step()
    assert all(map(torch.equal, models[0].parameters(), before))
    monkeypatch.undo()
    step()
    optimizers[1].step()
    assert apart(models, optimizers) < 1e-9


def test_a_deleted_optimizer_frees_its_state_though_the_function_stays():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(optimizer):
        optimizer.step()

    models, optimizers = pair()
    run(models, [partial(step, optimizers[0])], 2)
    held = [weakref.ref(value) for value in next(iter(optimizers[0].state.values())).values()
            if isinstance(value, torch.Tensor)]  # fmt: skip
    assert held
    del optimizers
    gc.collect()
    assert not any(value() is not None for value in held)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    models, optimizers = pair()
    run(models, [compiled(optimizers[0], "inductor"), optimizers[1].step], 30)
    assert apart(models, optimizers) < 1e-6

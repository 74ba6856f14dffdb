"""Case 23: torch.compile and observers; zero records is never silent."""

import warnings

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport


def make(strategy, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, ResidualPolarTransport(model.named_parameters(), lr=1e-2)


def batch(step):
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(step))


def step(call, optimizer, index):
    optimizer.zero_grad()
    loss = call(batch(index)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def observations(model, optimizer):
    return sum(optimizer.state[p].get("observations", 0) for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_case_23_a_and_c_attach_then_compile(strategy, backend, fullgraph):
    torch._dynamo.reset()
    model, optimizer = make(strategy)
    optimizer.attach_model(model, strategy=strategy, observe_every=1)
    call = torch.compile(model, backend=backend, fullgraph=fullgraph)
    for index in range(3):
        step(call, optimizer, index)
    assert observations(model, optimizer) == 6


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_case_23_b_compile_then_attach_records_or_warns(strategy):
    torch._dynamo.reset()
    model, optimizer = make(strategy)
    call = torch.compile(model, backend="aot_eager")
    step(call, optimizer, 0)
    optimizer.attach_model(model, strategy=strategy, observe_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(3):
            step(call, optimizer, index)
    named = [w for w in caught if "no statistics" in str(w.message)]
    seen = observations(model, optimizer)
    assert seen == 6 or (seen == 0 and len(named) == 1 and "'0', '2'" in str(named[0].message))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_case_23_d_the_compiled_curve_equals_the_eager_one(backend):
    torch._dynamo.reset()
    eager_model, eager_optimizer = make("hook")
    eager_optimizer.attach_model(eager_model, observe_every=1)
    eager = [step(eager_model, eager_optimizer, i) for i in range(12)]
    model, optimizer = make("compiled")
    optimizer.attach_model(model, strategy="compiled", observe_every=1)
    call = torch.compile(model, backend=backend, fullgraph=True)
    compiled = [step(call, optimizer, i) for i in range(12)]
    assert compiled == pytest.approx(eager, rel=1e-4)
    for p, q in zip(eager_model.parameters(), model.parameters(), strict=True):
        if p.ndim == 2:
            a, b = eager_optimizer.state[p], optimizer.state[q]
            assert float(b["residual_entropy_rank"]) == pytest.approx(
                float(a["residual_entropy_rank"]), abs=1e-4
            )

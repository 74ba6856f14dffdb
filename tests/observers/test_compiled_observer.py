"""Observation inside compiled graphs: no graph break, the eager ranks, nothing silent."""

import warnings

import pytest
import torch
import torch._dynamo.testing
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """In-place activation, a layer used twice, tokens wider than the sketch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(40, 36)
        self.b = nn.Linear(36, 40)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.b(self.relu(self.a(x)))


def three_forwards(call, x):
    return sum(call(x * (i + 1)).square().mean() for i in range(3))


def twice(call, x):
    return call(call(x)).square().mean()


def without_gradients_first(call, x):
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        call(x)
    return call(x).square().mean()


def autocast(call, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(x).float().square().mean()


def once(call, x):
    return call(x).square().mean()


def keyword(call, x):
    return call(x=x).square().mean()


SCENARIOS = {
    "once": once,
    "three forwards, one backward": three_forwards,
    "used twice": twice,
    "no_grad and inference_mode first": without_gradients_first,
    "autocast": autocast,
    "keyword-only": keyword,
}


def ranks_of(strategy, scenario, backend, body=None, micro_batches=1):
    torch._dynamo.reset()
    torch.manual_seed(5)
    net = Net()
    stage = ObservationStage()
    attach(net, net.parameters(), stage, strategy=strategy)
    call = body(net) if body else net
    if backend:
        call = torch.compile(call, backend=backend, fullgraph=True)
    for _ in range(micro_batches):
        SCENARIOS[scenario](call, torch.randn(4, 24, 40, requires_grad=True)).backward()
    committed = stage.commit()
    return [(float(committed.ranks[w]), committed.counts[w]) for w in (net.a.weight, net.b.weight)]


def compare(compiled, eager, tolerance=1e-4):
    for (rank, count), (expected, expected_count) in zip(compiled, eager, strict=True):
        assert rank == pytest.approx(expected, abs=tolerance)
        assert count == expected_count


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("strategy", ["compiled", "hook"])
def test_full_graph_ranks_equal_the_eager_ones(strategy, scenario):
    eager = ranks_of("hook", scenario, None)
    tolerance = 0.02 if scenario == "autocast" else 1e-4
    compare(ranks_of(strategy, scenario, "aot_eager", micro_batches=1), eager, tolerance)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_in_a_full_graph(backend, reentrant):
    def body(net):
        return lambda x: checkpoint(net, x, use_reentrant=reentrant)

    eager = ranks_of("hook", "once", None)
    compare(ranks_of("compiled", "once", backend, body), eager)


@pytest.mark.slow
def test_inductor_with_gradient_accumulation():
    eager = ranks_of("hook", "once", None, micro_batches=2)
    assert [count for _, count in eager] == [2, 2]
    compare(ranks_of("compiled", "once", "inductor", micro_batches=2), eager)


def test_cadence_never_recompiles():
    torch._dynamo.reset()
    net, stage = Net(), ObservationStage()
    attachment = attach(net, net.parameters(), stage, strategy="compiled", observe_every=3)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(net, backend=counter, fullgraph=True)
    counts = []
    for _ in range(5):
        call(torch.randn(64, 40)).square().mean().backward()
        counts.append(sum(stage.commit().counts.values()))
        attachment.after_step({})
        net.zero_grad()
    assert counts == [2, 0, 0, 2, 0]
    assert counter.frame_count == 1


def test_layers_compiled_one_by_one_share_their_code():
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)])
    stage = ObservationStage()
    attach(model, model.parameters(), stage, strategy="compiled")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    model(torch.randn(32, 8)).square().mean().backward()
    assert counter.frame_count <= 4  # One per requires-grad pattern, not one per layer.
    assert stage.commit().counts == {block[0].weight: 1 for block in model}


def test_a_detached_attachment_stops_a_compiled_model_too():
    torch._dynamo.reset()
    net, stage = Net(), ObservationStage()
    attachment = attach(net, net.parameters(), stage, strategy="compiled")
    call = torch.compile(net, backend="aot_eager")
    call(torch.randn(64, 40)).square().mean().backward()
    assert len(stage) == 2
    attachment.detach()
    stage.clear()
    call(torch.randn(64, 40)).square().mean().backward()
    assert len(stage) == 0


def test_attaching_after_the_first_compiled_call_is_not_silent():
    torch._dynamo.reset()
    net, stage = Net(), ObservationStage()
    call = torch.compile(net, backend="aot_eager")
    call(torch.randn(64, 40)).square().mean().backward()
    attachment = attach(net, net.parameters(), stage, strategy="compiled")
    call(torch.randn(64, 40)).square().mean().backward()
    seen = stage.commit().counts
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attachment.after_step({})
    assert seen or any("'a', 'b'" in str(w.message) for w in caught)


@pytest.mark.parametrize("observed_first", [True, False])
def test_two_models_of_one_class_keep_their_own_graphs(observed_first):
    torch._dynamo.reset()
    observed, plain, stage = Net(), Net(), ObservationStage()
    attach(observed, observed.parameters(), stage, strategy="compiled")
    calls = [torch.compile(net, backend="aot_eager") for net in (observed, plain)]
    order = calls if observed_first else calls[::-1]
    for call in order * 2:
        call(torch.randn(64, 40)).square().mean().backward()
    assert stage.commit().counts == {observed.a.weight: 2, observed.b.weight: 2}

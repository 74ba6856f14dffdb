"""One observation per backward through a layer, whatever the backward looks like."""

import gc
import weakref

import pytest
import torch
from rpt.observers import entropy_rank
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.parametrize("strategy", ["hook", "compiled"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 10)
        self.b = nn.Linear(10, 6)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def tapped(strategy, model=None):
    model = model or Net()
    stage = ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    return model, stage


def ranks_by_autograd(net: Net, x: torch.Tensor) -> tuple[float, float]:
    """Both layers' ranks, from cotangents that plain autograd hands out."""
    hidden = net.a(x)
    act = torch.tanh(hidden)
    out = net.b(act)
    d_hidden, d_out = torch.autograd.grad(loss_of(out), (hidden, out))
    return float(entropy_rank(x, d_hidden)), float(entropy_rank(act, d_out))


def check(net: Net, stage: ObservationStage, batches, count=None, tolerance=1e-6) -> None:
    committed = stage.commit()
    plain = Net()
    plain.load_state_dict(net.state_dict())
    expected = torch.tensor([ranks_by_autograd(plain, x) for x in batches]).mean(0)
    for weight, rank in zip((net.a.weight, net.b.weight), expected, strict=True):
        assert float(committed.ranks[weight]) == pytest.approx(float(rank), abs=tolerance)
        assert committed.counts[weight] == (count or len(batches))


def loss_of(y):
    return y.square().mean()


def test_one_backward(strategy):
    net, stage = tapped(strategy)
    x = torch.randn(32, 6)
    loss_of(net(x)).backward()
    check(net, stage, [x])


def test_the_tap_changes_no_gradient(strategy):
    net, _ = tapped(strategy)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(32, 6, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    loss_of(net(x)).backward()
    loss_of(plain(twin)).backward()
    assert torch.equal(x.grad, twin.grad)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_three_forwards_then_one_backward(strategy):
    net, stage = tapped(strategy)
    batches = [torch.randn(32, 6) for _ in range(3)]
    sum(loss_of(net(x)) for x in batches).backward()
    check(net, stage, batches)


def test_interleaved_forwards_and_backwards(strategy):
    net, stage = tapped(strategy)
    batches = [torch.randn(32, 6) for _ in range(2)]
    first, second = loss_of(net(batches[0])), loss_of(net(batches[1]))
    first.backward()
    second.backward()
    check(net, stage, batches)


def test_several_backwards_before_one_step(strategy):
    net, stage = tapped(strategy)
    batches = [torch.randn(32, 6) for _ in range(3)]
    for x in batches:
        loss_of(net(x)).backward()
    check(net, stage, batches)


def test_a_layer_used_twice_in_one_backward(strategy):
    net, stage = tapped(strategy)
    net(net(torch.randn(32, 6))).square().mean().backward()
    assert stage.commit().counts == {net.a.weight: 2, net.b.weight: 2}


def test_retained_graph_counts_each_backward(strategy):
    net, stage = tapped(strategy)
    x = torch.randn(32, 6)
    loss = loss_of(net(x))
    loss.backward(retain_graph=True)
    loss.backward()
    check(net, stage, [x], count=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_leave_nothing(strategy, mode):
    net, stage = tapped(strategy)
    x = torch.randn(32, 6)
    with mode():
        net(torch.randn(32, 6))
    assert len(stage) == 0
    loss_of(net(x)).backward()
    check(net, stage, [x])


def test_an_abandoned_graph_frees_its_activations(strategy):
    net, stage = tapped(strategy)
    x = torch.randn(32, 6)
    alive = weakref.ref(x)
    out = net(x)
    del x, out
    gc.collect()
    assert alive() is None
    x = torch.randn(32, 6)
    loss_of(net(x)).backward()
    check(net, stage, [x])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_activation_checkpointing(strategy, reentrant, micro_batches):
    net, stage = tapped(strategy)
    batches = [torch.randn(32, 6, requires_grad=True) for _ in range(micro_batches)]
    for x in batches:
        loss_of(checkpoint(net, x, use_reentrant=reentrant)).backward()
    check(net, stage, batches)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_that_share_a_weight(strategy, reentrant):
    # The second segment's recomputation runs while the first has statistics staged but no gradient.
    net, stage = tapped(strategy)
    x = torch.randn(32, 6, requires_grad=True)
    for _ in range(2):
        y = checkpoint(net, x, use_reentrant=reentrant)
        loss_of(checkpoint(net, y, use_reentrant=reentrant)).backward()
    assert stage.commit().counts == {net.a.weight: 4, net.b.weight: 4}


def test_weights_used_around_a_reentrant_checkpoint(strategy):
    net, stage = tapped(strategy)
    x = torch.randn(32, 6, requires_grad=True)
    loss_of(net(checkpoint(net, net(x), use_reentrant=True))).backward()
    assert stage.commit().counts == {net.a.weight: 3, net.b.weight: 3}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_a_skipped_step_left_goes_with_its_gradients(strategy, set_to_none):
    net, stage = tapped(strategy)
    x = torch.randn(32, 6)
    loss_of(net(torch.randn(32, 6))).backward()
    assert len(stage) == 2
    if set_to_none:
        net.zero_grad()
    else:
        stage.clear()  # What the optimizer's own zero_grad does.
        net.zero_grad(set_to_none=False)
    loss_of(net(x)).backward()
    check(net, stage, [x])


def test_discarded_statistics_of_an_unused_layer_go_too(strategy):
    net, stage = tapped(strategy)
    loss_of(net(torch.randn(32, 6))).backward()
    net.zero_grad()
    net.a(torch.randn(32, 6)).square().mean().backward()
    assert stage.commit().counts == {net.a.weight: 1}


def test_a_backward_that_raised_is_over(strategy):
    net, stage = tapped(strategy)

    def fail(gradient):
        raise RuntimeError("stop here")

    hidden = net.a(torch.randn(32, 6))
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        loss_of(net.b(torch.tanh(hidden))).backward()
    assert len(stage) == 1
    net.zero_grad()
    x = torch.randn(32, 6)
    loss_of(net(x)).backward()
    check(net, stage, [x])


def test_gradients_of_gradients(strategy):
    net, stage = tapped(strategy)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(16, 6)

    def penalty(model):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(model(leaf)), leaf, create_graph=True)
        return slope.square().sum() + loss_of(model(x))

    penalty(net).backward()
    penalty(plain).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert len(stage) >= 2


def test_function_transforms_pass_through(strategy):
    net, stage = tapped(strategy)
    x = torch.randn(8, 6)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, x):
        return loss_of(torch.func.functional_call(net, weights, (x,)))

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    assert per_sample["a.weight"].shape == (8, 10, 6)
    assert len(stage) == 0


def test_keyword_only_calls(strategy):
    layer, stage = tapped(strategy, nn.Linear(6, 4))
    x = torch.randn(32, 6)
    layer(input=x).square().mean().backward()
    delta = torch.autograd.grad(loss_of(y := layer(x)), y)[0]
    assert float(stage.commit().ranks[layer.weight]) == pytest.approx(
        float(entropy_rank(x, delta)), abs=1e-6
    )


def test_autocast(strategy):
    net, stage = tapped(strategy)
    x = torch.randn(64, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(net(x).float()).backward()
    check(net, stage, [x], tolerance=0.02)


def test_bfloat16_layers(strategy):
    net, stage = tapped(strategy, Net().bfloat16())
    loss_of(net(torch.randn(64, 6).bfloat16()).float()).backward()
    ranks = stage.commit().ranks
    assert all(rank.dtype == torch.float64 and torch.isfinite(rank) for rank in ranks.values())


def test_input_changed_in_place_after_the_layer(strategy):
    # Under autocast the layer saves a cast copy, so changing its input afterwards is legitimate.
    # (The operator keeps the input itself; compiled graphs copy where needed.)
    layer, stage = tapped("hook", nn.Linear(6, 4))
    x = torch.randn(32, 6)
    kept = x.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    x.zero_()
    loss_of(y.float()).backward()
    rank = float(stage.commit().ranks[layer.weight])
    delta = torch.autograd.grad(loss_of(y := layer(kept)), y)[0]
    assert rank == pytest.approx(float(entropy_rank(kept, delta)), abs=0.02)


def test_wide_layers_and_tokens(strategy):
    layer, stage = tapped(strategy, nn.Linear(70, 50))
    x = torch.randn(4, 30, 70)
    loss_of(torch.tanh(y := layer(x))).backward()
    delta = torch.autograd.grad(loss_of(torch.tanh(y := layer(x))), y)[0]
    assert float(stage.commit().ranks[layer.weight]) == pytest.approx(
        float(entropy_rank(x, delta)), abs=1e-6
    )


def test_convolutions_through_patches(strategy):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    stage = ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy, sites=["0", "2"])
    x = torch.randn(2, 3, 8, 8)
    loss_of(model(x)).backward()
    committed = stage.commit()
    hidden = torch.relu(model[0](x)).detach()
    out = model[2](hidden)
    delta = torch.autograd.grad(loss_of(out), out)[0]
    # Few enough positions that none was left out.
    patches = torch.nn.functional.unfold(hidden, 3).transpose(1, 2).reshape(-1, 72)
    expected = entropy_rank(patches, delta.flatten(2).transpose(1, 2).reshape(-1, 4))
    assert float(committed.ranks[model[2].weight]) == pytest.approx(float(expected), abs=1e-6)
    assert committed.counts == {model[0].weight: 1, model[2].weight: 1}


def test_a_layer_that_mixes_rows_is_named(strategy):
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return (x @ self.weight).mean(0, keepdim=True)

    model = nn.Sequential(Pooling())
    attach(model, model.parameters(), ObservationStage(), strategy=strategy, sites=["0"])
    with pytest.raises(RuntimeError, match="'0' read 8 rows but wrote 1"):
        model(torch.randn(8, 6)).sum().backward()

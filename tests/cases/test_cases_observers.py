"""Cases 39 and 48 of the second round: which backwards are observed, and by which copies."""

import copy
import pickle
import warnings

import pytest
import torch
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import nn
from torch.utils.checkpoint import checkpoint

from rpt import ResidualPolarTransport

STRATEGIES = ("hook", "compiled")


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def batch(seed):
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))


# -- case 48: backwards that give a weight no gradient ----------------------------------------------


def input_gradient(call, model):
    x = batch(9).requires_grad_()
    torch.autograd.grad(call(x).square().sum(), x)


def input_gradient_through_backward(call, model):
    x = batch(9).requires_grad_()
    call(x).square().sum().backward(inputs=[x])


def jacobian(call, model):
    torch.autograd.functional.jacobian(lambda x: call(x).sum(0), batch(9))


def batched_input_gradients(call, model):
    x = batch(9).requires_grad_()
    y = call(x)
    torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)


def batched_weight_gradients(call, model):
    y = call(batch(9))
    torch.autograd.grad(y, model[0].weight, torch.randn(3, *y.shape), is_grads_batched=True)


def frozen_from_the_start(call, model):
    model.requires_grad_(False)
    call(batch(9).requires_grad_()).square().sum().backward()
    model.requires_grad_(True)


def frozen_before_the_backward(call, model):
    loss = call(batch(9).requires_grad_()).square().sum()
    model.requires_grad_(False)
    loss.backward()
    model.requires_grad_(True)


def unfrozen_before_the_backward(call, model):
    model.requires_grad_(False)
    loss = call(batch(9).requires_grad_()).square().sum()
    model.requires_grad_(True)
    loss.backward()


def forward_mode(call, model):
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(batch(9), batch(8)))


def other_weights(call, model):
    teacher = {name: nn.Parameter(p.detach() * 2) for name, p in model.named_parameters()}
    torch.func.functional_call(model, teacher, (batch(9),)).square().sum().backward()


def weights_gradient_for_the_log(call, model):
    torch.autograd.grad(call(batch(9)).square().sum(), list(model.parameters()))


INTERLUDES = [
    input_gradient,
    input_gradient_through_backward,
    jacobian,
    batched_input_gradients,
    batched_weight_gradients,
    frozen_from_the_start,
    frozen_before_the_backward,
    unfrozen_before_the_backward,
    forward_mode,
    other_weights,
    weights_gradient_for_the_log,
]


def observed_ranks(model, stage, call, interlude=None):
    model.zero_grad()
    for seed in range(2):
        call(batch(seed)).square().mean().backward()
        if interlude is not None:
            interlude(call, model)
    found = stage.commit()
    return [(float(found.ranks[m.weight]), found.counts[m.weight]) for m in (model[0], model[2])]


def attached(strategy):
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    return model, stage


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("interlude", INTERLUDES)
def test_backwards_without_a_gradient_for_the_weight_are_not_observed(strategy, interlude):
    """Case 48."""
    model, stage = attached(strategy)
    expected = observed_ranks(model, stage, model)
    assert observed_ranks(model, stage, model, interlude) == expected


def test_nor_are_they_in_a_compiled_model():
    """Case 48; a compiled backward can be neither batched nor differentiated by row."""
    torch._dynamo.reset()
    model, stage = attached("compiled")
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = observed_ranks(model, stage, call)
    for interlude in INTERLUDES:
        if "batched" not in interlude.__name__ and interlude is not jacobian:
            assert observed_ranks(model, stage, call, interlude) == expected, interlude
    assert observed_ranks(model, stage, call) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_observation_by_hand_is_untouched_by_other_backwards(strategy):
    """Case 48: what a caller staged has no backward to be judged by."""
    model = network()
    optimizer = ResidualPolarTransport(model.parameters())
    optimizer.attach_model(model, strategy="explicit")
    model(batch(0)).square().mean().backward()
    optimizer.observe_residual(torch.randn(9, 6), torch.randn(9, 10), model[0].weight)
    for interlude in INTERLUDES:
        interlude(model, model)
    assert optimizer._observing.stage.commit().counts == {model[0].weight: 1}


@pytest.mark.parametrize("compiled", [False, True])
def test_own_and_other_weights_in_one_backward_count_the_own(compiled):
    """Case 48: student and teacher share a loss, a layer's modules and one backward."""
    torch._dynamo.reset()
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy="compiled" if compiled else "hook")
    call = torch.compile(model, backend="aot_eager") if compiled else model
    names = [name for name, _ in call.named_parameters()]
    teacher = {
        n: nn.Parameter(p.detach() * 2) for n, p in zip(names, model.parameters(), strict=True)
    }
    for _ in range(2):  # The second time, compiled graphs are reused.
        other = torch.func.functional_call(call, teacher, (batch(1),))
        (call(batch(0)) - other).square().sum().backward()
        assert stage.commit().counts == {model[0].weight: 1, model[2].weight: 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_a_caller_assigns_are_observed(strategy):
    """Case 48: autograd.grad, then `p.grad = g`, is a training loop like any other."""
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(model(batch(0)).square().mean(), weights)
    for p, g in zip(weights, gradients, strict=True):
        p.grad = g
    model(batch(1)).square().mean().backward()
    assert stage.commit().counts == {model[0].weight: 2, model[2].weight: 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_are_judged_by_their_own_backward(reentrant):
    """Case 48."""
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage)
    x = batch(0).requires_grad_()
    if not reentrant:  # Reentrant ones refuse autograd.grad.
        y = checkpoint(model, x, use_reentrant=False)
        torch.autograd.grad(y.square().sum(), x)
        assert len(stage) == 0
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert stage.commit().counts == {model[0].weight: 1, model[2].weight: 1}


# -- case 39: copies and loaded runs ------------------------------------------------------------------


def step(model, optimizer, seed):
    optimizer.zero_grad()
    model(batch(seed)).square().mean().backward()
    optimizer.step()


def observed_run(model=None, **options):
    model = model or network()
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    optimizer.attach_model(model, observe_every=1, **options)
    for seed in range(3):
        step(model, optimizer, seed)
    return model, optimizer


def silently(model, optimizer, seed=3):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, seed)


def assert_equal_weights(left, right):
    for p, q in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_first", [True, False])
def test_a_copy_of_model_and_optimizer_observes_what_the_original_did(strategy, model_first):
    """Case 39."""
    model, optimizer = observed_run(strategy=strategy)
    if model_first:
        twin, copied = copy.deepcopy((model, optimizer))
    else:
        copied, twin = copy.deepcopy((optimizer, model))
    for seed in range(3, 6):
        silently(model, optimizer, seed)
        silently(twin, copied, seed)
    assert_equal_weights(model, twin)
    for weight in (twin[0].weight, twin[2].weight):
        assert int(copied.state[weight]["observations"]) == 6
    copied.remove_observers()
    assert not any(m._forward_hooks for m in twin.modules())
    assert all(len(model[i]._forward_hooks) == 1 for i in (0, 2))
    again = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(again)
    del again
    silently(*third)
    silently(model, optimizer)
    assert_equal_weights(model, third[0])


def test_a_copied_convolution_is_observed_too():
    """Case 39."""
    net = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 3))
    optimizer = ResidualPolarTransport(net.parameters(), lr=1e-2)
    optimizer.attach_model(net, sites=["0", "2"], observe_every=1)
    copied, twin = copy.deepcopy((optimizer, net))
    twin(torch.randn(5, 2, 3, 3)).square().mean().backward()
    assert copied._observing.stage.commit().counts == {twin[0].weight: 1, twin[2].weight: 1}


def test_the_cadence_is_copied_with_its_phase():
    """Case 39."""
    model = network()
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model, observe_every=3)
    for seed in range(2):
        step(model, optimizer, seed)
    twin, copied = copy.deepcopy((model, optimizer))
    counts = []
    for seed in range(2, 8):
        step(twin, copied, seed)
        counts.append(int(copied.state[twin[0].weight]["observations"]))
    assert counts == [1, 2, 2, 2, 3, 3]


def test_a_model_copied_alone_observes_nothing():
    """Case 39: an averaged model's copy costs nothing and leaves nothing."""
    model, optimizer = observed_run()
    twin = copy.deepcopy(model)
    twin(batch(0)).square().mean().backward()
    assert len(optimizer._observing.stage) == 0
    assert not any("Tap" in type(n).__name__ for n in graph_nodes(twin(batch(0))))


def graph_nodes(tensor):
    waiting, seen = [tensor.grad_fn], []
    while waiting:
        node = waiting.pop()
        seen.append(node)
        waiting += [n for n, _ in node.next_functions if n is not None]
    return seen


def unpickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def copied_apart(model, optimizer):
    twin = copy.deepcopy(optimizer)
    names = dict(zip(dict(model.named_parameters()), twin.param_groups[0]["params"], strict=True))
    other = network()
    for name, p in names.items():
        module, _, attribute = name.rpartition(".")
        other.get_submodule(module)._parameters[attribute] = p
    return other, twin


def loaded(model, optimizer):
    other = network()
    other.load_state_dict(model.state_dict())
    fresh = ResidualPolarTransport(other.named_parameters(), lr=1e-2)
    fresh.load_state_dict(optimizer.state_dict())
    return other, fresh


@pytest.mark.parametrize("through", [unpickled, copied_apart, loaded])
@pytest.mark.parametrize("answer", ["none", "attach", "remove"])
def test_a_run_that_lost_its_model_says_so_once(through, answer):
    """Case 39."""
    model, optimizer = observed_run()
    twin, copied = through(model, optimizer)
    if answer == "attach":
        copied.attach_model(twin, observe_every=1)
        for seed in range(3, 6):
            silently(twin, copied, seed)
            silently(model, optimizer, seed)
        assert_equal_weights(model, twin)
        return
    if answer == "remove":
        copied.remove_observers()
        silently(twin, copied)
        return
    with pytest.warns(UserWarning, match="attach_model") as caught:
        step(twin, copied, 3)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    silently(twin, copied, 4)


@pytest.mark.parametrize("through", [unpickled, copied_apart, loaded])
def test_a_run_that_ended_its_observation_says_nothing(through):
    """Case 39."""
    model, optimizer = observed_run()
    optimizer.state_dict()
    optimizer.remove_observers()
    silently(*through(model, optimizer))

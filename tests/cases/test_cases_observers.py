"""Cases 39, 40, 47, 48, 70, 71 of the second round: observers and first use."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
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
    other_weights,
    weights_gradient_for_the_log,
]


def observed_ranks(strategy, interlude=None, compiled=False):
    torch._dynamo.reset()
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for seed in range(2):
        call(batch(seed)).square().mean().backward()
        if interlude is not None:
            interlude(call, model)
    found = stage.commit()
    return [(float(found.ranks[m.weight]), found.counts[m.weight]) for m in (model[0], model[2])]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("interlude", INTERLUDES)
def test_backwards_without_a_gradient_for_the_weight_are_not_observed(strategy, interlude):
    """Case 48."""
    assert observed_ranks(strategy, interlude) == observed_ranks(strategy)


@pytest.mark.parametrize(
    "interlude", [i for i in INTERLUDES if "batched" not in i.__name__ and i is not jacobian]
)
def test_nor_are_they_in_a_compiled_model(interlude):
    """Case 48."""
    assert observed_ranks("compiled", interlude, compiled=True) == observed_ranks(
        "compiled", compiled=True
    )


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
    assert optimizer._stage.commit().counts == {model[0].weight: 1}


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

"""The rule for one parameter, written out, beside the optimizer over stacks."""

import random

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport
from rpt.groups import group_rule
from rpt.rule.simple import simple_step

SHAPES = [(6, 9), (9, 6), (24, 24), (5, 5), (40, 12), (12, 40), (1, 7), (7, 1), (1, 1)]
SHAPES += [(8,), (70,), (1,), (), (4, 3, 2), (70, 65)]


def drawn(seed):
    """Options that decide what is computed, a few at a time."""
    pick = random.Random(seed)
    choices = {
        "polar_prior": [0.0, 0.6, 1.0],
        "polar_release_beta": [None, 0.5, 1.0],
        "betas": [(0.9, 0.95), (0.8, 0.99)],
        "polar_schedule": ["tight", "quintic"],
        "polar_steps": [3, 5],
        "update_rms": [None, 0.5, 1.2],
        "signal_length": [True, False],
        "max_relative_step": [None, 0.01, 0.07],
        "thin_as_vector": [True, False],
        "transport": [True, False],
        "closure": [True, False],
        "max_root_staleness": [1, 4, 50],
        "eps": [0.0, 1e-3],
        "weight_decay": [0.0, 0.1],
        "maximize": [False, True],
    }
    preset = pick.choice(["drop_in", "paper"])
    names = pick.sample(sorted(choices), 4)
    return {"preset": preset, "gain_rate": 0.0} | {
        name: pick.choice(choices[name]) for name in names
    }


def seen(parameter, group):
    """A parameter as the rule sees it: a matrix, or a vector."""
    if parameter.ndim < 2:
        return parameter.reshape(-1)
    matrix = parameter.reshape(parameter.shape[0], -1)
    return matrix.reshape(-1) if group["thin_as_vector"] and 1 in matrix.shape else matrix


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(12))
def test_the_stacks_follow_the_simple_rule(seed, dtype):
    generator = torch.Generator().manual_seed(seed)

    def normal(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    parameters = [nn.Parameter(normal(shape)) for shape in random.Random(seed).sample(SHAPES, 7)]
    lr = 1e-3
    optimizer = ResidualPolarTransport(parameters, lr, roots="full", **drawn(seed))
    (group,) = optimizer.param_groups
    rule = group_rule(group)
    twins = [seen(p, group).detach().clone() for p in parameters]
    states = [{} for _ in parameters]
    # Roots of few gradients amplify what float32 rounds off in directions that these have not shown.
    tolerance = 1e-10 if dtype == torch.float64 else 4e-6
    directions = [normal(p.shape) for p in parameters]
    for step in range(8 if dtype == torch.float32 else 25):
        scale = 1e3 if step == 5 else 1.0  # outgrows its roots
        for p, direction in zip(parameters, directions, strict=True):
            p.grad = scale * (0.3 * direction + normal(p.shape))
            if step == 3 and p.ndim == 1:
                p.grad.zero_()
        rank = random.Random(step).random() if step % 3 == 1 else None
        if rank is not None:
            optimizer.set_residual_entropy_rank(rank)
        optimizer.step()
        for k, (p, state) in enumerate(zip(parameters, states, strict=True)):
            twins[k] = simple_step(
                twins[k], seen(p.grad, group), state, rule, lr, group["weight_decay"], rank
            )
            error = (seen(p, group).detach() - twins[k]).abs().max()
            assert error <= tolerance * max(1.0, float(twins[k].abs().max())), tuple(p.shape)

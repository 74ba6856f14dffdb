"""What PyTorch's own optimizers are run with, for `ResidualPolarTransport`, and AdamW beside it.

Every requirement that PyTorch's generic optimizer tests state is asked of all of these. AdamW runs
through the same tests: one that it fails is a wrong test.
"""

from functools import partial

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport
from rpt.roots import BlockedRoots

__all__ = ["FEW", "INPUTS", "fill_gradients", "make_parameters", "over", "run", "same", "values"]

_OPTIONS = {
    "defaults": {},
    "rate": {"lr": 1e-2},
    "tensor rate": {"lr": torch.tensor(1e-2)},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "betas": {"betas": (0.8, 0.99), "eps": 1e-6},
    "paper": {"preset": "paper"},
    "gain": {"gain_rate": 0.05, "target_coherence": 0.1},
    "no transport": {"transport": False, "closure": False},
    "no polar share": {"polar_prior": 0.0},
    "half polar share": {"polar_prior": 0.5, "polar_schedule": "quintic", "polar_steps": 3},
    "full roots": {"roots": "full", "max_root_staleness": 2},
    "blocked roots": {"roots": BlockedRoots(block_size=4)},
    "low rank roots": {"roots": "low_rank"},
    "no roots": {"roots": "none"},
    "drift": {"root_drift_threshold": 0.05},
    "capturable": {"capturable": True},
    "raising": {"nonfinite": "raise"},
    "stochastic": {"rounding": "stochastic"},
}

INPUTS = {"AdamW": torch.optim.AdamW} | {
    name: partial(ResidualPolarTransport, **options) for name, options in _OPTIONS.items()
}


# For what options cannot change.
FEW = ("AdamW", "defaults", "paper", "capturable")


def over(*left_out, only=tuple(INPUTS)):
    """A test run for each input, as its argument `build`, but for those named."""
    names = [name for name in only if name not in left_out]
    return pytest.mark.parametrize("build", [INPUTS[name] for name in names], ids=names)


def make_parameters(dtype=torch.float32, seed=0):
    """A matrix, a bias, a convolution, a scalar, and a matrix of one row."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(6, 5), (6,), (4, 3, 2, 2), (), (1, 5)]
    return [
        nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float32).to(dtype))
        for s in shapes
    ]


def fill_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)


def run(optimizer, parameters, steps, start=0):
    """Steps whose gradients depend on their number alone."""
    for seed in range(start, start + steps):
        fill_gradients(parameters, seed)
        optimizer.step()


def values(parameters):
    return [p.detach().clone() for p in parameters]


def same(left, right):
    """Whether two nested states are equal, bit for bit and type for type."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right

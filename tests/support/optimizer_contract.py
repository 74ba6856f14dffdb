"""The optimizers that every test of the contract runs: AdamW, and ours with every preset and backend."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport

BACKENDS = ("auto", "full", "blocked", "low_rank")
OPTIMIZERS = {"AdamW": torch.optim.AdamW} | {
    f"{preset}-{roots}": partial(ResidualPolarTransport, preset=preset, roots=roots)
    for preset, roots in itertools.product(("drop_in", "paper"), BACKENDS)
}
OURS = [name for name in OPTIMIZERS if name != "AdamW"]
# Where backends cannot differ, one of each preset stands for all.
FEW = ["AdamW", "drop_in-auto", "paper-full"]


def every(names):
    return pytest.mark.parametrize("build", [OPTIMIZERS[n] for n in names], ids=names)


all_optimizers, few_optimizers, our_optimizers = map(every, (OPTIMIZERS, FEW, OURS))


def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(params, t):
    generator = torch.Generator().manual_seed(1000 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer, params, steps, start=0):
    for t in range(start, start + steps):
        give_gradients(params, t)
        optimizer.step()


def weights(params):
    return [p.detach().clone() for p in params]

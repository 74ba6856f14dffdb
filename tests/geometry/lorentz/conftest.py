"""The independent oracle at three curvatures, and directions to try it with."""

import sys
from pathlib import Path

import pytest
import torch
from lorentz_oracle import AmbientOracle

# The models compared with, `baselines`, are among the examples.
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))


@pytest.fixture(params=[0.3, 1.0, 2.7], ids=lambda k: f"k={k}")
def oracle(request):
    return AmbientOracle(request.param)


@pytest.fixture
def directions():
    """Unit directions (count, n) in float64."""

    def make(count, n=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        u = torch.randn(count, n, generator=generator, dtype=torch.float64)
        return u / u.norm(dim=-1, keepdim=True)

    return make

"""Shared test setup: one thread (small matmuls run far slower with two on a busy machine).

Makes the modules in `support` and `oracles` importable by all tests, under importlib mode.
"""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("support", "oracles")]
torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)

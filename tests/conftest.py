"""Shared test setup: one thread (small matmuls run far slower with two on a busy machine)."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)

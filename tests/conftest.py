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


# What torch 2.6 itself cannot do, by what a test's name holds.
OLD_TORCH = {
    "fsdp": "FSDP2 of torch 2.6 needs an accelerator",
    "test_more_ranks_than_rows_and_hybrid_sharding": "FSDP2 of torch 2.6 needs an accelerator",
    "test_accumulation_without_synchronisation_counts": "FSDP2 of torch 2.6 needs an accelerator",
    "test_a_fresh_optimizer_has_every_key_after_dcps": "FSDP2 of torch 2.6 needs an accelerator",
    "test_tensor_parallel_parameters[4-True]": "torch 2.6 shards evenly only",
    "test_case_14_tensor_learning_rates[lr1-True]": "schedulers of torch 2.6 refuse such a rate",
    "used twice": "torch 2.6 refuses a graph whose layer is called twice before the backward",
    "three forwards, one backward": "torch 2.6 refuses such a graph",
    "test_own_and_other_weights_in_one_backward_count_the_own[True]": "torch 2.6 refuses such a graph",
    "test_convolution_far_out_and_over_black_pixels": "log1p of torch 2.6 is infinite from 2.2e38 on",
}


def pytest_collection_modifyitems(items):
    for item in items if torch.__version__ < "2.7" else ():
        for part, reason in OLD_TORCH.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))

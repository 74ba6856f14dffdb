"""A convolution as a linear map of sampled patches."""

import pytest
import torch
from rpt.observers.patches import (
    MAX_PATCHES,
    Convolution,
    sampled_cotangents,
    sampled_patches,
    unsupported_convolution,
)
from torch import nn

CONVOLUTIONS = [
    (nn.Conv1d(3, 5, 3, stride=2, padding=1), (4, 3, 17)),
    (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (4, 3, 9, 8)),
    (nn.Conv2d(3, 5, 3, padding="same"), (4, 3, 6, 7)),
    (nn.Conv2d(3, 5, 3, padding=2, padding_mode="circular"), (2, 3, 6, 7)),
    (nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), (3, 6, 7)),
    (nn.Conv3d(2, 4, 2), (2, 2, 4, 5, 3)),
    (nn.Conv2d(3, 5, 3), (20, 3, 20, 20)),
]


@pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
def test_sampled_rows_satisfy_the_convolution(module, shape):
    x = torch.randn(shape)
    y = module(x)
    patches = sampled_patches(Convolution.of(module), x, y.shape)
    rows = sampled_cotangents(y, len(module.kernel_size))
    assert len(patches) == len(rows) <= MAX_PATCHES
    expected = patches @ module.weight.flatten(1).T + module.bias
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_observed_says_why():
    assert unsupported_convolution(nn.Conv2d(4, 4, 3)) is None
    assert "grouped" in unsupported_convolution(nn.Conv2d(4, 4, 3, groups=2))
    assert "transposed" in unsupported_convolution(nn.ConvTranspose2d(4, 4, 3))

"""Optimizer states in tests: kept, sent through a file, compared bit for bit."""

import copy
import io
import struct

import torch

__all__ = ["assert_bitwise", "cosine", "snapshot", "through_a_file"]


def snapshot(optimizer):
    """Deep copies of all parameters and of all state, to compare bit for bit."""
    parameters = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    return parameters, copy.deepcopy(optimizer.state_dict())


def assert_bitwise(left, right, where="root"):
    """Types, dtypes, shapes, keys and every bit: -0 is not 0, and a NaN is itself."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert bits(left) == bits(right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_bitwise(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_bitwise(a, b, f"{where}[{i}]")
    elif isinstance(left, float):
        assert struct.pack("d", left) == struct.pack("d", right), where
    else:
        assert left == right, where


def bits(tensor):
    """The bytes of a tensor's elements, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def through_a_file(state):
    """Saved and loaded as users do."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # weights_only is torch's default


def cosine(a, b):
    """Of two tensors, in float64."""
    return float(torch.cosine_similarity(a.double(), b.double(), dim=0))

"""The conformance check: what passes, and what it says about backends broken on purpose."""

import pytest
import torch

from rpt.roots import (
    AutoRoots,
    BackendError,
    BlockedRoots,
    FullRoots,
    LowRankRoots,
    NoRoots,
    Refresh,
    RootBackend,
    check_backend,
)


@pytest.mark.parametrize(
    "backend",
    [
        FullRoots(),
        FullRoots("sketch"),
        FullRoots("age"),
        BlockedRoots(),
        BlockedRoots(3),
        LowRankRoots(),
        LowRankRoots(2),
        AutoRoots(),
        AutoRoots(full_side=4, block_size=3, long_side=60),
        AutoRoots(full_side=1, block_size=1, long_side=1),
        NoRoots(),
    ],
    ids=lambda b: b.describe(),
)
def test_every_built_in_backend_conforms(backend):
    check_backend(backend)


class Minimal(RootBackend):
    """The smallest honest backend: one scale per matrix."""

    def create(self, batch, rows, cols, *, dtype, device):
        return {
            "scale": torch.zeros(batch, dtype=dtype, device=device),
            "root": torch.ones(batch, dtype=dtype, device=device),
        }

    def accumulate(self, state, gradient, beta2):
        state["scale"].lerp_(gradient.square().mean((1, 2)), 1 - beta2)

    def refresh(self, state, shape, correction, damping):
        value = state["scale"] / correction
        failed = ~value.isfinite()
        root = torch.where(value > 0, value, 1.0).rsqrt()
        state["root"].copy_(torch.where(failed, state["root"], root))
        return Refresh(torch.ones_like(value), failed)

    def apply(self, state, gradient):
        return gradient * state["root"].view(-1, 1, 1)


def test_a_minimal_backend_conforms():
    check_backend(Minimal())


def broken(**methods):
    return type("Broken", (Minimal,), methods)()


def _create(**changes):
    def create(self, batch, rows, cols, *, dtype, device):
        state = Minimal.create(self, batch, rows, cols, dtype=dtype, device=device)
        return state | {key: make(batch, dtype) for key, make in changes.items()}

    return create


def _replacing(self, state, gradient, beta2):
    state["scale"] = torch.lerp(state["scale"], gradient.square().mean((1, 2)), 1 - beta2)


def _adding(self, state, gradient, beta2):
    Minimal.accumulate(self, state, gradient, beta2)
    state["extra"] = gradient


def _spoiling(self, state, gradient, beta2):
    Minimal.accumulate(self, state, gradient, beta2)
    gradient.mul_(2)


def _mixing(self, state, gradient):
    return gradient * state["root"].mean()


def _forgetful(self, state, shape, correction, damping):
    value = state["scale"] / correction
    state["root"].copy_(torch.where(value > 0, value, 1.0).rsqrt())
    return Refresh(torch.ones_like(value), ~value.isfinite())


def _silent(self, state, shape, correction, damping):
    result = Minimal.refresh(self, state, shape, correction, damping)
    return result._replace(failed=torch.zeros_like(result.failed))


def _undamped(self, state, shape, correction, damping):
    value = state["scale"] / correction
    failed = value.isnan()
    state["root"].copy_(torch.where(failed, state["root"], value.rsqrt()))
    return Refresh(torch.ones_like(value), failed)


def _absolute(self, state, shape, correction, damping):
    value = state["scale"] / correction + 1e-2
    failed = ~value.isfinite()
    state["root"].copy_(torch.where(failed, state["root"], value.rsqrt()))
    return Refresh(torch.ones_like(value), failed)


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"create": lambda *_, **__: []}, "create returns a list, not a dict of tensors"),
        ({"create": _create(size=lambda b, d: 3)}, "entry 'size' is not a tensor"),
        ({"create": _create(one=lambda b, d: torch.zeros((), dtype=d))}, "must be the batch"),
        ({"create": _create(s=lambda b, d: torch.zeros(1, dtype=d).expand(b))}, "shares memory"),
        ({"accumulate": lambda *_: None}, "accumulate changes nothing"),
        ({"accumulate": _replacing}, "it must change them in place"),
        ({"accumulate": _adding}, "create must make every key"),
        ({"accumulate": _spoiling}, "accumulate changes the gradient"),
        ({"apply": lambda self, state, g: g.mT}, "apply returns shape"),
        ({"apply": lambda self, state, g: g.double() if g.dtype == torch.float32 else g.float()},
         "apply returns torch.float"),
        ({"apply": lambda self, state, g: -g}, "points against its gradient"),
        ({"apply": lambda self, state, g: g / 0}, "non-finite entries for ordinary gradients"),
        ({"apply": lambda self, state, g: g}, "not scale invariant"),
        ({"apply": _mixing}, "another request than each matrix alone"),
        ({"refresh": _forgetful}, "does not keep the previous root"),
        ({"refresh": _silent}, "does not report `failed`"),
        ({"refresh": _undamped}, "zero gradients give a non-finite request"),
        ({"refresh": _absolute}, "not scale invariant"),
        ({"refresh": lambda *_: None}, "raised AttributeError|raised TypeError"),
        ({"refresh": lambda self, s, shape, c, d: Refresh(c[:1], c[:1] > 9)}, "not one per matrix"),
        ({"drift": lambda self, s, shape, c: c.sum()}, "drift has shape"),
        ({"drift": lambda self, s, shape, c: torch.ones_like(c)}, "drift right after a refresh"),
        ({"state_bytes": lambda *_: 7}, "state_bytes says 7"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_words(methods, says):
    with pytest.raises(BackendError, match=says) as caught:
        check_backend(broken(**methods))
    assert caught.value.problems
    assert "Broken breaks the root backend contract" in str(caught.value)


def test_only_instances_are_checked():
    with pytest.raises(TypeError, match="an instance of a RootBackend subclass"):
        check_backend(FullRoots)

"""The conformance check: what passes, and what it says about backends broken on purpose."""

import pytest
import torch
from torch import nn

import rpt
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
        FullRoots("age"),
        BlockedRoots(),
        BlockedRoots(3),
        LowRankRoots(),
        *map(LowRankRoots, (2, 4, 7, 9)),
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


class Complete(Minimal):
    """One scale per row and column; takes up everything that the seam offers."""

    any_strides = True
    capturable = True
    padding = True

    def create(self, batch, rows, cols, *, dtype, device):
        sizes = {"row": rows, "col": cols}
        make = {"dtype": dtype, "device": device}
        state = {name: torch.zeros(batch, size, **make) for name, size in sizes.items()}
        roots = {f"{name}_root": torch.ones(batch, size, **make) for name, size in sizes.items()}
        return state | roots

    def accumulate(self, state, gradient, beta2, shapes=None):
        rows, cols = gradient.shape[-2:] if shapes is None else shapes.T[:, :, None]
        state["row"].lerp_(gradient.square().sum(2) / cols, 1 - beta2)
        state["col"].lerp_(gradient.square().sum(1) / rows, 1 - beta2)

    def refresh(self, state, shape, correction, damping):
        failed = torch.zeros_like(correction, dtype=torch.bool)
        sizes = shape if damping.shapes is None else damping.shapes.T[:, :, None]
        for name, size in zip(("row", "col"), sizes, strict=True):
            value = state[name] / correction[:, None]
            floor = damping.ridge * value.sum(1, keepdim=True) / size + damping.absolute[:, None]
            value = torch.maximum(value, floor)
            bad = ~value.isfinite().all(1)
            root = torch.where(value > 0, value, 1.0) ** -0.25
            state[f"{name}_root"].copy_(torch.where(bad[:, None], state[f"{name}_root"], root))
            failed = failed | bad
        return Refresh(torch.ones_like(correction), failed)

    def apply(self, state, gradient):
        return state["row_root"][:, :, None] * gradient * state["col_root"][:, None]

    def pads(self, rows, cols):
        return self.padding

    def crop(self, key, value, rows, cols):
        return value[..., : rows if key.startswith("row") else cols]


def test_a_backend_of_ones_own_may_do_all_that_the_built_in_ones_do():
    check_backend(Complete())
    seen = []

    class Padded(Complete):
        def accumulate(self, state, gradient, beta2, shapes=None):
            seen.append(shapes)
            super().accumulate(state, gradient, beta2, shapes)

    class Alone(Complete):
        padding = False

    moved = []
    for backend, capturable in ((Padded(), False), (Alone(), False), (Complete(), True)):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(s)) for s in ((4, 6), (6, 3), (5, 5), (2, 7))]
        optimizer = rpt.ResidualPolarTransport(
            weights, 1e-2, roots=backend, max_root_staleness=1, capturable=capturable
        )
        for _ in range(4):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        moved.append(weights)
    assert any(shapes is not None for shapes in seen)
    for values in zip(*moved, strict=True):
        torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values[2], values[1], rtol=1e-4, atol=1e-5)


def broken(base=Minimal, **methods):
    return type("Broken", (base,), methods)()


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


def _viewing(self, state, gradient, beta2, shapes=None):
    gradient.view(-1)
    Complete.accumulate(self, state, gradient, beta2, shapes)


def _asking(self, state, shape, correction, damping):
    assert bool((correction > 0).all())
    return Complete.refresh(self, state, shape, correction, damping)


def _padded_mean(self, state, shape, correction, damping):
    return Complete.refresh(self, state, shape, correction, damping._replace(shapes=None))


def _padded_count(self, state, gradient, beta2, shapes=None):
    Complete.accumulate(self, state, gradient, beta2)


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"accumulate": _viewing}, "any_strides: raised RuntimeError"),
        ({"refresh": _asking}, "capturable: it calls _local_scalar_dense"),
        ({"accumulate": _padded_count}, "pads: zeros around a matrix change its request"),
        ({"crop": lambda self, key, value, rows, cols: value}, "pads: crop gives 'row'"),
        ({"crop": lambda self, key, value, rows, cols: Complete().crop(key, value, rows, cols).clone()},
         "it must return a view"),
        ({"apply": lambda self, s, g: Complete().apply(s, g) + 1e-9}, "not zero where the gradient is"),
        ({"without_drift": lambda self: None}, "without_drift returns a NoneType"),
        ({"without_drift": lambda self: Minimal()}, "the backend it returns gives another request"),
    ],
)  # fmt: skip
def test_what_a_backend_says_it_can_do_is_tested(methods, says):
    with pytest.raises(BackendError, match=says):
        check_backend(broken(Complete, **methods))


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

"""What is wrong with a root backend, in words: a conformance check for the author of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .base import Damping, Refresh, RootBackend, State

__all__ = ["BackendError", "check_backend"]

_SHAPES = ((1, 1), (1, 9), (4, 4), (5, 8), (3, 70))
_BETA2 = 0.9


class BackendError(AssertionError):
    """A root backend broke the contract; `problems` lists every breach found."""

    def __init__(self, backend: RootBackend, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{type(backend).__name__} breaks the root backend contract:\n{lines}")


def check_backend(backend: RootBackend) -> None:
    """Run a root backend through the contract of `rpt.roots.RootBackend`.

    Covers several shapes, float32 and float64, one step and several, zero gradients, scaled gradients,
    batches against single matrices, statistics that no solver can decompose, and whatever the backend
    says it can do beyond that: gradients of any strides, steps without a host, padding, observed sides.

    Raises:
        TypeError: `backend` is no `RootBackend` instance.
        BackendError: with one line for everything that is wrong.
    """
    if not isinstance(backend, RootBackend):
        raise TypeError(
            f"check_backend takes an instance of a RootBackend subclass, not {backend!r}"
        )
    problems: list[str] = []
    for dtype in (torch.float32, torch.float64):
        for rows, cols in _SHAPES:
            where = f"({rows}, {cols}) {str(dtype).removeprefix('torch.')}"
            try:
                found = _check_shape(backend, rows, cols, dtype)
            except Exception as error:
                found = [f"raised {type(error).__name__}: {error}"]
            problems += [f"{where}: {problem}" for problem in found]
    if problems:
        raise BackendError(backend, list(dict.fromkeys(problems)))


def _gradients(rows: int, cols: int, dtype: torch.dtype, steps: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + cols)
    return torch.randn(steps, 2, rows, cols, generator=generator, dtype=torch.float64).to(dtype)


Accumulate = Callable[[State, Tensor], None]


def _run(
    backend: RootBackend,
    gradients: Tensor,
    *,
    shapes: Tensor | None = None,
    products: bool = False,
    accumulate: Accumulate | None = None,
    watch: AbstractContextManager[Any] | None = None,
) -> tuple[State, Tensor, Refresh]:
    """Feed gradients (steps, b, rows, cols); return the state, the last request, the last refresh.

    Args:
        shapes, products: for `Damping`, and shapes for `accumulate`.
        accumulate: in place of the backend's own.
        watch: active while the backend works.
    """
    _, batch, rows, cols = gradients.shape
    device = gradients.device
    state = backend.create(batch, rows, cols, dtype=gradients.dtype, device=device)
    refreshed = Refresh(gradients.new_ones(batch), torch.zeros(batch, dtype=torch.bool))
    damping = Damping(1e-4, gradients.new_zeros(batch), shapes, products)
    corrections = [
        gradients.new_full((batch,), 1 - _BETA2 ** (t + 1)) for t in range(len(gradients))
    ]
    with watch or nullcontext():
        for gradient, correction in zip(gradients, corrections, strict=True):
            if accumulate is not None:
                accumulate(state, gradient)
            elif shapes is None:
                backend.accumulate(state, gradient, _BETA2)
            else:
                backend.accumulate(state, gradient, _BETA2, shapes)
            refreshed = backend.refresh(state, (rows, cols), correction, damping)
        return state, backend.apply(state, gradients[-1]), refreshed


def _check_shape(backend: RootBackend, rows: int, cols: int, dtype: torch.dtype) -> list[str]:
    gradients = _gradients(rows, cols, dtype)
    device = gradients.device
    problems = _check_state(backend, rows, cols, dtype, device)
    if problems:
        return problems
    state, request, refreshed = _run(backend, gradients)
    last = gradients[-1]
    if request.shape != last.shape:
        return [f"apply returns shape {tuple(request.shape)}, not {tuple(last.shape)}"]
    if request.dtype != dtype:
        return [f"apply returns {request.dtype}, not the gradient's {dtype}"]
    if not request.isfinite().all():
        problems.append("apply returns non-finite entries for ordinary gradients")
    if not ((request * last).flatten(1).sum(1) > 0).all():
        problems.append("the request points against its gradient: the metric is not positive")
    for name, value in (("condition", refreshed.condition), ("failed", refreshed.failed)):
        if tuple(value.shape) != (2,):
            problems.append(
                f"refresh: {name} has shape {tuple(value.shape)}, not one per matrix (2,)"
            )
    correction = last.new_full((2,), 1 - _BETA2**3)
    drift = backend.drift(state, (rows, cols), correction)
    if tuple(drift.shape) != (2,):
        problems.append(f"drift has shape {tuple(drift.shape)}, not one per matrix (2,)")
    elif not (drift.abs() < 1e-3).all():
        problems.append(f"drift right after a refresh is {drift.tolist()}, not 0")

    tolerance = 2e-3 if dtype == torch.float32 else 1e-6
    for scale in (2.0**-10, 2.0**10):
        scaled = _run(backend, gradients * scale)[1]
        if not _close(scaled, request, tolerance):
            problems.append(
                f"gradients scaled by {scale:g} change the request: not scale invariant"
            )
    for i in range(2):
        single = _run(backend, gradients[:, i : i + 1])[1]
        if not _close(single[0], request[i], tolerance):
            problems.append("a batch of matrices gives another request than each matrix alone")
            break
    problems += _check_hard(backend, gradients)
    for claim in (_check_strides, _check_products, _check_padding, _check_sides, _check_driftless):
        try:
            problems += claim(backend, gradients, request, tolerance)
        except Exception as error:
            problems.append(f"{claim.__doc__}: raised {type(error).__name__}: {error}")
    return problems


def _check_strides(
    backend: RootBackend, gradients: Tensor, request: Tensor, tolerance: float
) -> list[str]:
    """any_strides"""
    tall = gradients.mT.contiguous().mT
    if not backend.any_strides or _close(_run(backend, tall)[1], request, tolerance):
        return []
    return ["any_strides: a gradient that lies tall in memory gives another request"]


def _check_products(
    backend: RootBackend, gradients: Tensor, request: Tensor, tolerance: float
) -> list[str]:
    """capturable"""
    if not backend.capturable:
        return []
    watch = _HostReads()
    found = _run(backend, gradients, products=True, watch=watch)[1]
    problems = [f"capturable: it calls {name}, which waits for the host" for name in watch.found]
    # Roots by products are damped a little differently: the same direction, no more is asked.
    cosine = torch.cosine_similarity(found.flatten(1), request.flatten(1))
    if not (cosine > 0.9).all():
        problems.append("capturable: with Damping.products the request is another one")
    return problems


class _HostReads(TorchDispatchMode):
    """Notes operations whose result, or whose status, the host has to wait for."""

    WAITING = (
        "_local_scalar_dense", "_linalg_eigh", "_linalg_svd", "linalg_eig", "_linalg_eigvals",
        "linalg_lstsq", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITING:
            self.found[name] = None
        return func(*args, **(kwargs or {}))


def _check_padding(
    backend: RootBackend, gradients: Tensor, request: Tensor, tolerance: float
) -> list[str]:
    """pads"""
    steps, batch, rows, cols = gradients.shape
    wide, long = rows + 2, cols + 3
    if not backend.pads(wide, long):
        return []
    padded = gradients.new_zeros(steps, batch, wide, long)
    padded[..., :rows, :cols] = gradients
    shapes = gradients.new_tensor([[rows, cols]]).repeat(batch, 1)
    state, found, _ = _run(backend, padded, shapes=shapes)
    problems = []
    if not _close(found[:, :rows, :cols], request, tolerance):
        problems.append("pads: zeros around a matrix change its request")
    if found[:, rows:].any() or found[:, :, cols:].any():
        problems.append("pads: the request is not zero where the gradient is padding")
    for key, value in _run(backend, gradients)[0].items():
        cropped = backend.crop(key, state[key][0], rows, cols)
        if cropped.shape != value[0].shape:
            problems.append(
                f"pads: crop gives {key!r} the shape {tuple(cropped.shape)}, an unpadded matrix has "
                f"{tuple(value[0].shape)}"
            )
        elif cropped.numel() and cropped.untyped_storage().data_ptr() != (
            state[key].untyped_storage().data_ptr()
        ):
            problems.append(f"pads: crop copies {key!r}: it must return a view")
    return problems


def _check_sides(
    backend: RootBackend, gradients: Tensor, request: Tensor, tolerance: float
) -> list[str]:
    """accumulate_sides"""
    if type(backend).accumulate_sides is RootBackend.accumulate_sides:
        return []
    problems = []
    rows, cols = request.shape[-2:]
    for given in (("left", "right"), ("left",), ("right",)):

        def accumulate(state: State, gradient: Tensor, given: tuple[str, ...] = given) -> None:
            own = {"left": gradient @ gradient.mT / cols, "right": gradient.mT @ gradient / rows}
            sides = {name: own[name] for name in given}
            # With both sides given the gradient has no say.
            seen = torch.full_like(gradient, torch.nan) if len(given) == 2 else gradient
            before = {key: value.data_ptr() for key, value in state.items()}
            backend.accumulate_sides(state, seen, _BETA2, **sides)
            if before != {key: value.data_ptr() for key, value in state.items()}:
                problems.append("accumulate_sides replaces tensors: it must change them in place")

        found = _run(backend, gradients, accumulate=accumulate)[1]
        if not _close(found, request, tolerance):
            named = " and ".join(given)
            problems.append(
                f"accumulate_sides: the gradient's own covariance given as {named} does not give the "
                "request of accumulate"
            )
    return problems


def _check_driftless(
    backend: RootBackend, gradients: Tensor, request: Tensor, tolerance: float
) -> list[str]:
    """without_drift"""
    light = backend.without_drift()
    if not isinstance(light, RootBackend):
        return [f"without_drift returns a {type(light).__name__}, not a backend"]
    if _close(_run(light, gradients)[1], request, tolerance):
        return []
    return ["without_drift: the backend it returns gives another request"]


def _check_state(
    backend: RootBackend, rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> list[str]:
    problems = []
    state = backend.create(2, rows, cols, dtype=dtype, device=device)
    if not isinstance(state, dict):
        return [f"create returns a {type(state).__name__}, not a dict of tensors"]
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            return [f"create: entry {key!r} is not a tensor under a string key"]
        if value.ndim == 0 or len(value) != 2:
            problems.append(
                f"create: {key!r} has shape {tuple(value.shape)}; its first dimension must be the batch"
            )
        if 0 in value.stride() and value.numel() > 1 and value.shape[0] > 1:
            problems.append(f"create: {key!r} shares memory between matrices (an expanded tensor)")
    if problems:
        return problems
    before = {key: value.clone() for key, value in state.items()}
    pointers = {key: value.data_ptr() for key, value in state.items()}
    gradient = _gradients(rows, cols, dtype, 1)[0]
    kept = gradient.clone()
    backend.accumulate(state, gradient, _BETA2)
    if any(state[key].data_ptr() != pointer for key, pointer in pointers.items()):
        problems.append("accumulate replaces tensors: it must change them in place")
    if set(state) != set(before):
        problems.append("accumulate adds or removes state: create must make every key")
    if all(torch.equal(state[key], value) for key, value in before.items() if key in state):
        problems.append("accumulate changes nothing")
    if not torch.equal(gradient, kept):
        problems.append("accumulate changes the gradient")
    measured = backend.state_bytes(rows, cols, dtype)
    actual = sum(value.numel() * value.element_size() for value in before.values()) // 2
    if measured != actual:
        problems.append(f"state_bytes says {measured} where the state takes {actual}")
    return problems


def _check_hard(backend: RootBackend, gradients: Tensor) -> list[str]:
    problems = []
    if not _run(backend, torch.zeros_like(gradients))[1].isfinite().all():
        problems.append("zero gradients give a non-finite request")
    state, request, _ = _run(backend, gradients)
    batch, rows, cols = request.shape
    backend.accumulate(state, torch.full_like(request, torch.nan), _BETA2)
    refreshed = backend.refresh(
        state,
        (rows, cols),
        request.new_ones(batch),
        Damping(1e-4, request.new_zeros(batch)),
    )
    after = backend.apply(state, gradients[-1])
    if not refreshed.failed.all():
        problems.append("refresh does not report `failed` for statistics that are not finite")
    if not _close(after, request, 1e-6):
        problems.append("a failed refresh does not keep the previous root")
    return problems


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return bool((x - y).abs().max() <= tolerance * y.abs().max().clamp_min(1e-30))

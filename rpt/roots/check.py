"""What is wrong with a root backend, in words: a conformance check for the author of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .base import Damping, Refresh, RootBackend, State

_SHAPES = ((1, 1), (1, 9), (4, 4), (5, 8), (3, 70))
_BETA2 = 0.9


class BackendError(AssertionError):
    """A root backend broke the contract; `problems` lists every breach found.

    Example:
        >>> import rpt
        >>> class Deaf(rpt.roots.NoRoots):
        ...     def accumulate(self, state, gradient, beta2, shapes=None): pass
        >>> try: rpt.roots.check_backend(Deaf())
        ... except rpt.roots.BackendError as error: print(error.problems[0])
        (1, 1) float32: accumulate changes nothing
    """

    def __init__(self, backend: RootBackend, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        super().__init__(f"{type(backend).__name__} breaks the root backend contract:\n{lines}")


def check_backend(backend: RootBackend) -> None:
    """Run a root backend through the contract of `rpt.roots.RootBackend`.

    Covers several shapes, float32 and float64, zero and scaled gradients, batches against single
    matrices, statistics that no solver can decompose, and whatever the backend says it can do beyond
    that: gradients of any strides, steps without a host, padding, observed sides.

    Raises:
        TypeError: `backend` is no `RootBackend` instance.
        BackendError: with one line for everything that is wrong.

    Example:
        >>> import rpt
        >>> rpt.roots.check_backend(rpt.roots.BlockedRoots(4))  # silent: nothing is wrong
    """
    if not isinstance(backend, RootBackend):
        raise TypeError(
            f"check_backend takes an instance of a RootBackend subclass, not {backend!r}"
        )
    problems = []
    for dtype in (torch.float32, torch.float64):
        for rows, cols in _SHAPES:
            where = f"({rows}, {cols}) {str(dtype).removeprefix('torch.')}"
            problems += [f"{where}: {found}" for found in _all_checks(backend, rows, cols, dtype)]
    if problems:
        raise BackendError(backend, list(dict.fromkeys(problems)))


class _Trial(NamedTuple):
    """A backend and what it made of ordinary gradients, (steps, 2, rows, cols)."""

    backend: RootBackend
    gradients: Tensor
    state: State
    request: Tensor
    refreshed: Refresh

    def same(self, found: Tensor) -> bool:
        """Whether a request is the one that was made."""
        tolerance = 2e-3 if found.dtype == torch.float32 else 1e-6
        return _close(found, self.request, tolerance)


def _all_checks(backend: RootBackend, rows: int, cols: int, dtype: torch.dtype) -> Iterator[str]:
    generator = torch.Generator().manual_seed(rows * 100 + cols)
    gradients = torch.randn(3, 2, rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    try:
        problems = list(_state(backend, gradients))
        if not problems:
            trial = _Trial(backend, gradients, *_run(backend, gradients))
            problems = list(_request(trial))
    except Exception as error:
        problems = [f"raised {type(error).__name__}: {error}"]
    yield from problems
    if problems:
        return
    for check in _CHECKS:
        try:
            yield from check(trial)
        except Exception as error:
            yield f"{check.__name__[1:]}: raised {type(error).__name__}: {error}"


def _run(
    backend: RootBackend,
    gradients: Tensor,
    *,
    shapes: Tensor | None = None,
    products: bool = False,
    watch: AbstractContextManager[Any] | None = None,
) -> tuple[State, Tensor, Refresh]:
    """Feed gradients (steps, b, rows, cols); the state, the last request, the last refresh."""
    steps, batch, rows, cols = gradients.shape
    state = backend.create(batch, rows, cols, dtype=gradients.dtype, device=gradients.device)
    damping = Damping(1e-4, gradients.new_zeros(batch), shapes, products)
    corrections = [_correction(gradients[0], t + 1) for t in range(steps)]
    padded = () if shapes is None else (shapes,)
    with watch or nullcontext():
        for gradient, correction in zip(gradients, corrections, strict=True):
            backend.accumulate(state, gradient, _BETA2, *padded)
            refreshed = backend.refresh(state, (rows, cols), correction, damping)
        return state, backend.apply(state, gradients[-1]), refreshed


def _correction(gradient: Tensor, step: int) -> Tensor:
    return gradient.new_full((len(gradient),), 1 - _BETA2**step)


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return bool((x - y).abs().max() <= tolerance * y.abs().max().clamp_min(1e-30))


def _state(backend: RootBackend, gradients: Tensor) -> Iterator[str]:
    """`create`, `accumulate` and `state_bytes`."""
    gradient, (rows, cols) = gradients[0].clone(), gradients.shape[-2:]
    state = backend.create(2, rows, cols, dtype=gradient.dtype, device=gradient.device)
    if not isinstance(state, dict):
        yield f"create returns a {type(state).__name__}, not a dict of tensors"
        return
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            yield f"create: entry {key!r} is not a tensor under a string key"
            return
        if value.ndim == 0 or len(value) != 2:
            shape = tuple(value.shape)
            yield f"create: {key!r} has shape {shape}; its first dimension must be the batch"
            return
        if 0 in value.stride() and value.numel() > 1:
            yield f"create: {key!r} shares memory between matrices (an expanded tensor)"
            return
    before = {key: value.clone() for key, value in state.items()}
    tensors = dict(state)
    backend.accumulate(state, gradient, _BETA2)
    if any(state[key] is not tensor for key, tensor in tensors.items()):
        yield "accumulate replaces tensors: it must change them in place"
    if set(state) != set(before):
        yield "accumulate adds or removes state: create must make every key"
    if all(torch.equal(state[key], value) for key, value in before.items()):
        yield "accumulate changes nothing"
    if not torch.equal(gradient, gradients[0]):
        yield "accumulate changes the gradient"
    said = backend.state_bytes(rows, cols, gradient.dtype)
    taken = sum(value.nbytes for value in before.values()) // 2
    if said != taken:
        yield f"state_bytes says {said} where the state takes {taken}"


def _request(trial: _Trial) -> Iterator[str]:
    """What every other check counts on."""
    request, last = trial.request, trial.gradients[-1]
    if request.shape != last.shape:
        yield f"apply returns shape {tuple(request.shape)}, not {tuple(last.shape)}"
    elif request.dtype != last.dtype:
        yield f"apply returns {request.dtype}, not the gradient's {last.dtype}"


def _metric(trial: _Trial) -> Iterator[str]:
    backend, gradients, state, request, refreshed = trial
    last = gradients[-1]
    if not request.isfinite().all():
        yield "apply returns non-finite entries for ordinary gradients"
    if not ((request * last).flatten(1).sum(1) > 0).all():
        yield "the request points against its gradient: the metric is not positive"
    for name, value in refreshed._asdict().items():
        if tuple(value.shape) != (2,):
            yield f"refresh: {name} has shape {tuple(value.shape)}, not one per matrix (2,)"
    drift = backend.drift(state, (last.shape[1], last.shape[2]), _correction(last, 3))
    if tuple(drift.shape) != (2,):
        yield f"drift has shape {tuple(drift.shape)}, not one per matrix (2,)"
    elif not (drift.abs() < 1e-3).all():
        yield f"drift right after a refresh is {drift.tolist()}, not 0"
    for scale in (2.0**-10, 2.0**10):
        if not trial.same(_run(backend, gradients * scale)[1]):
            yield f"gradients scaled by {scale:g} change the request: not scale invariant"
    single = torch.cat([_run(backend, gradients[:, i : i + 1])[1] for i in range(2)])
    if not trial.same(single):
        yield "a batch of matrices gives another request than each matrix alone"


def _failures(trial: _Trial) -> Iterator[str]:
    backend, gradients, state, request, _ = trial
    state = {key: value.clone() for key, value in state.items()}
    if not _run(backend, torch.zeros_like(gradients))[1].isfinite().all():
        yield "zero gradients give a non-finite request"
    _, rows, cols = request.shape
    backend.accumulate(state, torch.full_like(request, torch.nan), _BETA2)
    damping = Damping(1e-4, request.new_zeros(2))
    refreshed = backend.refresh(state, (rows, cols), request.new_ones(2), damping)
    if not refreshed.failed.all():
        yield "refresh does not report `failed` for statistics that are not finite"
    if not _close(backend.apply(state, gradients[-1]), request, 1e-6):
        yield "a failed refresh does not keep the previous root"


def _any_strides(trial: _Trial) -> Iterator[str]:
    tall = trial.gradients.mT.contiguous().mT
    if trial.backend.any_strides and not trial.same(_run(trial.backend, tall)[1]):
        yield "any_strides: a gradient that lies tall in memory gives another request"


def _capturable(trial: _Trial) -> Iterator[str]:
    if not trial.backend.capturable:
        return
    watch = _HostReads()
    found = _run(trial.backend, trial.gradients, products=True, watch=watch)[1]
    for name in watch.found:
        yield f"capturable: it calls {name}, which waits for the host"
    # Roots by products are damped a little differently: the same direction, no more is asked.
    if not (torch.cosine_similarity(found.flatten(1), trial.request.flatten(1)) > 0.9).all():
        yield "capturable: with Damping.products the request is another one"


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


def _pads(trial: _Trial) -> Iterator[str]:
    backend, gradients = trial.backend, trial.gradients
    steps, batch, rows, cols = gradients.shape
    if not backend.pads(rows + 2, cols + 3):
        return
    padded = gradients.new_zeros(steps, batch, rows + 2, cols + 3)
    padded[..., :rows, :cols] = gradients
    shapes = gradients.new_tensor([[rows, cols]]).repeat(batch, 1)
    state, found, _ = _run(backend, padded, shapes=shapes)
    if not trial.same(found[:, :rows, :cols]):
        yield "pads: zeros around a matrix change its request"
    if found[:, rows:].any() or found[:, :, cols:].any():
        yield "pads: the request is not zero where the gradient is padding"
    for key, value in trial.state.items():
        cropped = backend.crop(key, state[key][0], rows, cols)
        if cropped.shape != value[0].shape:
            yield (
                f"pads: crop gives {key!r} the shape {tuple(cropped.shape)}, an unpadded matrix has "
                f"{tuple(value[0].shape)}"
            )
        elif cropped.numel() and cropped._base is None:
            yield f"pads: crop copies {key!r}: it must return a view"


def _without_drift(trial: _Trial) -> Iterator[str]:
    light = trial.backend.without_drift()
    if not isinstance(light, RootBackend):
        yield f"without_drift returns a {type(light).__name__}, not a backend"
    elif not trial.same(_run(light, trial.gradients)[1]):
        yield "without_drift: the backend it returns gives another request"


_CHECKS = (
    *(_metric, _failures),
    *(_any_strides, _capturable, _pads, _without_drift),
)

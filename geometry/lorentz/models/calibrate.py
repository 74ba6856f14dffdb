"""Bringing the radii of a model to a common size before training (Polar-ViT paper, App. D.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.multihead import HeadGain
from ..layers.curvature import Curvature
from ..layers.linear import PolarLinear
from ..ops.coordinates import from_ambient, to_ambient
from ..ops.point import Point
from ..ops.scalar import asinh_exp, log_sinh


def _shift(output: Point, target: float, per_head: bool) -> tuple[Tensor, Point]:
    """What brings the mean ln sinh a to that of the target, and the output with it."""
    a, u = output
    somewhere = a > 0
    log_radius = log_sinh(torch.where(somewhere, a, 1.0))
    weights = somewhere.to(a.dtype)
    dims = tuple(range(a.dim() - 1)) if per_head else tuple(range(a.dim()))
    mean = (weights * log_radius).sum(dims) / weights.sum(dims).clamp(min=1.0)
    wanted = math.log(math.sinh(target))
    shift = torch.where(weights.sum(dims) > 0, wanted - mean, 0.0)
    moved = torch.where(somewhere, asinh_exp(log_radius + shift), a)
    return shift, Point(moved, u)


@torch.no_grad()
def calibrate_(model: nn.Module, batch: Any, target_radius: float = 1.0) -> nn.Module:
    """Shift φ₀ of every `PolarLinear` and the gain of every head so that radii start alike.

    Runs the model once, without gradients and in evaluation mode, on one batch; each layer, in the
    order it is called, is moved so that its output's mean ln sinh a is ln sinh(target/√k), before
    the next layer sees it. A layer called more than once is calibrated at its first call.
    `layer.calibrated`, a saved buffer, says whether it happened.

    Args:
        model: contains `PolarLinear` layers.
        batch: a tensor, or a tuple of arguments, for `model`.
        target_radius: r, in the units of distances (k of each layer is respected).

    Returns:
        The model.

    Raises:
        ValueError: the target is not positive, or the model has nothing to calibrate.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> layer = lorentz.calibrate_(lorentz.PolarLinear(8, 4), lorentz.exp_map_origin(torch.randn(5, 8)))
        >>> layer.calibrated
        tensor(True)
    """
    if not (target_radius > 0 and math.isfinite(target_radius)):
        raise ValueError(f"target_radius must be positive and finite, got {target_radius!r}")
    layers = [m for m in model.modules() if isinstance(m, PolarLinear | HeadGain)]
    if not layers:
        raise ValueError("the model has no PolarLinear or HeadGain to calibrate")
    default = next((m.curvature for m in layers if isinstance(m, PolarLinear)), Curvature(1.0))
    done: set[int] = set()

    def hook(layer: nn.Module, _: Any, output: Point | Tensor) -> Point | Tensor | None:
        if id(layer) in done:
            return None
        done.add(id(layer))
        assert isinstance(layer, PolarLinear | HeadGain)
        # `HeadGain` has none of its own. The value is read on the host: calibration happens once.
        k = getattr(layer, "curvature", default)()
        point = from_ambient(output, k=k) if isinstance(output, Tensor) else output
        target = target_radius / math.sqrt(float(k))
        shift, moved = _shift(point, target, isinstance(layer, HeadGain))
        layer.shift_log_radius_(shift)
        return to_ambient(moved, k=k) if isinstance(output, Tensor) else moved

    handles = [layer.register_forward_hook(hook) for layer in layers]
    training = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        run: Callable[..., Any] = model
        # A Point is a tuple, too: one argument, not two.
        is_arguments = isinstance(batch, tuple) and not isinstance(batch, Point)
        run(*batch) if is_arguments else run(batch)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training:
            module.training = mode
    return model

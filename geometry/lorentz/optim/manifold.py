"""Lorentz points as parameters: the manifold object an optimizer asks, and the parameter itself.

A parameter holds points in one tensor (…, 1 + n): a, then the direction u. Tangent vectors have
the same shape: ξ_r, then ξ_⊥. The object's methods are those of `riemannian.Manifold`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import check_choice
from ..ops.coordinates import gradient_from_polar
from ..ops.maps import exp_map, parallel_transport
from ..ops.point import Point
from ..ops.scalar import norm_and_direction
from .riemannian import RiemannianAdamWState, riemannian_adamw_update


def pack(x: tuple[Tensor, Tensor]) -> Tensor:
    """(a, u) or (ξ_r, ξ_⊥) → one tensor (…, 1 + n).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.pack(lorentz.exp_map_origin(torch.tensor([3.0, 0.0])))
        tensor([3., 1., 0.])
    """
    return torch.cat([x[0].unsqueeze(-1), x[1]], -1)


def unpack(packed: Tensor) -> Point:
    """One tensor (…, 1 + n) → (a, u), or (ξ_r, ξ_⊥), as it is.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.unpack(torch.tensor([3.0, 1.0, 0.0]))
        Point(a=tensor(3.), u=tensor([1., 0.]))
    """
    return Point(packed[..., 0], packed[..., 1:])


class LorentzManifold:
    """How Lorentz points in polar form are optimised (`riemannian.Manifold`).

    Args:
        k: the curvature is −1/k: a number, or the module that returns it (the `Curvature` of the layer
            that owns the points).
        decay: what weight decay does to a point: "centroid" takes the centroid with the origin
            under the weights (1 − w, w), w = learning rate × weight decay, in polar form (the
            paper's Riemannian AdamW); "geodesic" takes a ← (1 − w) a.

    Raises:
        ValueError: another rule, or k is not positive and finite.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> points = lorentz.pack(lorentz.exp_map_origin(torch.tensor([3.0, 0.0])))
        >>> lorentz.LorentzManifold(decay="geodesic").decay(points, 0.5)
        tensor([1.5000, 1.0000, 0.0000])
    """

    def __init__(self, k: float | nn.Module = 1.0, *, decay: str = "centroid") -> None:
        check_choice("decay", decay, ("centroid", "geodesic"))
        if not isinstance(k, nn.Module) and not 0 < k < math.inf:
            raise ValueError(f"k (the curvature is −1/k) must be positive and finite, got {k!r}")
        self.k = k
        self.decay_rule = decay

    def curvature(self) -> float | Tensor:
        """k as it is now, without a gradient."""
        return self.k().detach() if isinstance(self.k, nn.Module) else self.k

    def adamw_update(
        self, point: Tensor, gradient: Tensor, *moments: Any, **options: Any
    ) -> RiemannianAdamWState:
        """`riemannian_adamw_update` here: what `ResidualPolarTransport` asks of a manifold."""
        return riemannian_adamw_update(self, point, gradient, *moments, **options)

    def riemannian_gradient(self, point: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient by the stored (a, u): ξ_r = ∂a/√k, ξ_⊥ = P ∂u/(√k sinh a)."""
        tangent = gradient_from_polar(unpack(point), *unpack(gradient), k=self.curvature())
        return pack(tangent).to(gradient.dtype)

    def retract(self, point: Tensor, tangent: Tensor) -> Tensor:
        """The exponential map; the direction is made unit again."""
        return self.project(pack(exp_map(unpack(point), unpack(tangent), k=self.curvature()))).to(
            point.dtype
        )

    def transport(self, point: Tensor, tangent: Tensor, new_point: Tensor) -> Tensor:
        """Parallel transport along the geodesic; rounding that left the tangent space is cut."""
        end = unpack(new_point)
        radial, across = parallel_transport(unpack(point), end, unpack(tangent))
        across = across - (across * end.u).sum(-1, keepdim=True) * end.u
        return pack((radial, across)).to(tangent.dtype)

    def squared_norm(self, point: Tensor, tangent: Tensor) -> Tensor:
        """ξ_r² + ‖ξ_⊥‖², a plain sum (Eq. 14)."""
        return tangent.square().sum(-1)

    def decay(self, point: Tensor, amount: float | Tensor) -> Tensor:
        """Pull the radius toward 0: a − ½[log1p(ωe^a) − log1p(ωe^−a)], ω = w/(1−w), or (1 − w) a."""
        a, u = unpack(point)
        w = torch.as_tensor(amount, dtype=torch.float64 if a.dtype == torch.float64 else None)
        w = w.to(device=a.device, dtype=torch.promote_types(a.dtype, torch.float32))
        if self.decay_rule == "geodesic":
            new_a = a * (1.0 - w)
        else:
            log_omega = torch.log(w) - torch.log1p(-w)
            softplus = nn.functional.softplus
            step = softplus(log_omega + a, threshold=80.0) - softplus(log_omega - a)
            new_a = (a - 0.5 * step).clamp(min=0.0)
        return self.project(pack((new_a, u.to(new_a.dtype)))).to(point.dtype)

    def project(self, point: Tensor) -> Tensor:
        """Make stored numbers a point again: a ≥ 0, u unit, and u = 0 where a = 0."""
        a, u = unpack(point)
        _, direction = norm_and_direction(u)
        direction = torch.where((a > 0).unsqueeze(-1), direction, 0.0)
        return pack((a.clamp(min=0.0), direction))

    def __repr__(self) -> str:
        return f"LorentzManifold(k={self.curvature()}, decay={self.decay_rule!r})"


class LorentzParameter(nn.Parameter):
    """An `nn.Parameter` of packed points (…, 1 + n) that carries its `manifold`.

    The manifold survives `copy.deepcopy`, pickling, `state_dict`/`load_state_dict` and
    `AveragedModel`. Whatever puts another tensor in its place (`fully_shard`, `to_empty`,
    `load_state_dict(assign=True)`, a conversion under torch's overwrite or swap flags) loses it, unless
    the module that owns it is a `KeepsManifold`, as `LorentzEmbedding` is.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> points = lorentz.pack(lorentz.exp_map_origin(torch.randn(5, 3)))
        >>> lorentz.LorentzParameter(points, lorentz.LorentzManifold()).manifold
        LorentzManifold(k=1.0, decay='centroid')
    """

    manifold: LorentzManifold

    def __new__(
        cls, data: Tensor, manifold: LorentzManifold, requires_grad: bool = True
    ) -> LorentzParameter:
        """Wrap packed points."""
        parameter = super().__new__(cls, data, requires_grad)
        parameter.manifold = manifold
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> LorentzParameter:
        if id(self) in memo:
            return memo[id(self)]
        data = self.data.clone(memory_format=torch.preserve_format)
        result = type(self)(data, copy.deepcopy(self.manifold, memo), self.requires_grad)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.data, self.manifold, self.requires_grad)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LorentzParameter({self.data!r}, {self.manifold!r})"


class KeepsManifold(nn.Module):
    """A module whose points stay points, whatever parameter torch puts in the place of one.

    Derive a module of your own that holds a `LorentzParameter` from this class.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> module = lorentz.KeepsManifold()
        >>> module.points = lorentz.LorentzParameter(torch.zeros(5, 4), lorentz.LorentzManifold())
        >>> hasattr(module.double().points, "manifold")
        True
    """

    def __setattr__(self, name: str, value: Any) -> None:
        # `fully_shard` and `load_state_dict(assign=True)` come this way.
        if isinstance(value, LorentzParameter):
            self.__dict__.setdefault("_manifolds", {})[name] = value.manifold
        super().__setattr__(name, value)
        if name in self.__dict__.get("_manifolds", ()):
            self._mark()

    def _mark(self) -> None:
        for name, manifold in self.__dict__.get("_manifolds", {}).items():
            if isinstance(parameter := self._parameters.get(name), nn.Parameter):
                parameter.manifold = manifold  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsManifold:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

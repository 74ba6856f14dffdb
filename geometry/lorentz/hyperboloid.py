"""`Lorentz`: the manifold as an object on ambient tensors, for those who come from geoopt."""

from __future__ import annotations

import torch
from torch import Tensor

from .layers.curvature import Curvature, as_curvature_module
from .layers.embedding import LorentzEmbedding
from .layers.sites import NoSites
from .ops.coordinates import (
    from_ambient,
    from_poincare,
    gradient_from_ambient,
    tangent_from_ambient,
    tangent_to_ambient,
    to_ambient,
    to_poincare,
)
from .ops.distance import distance, distance_to_origin, pairwise_distance
from .ops.maps import exp_map, exp_map_origin, log_map, log_map_origin, parallel_transport
from .ops.point import Point, PointLike
from .optim.manifold import LorentzManifold, LorentzParameter, pack


class Lorentz(NoSites):
    """The hyperboloid ⟨x, x⟩ = −x₀² + x₁² + … = −k of curvature −1/k, with the names and the ambient
    tensors (…, 1 + n), time first, of `geoopt.Lorentz`.

    Every method goes through polar form and the functions of this package, and gives what they
    give. What ambient float32 numbers hold is another matter: read back, they resolve distances up
    to radius 8 or so. Keep points in polar form (`to_polar`, `parameter`, `embedding`) where they
    go farther out.

    Args:
        k: the curvature is −1/k: a positive number, or a shared `Curvature`.
        learnable: whether ln k is a parameter (of a number).

    Raises:
        ValueError: k is not positive and finite.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> manifold = lorentz.Lorentz(k=1.0)
        >>> p, q = manifold.random_normal(2, 100, 6)
        >>> manifold.dist(p, q).shape
        torch.Size([100])
    """

    def __init__(self, k: float | Curvature = 1.0, *, learnable: bool = False) -> None:
        super().__init__()
        learned = learnable and not isinstance(k, Curvature)
        self.curvature = Curvature(float(k), learnable=True) if learned else as_curvature_module(k)  # type: ignore[arg-type]

    @property
    def k(self) -> Tensor:
        """k as it is now, a 0-d tensor."""
        return self.curvature()

    def to_polar(self, x: Tensor) -> Point:
        """Ambient points (…, 1 + n) → (a, u). Only the space coordinates are read."""
        return from_ambient(x, k=self.k)

    def from_polar(self, point: PointLike) -> Tensor:
        """(a, u) → ambient points (…, 1 + n)."""
        return to_ambient(point, k=self.k)

    def parameter(self, x: Tensor, *, decay: str = "centroid") -> LorentzParameter:
        """Ambient points (…, 1 + n) as a parameter in polar form, for `RiemannianAdamW` and
        `rpt.ResidualPolarTransport`; `unpack` reads it as (a, u)."""
        points = pack(self.to_polar(x)).detach()
        return LorentzParameter(points, LorentzManifold(self.curvature, decay=decay))

    def embedding(self, num_embeddings: int, features: int, **options: float) -> LorentzEmbedding:
        """A `LorentzEmbedding` of this curvature, which is saved with its points."""
        return LorentzEmbedding(num_embeddings, features, k=self.curvature, **options)  # type: ignore[arg-type]

    def dist(self, x: Tensor, y: Tensor, *, keepdim: bool = False) -> Tensor:
        """Geodesic distance (…); exactly 0 at coincidence, with gradient 0."""
        return _keep(distance(self.to_polar(x), self.to_polar(y), k=self.k), keepdim)

    def pairwise_dist(self, x: Tensor, y: Tensor) -> Tensor:
        """Distances (…, N, M) of all pairs of (…, N, 1 + n) and (…, M, 1 + n)."""
        return pairwise_distance(self.to_polar(x), self.to_polar(y), k=self.k)

    def dist0(self, x: Tensor, *, keepdim: bool = False) -> Tensor:
        """Distance to the origin (…)."""
        return _keep(distance_to_origin(self.to_polar(x), k=self.k), keepdim)

    def inner(
        self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False
    ) -> Tensor:
        """Riemannian inner product (…) of tangent vectors at x, (…, 1 + n); v is u by default."""
        point = self.to_polar(x)
        first = tangent_from_ambient(point, u)
        second = first if v is None else tangent_from_ambient(point, v)
        product = first.radial * second.radial
        product = product + (first.perpendicular * second.perpendicular).sum(-1)
        return _keep(product, keepdim)

    def norm(self, x: Tensor, u: Tensor, *, keepdim: bool = False) -> Tensor:
        """Length (…) of tangent vectors at x; 0 with gradient 0 for the zero vector."""
        squared = self.inner(x, u, keepdim=keepdim)
        nonzero = squared > 0
        return torch.where(nonzero, torch.sqrt(torch.where(nonzero, squared, 1.0)), 0.0)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The end of the geodesic from x along the tangent vector u."""
        point = self.to_polar(x)
        return self.from_polar(exp_map(point, tangent_from_ambient(point, u), k=self.k))

    retr = expmap

    def expmap0(self, u: Tensor) -> Tensor:
        """The exponential map at the origin of tangent vectors (…, 1 + n), whose time is 0."""
        return self.from_polar(exp_map_origin(u[..., 1:], k=self.k))

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The tangent vector at x that leads to y; the inverse of `expmap`."""
        point = self.to_polar(x)
        return tangent_to_ambient(point, log_map(point, self.to_polar(y), k=self.k))

    def logmap0(self, y: Tensor) -> Tensor:
        """The logarithm at the origin: (…, 1 + n) with time 0; the inverse of `expmap0`."""
        v = log_map_origin(self.to_polar(y), k=self.k)
        return torch.cat([torch.zeros_like(v[..., :1]), v], -1)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport of the tangent vector v along the geodesic from x to y."""
        start, end = self.to_polar(x), self.to_polar(y)
        moved = parallel_transport(start, end, tangent_from_ambient(start, v), k=self.k)
        return tangent_to_ambient(end, moved)

    ptransp = transp

    def transp0(self, y: Tensor, v: Tensor) -> Tensor:
        """Parallel transport from the origin to y."""
        return self.transp(self.origin(*y.shape, dtype=y.dtype, device=y.device), y, v)

    def transp0back(self, x: Tensor, v: Tensor) -> Tensor:
        """Parallel transport from x to the origin."""
        return self.transp(x, self.origin(*x.shape, dtype=x.dtype, device=x.device), v)

    def projx(self, x: Tensor) -> Tensor:
        """The point with the space coordinates of x: its time coordinate is made to fit."""
        return self.from_polar(self.to_polar(x))

    def proju(self, x: Tensor, v: Tensor) -> Tensor:
        """The orthogonal projection of ambient vectors onto the tangent space at x."""
        point = self.to_polar(x)
        raised = torch.cat([-v[..., :1], v[..., 1:]], -1)
        return tangent_to_ambient(point, gradient_from_ambient(point, raised))

    def egrad2rgrad(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The Riemannian gradient at x from the one by ambient coordinates."""
        point = self.to_polar(x)
        return tangent_to_ambient(point, gradient_from_ambient(point, gradient))

    def to_poincare(self, x: Tensor) -> Tensor:
        """Coordinates (…, n) in the ball of radius √k."""
        return to_poincare(self.to_polar(x), k=self.k)

    def from_poincare(self, p: Tensor) -> Tensor:
        """Ambient points (…, 1 + n) from coordinates (…, n) in the ball of radius √k."""
        return self.from_polar(from_poincare(p, k=self.k))

    def origin(
        self,
        *size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Origins (√k, 0, …) of shape `size`, the last of which is 1 + n."""
        origin = torch.zeros(*size, dtype=dtype, device=device)
        origin[..., 0] = self.k.detach().sqrt()
        return origin

    def random_normal(
        self,
        *size: int,
        std: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """`expmap0` of normal vectors, of shape `size`, the last of which is 1 + n."""
        return self.expmap0(std * torch.randn(*size, dtype=dtype, device=device))

    random = random_normal

    def extra_repr(self) -> str:
        return f"k={float(self.k.detach()):g}"


def _keep(x: Tensor, keepdim: bool) -> Tensor:
    return x.unsqueeze(-1) if keepdim else x

"""Polar convolution: one `conv2d` on space coordinates, no receptive field is ever formed; and the
activations, dropout and pooling that go with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...checks import check_choice, check_count, check_number
from ..ops.coordinates import from_space, to_space, unit_space
from ..ops.point import Point, PointLike, promote, without_autocast
from ..ops.scalar import arcosh1p, asinh_exp, limit_radius, log_of_norm, norm_and_direction
from ..ops.space import (
    centroid_pool2d,
    channels_first,
    channels_last,
    homogeneous_activation,
    max_pool2d,
)
from .curvature import Curvature, as_curvature_module
from .radius import anchored_log_radius


class DirectionConv2d(nn.Conv2d):
    """The kernel of a `PolarConv2d`, computed in float32 at least; what an observer sees."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, n, height, width) → (batch, n′ (+ 1), height′, width′)."""
        with without_autocast(x.device.type):
            return self._conv_forward(x, self.weight.to(x.dtype), None)


class PolarConv2d(nn.Module):
    """Polar convolution: the points of each receptive field are concatenated and mapped by a
    polar fully connected layer (Polar-ViT paper, App. F and Eq. 8).

    A concatenation has the space coordinates of its parts side by side, so its direction map is a
    convolution of sinh(a) u, and its time coordinate is √(1 + Σ sinh² a), a box sum. The radius
    parameter φ is one more output channel of the same convolution. Padding is with the origin.

    Args:
        in_channels: n, the dimension of the points of the input image.
        out_channels: n′.
        kernel_size, stride, padding, dilation: as in `torch.nn.Conv2d`, zeros only.
        k: curvature −1/k, a number or a shared `Curvature`.
        radius: "anchored" (Eq. 8) or "lorentz", the plain Lorentz convolution.

    Radii are limited to `radius_limit`. Parameters: `direction.weight` (n′ + 1, n, height, width),
    or n′, a Euclidean kernel and the layer's observation site, whose last row is φ, 0 at the
    start; `time_weight` (n′,) and the radius parameters of `PolarLinear`.

    Raises:
        ValueError: a size below 1, another rule, or points of another shape.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> image = lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))
        >>> lorentz.PolarConv2d(3, 6, 3, padding=1)(image).u.shape
        torch.Size([1, 4, 4, 6])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        k: float | Curvature = 1.0,
        radius: str = "anchored",
    ) -> None:
        super().__init__()
        check_choice("radius", radius, ("anchored", "lorentz"))
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        window = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        for name, value in window.items():
            for side in value if isinstance(value, tuple) else (value,):
                check_count(name, side)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.curvature = as_curvature_module(k)
        self.radius_rule = radius
        anchored = radius == "anchored"
        self.direction = DirectionConv2d(
            in_channels,
            out_channels + anchored,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            bias=False,
        )
        self.time_weight = nn.Parameter(torch.empty(out_channels))
        if anchored:
            self.norm_power_change = nn.Parameter(torch.zeros(()))
            self.radius_gain = nn.Parameter(torch.zeros(()))
            self.radius_bias = nn.Parameter(torch.zeros(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the kernel (Xavier, over the concatenation) and go back to the Lorentz layer."""
        with torch.no_grad():
            weight = self.direction.weight
            fan_in = 1 + weight[0].numel()
            bound = (6.0 / (fan_in + self.out_channels)) ** 0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(self.time_weight, -bound, bound)
            if self.radius_rule == "anchored":
                weight[-1].zero_()
                for p in (self.norm_power_change, self.radius_gain, self.radius_bias):
                    p.zero_()

    def forward(self, x: PointLike) -> Point:
        """Points (batch, height, width), (batch, height, width, n) → (batch, height′, width′), …"""
        ((a, u),) = promote(x)
        if a.dim() != 3 or u.shape[-1] != self.in_channels:
            raise ValueError(
                "expected points (batch, height, width) and (batch, height, width, "
                f"{self.in_channels}), got {tuple(a.shape)} and {tuple(u.shape)}"
            )
        a = limit_radius(a)
        out = self.direction(channels_first(unit_space(a, u)))
        sinh_a = torch.sinh(a)
        squares = self._box_sum(sinh_a * sinh_a)
        time = torch.sqrt(1.0 + squares)
        h = channels_last(out)[..., : self.out_channels]
        h = h + time.unsqueeze(-1) * self.time_weight.to(a.dtype)
        norm, direction = norm_and_direction(h, at_zero=math.inf)
        log_radius = log_of_norm(norm)
        if self.radius_rule == "anchored":
            # cosh of twice the radius of the concatenation is 1 + 2Σ sinh² a.
            field_radius = 0.5 * arcosh1p(2.0 * squares)
            log_radius = anchored_log_radius(
                log_radius,
                field_radius,
                out[:, -1] / time,
                power_change=self.norm_power_change,
                gain=self.radius_gain,
                bias=self.radius_bias,
            )
        return Point(asinh_exp(log_radius) * (norm > 0), direction)

    def _box_sum(self, squares: Tensor) -> Tensor:
        """(batch, height, width) → sums over receptive fields (batch, height′, width′)."""
        conv = self.direction
        if conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.padding in (0, (0, 0)):
            return squares
        ones = squares.new_ones(1, 1, *conv.kernel_size)
        with without_autocast(squares.device.type):
            return functional.conv2d(
                squares.unsqueeze(1),
                ones,
                stride=conv.stride,
                padding=conv.padding,
                dilation=conv.dilation,
            ).squeeze(1)

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """The kernel reads the space coordinates that the layer before made."""
        return [self.direction]

    def extra_repr(self) -> str:
        return f"{self.in_channels} → {self.out_channels}, radius={self.radius_rule!r}"


class PolarReLU(nn.Module):
    """relu on the space coordinates: direction relu(u), ln sinh a + ln‖relu(u)‖.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PolarReLU()(lorentz.exp_map_origin(torch.tensor([3.0, 0.0]))).u
        tensor([1., 0.])
    """

    def forward(self, x: PointLike) -> Point:
        """Points to points of the same shapes."""
        return homogeneous_activation(x, torch.relu)


class SpaceActivation(nn.Module):
    """Any function of the space coordinates that keeps their shape, e.g. `gelu` or `tanh`.

    Radii are limited to twice `radius_limit`, where the space coordinates stay finite.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> activation = lorentz.SpaceActivation(torch.nn.functional.gelu)
        >>> activation(lorentz.exp_map_origin(torch.randn(5, 3))).u.shape
        torch.Size([5, 3])
    """

    def __init__(self, function: Callable[[Tensor], Tensor], *, k: float | Curvature = 1.0) -> None:
        super().__init__()
        self.function = function
        self.curvature = as_curvature_module(k)

    def forward(self, x: PointLike) -> Point:
        """Points to points of the same shapes."""
        k = self.curvature()
        return from_space(self.function(to_space(x, k=k)), k=k)


class PolarDropout(nn.Module):
    """Dropout on the space coordinates, of probability p in [0, 1] (else ValueError).

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PolarDropout(0.1)(lorentz.exp_map_origin(torch.randn(5, 3))).u.shape
        torch.Size([5, 3])
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        check_number("p", p, 0.0)
        self.dropout = nn.Dropout(p)

    def forward(self, x: PointLike) -> Point:
        """Points to points of the same shapes; the identity in evaluation."""
        if not self.training or self.dropout.p == 0:
            return Point(*promote(x)[0])
        return homogeneous_activation(x, self.dropout)


class PolarMaxPool2d(nn.Module):
    """`max_pool2d` as a module: (batch, height, width), … to a smaller image.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.PolarMaxPool2d(2)(lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))).u.shape
        torch.Size([1, 2, 2, 3])
    """

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        check_count("kernel_size", kernel_size)
        self.kernel_size = kernel_size

    def forward(self, x: PointLike) -> Point:
        return max_pool2d(x, self.kernel_size)


class CentroidPool2d(PolarMaxPool2d):
    """`centroid_pool2d` as a module: (batch, height, width), … to a smaller image.

    Example:
        >>> import torch, rpt.geometry.lorentz as lorentz
        >>> lorentz.CentroidPool2d(2)(lorentz.exp_map_origin(torch.randn(1, 4, 4, 3))).u.shape
        torch.Size([1, 2, 2, 3])
    """

    def forward(self, x: PointLike) -> Point:
        return centroid_pool2d(x, self.kernel_size)

"""The radial–tangential model: the real lift of C^d, projectors, and the covariance.

A complex vector of dimension d is stored as 2d real numbers, real and imaginary parts interleaved
(Re z_1, Im z_1, Re z_2, …), so that `torch.view_as_complex` sees it without a copy. Under this lift
Re(x†y) is the ordinary dot product.

Source: RT-Filter paper, section 3.1, Eq. 2, Propositions 1 to 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "complex_to_real",
    "inner_product",
    "multiply_by_i",
    "radial_projector",
    "radial_tangential_covariance",
    "radial_tangential_precision",
    "real_to_complex",
    "tangential_projector",
    "unit_direction",
]


def complex_to_real(z: Tensor) -> Tensor:
    """Lift complex (…, d) to real (…, 2d), interleaved (appendix F.1).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import complex_to_real
        >>> complex_to_real(torch.tensor([1 + 2j, 3j]))
        tensor([1., 2., 0., 3.])
    """
    return torch.view_as_real(z).flatten(-2)


def real_to_complex(x: Tensor) -> Tensor:
    """Read real (…, 2d), interleaved, as complex (…, d) (appendix F.1).

    Raises:
        ValueError: an odd last size.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import real_to_complex
        >>> real_to_complex(torch.tensor([1.0, 2.0, 0.0, 3.0]))
        tensor([1.+2.j, 0.+3.j])
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"a lifted complex vector has an even number of features, got {x.shape[-1]}"
        )
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def multiply_by_i(x: Tensor) -> Tensor:
    """Multiply a lifted complex vector (…, 2d) by the imaginary unit (appendix F.1).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import multiply_by_i
        >>> multiply_by_i(torch.tensor([1.0, 2.0]))
        tensor([-2.,  1.])
    """
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)


def inner_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part (…) of x†y for lifted vectors (…, 2d); appendix F.1.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import inner_product
        >>> inner_product(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 0.0]))  # (i)†2
        (tensor(0.), tensor(-2.))
    """
    return (x * y).sum(-1), -(x * multiply_by_i(y)).sum(-1)


def unit_direction(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x (…, n) into magnitude (…) and unit direction (…, n) (section 3.1).

    The zero vector keeps direction 0, and gradients through it are 0.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import unit_direction
        >>> unit_direction(torch.tensor([0.0, 4.0]))
        (tensor(4.), tensor([0., 1.]))
    """
    magnitude = torch.linalg.vector_norm(x, dim=-1)
    return magnitude, x / magnitude.masked_fill(magnitude == 0, 1.0).unsqueeze(-1)


def radial_projector(x: Tensor) -> Tensor:
    """P_R(x) = x x† / ‖x‖² (Eq. 2) of real or complex vectors (…, n) as matrices (…, n, n).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import radial_projector
        >>> radial_projector(torch.tensor([1.0, 1.0]))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return x.unsqueeze(-1) * x.conj().unsqueeze(-2) / (x.abs() ** 2).sum(-1)[..., None, None]


def tangential_projector(x: Tensor) -> Tensor:
    """P_T(x) = I − P_R(x) (Eq. 2), shape (…, n, n).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import tangential_projector
        >>> tangential_projector(torch.tensor([2.0, 0.0])) @ torch.tensor([3.0, 5.0])
        tensor([0., 5.])
    """
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) - radial_projector(x)


def radial_tangential_covariance(
    x: Tensor, radial_variance: Tensor | float, tangential_variance: Tensor | float
) -> Tensor:
    """Σ = σ_r² P_R(x) + σ_t² P_T(x) (Eq. 2), shape (…, n, n); variances scalar or of shape (…).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import radial_tangential_covariance
        >>> radial_tangential_covariance(torch.tensor([2.0, 0.0]), 3.0, 0.5)
        tensor([[3.0000, 0.0000],
                [0.0000, 0.5000]])
    """
    dtype = x.real.dtype if x.is_complex() else x.dtype
    radial, tangential = (
        torch.as_tensor(variance, dtype=dtype, device=x.device)[..., None, None]
        for variance in (radial_variance, tangential_variance)
    )
    return radial * radial_projector(x) + tangential * tangential_projector(x)


def radial_tangential_precision(
    x: Tensor, radial_variance: Tensor | float, tangential_variance: Tensor | float
) -> Tensor:
    """The inverse of `radial_tangential_covariance`: P_R(x)/σ_r² + P_T(x)/σ_t² (Proposition 3).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import radial_tangential_precision
        >>> radial_tangential_precision(torch.tensor([2.0, 0.0]), 4.0, 0.5)
        tensor([[0.2500, 0.0000],
                [0.0000, 2.0000]])
    """
    return radial_tangential_covariance(x, 1.0 / radial_variance, 1.0 / tangential_variance)

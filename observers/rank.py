"""Sketched regression of output cotangents on activations, and its normalised entropy rank.

The statistic is the one of the RPT guide ("The observer measures shape, not loss"): the local
least-squares operator O = (XᵀX + λsI)⁻¹XᵀΔ and the effective rank exp(−Σ p ln p) / min(n, m) of its
singular energies. Work is split in two, so that a backward pass pays for a few thin products only:

* `statistics` sketches both sides to at most `dim` columns and keeps two small matrices;
* `ranks` solves and decomposes all statistics of equal size in one batched call.

Everything here is a pure function of its arguments and runs without autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ObserverSettings", "Statistics", "entropy_rank", "ranks", "sketch", "statistics"]

NULLS = ("none", "shuffle", "analytic")
NULL_DRAWS = 8
_SKETCH_SEED = 0x5EED
# Below this many rows per sketch column the regression may be rank-deficient, where float32 moments
# are all rounding noise in the directions that the ridge leaves open.
_DOUBLE_ROWS = 8
# A centred column block whose energy is rounding noise of its offset carries no relation.
_CONSTANT_TOLERANCE = 64.0


@dataclass(frozen=True)
class ObserverSettings:
    """How one observation is turned into a rank.

    Attributes:
        dim: Widest side of the regression; wider activations or cotangents are sketched down to it.
        ridge: Ridge relative to the activations' mean energy per coordinate.
        center: Subtract the mean over rows from both sides.
        null: "none" reports the guide's rank. "shuffle" and "analytic" divide it by the rank which
            the same marginals give with no relation between the two sides, so that unrelated data
            reads 1 (see `ranks`).

    Raises:
        ValueError: For a value out of range.

    Example:
        >>> from rpt.observers import ObserverSettings
        >>> ObserverSettings(dim=16)
        ObserverSettings(dim=16, ridge=1e-07, center=True, null='none')
    """

    dim: int = 32
    ridge: float = 1e-7
    center: bool = True
    null: str = "none"

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim < 1:
            raise ValueError(f"observer dim must be a positive integer, got {self.dim!r}")
        if not 0 < self.ridge < float("inf"):
            raise ValueError(f"observer ridge must be positive and finite, got {self.ridge!r}")
        if self.null not in NULLS:
            raise ValueError(f"observer null must be one of {NULLS}, got {self.null!r}")


class Statistics(NamedTuple):
    """What one observation leaves behind: small plain tensors, in units of their own.

    Attributes:
        moments: ZᵀZ, summed over rows, of both sketched sides side by side, Z = [X, Δ] centred;
            (n + m, n + m). Either side may carry any positive factor.
        offset: What centring subtracted, (n + m,).
        rows: The number of finite rows, 0-d.
        width: n, the columns of X.
        shuffled: With `null="shuffle"`, XᵀΔ of re-paired rows, (draws, n, m).
    """

    moments: Tensor
    offset: Tensor
    rows: Tensor
    width: int
    shuffled: Tensor | None = None


@lru_cache(maxsize=256)
def _sketch_basis(width: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Fixed matrix (columns, dim) that makes `_fold`, then it, a map with orthonormal columns.

    Folding adds features up, which would favour what all of them share over every other direction.
    So one column alone sees that, with the share dim/width that any direction has on average; the
    others are drawn orthogonal to it. The same for every process and every run.
    """
    columns = min(width, 2 * dim)
    members = torch.full((columns,), float(width // columns), dtype=torch.float64)
    members[: width % columns] += 1
    generator = torch.Generator().manual_seed(_SKETCH_SEED + width)
    gaussian = torch.randn(columns, dim, generator=generator, dtype=torch.float64)
    common = (members / width).sqrt()
    drawn = torch.linalg.qr(gaussian - torch.outer(common, common @ gaussian)).Q
    share = dim / width
    drawn[:, 0] = share**0.5 * common + (1 - share) ** 0.5 * drawn[:, 0]
    return (drawn / members.sqrt()[:, None]).to(device=device, dtype=dtype).contiguous()


def _fold(flat: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Add up every 2·dim-th feature, (rows, width) → (rows, min(width, 2·dim)).

    One pass over the data; a dense product of full width costs several times that.
    """
    width = flat.shape[1]
    columns = min(width, 2 * dim)
    if width == columns:
        return flat.to(dtype)
    whole = width - width % columns
    blocks = flat[:, :whole].unflatten(1, (-1, columns))
    folded = blocks.sum(1, dtype=dtype)
    if whole < width:
        folded[:, : width - whole] += flat[:, whole:]
    return folded


@lru_cache(maxsize=64)
def _shuffles(rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SKETCH_SEED)
    order = [torch.randperm(rows, generator=generator) for _ in range(NULL_DRAWS)]
    return torch.stack(order).to(device)


@torch.no_grad()
def sketch(values: Tensor, dim: int) -> Tensor:
    """Flatten leading dimensions and project the last one onto at most `dim` fixed directions.

    Args:
        values: (…, width), any floating dtype.
        dim: Most columns to keep.

    Returns:
        (rows, min(width, dim)) in float32, or float64 for float64 values; never an alias of
        `values`, so that a later in-place change of them does not reach the observation. A row with
        a non-finite entry stays non-finite in every column.
    """
    width = values.shape[-1]
    flat = values.detach().reshape(-1, width)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    if width <= dim:
        return flat.to(dtype, copy=True)
    with torch.autocast(values.device.type, enabled=False):
        return _fold(flat, dim, dtype) @ _sketch_basis(width, dim, values.device, dtype)


@torch.no_grad()
def sketched_statistics(x: Tensor, delta: Tensor, settings: ObserverSettings) -> Statistics:
    """`statistics` of two sides that went through `sketch`: (rows, n) and (rows, m).

    Runs in every observed backward of every layer, where the count of operations is what costs:
    everything that can wait until `ranks`, for all layers in one batch, waits.
    """
    dtype = torch.promote_types(x.dtype, delta.dtype)
    if len(x) < _DOUBLE_ROWS * settings.dim and x.device.type != "mps":
        dtype = torch.float64
    width = x.shape[1]
    with torch.autocast(x.device.type, enabled=False):
        both = torch.cat([x.to(dtype), delta.to(dtype)], dim=1)
        keep = None
        if _ordinary(both, width):
            rows = torch.tensor(len(both))
        else:
            # Sums carry every NaN and infinity of their row.
            keep = torch.isfinite(both.sum(1, keepdim=True))
            rows = keep.sum()
            both = both.nan_to_num_(0.0, 0.0, 0.0).mul_(keep)
            _to_unit_range(both[:, :width])
            _to_unit_range(both[:, width:])
        offset = both.new_zeros(both.shape[1])
        if settings.center:
            offset = both.sum(0) / rows.clamp_min(1)
            both = both.sub_(offset)
            both = both if keep is None else both.mul_(keep)
        shuffled = None
        if settings.null == "shuffle":
            permuted = both[:, width:][_shuffles(len(both), both.device)]
            shuffled = both[:, :width].mT @ permuted
        return Statistics(both.mT @ both, offset, rows, width, shuffled)


def _ordinary(both: Tensor, width: int) -> bool:
    """Whether no row needs to be dropped and no side rescaled: free to know on a CPU, else False."""
    if both.device.type != "cpu" or not both.numel():
        return False
    for side in (both[:, :width], both[:, width:]):
        low, high = torch.aminmax(side)
        if not 1e-15 < max(-float(low), float(high)) < 1e15:  # NaN is not, either.
            return False
    return True


def _to_unit_range(values: Tensor) -> None:
    """Scale in place by a power of two, which rounds nothing, so that squares stay in range."""
    if not values.numel():
        return
    largest = values.abs().amax()
    tiny = torch.finfo(values.dtype).tiny
    exponent = torch.frexp(torch.where(largest > tiny, largest, 1.0)).exponent
    values.mul_(torch.ldexp(torch.ones_like(largest), -exponent))


def statistics(activations: Tensor, cotangents: Tensor, settings: ObserverSettings) -> Statistics:
    """Reduce one observation of a linear map to its sketched sufficient statistics.

    Args:
        activations: What the map read, (…, n).
        cotangents: The loss's gradient with respect to what it wrote, (…, m), same leading shape.
        settings: Sketch width, centring and null.

    Raises:
        ValueError: Where the two do not have the same number of rows, or have no columns.
    """
    if activations.ndim == 0 or cotangents.ndim == 0:
        raise ValueError("an observation needs activations (…, n) and cotangents (…, m), got 0-d")
    if activations.shape[-1] == 0 or cotangents.shape[-1] == 0:
        raise ValueError("an observation needs at least one column on either side")
    x, delta = sketch(activations, settings.dim), sketch(cotangents, settings.dim)
    if len(x) != len(delta):
        raise ValueError(
            f"activations {tuple(activations.shape)} and cotangents {tuple(cotangents.shape)} "
            f"must have the same leading dimensions, but have {len(x)} and {len(delta)} rows"
        )
    return sketched_statistics(x, delta, settings)


@torch.no_grad()
def ranks(
    observations: Sequence[Statistics], settings: ObserverSettings | None = None
) -> list[Tensor]:
    """The normalised entropy rank of each observation, equal sizes in one batched call.

    Without a null this is the RPT guide's ρ: the shape of O = (C + λ)⁻¹K. It leans on the weakest
    directions of either side, related or not. With a null the relation is taken in the coordinates
    in which unrelated data is isotropic, C^−½ K D^−½ (D the cotangents' covariance), and its rank
    divided by the one that the same marginals give with no relation, clipped to 1: mean over 8
    fixed re-pairings of the rows ("shuffle"), or 8 fixed Gaussian draws, which is what independence
    makes of it ("analytic"). Unrelated data reads 1; a relation of k directions about k/min(n, m)
    once rows ≫ n·m.

    Returns:
        0-d tensors in [0, 1], in the order given, float64 where the device has it (the regression's
        condition reaches 1/ridge, beyond what float32 resolves).
    """
    settings = settings or ObserverSettings()
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, item in enumerate(observations):
        key = (item.moments.shape, item.width, item.moments.dtype, item.moments.device)
        groups.setdefault((*key, item.shuffled is None), []).append(index)
    result: list[Tensor] = [torch.empty(())] * len(observations)
    for members in groups.values():
        batch = [observations[index] for index in members]
        device = batch[0].moments.device
        where = torch.device("cpu") if device.type == "mps" else device
        value = _batch_ranks([_moved(item, where) for item in batch], settings)
        if where != device:
            value = value.float().to(device)
        for position, index in enumerate(members):
            result[index] = value[position]
    return result


def _moved(item: Statistics, where: torch.device) -> Statistics:
    if item.moments.device == where == item.rows.device:
        return item
    shuffled = None if item.shuffled is None else item.shuffled.to(where)
    return Statistics(
        item.moments.to(where), item.offset.to(where), item.rows.to(where), item.width, shuffled
    )


def _batch_ranks(batch: list[Statistics], settings: ObserverSettings) -> Tensor:
    """`ranks` of statistics of one size on one device; (batch,), float64."""
    n = batch[0].width
    rounding = _CONSTANT_TOLERANCE * torch.finfo(batch[0].moments.dtype).eps
    rows = torch.stack([item.rows for item in batch])
    count = rows.clamp_min(1)[:, None, None]
    moments = torch.stack([item.moments for item in batch]).double() / count
    offset = torch.stack([item.offset for item in batch]).double()
    energy = moments.diagonal(dim1=-2, dim2=-1)
    related = rows >= 2
    scales = []
    for side in (slice(0, n), slice(n, None)):
        mean_energy = energy[:, side].mean(1)
        # Beside a constant, what centring leaves is rounding noise and carries no relation.
        varies = mean_energy > rounding**2 * offset[:, side].square().mean(1)
        related &= varies
        scales.append(torch.where(varies, mean_energy, 1.0).rsqrt()[:, None, None])
    gate = related[:, None, None]
    covariance = torch.where(gate, moments[:, :n, :n] * scales[0].square(), 0.0)
    cross = torch.where(gate, moments[:, :n, n:] * (scales[0] * scales[1]), 0.0)
    if settings.null == "none":
        return _operator_rank(_regress(covariance, cross, settings.ridge))
    output_covariance = torch.where(gate, moments[:, n:, n:] * scales[1].square(), 0.0)
    shuffled = None
    if batch[0].shuffled is not None:
        stacked = torch.stack([item.shuffled for item in batch if item.shuffled is not None])
        scale = (gate * scales[0] * scales[1] / count)[:, None]
        shuffled = stacked.double() * scale
    return _calibrated(covariance, cross, output_covariance, shuffled, settings.ridge)


def _regress(covariance: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """(C + ridge·s·I)⁻¹K for batches C (…, n, n) and K (…, n, m); non-finite results become 0."""
    size = covariance.shape[-1]
    mean_energy = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-20) / size
    identity = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    damped = covariance + (ridge * mean_energy)[..., None, None] * identity
    operator = torch.linalg.solve_ex(damped, cross).result
    finite = torch.isfinite(operator).all(-1).all(-1)[..., None, None]
    return torch.where(finite, operator, 0.0)


def _operator_rank(operator: Tensor) -> Tensor:
    """exp(−Σ p ln p)/min(n, m) with p the singular energies of (…, n, m); 1 for a zero operator."""
    rows, columns = operator.shape[-2:]
    largest = operator.abs().amax((-2, -1), keepdim=True)
    unit = operator / torch.where(largest > 0, largest, 1.0)
    gram = unit @ unit.mT if rows <= columns else unit.mT @ unit
    energies = _eigenvalues(gram).clamp_min(0.0)
    total = energies.sum(-1, keepdim=True)
    p = energies / torch.where(total > 0, total, 1.0)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    rank = (entropy.exp() / min(rows, columns)).clamp(0.0, 1.0)
    return torch.where(torch.isfinite(rank) & (total.squeeze(-1) > 0), rank, 1.0)


def _eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues of a batch; all zero for a matrix whose decomposition fails."""
    try:
        return torch.linalg.eigvalsh(gram)
    except torch.linalg.LinAlgError:
        if gram.ndim == 2:
            return torch.zeros_like(gram[0])  # Reads as rank 1: nothing measured.
        return torch.stack([_eigenvalues(matrix) for matrix in gram])


def _calibrated(
    covariance: Tensor,
    cross: Tensor,
    output_covariance: Tensor,
    shuffled: Tensor | None,
    ridge: float,
) -> Tensor:
    """Rank of the whitened relation over its mean rank without one; (batch,), at most 1."""
    whiten_left, span_left = _whitening(covariance, ridge)
    whiten_right, span_right = _whitening(output_covariance, ridge)
    related = whiten_left @ cross @ whiten_right
    if shuffled is None:
        generator = torch.Generator().manual_seed(_SKETCH_SEED)
        shape = (NULL_DRAWS, *cross.shape[-2:])
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(cross.device)
        unrelated = span_left[:, None] @ noise @ span_right[:, None]
    else:
        unrelated = whiten_left[:, None] @ shuffled @ whiten_right[:, None]
    return (_operator_rank(related) / _operator_rank(unrelated).mean(1)).clamp(max=1.0)


def _whitening(matrix: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """(A + λI)^−½ and (A + λI)^−½ A^½ for a semidefinite batch; identities where it fails."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        return identity.expand_as(matrix), identity.expand_as(matrix)
    values = values.clamp_min(0.0)
    floor = (ridge * values.mean(-1, keepdim=True)).clamp_min(1e-20)
    scale = (values + floor).rsqrt().unsqueeze(-2)
    root = values.sqrt().unsqueeze(-2)
    return vectors * scale @ vectors.mT, vectors * (scale * root) @ vectors.mT


def entropy_rank(
    activations: Tensor,
    cotangents: Tensor,
    *,
    settings: ObserverSettings | None = None,
    **overrides: Any,
) -> Tensor:
    """Normalised entropy rank of the local operator from activations to output cotangents.

    Args:
        activations: (…, n), any floating dtype.
        cotangents: (…, m), same leading shape; any common scale, also a loss scaler's.
        settings: Defaults to `ObserverSettings()`.
        **overrides: Fields of `ObserverSettings` to change, `dim=64` or `observer_dim=64` alike.

    Returns:
        A 0-d tensor in [0, 1]: near 1 for a broad relation, near 0 for a narrow one, 1 where
        there is nothing to measure. float32, or float64 for float64 input.

    Raises:
        ValueError: For mismatched shapes or a setting out of range.
        TypeError: For an unknown setting.

    Example:
        >>> import torch
        >>> from rpt.observers import entropy_rank
        >>> x = torch.randn(512, 6, dtype=torch.float64)
        >>> round(float(entropy_rank(x, x)), 3)  # every direction alike
        1.0
        >>> round(float(entropy_rank(x, x @ torch.ones(6, 6).double())), 3)  # one of six
        0.167
    """
    fields = {key.removeprefix("observer_"): value for key, value in overrides.items()}
    settings = replace(settings or ObserverSettings(), **fields)
    value = ranks([statistics(activations, cotangents, settings)], settings)[0]
    wide = torch.float64 in (activations.dtype, cotangents.dtype)
    return value.to(torch.float64 if wide else torch.float32)

"""The RT-Filter as a plain function, and the isotropic filter it is compared with.

Both estimate, at every time t_i, the latent state from all (or all earlier) observations,
transported to t_i, by iteratively reweighted least squares: weights from residuals at the current
estimate, a weighted mean, an update, and again.

Source: RT-Filter paper, section 3.4, appendix A.3, C.2, G.1 and G.3.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..checks import check_choice, check_count, check_number
from .logits import PolarSettings
from .model import inner_product, multiply_by_i, unit_direction
from .parameters import FilterScalars
from .paths.dense import PolarEstimate, PolarInputs, polar_estimate
from .robust import robust_filter_estimate
from .sphere import across, sphere_exp, sphere_log
from .transport import apply_rotation, check_times, relative_times, rotation, rotation_angles
from .visibility import Visibility

__all__ = ["RTFilterResult", "isotropic_filter", "rt_filter"]


class RTFilterResult(NamedTuple):
    """Estimates at each observation's time.

    state: (…, tokens, 2d) lifted; direction: unit, likewise; magnitude: (…, tokens).
    directional_weights, radial_weights: (…, tokens, tokens) of the last iteration; radial may be
        None.
    log_precision: log λ_ū of the directional evidence, (…, tokens).

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import rt_filter
        >>> rt_filter(torch.randn(5, 4), torch.arange(5)).directional_weights.shape
        torch.Size([5, 5])
    """

    state: Tensor
    direction: Tensor
    magnitude: Tensor
    directional_weights: Tensor
    radial_weights: Tensor | None
    log_precision: Tensor


class _Problem(NamedTuple):
    turn: tuple[Tensor, Tensor]
    rotated: Tensor
    view: Visibility
    shape: torch.Size


def _prepare(
    observations: Tensor,
    times: Tensor,
    frequencies: Tensor | None,
    valid: Tensor | None,
    causal: bool,
) -> _Problem:
    if observations.dim() < 2 or observations.shape[-1] % 2:
        raise ValueError(
            "observations must be lifted complex vectors (…, tokens, 2d), got"
            f" {tuple(observations.shape)}"
        )
    if observations.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"observations must be float32 or float64, got {observations.dtype}")
    shape = observations.shape
    batch, tokens, dimension = math.prod(shape[:-2]), shape[-2], shape[-1] // 2
    flat = observations.reshape(batch, tokens, 2 * dimension)
    if times.dim() > 1:
        times = times.expand(*shape[:-1]).reshape(batch, tokens)
    relative = relative_times(check_times(times, batch, tokens))
    if frequencies is None:
        frequencies = torch.zeros(dimension, dtype=flat.dtype, device=flat.device)
    if frequencies.shape != (dimension,):
        raise ValueError(
            f"frequencies must have shape ({dimension},), got {tuple(frequencies.shape)}"
        )
    padding = None
    if valid is not None:
        if valid.dtype != torch.bool:
            raise TypeError(f"valid must be boolean, False where missing, got {valid.dtype}")
        padding = ~valid.expand(shape[:-1]).reshape(batch, tokens)
        flat = flat.masked_fill(padding.unsqueeze(-1), 0.0)
    turn = rotation(rotation_angles(relative, frequencies), flat.dtype)
    rotated = apply_rotation(flat, *turn, inverse=True)
    return _Problem(turn, rotated, Visibility(relative, relative, causal, padding), shape)


def _check_numbers(positive: dict[str, float], rest: dict[str, float]) -> None:
    for name, value in positive.items():
        check_number(name, value, above=0.0)
    for name, value in rest.items():
        check_number(name, value, 0.0)


def _scalars(like: Tensor, **values: float) -> FilterScalars:
    """The numbers of Algorithm 1 for one head, 1 where none is given."""
    named = dict.fromkeys(FilterScalars._fields, 1.0) | values
    return FilterScalars(**{name: like.new_tensor([value]) for name, value in named.items()})


def rt_filter(
    observations: Tensor,
    times: Tensor,
    frequencies: Tensor | None = None,
    *,
    decay: float = 0.0,
    tangential_variance: float = 1.0,
    radial_variance: float = 1.0,
    query_tangential_variance: float | None = None,
    query_radial_variance: float | None = None,
    inflation: float = 0.0,
    magnitude_floor: float = 0.0,
    process_noise: float = 0.0,
    weights: Literal["student_t", "exponential", "none"] = "student_t",
    nu_tangential: float = 4.0,
    nu_radial: float = 4.0,
    directional: Literal["chordal", "exact"] = "chordal",
    radial: Literal["own", "joint", "shared", "off"] = "own",
    update: Literal["geodesic", "ambient"] = "geodesic",
    directional_step: float = 1.0,
    radial_step: float = 1.0,
    resultant_scaling: bool = True,
    gain: Literal["fixed", "bayes"] = "fixed",
    prior_precision: float = 1.0,
    start: Literal["observation", "consensus"] = "observation",
    iterations: int = 1,
    causal: bool = True,
    valid: Tensor | None = None,
) -> RTFilterResult:
    """Filter noisy observations of dx/dt = (−μ + iω) x; with causal=False, smooth them.

    Magnitudes decay with |t_i − t_j| (Algorithm 1), so smoothing is meant for μ = 0: a later
    observation would have to grow on its way back.

    Source: RT-Filter paper, section 3.4, appendix C.2, G.1 and G.3.

    Args:
        observations: lifted complex vectors (…, tokens, 2d), float32 or float64.
        times: (tokens,) or broadcastable to (…, tokens); any origin, order and spacing.
        frequencies: ω, (d,), radians per unit of time; None: no rotation.
        decay: μ ≥ 0, per unit of time.
        tangential_variance, radial_variance: η_t², η_r² per real coordinate, of each observation.
        query_tangential_variance, query_radial_variance: variances of the current estimate in the
            residuals; default: those of an observation.
        inflation: ι_t² = ι_r², added to every variance.
        magnitude_floor: m_∞² in squared units of the observations.
        process_noise: σ², variance per unit of time of isotropic process noise.
        weights: influence weights, "none" for the Gaussian likelihood. Squared distances enter as
            d²/(ν d), the directional one in raw magnitudes (appendix C.2.1).
        directional: "chordal" (Corollary 5), or "exact": complex correlations (G.1).
        radial: "own" weights from radial residuals (the paper's), "shared" with the directional
            estimate (the paper's cheaper variant), "off", or "joint": own weights times the
            directional influence weights, so that an observation in the wrong direction loses its
            say on the magnitude, too (our addition; best where outliers occur).
        update: "geodesic": u⁺ = Exp_u(α‖ū‖ Log_u(ū/‖ū‖)), m⁺ = m + β(m̄ − m); "ambient": the
            first-order x⁺ = x + α m P_T(u)ū + β(m̄ − m)u.
        resultant_scaling: keep the factor ‖ū‖ of the geodesic step (C.2); False: SLERP (C.2.2).
        gain: "bayes" replaces α by K = λ_ū/(λ⁻ + λ_ū), λ⁻ = prior_precision (G.3).
        start: first estimate: each token's own observation, or the Gaussian consensus, which an
            observation that is itself an outlier cannot capture.
        iterations: IRLS iterations.
        valid: boolean, broadcastable to (…, tokens); False where an observation is missing.
            Estimates are made at those times, too (from zero, so with start="consensus").

    Raises:
        ValueError, TypeError: on shapes, dtypes, or options that do not fit.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import rt_filter, simulate_trajectories
        >>> omega = torch.tensor([0.4, -1.3])
        >>> tracks = simulate_trajectories(8, torch.arange(20.0).double(), omega, radial_std=0.3)
        >>> rt_filter(tracks.observations, tracks.times, omega, radial_variance=0.09).state.shape
        torch.Size([8, 20, 4])
    """
    if query_tangential_variance is None:
        query_tangential_variance = tangential_variance
    if query_radial_variance is None:
        query_radial_variance = radial_variance
    _check_numbers(
        {
            "tangential_variance": tangential_variance,
            "radial_variance": radial_variance,
            "nu_tangential": nu_tangential,
            "nu_radial": nu_radial,
            "prior_precision": prior_precision,
        },
        {
            "decay": decay,
            "query_tangential_variance": query_tangential_variance,
            "query_radial_variance": query_radial_variance,
            "inflation": inflation,
            "magnitude_floor": magnitude_floor,
            "process_noise": process_noise,
        },
    )
    check_number("directional_step", directional_step)
    check_number("radial_step", radial_step)
    for name, choice, choices in (
        ("weights", weights, ("student_t", "exponential", "none")),
        ("directional", directional, ("chordal", "exact")),
        ("radial", radial, ("own", "joint", "shared", "off")),
        ("update", update, ("geodesic", "ambient")),
        ("gain", gain, ("fixed", "bayes")),
        ("start", start, ("observation", "consensus")),
    ):
        check_choice(name, choice, choices)
    check_count("iterations", iterations)
    if valid is not None and start == "observation" and not bool(valid.all()):
        raise ValueError('missing observations need start="consensus"')
    problem = _prepare(observations, times, frequencies, valid, causal)
    observed_magnitude, observed = unit_direction(problem.rotated)
    scalars = _scalars(
        observed,
        decay=decay,
        key_tangential=tangential_variance,
        query_tangential=query_tangential_variance,
        inflation_tangential=inflation,
        key_radial=radial_variance,
        query_radial=query_radial_variance,
        inflation_radial=inflation,
        magnitude_floor=magnitude_floor,
        process_noise=process_noise,
        nu_tangential=nu_tangential,
        nu_radial=nu_radial,
        sphere_scale=2.0 / observations.shape[-1],
    )
    settings = PolarSettings(
        weights=weights, radial=radial, exact=directional == "exact", process=process_noise > 0
    )

    def estimate(u: Tensor, m: Tensor, chosen: PolarSettings) -> PolarEstimate:
        inputs = PolarInputs(
            u.unsqueeze(1),
            observed.unsqueeze(1),
            observed.unsqueeze(1),
            m.unsqueeze(1),
            observed_magnitude.unsqueeze(1),
        )
        return polar_estimate(inputs, problem.view, scalars, chosen, precision=True, weights=True)

    direction, magnitude = observed, observed_magnitude
    if start == "consensus":
        # The chordal consensus does not depend on the estimate it starts from.
        plain = settings._replace(weights="none", exact=False)
        first = estimate(direction, magnitude, plain)
        direction = unit_direction(first.direction.squeeze(1))[1]
        if radial != "off":
            magnitude = estimate(direction, magnitude, plain).magnitude.squeeze(1)
    for _ in range(iterations):
        found = estimate(direction, magnitude, settings)
        assert found.log_precision is not None
        log_precision = found.log_precision.squeeze(1)
        step: Tensor | float = directional_step
        if gain == "bayes":
            step = torch.sigmoid(log_precision - math.log(prior_precision)).unsqueeze(-1)
        mean = found.direction.squeeze(1)
        correction = radial_step * (found.magnitude.squeeze(1) - magnitude)
        if update == "geodesic":
            length, target = unit_direction(mean)
            if settings.exact:
                target = _nearest_phase(direction, target)
            scale = length.unsqueeze(-1) if resultant_scaling else (length > 0).unsqueeze(-1)
            direction = sphere_exp(direction, step * scale * sphere_log(direction, target))
            state = (magnitude + correction).unsqueeze(-1) * direction
        else:
            move = step * magnitude.unsqueeze(-1) * across(direction, mean, exact=settings.exact)
            state = (magnitude + correction).unsqueeze(-1) * direction + move
            direction = unit_direction(state)[1]
        magnitude = magnitude + correction
    assert found.directional_weights is not None
    pairs = (*problem.shape[:-1], problem.shape[-2])
    return RTFilterResult(
        apply_rotation(state, *problem.turn).reshape(problem.shape),
        apply_rotation(direction, *problem.turn).reshape(problem.shape),
        magnitude.reshape(problem.shape[:-1]),
        found.directional_weights.reshape(pairs),
        None if found.radial_weights is None else found.radial_weights.reshape(pairs),
        log_precision.reshape(problem.shape[:-1]),
    )


def _nearest_phase(base: Tensor, point: Tensor) -> Tensor:
    """Turn `point` by the phase that makes base†point real and positive: 1 − |u†v|² ignores it."""
    real, imaginary = inner_product(base, point)
    size, phase = unit_direction(torch.stack((real, imaginary), -1))
    turned = phase[..., :1] * point - phase[..., 1:] * multiply_by_i(point)
    return torch.where(size.unsqueeze(-1) > 0, turned, point)


def isotropic_filter(
    observations: Tensor,
    times: Tensor,
    frequencies: Tensor | None = None,
    *,
    decay: float = 0.0,
    variance: float = 1.0,
    query_variance: float | None = None,
    inflation: float = 0.0,
    process_noise: float = 0.0,
    weights: Literal["student_t", "exponential"] = "student_t",
    nu: float = 4.0,
    start: Literal["observation", "consensus"] = "observation",
    iterations: int = 1,
    causal: bool = True,
) -> Tensor:
    """Robust Filter Attention's estimator (appendix A.3, A.4) as a plain function.

    Arguments as in `rt_filter`, with one variance η² per real coordinate; the estimate is the
    query of the next iteration. Returns states (…, tokens, 2d).

    Raises:
        ValueError, TypeError: on shapes, dtypes, or options that do not fit.

    Example:
        >>> import torch
        >>> from rpt.geometry.rt_filter import isotropic_filter
        >>> isotropic_filter(torch.randn(5, 4), torch.arange(5), torch.tensor([0.4, -1.3])).shape
        torch.Size([5, 4])
    """
    query_variance = variance if query_variance is None else query_variance
    rest = {"decay": decay, "query_variance": query_variance, "inflation": inflation}
    _check_numbers({"variance": variance, "nu": nu}, {**rest, "process_noise": process_noise})
    check_choice("weights", weights, ("student_t", "exponential"))
    check_choice("start", start, ("observation", "consensus"))
    check_count("iterations", iterations)
    problem = _prepare(observations, times, frequencies, None, causal)
    keys = problem.rotated.unsqueeze(1)

    scalars = _scalars(
        keys,
        decay=decay,
        key_tangential=variance,
        query_tangential=query_variance,
        inflation_tangential=inflation,
        process_noise=process_noise,
        nu_tangential=nu,
    )
    state = keys
    if start == "consensus":
        # Exponential weights of infinite ν: precisions alone.
        plain = scalars._replace(nu_tangential=keys.new_tensor([math.inf]))
        state, _ = robust_filter_estimate(keys, keys, keys, problem.view, plain, student_t=False)
    for _ in range(iterations):
        state, _ = robust_filter_estimate(
            state, keys, keys, problem.view, scalars, student_t=weights == "student_t"
        )
    return apply_rotation(state.squeeze(1), *problem.turn).reshape(problem.shape)

"""The plain filter: updates, weights, extensions, and that it tracks better than its rivals."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from rpt.geometry.rt_filter import (
    complex_to_real,
    geodesic_angle,
    isotropic_filter,
    real_to_complex,
    rt_filter,
    simulate_trajectories,
    unit_direction,
)

OMEGA = torch.tensor([0.4, -1.3, 0.11, 2.2], dtype=torch.float64)


def tracks(count=32, tokens=48, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    times = torch.arange(tokens, dtype=torch.float64)
    return simulate_trajectories(count, times, OMEGA, generator=generator, **options)


def angle_error(states, estimate, warm_up=12):
    truth, found = unit_direction(states)[1], unit_direction(estimate)[1]
    return float(geodesic_angle(truth, found)[:, warm_up:].mean())


def magnitude_error(states, magnitude, warm_up=12):
    truth = unit_direction(states)[0]
    return float(((magnitude - truth).abs() / truth)[:, warm_up:].mean())


def test_simulated_observations_follow_equation_5():
    data = tracks(400, 20, radial_std=0.05, tangential_std=0.02, decay=0.05)
    m, u = unit_direction(data.states)
    residual = data.observations - data.states
    along = (residual * u).sum(-1)
    across = residual - along.unsqueeze(-1) * u
    assert float(along.std()) == pytest.approx(0.05, rel=0.03)
    assert float(across.pow(2).sum(-1).mean()) == pytest.approx(7 * 0.02**2, rel=0.03)
    rate = (m[:, 1:] / m[:, :-1]).log()
    torch.testing.assert_close(rate, torch.full_like(rate, -0.05))


def test_without_noise_the_state_is_recovered_exactly():
    data = tracks(radial_std=0.0, tangential_std=0.0, decay=0.03)
    for update in ("geodesic", "ambient"):
        for directional in ("chordal", "exact"):
            found = rt_filter(
                data.observations,
                data.times,
                OMEGA,
                decay=0.03,
                update=update,
                directional=directional,
                iterations=2,
            )
            torch.testing.assert_close(found.state, data.states, rtol=0, atol=1e-12)


def test_one_gaussian_step_against_a_loop_in_complex_arithmetic():
    data = tracks(1, 6, radial_std=0.2, tangential_std=0.3)
    mu, eta_t, eta_r, iota, floor, alpha, beta = 0.1, 0.3, 0.2, 0.05, 0.02, 0.7, 0.4
    found = rt_filter(
        data.observations,
        data.times,
        OMEGA,
        decay=mu,
        tangential_variance=eta_t,
        radial_variance=eta_r,
        inflation=iota,
        magnitude_floor=floor,
        weights="none",
        update="ambient",
        directional_step=alpha,
        radial_step=beta,
    )
    z = real_to_complex(data.observations)[0]
    for i in range(6):
        m_i = torch.linalg.vector_norm(z[i])
        u_i = z[i] / m_i
        kappas, rhos, directions, seen = [], [], [], []
        for j in range(i + 1):
            lag = i - j
            moved = z[j] * torch.exp(1j * OMEGA * lag)
            factor = math.exp(-mu * lag)
            m_hat = factor * torch.linalg.vector_norm(z[j])
            u_hat = moved / torch.linalg.vector_norm(moved)
            kappas.append((m_hat**2 + floor) / (eta_t * factor**2 + iota))
            rhos.append(1 / (eta_r * factor**2 + iota))
            directions.append(u_hat)
            seen.append((u_i.conj() @ u_hat).real * m_hat)
        kappa, rho = torch.stack(kappas), torch.tensor(rhos, dtype=torch.float64)
        mean = sum(k / kappa.sum() * u for k, u in zip(kappa, directions, strict=True))
        m_bar = sum(r / rho.sum() * s for r, s in zip(rho, seen, strict=True))
        tangent = mean - u_i * (u_i.conj() @ mean).real
        state = z[i] + alpha * m_i * tangent + beta * (m_bar - m_i) * u_i
        torch.testing.assert_close(found.state[0, i], complex_to_real(state), rtol=0, atol=1e-12)


def test_ambient_update_is_the_first_order_form_of_the_geodesic_one():
    """Directions agree to second order in the tangential noise."""

    def gap(noise):
        data = tracks(8, 20, radial_std=0.0, tangential_std=noise)
        same = {"tangential_variance": 1.0, "directional_step": 0.6}
        first = rt_filter(data.observations, data.times, OMEGA, update="ambient", **same)
        exact = rt_filter(data.observations, data.times, OMEGA, update="geodesic", **same)
        return float((first.direction - exact.direction).abs().max())

    assert math.log2(gap(0.02) / gap(0.01)) == pytest.approx(3.0, abs=0.6)


def test_slerp_reaches_the_consensus_and_the_resultant_length_holds_back():
    data = tracks(tangential_std=0.3)
    options = {"weights": "none", "start": "observation"}
    full = rt_filter(data.observations, data.times, OMEGA, resultant_scaling=False, **options)
    held = rt_filter(data.observations, data.times, OMEGA, **options)
    own = unit_direction(data.observations)[1]
    moved_full, moved_held = (geodesic_angle(own, r.direction)[:, 10:] for r in (full, held))
    assert bool((moved_held < moved_full).all())


def test_exact_directional_estimate_ignores_phases():
    """1 − |u†û|² does not see a common phase per observation; the chordal form does."""
    data = tracks(16, 40, radial_std=0.05, tangential_std=0.05)
    phase = torch.polar(torch.ones(16, 40, 1).double(), 6.28 * torch.rand(16, 40, 1).double())
    turned = complex_to_real(real_to_complex(data.observations) * phase)
    found = rt_filter(
        turned, data.times, OMEGA, directional="exact", tangential_variance=0.0025, iterations=3
    )
    chordal = rt_filter(turned, data.times, OMEGA, tangential_variance=0.0025, iterations=3)
    truth = real_to_complex(unit_direction(data.states)[1])

    def overlap(result):
        return (real_to_complex(result.direction).conj() * truth).sum(-1).abs()[:, 20:].mean()

    observed = (real_to_complex(unit_direction(turned)[1]).conj() * truth).sum(-1).abs().mean()
    assert 1 - float(overlap(found)) < 0.25 * (1 - float(observed))
    assert float(overlap(chordal)) < float(overlap(found))


def test_bayesian_gain_grows_with_the_evidence_and_precision_adds_up():
    data = tracks(4, 30, tangential_std=0.1)
    found = rt_filter(
        data.observations, data.times, OMEGA, tangential_variance=0.01, weights="none",
        gain="bayes", prior_precision=100.0,
    )  # fmt: skip
    m = unit_direction(data.observations)[0]
    expected = (m**2 / 0.01).cumsum(-1).log()
    torch.testing.assert_close(found.log_precision, expected)
    one = rt_filter(
        data.observations, data.times, OMEGA, tangential_variance=0.01, weights="none",
        gain="bayes", prior_precision=1e12,
    )  # fmt: skip
    own = unit_direction(data.observations)[1]
    assert float((one.direction - own).abs().max()) < 1e-6


def test_outliers_lose_their_weight():
    data = tracks(32, 40, radial_std=0.1, tangential_std=0.1, outlier_rate=0.2)
    found = rt_filter(
        data.observations, data.times, OMEGA, tangential_variance=0.01, radial_variance=0.01,
        start="consensus", iterations=3,
    )  # fmt: skip
    weight = found.directional_weights[:, -1]
    outlier, inlier = weight[data.outliers].mean(), weight[~data.outliers].mean()
    assert float(outlier) < 0.02 * float(inlier)


@pytest.mark.parametrize(
    ("world", "radial_weights"),
    [
        ({"radial_std": 0.5, "tangential_std": 0.1}, "own"),
        ({"radial_std": 0.3, "tangential_std": 0.1, "outlier_rate": 0.3}, "joint"),
    ],
    ids=["radial noise", "outliers"],
)
def test_it_tracks_better_than_the_isotropic_filter_where_noise_is_not_isotropic(
    world, radial_weights
):
    data = tracks(128, 48, decay=0.01, seed=3, **world)
    radial, tangential = world["radial_std"] ** 2, world["tangential_std"] ** 2
    same = {"decay": 0.01, "start": "consensus", "iterations": 3}
    found = rt_filter(
        data.observations, data.times, OMEGA, tangential_variance=tangential,
        radial_variance=radial, resultant_scaling=False, radial=radial_weights, **same,
    )  # fmt: skip
    isotropic = isotropic_filter(
        data.observations, data.times, OMEGA, variance=(radial + 7 * tangential) / 8, **same
    )
    assert angle_error(data.states, found.state) < 0.95 * angle_error(data.states, isotropic)
    assert magnitude_error(data.states, found.magnitude) < magnitude_error(
        data.states, unit_direction(isotropic)[0]
    )


def test_the_tracking_example_compares_its_filters(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "examples"))
    example = importlib.import_module("rt_filter_tracking")
    generator, times = torch.Generator().manual_seed(0), torch.arange(30, dtype=torch.float64)
    data = simulate_trajectories(
        16, times, example.FREQUENCIES, radial_std=0.3, tangential_std=0.03, generator=generator
    )
    angles = {k: v[0] for k, v in example.compare(data, 0.0, 0.3, 0.03).items()}
    assert angles["RT-Filter"] < angles["isotropic filter"] < angles["observation"]


def test_missing_observations_and_smoothing():
    data = tracks(4, 20, radial_std=0.0, tangential_std=0.0)
    valid = torch.ones(20, dtype=torch.bool)
    valid[[0, 7, 8]] = False
    spoiled = data.observations.masked_fill(~valid[:, None], float("nan"))
    found = rt_filter(spoiled, data.times, OMEGA, valid=valid, start="consensus", causal=False)
    torch.testing.assert_close(found.state, data.states, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="consensus"):
        rt_filter(spoiled, data.times, OMEGA, valid=valid)


def test_only_time_differences_matter():
    data = tracks(3, 20, tangential_std=0.2)
    order = torch.randperm(20)
    plain = rt_filter(data.observations, data.times, OMEGA, decay=0.05)
    shifted = rt_filter(data.observations[:, order], data.times[order] + 1.7e9, OMEGA, decay=0.05)
    torch.testing.assert_close(shifted.state, plain.state[:, order], rtol=0, atol=1e-9)


def test_arguments_are_checked():
    x, t = torch.zeros(2, 5, 8), torch.arange(5)
    for broken in (
        lambda: rt_filter(x[..., :7], t),
        lambda: rt_filter(x, torch.arange(4)),
        lambda: rt_filter(x, t, torch.zeros(3)),
        lambda: rt_filter(x, t, iterations=0),
    ):
        with pytest.raises(ValueError):
            broken()
    with pytest.raises(TypeError):
        rt_filter(x.half(), t)

"""The entropy rank against the guide's formulas, golden values, and planted operators."""

from pathlib import Path

import entropy_rank_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rpt.observers import ObserverSettings, entropy_rank
from rpt.observers.rank import ranks, sketch, statistics

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "rpt_golden.npz")
CASES = [
    key.removesuffix("/rank")
    for key in GOLDEN.files
    if key.startswith("rank_") and key.endswith("/rank")
]


@pytest.mark.parametrize("case", CASES)
def test_golden_rank(case):
    x = torch.tensor(GOLDEN[f"{case}/X"], dtype=torch.float32)
    delta = torch.tensor(GOLDEN[f"{case}/Delta"], dtype=torch.float32)
    center = bool(GOLDEN[f"{case}/center"])
    rank = entropy_rank(x, delta, observer_dim=64, center=center)
    assert rank.shape == ()
    assert rank.dtype == torch.float32
    assert float(rank) == pytest.approx(float(GOLDEN[f"{case}/rank"]), abs=1e-5)
    if f"{case}/rank_f64" in GOLDEN.files:
        rank = entropy_rank(x.double(), delta.double(), dim=64, center=center)
        assert float(rank) == pytest.approx(float(GOLDEN[f"{case}/rank_f64"]), abs=1e-12)


@given(
    rows=st.integers(40, 90),
    n=st.integers(2, 12),
    m=st.integers(2, 12),
    seed=st.integers(0, 1000),
    decades=st.floats(0, 2),
)
def test_matches_the_formulas_in_float64(rows, n, m, seed, decades):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, n)) * np.logspace(0, -decades, n)
    delta = x @ rng.normal(size=(n, m)) + rng.normal(size=(rows, m)) + 3.0
    expected = oracle.entropy_rank(x, delta)
    got64 = float(entropy_rank(torch.tensor(x), torch.tensor(delta)))
    assert got64 == pytest.approx(expected, abs=1e-9)
    got32 = float(entropy_rank(torch.tensor(x).float(), torch.tensor(delta).float()))
    assert got32 == pytest.approx(expected, abs=2e-4)


def test_sketched_rank_is_the_rank_of_the_sketches():
    x, delta = torch.randn(500, 200), torch.randn(500, 70)
    thin = sketch(x, 32), sketch(delta, 32)
    assert thin[0].shape == thin[1].shape == (500, 32)
    expected = oracle.entropy_rank(thin[0].double().numpy(), thin[1].double().numpy())
    assert float(entropy_rank(x, delta)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("width", [33, 50, 64, 65, 100, 256, 300, 768])
def test_sketch_has_fixed_orthonormal_columns(width):
    basis = sketch(torch.eye(width, dtype=torch.float64), 32)
    identity = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(basis.T @ basis, identity, atol=1e-12, rtol=0)
    torch.manual_seed(123)
    assert torch.equal(basis, sketch(torch.eye(width, dtype=torch.float64), 32))
    # What all features share keeps the share of any other direction.
    ones = torch.full((1, width), width**-0.5, dtype=torch.float64)
    assert float((ones @ basis).square().sum()) == pytest.approx(32 / width, rel=1e-9)


def test_sketching_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    for null in ("none", "shuffle", "analytic"):
        entropy_rank(torch.ones(33, 77), torch.ones(33, 78), null=null)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("null", ["none", "shuffle", "analytic"])
@pytest.mark.parametrize("wide", [False, True])
def test_scale_leaves_the_rank_unchanged(null, wide):
    width = 50 if wide else 8
    x, delta = torch.randn(300, width), torch.randn(300, 9)
    delta = delta + x @ torch.randn(width, 1) @ torch.randn(1, 9)
    base = float(entropy_rank(x, delta, null=null))
    for a, b in [(1e-12, 1), (1, 1e-12), (1e-20, 1e18), (1e-12, 1e-30), (1e3, 1e3)]:
        # The scaling itself rounds the data.
        assert float(entropy_rank(a * x, b * delta, null=null)) == pytest.approx(base, abs=2e-5)
    for a, b in [(65536, 1), (1, 65536), (2.0**-60, 2.0**-60), (1, 2.0**60)]:
        assert float(entropy_rank(a * x, b * delta, null=null)) == pytest.approx(base, abs=1e-7)


def test_half_precision_with_loss_scaled_cotangents():
    x, delta = torch.randn(256, 40), torch.randn(256, 40)
    scaled = (delta * 15_000).half()
    assert scaled.isfinite().all()
    rank = entropy_rank((x * 20_000).clamp(-6e4, 6e4).half(), scaled)
    assert torch.isfinite(rank)
    half = entropy_rank(x.half(), (delta / 16).half())
    assert float(entropy_rank(x.half(), (delta * 4096).half())) == pytest.approx(
        float(half), abs=1e-3
    )
    bf16 = entropy_rank(x.bfloat16(), delta.bfloat16())
    assert float(bf16) == pytest.approx(float(entropy_rank(x, delta)), abs=0.02)


def test_fewer_rows_than_columns_is_not_rounding_noise():
    x, delta = torch.randn(10, 100), torch.randn(10, 100)
    exact = float(entropy_rank(x.double(), delta.double()))
    assert float(entropy_rank(x, delta)) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("width", [6, 1000])
def test_nothing_to_measure_reads_one(width):
    delta = torch.randn(700, 5)
    constant = torch.randn(width).expand(700, width)
    assert float(entropy_rank(constant, delta)) == 1.0
    assert float(entropy_rank(torch.zeros(700, width), delta)) == 1.0
    assert float(entropy_rank(torch.randn(700, width), torch.zeros(700, 5))) == 1.0
    assert float(entropy_rank(torch.randn(1, width), delta[:1])) == 1.0
    assert float(entropy_rank(torch.randn(0, width), delta[:0])) == 1.0
    assert float(entropy_rank(torch.randn(width), delta[0])) == 1.0
    assert float(entropy_rank(torch.full((700, width), torch.nan), delta)) == 1.0


@pytest.mark.parametrize("width", [6, 90])
def test_non_finite_rows_are_dropped(width):
    x, delta = torch.randn(200, width), torch.randn(200, 5)
    keep = torch.ones(200, dtype=torch.bool)
    dirty_x, dirty_delta = x.clone(), delta.clone()
    dirty_x[3, 1] = torch.nan
    dirty_x[50, 2] = torch.inf
    dirty_delta[60, 0] = -torch.inf
    keep[[3, 50, 60]] = False
    expected = float(entropy_rank(x[keep], delta[keep]))
    assert float(entropy_rank(dirty_x, dirty_delta)) == pytest.approx(expected, abs=2e-5)


def test_batched_ranks_equal_single_ones_and_keep_order():
    settings = ObserverSettings(dim=16)
    pairs = [(torch.randn(64, n), torch.randn(64, m)) for n, m in [(8, 4), (4, 4), (8, 4), (40, 9)]]
    together = ranks([statistics(x, d, settings) for x, d in pairs], settings)
    alone = [entropy_rank(x, d, settings=settings) for x, d in pairs]
    for a, b in zip(together, alone, strict=True):
        assert float(a) == pytest.approx(float(b), abs=1e-7)
    assert ranks([], settings) == []


def test_leading_dimensions_are_rows():
    x, delta = torch.randn(4, 16, 6), torch.randn(4, 16, 5)
    assert torch.equal(entropy_rank(x, delta), entropy_rank(x.flatten(0, 1), delta.flatten(0, 1)))


def test_failed_decomposition_counts_as_one(monkeypatch):
    def fail(matrix):
        raise torch.linalg.LinAlgError("no convergence")

    x, delta = torch.randn(64, 6), torch.randn(64, 5)
    monkeypatch.setattr(torch.linalg, "eigvalsh", fail)
    assert float(entropy_rank(x, delta)) == 1.0
    monkeypatch.setattr(torch.linalg, "eigh", fail)
    assert float(entropy_rank(x, delta, null="analytic")) == 1.0


@pytest.mark.parametrize("null", ["shuffle", "analytic"])
@pytest.mark.parametrize("decades", [0.0, 2.0])
@pytest.mark.parametrize("rows", [256, 2048])
def test_unrelated_data_reads_one_under_a_null(null, decades, rows):
    spectrum = torch.logspace(0, -decades, 32)
    for _ in range(3):
        x, delta = torch.randn(rows, 32) * spectrum, torch.randn(rows, 32) * spectrum
        assert float(entropy_rank(x, delta, null=null)) > 0.95
        assert float(entropy_rank(x, delta)) < 0.7  # The guide's statistic reads the marginals.


@given(
    directions=st.integers(1, 6),
    seed=st.integers(0, 100),
    null=st.sampled_from(["shuffle", "analytic"]),
)
def test_planted_operators_are_told_apart_by_their_rank(directions, seed, null):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    spectrum = torch.logspace(0, -1, 24)
    x = normal(4096, 24) * spectrum
    left = torch.linalg.qr(normal(24, directions)).Q
    right = torch.linalg.qr(normal(24, directions)).Q
    whitened = x / spectrum
    delta = 4.0 * whitened @ left @ right.T + 0.5 * normal(4096, 24)
    rank = float(entropy_rank(x, delta, null=null))
    # The k planted directions, and what is left of the noise in the other 24 − k.
    assert directions / 24 * 0.8 < rank < directions / 24 + 0.35
    shuffled = delta[torch.randperm(4096, generator=generator)]
    assert float(entropy_rank(x, shuffled, null=null)) > 0.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim"),
        ({"ridge": 0.0}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"null": "maybe"}, "null"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ObserverSettings(**arguments)
    with pytest.raises(ValueError, match=message):
        entropy_rank(torch.ones(3, 2), torch.ones(3, 2), **arguments)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match="leading dimensions"):
        entropy_rank(torch.ones(4, 3), torch.ones(5, 2))
    with pytest.raises(ValueError, match="column"):
        entropy_rank(torch.ones(4, 0), torch.ones(4, 2))
    with pytest.raises(ValueError, match="0-d"):
        entropy_rank(torch.ones(()), torch.ones(4, 2))
    with pytest.raises(TypeError):
        entropy_rank(torch.ones(4, 2), torch.ones(4, 2), nonsense=1)

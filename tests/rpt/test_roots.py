"""Root backends against fractional matrix powers in float64 and at sixty digits."""

import inverse_root_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rpt import ResidualPolarTransport
from rpt.roots import (
    AutoRoots,
    BlockedRoots,
    Damping,
    FullRoots,
    LowRankRoots,
    NoRoots,
    inverse_root,
    resolve_roots,
)

BETA2 = 0.9
RIDGE = 1e-4


def gradients(rows, cols, steps=4, seed=0, batch=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(steps, batch, rows, cols, generator=generator, dtype=torch.float64)
    return drawn.to(dtype)


def run(backend, grads, refreshes="all", ridge=RIDGE):
    _, batch, rows, cols = grads.shape
    state = backend.create(batch, rows, cols, dtype=grads.dtype, device=grads.device)
    result = None
    for t, g in enumerate(grads, 1):
        backend.accumulate(state, g, BETA2)
        if refreshes == "all" or t == len(grads):
            correction = g.new_full((batch,), 1 - BETA2**t)
            result = backend.refresh(
                state, (rows, cols), correction, Damping(ridge, g.new_zeros(batch))
            )
    return state, backend.apply(state, grads[-1]), result


def covariances(grads):
    return oracle.covariances(grads[:, 0].double().numpy(), BETA2)


def floored_root(matrix):
    return oracle.floored_root(matrix, ridge=RIDGE)


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 5), (6, 6), (4, 17)])
def test_full_roots_against_scipy(shape):
    grads = gradients(*shape)
    _, request, _ = run(FullRoots(), grads)
    left, right = covariances(grads)
    expected = floored_root(left) @ grads[-1, 0].numpy() @ floored_root(right)
    np.testing.assert_allclose(request[0], expected, rtol=1e-7, atol=1e-7)


def test_inverse_root_at_sixty_digits():
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
    values = torch.tensor([1e-3, 0.2, 1.0, 30.0, 500.0], dtype=torch.float64)
    matrix = (basis * values) @ basis.T
    matrix = 0.5 * (matrix + matrix.T)
    expected = torch.tensor(oracle.root_at_sixty_digits(matrix, -0.25))
    wide = inverse_root(matrix, ridge=0.0).root
    assert ((wide - expected).abs().max() / expected.abs().max()).item() < 1e-10
    narrow = inverse_root(matrix.float(), ridge=0.0).root
    assert ((narrow - expected).abs().max() / expected.abs().max()).item() < 1e-2


@given(st.integers(1, 8), st.sampled_from([-0.25, -0.5, -1.0]), st.floats(-15, 15))
def test_inverse_root_is_homogeneous_and_a_root(n, power, exponent):
    grads = gradients(n, n + 2, 1, seed=n)[0, 0]
    matrix = grads @ grads.T
    scale = 10.0**exponent
    root = inverse_root(matrix, power, ridge=1e-6).root
    scaled = inverse_root(scale * matrix, power, ridge=1e-6).root
    torch.testing.assert_close(scaled, scale**power * root, rtol=1e-8, atol=0)
    torch.testing.assert_close(root, root.mT)
    whole = torch.linalg.matrix_power(root, round(-1 / power)) @ matrix
    values = torch.linalg.eigvalsh(matrix)
    if values[0] > 1e-6 * values.mean():
        torch.testing.assert_close(whole, torch.eye(n, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_padding_hides_no_cluster_of_eigenvalues():
    # Two directions above a rest that is one value within float32's rounding of the largest.
    generator = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64)).Q
    values = torch.full((12,), 1e-5, dtype=torch.float64)
    values[:2] = torch.tensor([1.0, 0.5])
    matrix = ((basis * values) @ basis.T).float()
    padded = torch.zeros(1, 40, 40)
    padded[0, :12, :12] = matrix
    expected = (basis * values.pow(-0.25)) @ basis.T
    root = inverse_root(padded, ridge=1e-7, sizes=torch.tensor([12.0])).root[0, :12, :12]
    alone = inverse_root(matrix, ridge=1e-7).root
    for found in (root, alone):
        assert ((found - expected).norm() / expected.norm()).item() < 3e-4


def test_batches_of_inverse_roots_fail_alone():
    good, bad = torch.eye(3), torch.full((3, 3), torch.nan)
    result = inverse_root(torch.stack([4 * good, bad, 9 * good]), -0.5)
    assert result.failed.tolist() == [False, True, False]
    torch.testing.assert_close(result.root[0], good / 2)
    torch.testing.assert_close(result.root[2], good / 3)


@pytest.mark.parametrize("shape", [(4, 6), (7, 7), (3, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_with_every_eigenpair_equals_full(shape, dtype):
    grads = gradients(*shape, steps=6, dtype=dtype)
    _, expected, _ = run(FullRoots(), grads)
    _, actual, _ = run(LowRankRoots(rank=max(shape)), grads)
    assert ((actual - expected).norm() / expected.norm()).item() < 1e-4


def test_low_rank_finds_what_a_low_rank_gradient_has():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (40, 60))
    mixing = torch.randn(8, 1, 2, 2, generator=generator, dtype=torch.float64)
    grads = left @ mixing @ right.T
    _, expected, _ = run(FullRoots(), grads)
    _, actual, _ = run(LowRankRoots(rank=4), grads)
    assert ((actual - expected).norm() / expected.norm()).item() < 1e-3


def test_low_rank_state_grows_with_the_rank_only():
    small = LowRankRoots(8).state_bytes(4096, 4096)
    assert small < 6 * 4 * (4096 + 4096) * 8
    assert LowRankRoots(16).state_bytes(4096, 4096) < 2.1 * small


@pytest.mark.parametrize("shape", [(4, 6), (8, 8)])
def test_blocked_with_one_block_equals_full(shape):
    grads = gradients(*shape, dtype=torch.float32)
    _, expected, _ = run(FullRoots(), grads)
    _, actual, _ = run(BlockedRoots(block_size=8), grads)
    assert torch.equal(actual, expected)


def test_blocks_are_the_diagonal_blocks_of_the_factors():
    grads = gradients(5, 7)
    backend = BlockedRoots(block_size=3)
    _, request, _ = run(backend, grads)
    left, right = covariances(grads)

    def blocks(matrix, sizes):
        out, first = np.zeros_like(matrix), 0
        for size in sizes:
            part = slice(first, first + size)
            out[part, part] = floored_root(matrix[part, part])
            first += size
        assert first == len(matrix)
        return out

    # 5 rows in two blocks of at most 3, 7 in three: as equal as they can be, ragged at the edge.
    expected = blocks(left, (3, 2)) @ grads[-1, 0].numpy() @ blocks(right, (3, 3, 1))
    np.testing.assert_allclose(request[0], expected, rtol=1e-7, atol=1e-7)


def test_auto_is_full_when_small_blocked_above_and_diagonal_when_long():
    grads = gradients(6, 10)
    _, expected, _ = run(FullRoots(), grads)
    torch.testing.assert_close(run(AutoRoots(full_side=10), grads)[1], expected)
    _, expected, _ = run(BlockedRoots(block_size=4), grads)
    auto = AutoRoots(full_side=5, block_size=4)
    torch.testing.assert_close(run(auto, grads)[1], expected)
    state, request, _ = run(AutoRoots(full_side=6, long_side=9), grads)
    assert state["right_diagonal"].shape == (1, 10)
    left, right = covariances(grads)
    diagonal = np.diag(right)
    scale = np.maximum(diagonal, RIDGE * diagonal.mean()) ** -0.25
    expected = floored_root(left) @ grads[-1, 0].numpy() * scale
    np.testing.assert_allclose(request[0], expected, rtol=1e-7, atol=1e-7)


def test_no_roots_only_normalises_the_scale():
    grads = gradients(4, 6)
    _, request, _ = run(NoRoots(), grads)
    ratio = request / grads[-1]
    torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio))
    _, larger, _ = run(NoRoots(), 1000 * grads)
    torch.testing.assert_close(larger, request)


@pytest.mark.parametrize(
    "backend", [FullRoots(), BlockedRoots(3), LowRankRoots(8), AutoRoots(full_side=4, block_size=3)]
)
def test_drift_is_measured_against_the_last_refresh(backend):
    grads = gradients(5, 8)
    state, _, _ = run(backend, grads)
    correction = torch.full((1,), 1 - BETA2**4, dtype=torch.float64)
    assert backend.drift(state, (5, 8), correction).item() < 1e-6
    backend.accumulate(state, 3 * grads[0], BETA2)
    correction = torch.full((1,), 1 - BETA2**5, dtype=torch.float64)
    drift = backend.drift(state, (5, 8), correction).item()
    if isinstance(backend, FullRoots):
        old = covariances(grads)
        new = covariances(torch.cat([grads, 3 * grads[:1]]))
        change = [np.linalg.norm(n - o) / np.linalg.norm(o) for n, o in zip(new, old, strict=True)]
        assert drift == pytest.approx(max(change), rel=1e-9)
    assert drift > 0.1


@pytest.mark.parametrize(
    "text",
    ["full", "blocked", "low_rank", "auto", "none", "low_rank(rank=7)", "blocked(block_size=5)",
     "auto(full_side=3, block_size=2, long_side=9)", "full(drift_from='age')"],
)  # fmt: skip
def test_backends_as_text(text):
    backend = resolve_roots(text)
    again = resolve_roots(backend.describe())
    assert again == backend
    assert resolve_roots(backend) is backend


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("dense", ValueError, "choose one of full, blocked"),
        ("low_rank(rank)", ValueError, "takes the options rank"),
        ("low_rank(3)", ValueError, "takes the options rank"),
        ("low_rank(rank=0)", ValueError, "rank=0 must be a positive whole number"),
        ("full(", ValueError, "cannot be read"),
        ("full(drift_from=__import__('os'))", ValueError, "roots="),
        (None, TypeError, "give a name"),
        (FullRoots, TypeError, "an instance of a RootBackend subclass"),
    ],
)
def test_backends_that_do_not_exist(spec, error, says):
    with pytest.raises(error, match=says):
        resolve_roots(spec)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": 2.5}, {"block_size": True}])
def test_backend_settings_are_checked(options):
    with pytest.raises(ValueError, match="block_size="):
        BlockedRoots(**options)


def test_no_backend_allocates_a_vocabulary_squared():
    for name in ("auto", "blocked", "low_rank"):
        state_bytes = resolve_roots(name).state_bytes(50_304, 64)
        assert state_bytes < (3 if name == "auto" else 7) * 50_304 * 64 * 4, name
    long = AutoRoots().state_bytes(50_304, 50_304)
    assert long < 10 * 50_304 * 4


@pytest.mark.parametrize("roots", ["auto", "full", "blocked", "low_rank"])
def test_gradients_with_equal_or_zero_rows_are_ordinary(roots):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(12, 9))
    optimizer = ResidualPolarTransport([weight], lr=1e-2, roots=roots)
    for t in range(12):
        weight.grad = torch.randn(12, 1).expand(12, 9).clone()
        weight.grad[t % 5 :] = 0
        optimizer.step()
        assert weight.isfinite().all()


def test_custom_backends_reach_the_optimizer_and_its_checkpoints():
    class Mine(FullRoots):
        pass

    instance = Mine()
    weight, other = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3, 3))
    optimizer = ResidualPolarTransport(
        [{"params": [weight], "roots": instance}, {"params": [other]}], lr=1e-2
    )
    for p in (weight, other):
        p.grad = torch.randn(p.shape)
    optimizer.step()
    state = optimizer.state_dict()
    assert isinstance(state["param_groups"][0]["roots"], str)
    twin = nn.Parameter(weight.detach().clone())
    missing = ResidualPolarTransport(
        [{"params": [twin]}, {"params": [nn.Parameter(other.detach().clone())]}], lr=1e-2
    )
    with pytest.raises(ValueError, match="build the optimizer with that instance"):
        missing.load_state_dict(state)
    assert not missing.state
    twin.grad = weight.grad.clone()
    found = ResidualPolarTransport(
        [{"params": [twin], "roots": instance}, {"params": [nn.Parameter(other.detach().clone())]}]
    )
    found.load_state_dict(state)
    found.step()
    optimizer.step()
    assert torch.equal(twin, weight)

"""PolarAttention and RobustFilterAttention against loops in complex float64, limits, and
contracts.
"""

import numpy as np
import pytest
import rt_attention_oracle as oracle
import torch
from rpt.geometry.rt_filter import PolarAttention, RobustFilterAttention
from torch.nn import functional as F


def perturb(layer):
    """Move every scalar away from its initial value, so that no two roles coincide."""
    with torch.no_grad():
        for parameter in layer.scalars.parameters():
            parameter += 0.5 * torch.rand_like(parameter) - 0.25
        for name in ("directional_step", "radial_step"):
            if hasattr(layer, name):
                getattr(layer, name).raw += torch.rand_like(getattr(layer, name).raw) - 0.5
    return layer


@pytest.mark.parametrize("backend", ["dense", "chunked"])
def test_algorithm_1_against_a_loop(backend):
    layer = perturb(PolarAttention(12, 3, backend=backend, decay_range=(0.05, 0.5)).double())
    with torch.no_grad():
        layer.query_gain.raw += 0.3
        layer.value_gain.raw -= 0.2
    x = torch.randn(2, 9, 12, dtype=torch.float64) * torch.rand(2, 9, 1) * 3
    expected = oracle.polar_attention(layer, x, np.arange(9.0))
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=0, atol=1e-12)
    times = torch.tensor([0.0, 0.5, 0.5, 3.25, 1.0, 7.0, 7.5, 7.25, 20.0], dtype=torch.float64)
    expected = oracle.polar_attention(layer, x, times.numpy())
    found = layer(x, times=times + 1.7e9).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", ["dense", "chunked"])
def test_robust_filter_attention_against_a_loop(backend):
    layer = RobustFilterAttention(16, 4, backend=backend, decay_range=(0.05, 0.5)).double()
    layer = perturb(layer)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    found = layer(x).detach().numpy()
    np.testing.assert_allclose(found, oracle.robust_filter_attention(layer, x), rtol=0, atol=1e-12)


def split(layer, x, projection):
    return projection(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("backend", ["auto", "dense", "chunked"])
@pytest.mark.parametrize("normalize", [True, False])
def test_standard_limit_is_softmax_attention_with_rotary_positions(backend, normalize):
    layer = PolarAttention.standard(24, 3, normalize=normalize, backend=backend, step=0.7)
    layer = layer.double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    q, k, v = (
        split(layer, x, p)
        for p in (layer.query_projection, layer.key_projection, layer.value_projection)
    )
    if normalize:
        q, k, v = (F.rms_norm(t, (8,), eps=1e-30) / 2**0.5 for t in (q, k, v))
    # Rotary positions, written down once more: pairs turned by t·base^(−2k/8).
    omega = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    angle = torch.arange(11, dtype=torch.float64)[:, None] * omega.float().double()
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotary(t):
        turned = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.view_as_real(turned).flatten(-2)

    mean = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    expected = layer.output_projection(0.7 * mean.transpose(1, 2).flatten(2))
    # The initial temperature, stored in float32, meets 1/√8 to its rounding.
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=3e-7)


def test_student_weights_tend_to_exponential_ones():
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    exponential = PolarAttention(16, 2, weights="exponential", nu=1.0, radial="off").double()
    gaps = []
    for nu in (1e2, 1e3, 1e4):
        student = PolarAttention(16, 2, nu=nu, radial="off").double()
        state = exponential.state_dict()
        state["scalars.nu_tangential.raw"] = student.scalars["nu_tangential"].raw.detach()
        student.load_state_dict(state)
        gaps.append(float((student(x) - exponential(x)).detach().abs().max()))
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.2)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.2)


def test_isotropic_settings_reproduce_robust_filter_attention():
    options = {"decay": False, "nu": 3.0}
    polar = PolarAttention(
        16, 4, magnitude_precision=False, tangent=False, radial="off", step=0.25, **options
    )
    isotropic = RobustFilterAttention(16, 4, normalize=True, **options)
    polar, isotropic = polar.double(), isotropic.double()
    missing, unexpected = isotropic.load_state_dict(polar.state_dict(), strict=False)
    assert not missing
    assert all("gain" in name or "step" in name for name in unexpected)
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    # The gains, stored in float32, start at 1 to their rounding.
    torch.testing.assert_close(polar(x), 0.25 * isotropic(x), rtol=0, atol=1e-7)


def test_a_token_that_sees_only_itself_gets_no_tangential_update():
    for backend in ("dense", "chunked"):
        layer = PolarAttention(32, 4, radial="off", backend=backend)
        x = torch.randn(3, 10, 32)
        assert float(layer(x)[:, 0].detach().abs().max()) == 0.0
        eye = torch.eye(10, dtype=torch.bool)
        assert float(layer(x, attn_mask=eye).detach().abs().max()) == 0.0


def test_initial_values_are_those_of_the_specification():
    layer = PolarAttention(64, 8)
    values = layer.filter_scalars()
    for name in ("key_tangential", "query_tangential", "inflation_tangential", "key_radial",
                 "query_radial", "inflation_radial", "temperature", "sphere_scale"):  # fmt: skip
        torch.testing.assert_close(getattr(values, name).detach(), torch.ones(8), rtol=2e-7, atol=0)
    assert values.magnitude_floor.detach().allclose(torch.tensor(0.01), rtol=1e-6, atol=0)
    assert values.nu_tangential.detach().allclose(torch.tensor(4.0), rtol=2e-7, atol=0)
    assert float(layer.directional_step().detach()[0]) == 0.5
    assert float(layer.radial_step().detach()[0]) == 0.5
    assert values.decay.detach()[:2].tolist() == [0.0, 0.0]
    assert bool((values.decay.detach()[2:] > 0).all())
    assert values.process_noise.tolist() == [0.0] * 8
    # The query, key and value gains are single numbers: they keep vectors on the sphere.
    assert {layer.query_gain.raw.shape, layer.value_gain.raw.shape} == {torch.Size([])}


def test_units_of_magnitude_agree_without_a_floor():
    rms, raw = PolarAttention(16, 2), PolarAttention(16, 2, m_units="raw")
    raw.load_state_dict(rms.state_dict())
    with torch.no_grad():
        # Raw magnitudes are √d times larger: m_∞² and radial variances scale with d.
        for name in ("magnitude_floor", "key_radial", "query_radial", "inflation_radial"):
            value = rms.scalars[name]() * 8
            raw.scalars[name].raw.copy_(value + torch.log(-torch.expm1(-value)))
        raw.radial_step.raw.copy_(torch.logit(torch.tensor(0.5 / 8**0.5)))
    x = torch.randn(2, 12, 16)
    torch.testing.assert_close(raw(x), rms(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
def test_precision_of_inputs_modules_and_autocast(kind):
    x = torch.randn(2, 40, 32)
    layer = kind(32, 4)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = layer(x)
    assert automatic.dtype == torch.float32
    assert float((automatic - exact).detach().abs().max()) < 0.1 * float(exact.detach().std())
    for dtype in (torch.bfloat16, torch.float16):
        low = kind(32, 4).to(dtype)
        low.load_state_dict(layer.state_dict())
        assert low.frequencies().dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in low.scalars.parameters())
        y = low(x.to(dtype))
        assert y.dtype == dtype
        assert float((y.float() - exact).detach().abs().max()) < 0.15 * float(exact.detach().std())
        y.float().square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in low.parameters() if p.grad is not None)
    assert layer.double().frequencies().dtype == torch.float32


def test_weights_are_returned_for_pictures():
    layer = PolarAttention(16, 2)
    y, weights = layer(torch.randn(2, 7, 16), need_weights=True)
    for a in weights:
        assert a.shape == (2, 2, 7, 7)
        torch.testing.assert_close(a.sum(-1), torch.ones(2, 2, 7))
        assert float(a.detach().triu(1).abs().max()) == 0.0
    assert y.shape == (2, 7, 16)
    assert RobustFilterAttention(16, 2)(torch.randn(2, 7, 16), need_weights=True)[1].radial is None


def test_cross_attention_updates_states_by_a_memory():
    layer = PolarAttention(16, 2).double()
    x, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 9, 16).double()
    own, theirs = torch.rand(5).double() * 10, torch.rand(9).double() * 10
    late = layer(x, memory, times=own, memory_times=theirs, is_causal=True)
    for query in range(5):
        seen = theirs <= own[query]
        if not seen.any():
            assert float(late[:, query].detach().abs().max()) == 0.0
            continue
        alone = layer(
            x[:, query : query + 1],
            memory[:, seen],
            times=own[query : query + 1],
            memory_times=theirs[seen],
        )
        torch.testing.assert_close(late[:, query : query + 1], alone, rtol=0, atol=1e-12)
    assert layer(x, memory).shape == x.shape
    with pytest.raises(ValueError, match="one clock"):
        layer(x, memory, times=own)


def test_context_rotation_starts_as_plain_rotation_and_then_matters():
    torch.manual_seed(1)
    plain, context = PolarAttention(16, 2), PolarAttention(16, 2, context_rotation=True)
    context.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(1, 12, 16)
    torch.testing.assert_close(context(x), plain(x))
    torch.nn.init.normal_(context.context_projection.weight)
    assert float((context(x) - plain(x)).detach().abs().max()) > 1e-2
    # Only what lies between two tokens turns them: a common prefix does not.
    y = context(x)
    full = context(torch.cat((torch.randn(1, 3, 16), x), 1), attn_mask=_hide_prefix(15, 3))
    torch.testing.assert_close(full[:, 3:], y, rtol=1e-4, atol=1e-5)


def _hide_prefix(tokens, prefix):
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    mask[:, :prefix] = False
    return mask


def test_bayesian_gain_follows_the_formula():
    layer = PolarAttention(16, 1, gain="bayes", radial="off").double()
    with torch.no_grad():
        layer.prior_carry.raw += 0.4
        layer.prior_precision.raw -= 0.3
        layer.key_projection.weight.copy_(layer.query_projection.weight)
    x, prior = torch.randn(1, 6, 16).double(), torch.randn(1, 1, 6).double()
    carry, floor = layer.prior_carry(), layer.prior_precision()
    found = layer.filter(x).log_precision.exp() - floor
    before = carry * prior.exp() + floor
    step = layer.filter(x, prior_log_precision=prior)
    torch.testing.assert_close(step.log_precision, (found + before).log())
    fixed = PolarAttention(16, 1, radial="off", step=0.5).double()
    fixed.load_state_dict(layer.state_dict(), strict=False)
    gain = found / (before + found)
    torch.testing.assert_close(step.output, 2 * gain.squeeze(1).unsqueeze(-1) * fixed(x))
    # λ_ū itself: the first token sees only itself, with query and key alike: κ of its own state.
    numbers = layer.filter_scalars()
    size = layer.value_projection(x)[:, 0].square().sum(-1) / 16
    variance = numbers.key_tangential + numbers.inflation_tangential
    torch.testing.assert_close(found[:, 0, 0], (size + numbers.magnitude_floor) / variance)


def test_dropout_drops_only_directional_weights_and_only_in_training():
    layer = PolarAttention(16, 2, dropout=0.5)
    x = torch.randn(1, 40, 16)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    outputs = torch.stack([layer(x) for _ in range(200)])
    layer.eval()
    noise = outputs.std(0) / 200**0.5
    assert float(((outputs.mean(0) - layer(x)) / noise.clamp_min(1e-3)).detach().abs().mean()) < 1.5
    assert float(outputs.std(0)[:, 5:].detach().mean()) > 1e-2


@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention])
def test_arguments_are_checked_before_anything_changes(kind):
    layer = kind(16, 2)
    x, cache = torch.randn(2, 4, 16), layer.new_cache()
    layer(x, cache=cache)
    for call in (
        lambda: layer(x[0]),
        lambda: layer(x[..., :8]),
        lambda: layer(x.long()),
        lambda: layer(x, times=torch.arange(5)),
        lambda: layer(x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)),
        lambda: layer(x, attn_mask=torch.ones(3, 4, dtype=torch.bool)),
        lambda: layer(x, times=torch.arange(4), cache=cache),
        lambda: layer(x, x, cache=cache),
        lambda: layer(torch.randn(3, 4, 16), cache=cache),
    ):
        with pytest.raises(ValueError):
            call()
        assert cache.length == 4
    with pytest.raises(TypeError):
        layer(x, key_padding_mask=torch.zeros(2, 4))
    for broken in (
        lambda: kind(16, 3),
        lambda: kind(16, 2, dropout=1.0),
        lambda: kind(16, 2, weights="huber"),
        lambda: kind(16, 2, backend="fast"),
    ):
        with pytest.raises(ValueError):
            broken()
    if kind is PolarAttention:
        with pytest.raises(ValueError, match="sphere"):
            kind(16, 2, normalize=False)

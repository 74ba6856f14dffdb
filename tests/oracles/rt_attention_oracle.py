"""Filter attention (the RT-Filter paper) by loops in complex NumPy, with a layer's own parameters."""

import math

import mpmath
import numpy as np


def array(tensor):
    return tensor.detach().double().numpy()


def to_complex(x):
    return x[..., 0::2] + 1j * x[..., 1::2]


def projected(layer, x):
    """Queries, keys and values, each complex (b, tokens, heads, d)."""
    linear = (layer.query_projection, layer.key_projection, layer.value_projection)
    every = [array(x) @ array(projection.weight).T for projection in linear]
    return [to_complex(y.reshape(*y.shape[:2], layer.num_heads, -1)) for y in every]


def polar_attention(layer, x, times):
    """Algorithm 1 with the specification's resolutions, pair by pair: (b, tokens, width)."""
    p = {k: array(v) for k, v in layer.filter_scalars()._asdict().items()}
    alpha = array(layer.directional_step())
    beta = array(layer.radial_step())
    omega = array(layer.frequencies())
    heads, d = layer.num_heads, layer.head_dim
    r, gain = math.sqrt(d), float(layer.value_gain().detach())
    qkv = projected(layer, x)
    result = np.zeros((*x.shape[:2], heads, 2 * d))
    for b in range(x.shape[0]):
        for h in range(heads):
            q, k, v = (a[b, :, h] for a in qkv)
            m = np.linalg.norm(v, axis=-1) / math.sqrt(d)
            q, k, v = (a / np.linalg.norm(a, axis=-1, keepdims=True) * r for a in (q, k, v))
            for i in range(x.shape[1]):
                lts, lrs, moved, seen = [], [], [], []
                for j in range(x.shape[1]):
                    if times[j] > times[i]:
                        continue
                    lag = times[i] - times[j]
                    phase = np.exp(1j * omega * lag)
                    c = (q[i].conj() @ (phase * k[j])).real / r**2
                    e = math.exp(-p["decay"][h] * abs(lag))
                    m_hat = m[j] * e
                    sigma = p["key_tangential"][h] * e**2
                    top = m_hat**2 + p["magnitude_floor"][h]
                    kappa = top / (sigma + p["inflation_tangential"][h])
                    tilde = top / (sigma + p["query_tangential"][h] + p["inflation_tangential"][h])
                    nu = p["nu_tangential"][h]
                    scale = 2 / nu * p["sphere_scale"][h]
                    lts.append(
                        p["temperature"][h]
                        * (math.log(kappa) - (nu + 1) * math.log(1 + scale * tilde * max(1 - c, 0)))
                    )
                    sigma_r = p["key_radial"][h] * e**2 + p["inflation_radial"][h]
                    d_r = (c * m_hat - m[i]) ** 2 / (sigma_r + p["query_radial"][h])
                    nu = p["nu_radial"][h]
                    lrs.append(-math.log(sigma_r) - (nu + 1) * math.log(1 + d_r / nu))
                    moved.append(phase * v[j])
                    seen.append(c * m_hat)
                a_t = np.exp(np.array(lts) - max(lts))
                a_r = np.exp(np.array(lrs) - max(lrs))
                mean = (a_t / a_t.sum()) @ np.array(moved)
                m_bar = (a_r / a_r.sum()) @ np.array(seen)
                tangent = mean - v[i] * (v[i].conj() @ mean).real / (np.abs(v[i]) ** 2).sum()
                update = alpha[h] * tangent + beta[h] * (m_bar - m[i]) * v[i]
                update = gain * update
                result[b, i, h, 0::2], result[b, i, h, 1::2] = update.real, update.imag
    return result.reshape(*x.shape[:2], -1) @ array(layer.output_projection.weight).T


def robust_filter_attention(layer, x):
    """Appendix A.4, pair by pair: (b, tokens, width)."""
    p = {k: array(v) for k, v in layer.filter_scalars()._asdict().items()}
    omega, d = array(layer.frequencies()), layer.head_dim
    qkv = projected(layer, x)
    result = np.zeros((*x.shape[:2], layer.num_heads, 2 * d))
    for b, h, i in np.ndindex(x.shape[0], layer.num_heads, x.shape[1]):
        q, k, v = (a[b, :, h] for a in qkv)
        logits, moved = [], []
        for j in range(i + 1):
            mu = p["decay"][h]
            lag, noise = i - j, p["process_noise"][h]
            e = math.exp(-mu * lag)
            phase = np.exp(1j * omega * lag)
            grown = noise * (lag if mu == 0 else (1 - e**2) / (2 * mu))
            sigma = grown + p["key_tangential"][h] * e**2 + p["inflation_tangential"][h]
            residual = np.linalg.norm(q[i] - e * phase * k[j]) ** 2
            nu = p["nu_tangential"][h]
            inner = 1 + residual / (sigma + p["query_tangential"][h]) / (nu * d)
            logits.append(p["temperature"][h] * (-math.log(sigma) - (nu + 1) * math.log(inner)))
            moved.append(e * phase * v[j])
        weights = np.exp(np.array(logits) - max(logits))
        mean = (weights / weights.sum()) @ np.array(moved)
        result[b, i, h, 0::2], result[b, i, h, 1::2] = mean.real, mean.imag
    return result.reshape(*x.shape[:2], -1) @ array(layer.output_projection.weight).T


def process_variance(lag, mu):
    """(1 − e^{−2μt})/2μ, t where μ = 0, of unit process noise (Appendix A.4), at fifty digits."""
    with mpmath.workdps(50):
        mu, lag = mpmath.mpf(mu), mpmath.mpf(lag)
        return float(-mpmath.expm1(-2 * mu * lag) / (2 * mu) if mu else lag)

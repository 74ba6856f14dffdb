"""Self-context layers sample by sample in NumPy float64, from the self-context specification."""

import math

import numpy as np
from scipy.special import expit


def array(tensor):
    return tensor.detach().double().numpy()


def affine(linear, x):
    return array(linear.weight) @ x + array(linear.bias)


def lelu(z):
    """The logistic gate of unit variance, z σ(πz/√3)."""
    return z * expit(math.pi * z / math.sqrt(3))


def soft_eikonal(layer, x, size=None):
    """`SoftEikonalLinear` of one sample x (n_in,); `size` overrides the detached RMS."""
    rank, frames = layer.rank, array(layer.primitive)

    def allocate(point):
        factor = affine(layer.metric, point).reshape(rank, rank)
        metric = factor @ factor.T / rank
        projections = [frame @ point for frame in frames]
        cost = np.array([p @ metric @ p for p in projections])
        response = []
        for c, p in zip(cost, projections, strict=True):
            evidence = np.array(
                [np.log1p(c), np.log1p(np.mean(p**2)), np.mean(p), np.log1p(np.mean(np.abs(p)))]
            )
            response.append(affine(layer.response[2], lelu(affine(layer.response[0], evidence))))
        logits = np.array(response)[:, 0] - cost / (cost.mean() + 1e-5)
        weight = np.exp(logits / layer.temperature)
        return projections, weight / weight.sum()

    size = np.sqrt(np.mean(x**2)) if size is None else size
    projections, weight = allocate(x)
    for _ in range(layer.context_steps):
        lifted = sum(
            w * (p @ frame) for w, p, frame in zip(weight, projections, frames, strict=True)
        )
        lifted = lifted / rank
        context = lifted * max(size, 1e-6) / max(np.sqrt(np.mean(lifted**2)), 1e-6)
        projections, weight = allocate(x + layer.self_context_strength * context)
    pooled = sum(w * p for w, p in zip(weight, projections, strict=True))
    scale = np.log1p(np.exp(array(layer.scale)[0]))
    return affine(layer.base, x) + scale * pooled @ array(layer.shared)


def transformer_block(block, x, allowed):
    """`ContextTransformerBlock` of one sequence (tokens, width); allowed: (tokens, tokens) bool."""

    def normed(norm, y):
        eps = np.finfo(float).eps if norm.eps is None else norm.eps
        return array(norm.weight) * y / np.sqrt((y**2).mean(-1, keepdims=True) + eps)

    (tokens, width), heads = x.shape, block.num_heads
    q, k, v = np.split(normed(block.norm1, x) @ array(block.qkv.weight).T, 3, axis=-1)
    mixed = np.zeros_like(x)
    for head, i in np.ndindex(heads, tokens):
        keys, part = np.flatnonzero(allowed[i]), np.arange(width).reshape(heads, -1)[head]
        if len(keys):
            weight = np.exp(k[np.ix_(keys, part)] @ q[i, part] / math.sqrt(len(part)))
            mixed[i, part] = weight / weight.sum() @ v[np.ix_(keys, part)]
    x = x + mixed @ array(block.attention_output.weight).T
    inner = [lelu(soft_eikonal(block.context_up, y)) for y in normed(block.norm2, x)]
    return x + np.stack([soft_eikonal(block.context_down, y) for y in inner])

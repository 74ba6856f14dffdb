"""Options of the Lorentz layers that make no sense."""

import math

import pytest
import rpt.geometry.lorentz as L
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

# --- 55, the kind: options that make no sense ----------------------------------------------------

SIZES = st.sampled_from([0, -1, 1.5, True, None])
NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf])
NEGATIVE = st.one_of(NUMBERS, st.just(-1.0))
SENSELESS = {
    "Curvature k": (lambda v: L.Curvature(v), st.one_of(NEGATIVE, st.just(0.0))),
    "Manifold k": (lambda v: L.LorentzManifold(v), st.one_of(NEGATIVE, st.just(0.0))),
    "PolarLinear in": (lambda v: L.PolarLinear(v, 3), SIZES),
    "PolarLinear out": (lambda v: L.PolarLinear(3, v), SIZES),
    "PolarLinear k": (lambda v: L.PolarLinear(3, 3, k=v), NEGATIVE),
    "PolarLinear radius": (lambda v: L.PolarLinear(3, 3, radius=v), st.just("nonsense")),
    "PolarLinear radius_std": (lambda v: L.PolarLinear(3, 3, radius_std=v), NEGATIVE),
    "PolarLinear init": (lambda v: L.PolarLinear(3, 3, init=v), st.just("nonsense")),
    "attention heads": (lambda v: L.PolarMultiheadAttention(4, v), SIZES),
    "attention dim": (lambda v: L.PolarMultiheadAttention(v, 1), SIZES),
    "attention dropout": (lambda v: L.PolarMultiheadAttention(4, 2, dropout=v), NEGATIVE),
    "attention backend": (
        lambda v: L.PolarMultiheadAttention(4, 2, backend=v),
        st.just("nonsense"),
    ),
    "GyroLayerNorm": (lambda v: L.GyroLayerNorm(v), SIZES),
    "GyroLayerNorm eps": (lambda v: L.GyroLayerNorm(3, eps=v), NEGATIVE),
    "SpaceLayerNorm": (lambda v: L.SpaceLayerNorm(v), SIZES),
    "PolarBatchNorm2d": (lambda v: L.PolarBatchNorm2d(v), SIZES),
    "PolarBatchNorm2d momentum": (lambda v: L.PolarBatchNorm2d(3, momentum=v), NEGATIVE),
    "PolarBatchNorm2d eps": (lambda v: L.PolarBatchNorm2d(3, eps=v), NEGATIVE),
    "BoostResidual": (lambda v: L.BoostResidual(v), NUMBERS),
    "GyroResidual": (lambda v: L.GyroResidual(v), NUMBERS),
    "LorentzMLR": (lambda v: L.LorentzMLR(v, 2), SIZES),
    "LorentzEmbedding": (lambda v: L.LorentzEmbedding(v, 2), SIZES),
    "LorentzEmbedding std": (lambda v: L.LorentzEmbedding(2, 2, std=v), NEGATIVE),
    "LorentzEmbedding decay": (lambda v: L.LorentzEmbedding(2, 2, decay=v), st.just("nonsense")),
    "PatchEmbedding": (lambda v: L.PatchEmbedding(3, v, 4), SIZES),
    "PositionTable": (lambda v: L.PositionTable(4, v), SIZES),
    "PositionTable std": (lambda v: L.PositionTable(4, 4, std=v), NEGATIVE),
    "HorosphericalEncoding": (lambda v: L.HorosphericalEncoding(v, 4), SIZES),
    "HorosphericalEncoding rate": (
        lambda v: L.HorosphericalEncoding(2, 4, initial_rate=v),
        NUMBERS,
    ),
    "BoostEncoding": (lambda v: L.BoostEncoding(v, 4), SIZES),
    "HeadGain": (lambda v: L.HeadGain(v), SIZES),
    "PolarConv2d": (lambda v: L.PolarConv2d(v, 3, 3), SIZES),
    "PolarConv2d kernel": (lambda v: L.PolarConv2d(3, 3, v), SIZES),
    "PolarMaxPool2d": (lambda v: L.PolarMaxPool2d(v), SIZES),
    "CentroidPool2d": (lambda v: L.CentroidPool2d(v), SIZES),
    "PolarDropout": (lambda v: L.PolarDropout(v), NEGATIVE),
    "PolarUNet": (lambda v: L.PolarUNet(v), SIZES),
    "PolarViT depth": (lambda v: L.ViTConfig(2, 8, depth=v), SIZES),
    "PolarViT k": (lambda v: L.ViTConfig(2, 8, k=v), NEGATIVE),
    "PolarViT alpha": (lambda v: L.ViTConfig(2, 8, alpha=v), NUMBERS),
    "RiemannianAdamW lr": (lambda v: L.RiemannianAdamW([nn.Parameter(torch.ones(2))], v), st.just(-1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", SENSELESS)
def test_case_55_constructors_refuse_options_that_make_no_sense(name):
    build, values = SENSELESS[name]

    @settings(max_examples=8)
    @given(values)
    def refuses(value):
        with pytest.raises((ValueError, TypeError)):
            build(value)

    refuses()

"""Calibration, and the observation sites that every layer declares."""

import copy
import math

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from rpt.observers.protocol import ObservableModel, declared_sites
from torch import nn


def points(*shape, scale=1.0, dtype=torch.float32):
    return lorentz.exp_map_origin(scale * torch.randn(*shape, dtype=dtype))


# --- calibration, curvature, observation --------------------------------------------------------


class Small(nn.Module):
    def __init__(self, k=1.0):
        super().__init__()
        curvature = lorentz.Curvature(k)
        self.embed = lorentz.PatchEmbedding(1, 4, 8, k=curvature)
        self.norm = lorentz.GyroLayerNorm(8, k=curvature)
        self.attention = lorentz.PolarMultiheadAttention(8, 2, k=curvature)
        self.residual = lorentz.BoostResidual()
        self.mlp = lorentz.PolarMLP(8, 16, k=curvature)
        self.head = lorentz.LorentzMLR(8, 3, k=curvature)

    def forward(self, images):
        x = self.embed(images)
        x = self.residual(x, self.attention(self.norm(x)))
        x = self.residual(x, self.mlp(x))
        return self.head(lorentz.centroid(x))


@pytest.mark.parametrize("k", [1.0, 2.7])
def test_calibration_sets_the_radii_once(k):
    torch.manual_seed(0)
    model, images = Small(k), torch.rand(4, 1, 8, 8)
    assert not model.mlp.first.calibrated
    lorentz.calibrate_(model, images, 1.5)
    radii = {}
    for name in ("embed.projection", "attention.query", "attention.output", "mlp.second"):
        module = model.get_submodule(name)
        module.register_forward_hook(
            lambda m, i, out, name=name: radii.__setitem__(name, out.a.sinh().log().mean())
        )
    model(images)
    for value in radii.values():
        assert math.asinh(math.exp(value)) * math.sqrt(k) == pytest.approx(1.5, rel=1e-3)
    saved = copy.deepcopy(model.state_dict())
    assert bool(saved["mlp.first.calibrated"])
    fresh = Small(k)
    fresh.load_state_dict(saved)
    assert torch.equal(fresh(images), model(images))
    assert model.training
    # What decays is the deviation from the calibrated value: it is still 0.
    assert model.mlp.first.radius_bias == 0
    with pytest.raises(ValueError, match="positive"):
        lorentz.calibrate_(model, images, 0.0)
    with pytest.raises(ValueError, match="no PolarLinear"):
        lorentz.calibrate_(nn.Linear(2, 2), torch.rand(1, 2))


def test_every_layer_declares_its_sites():
    model = Small()
    sites = declared_sites(model)
    expected = {
        model.embed.projection.direction,
        *(getattr(model.attention, n).direction for n in ("query", "key", "value", "output")),
        model.mlp.first.direction,
        model.mlp.second.direction,
    }
    assert set(sites) == expected
    assert all(isinstance(site, nn.Linear) for site in sites)
    for name in lorentz.__all__:
        thing = getattr(lorentz, name)
        if isinstance(thing, type) and issubclass(thing, nn.Module):
            helpers = (lorentz.Curvature, lorentz.HeadGain, lorentz.PolarReLU)
            helpers += (lorentz.SpaceActivation, lorentz.PolarDropout)
            helpers += (lorentz.HorosphericalEncoding, lorentz.BoostEncoding)
            helpers += (lorentz.KeepsManifold,)
            helpers += (lorentz.PolarMaxPool2d, lorentz.CentroidPool2d)
            assert issubclass(thing, helpers) or issubclass(thing, ObservableModel)


def test_curvature_is_learned_and_shared():
    model = Small(1.3)
    names = {id(p): n for n, p in model.named_parameters()}
    assert sum("log_k" in n for n in names.values()) == 1
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    log_k = model.embed.curvature.log_k
    assert log_k.grad.isfinite()
    assert log_k.grad != 0
    with pytest.raises(ValueError, match="positive"):
        lorentz.Curvature(-1.0)

"""Riemannian optimizers that are copied, and tables of points."""

import copy
import io
import pickle
import warnings

import pytest
import rpt.geometry.lorentz as L
import torch
from torch import nn


def points(*shape, scale=1.0, dtype=torch.float32):
    return L.exp_map_origin(scale * torch.randn(*shape, dtype=dtype))


def same(x, y):
    return torch.equal(x.a, y.a) and torch.equal(x.u, y.u)


# --- 38: a copied Riemannian optimizer steps as the original -------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = L.LorentzEmbedding(6, 4, std=1.0)
        self.map = L.PolarLinear(4, 3)

    def forward(self, tokens):
        return self.map(self.table(tokens))


def by_copy(pair):
    return copy.deepcopy(pair)


def by_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


def by_torch_save(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [by_copy, by_pickle, by_torch_save])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_case_38_copied_riemannian_adamw_steps_bitwise_alike(way, steps_before):
    model = Words()
    pair = model, L.RiemannianAdamW(L.parameter_groups(model, 0.1), lr=0.05, amsgrad=False)

    def step(pair):
        model, optimizer = pair
        optimizer.zero_grad()
        out = model(torch.arange(6))
        (out.a.sum() + out.u[:, 0].sum()).backward()
        optimizer.step()

    for _ in range(steps_before):
        step(pair)
    other = way(pair)
    for _ in range(3):
        step(pair)
        step(other)
    assert isinstance(other[0].table.weight, L.LorentzParameter)
    for ours, theirs in zip(pair[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", [by_copy, by_pickle])
def test_case_38_caches_and_layers_can_be_copied(way):
    layer, cache = L.PolarMultiheadAttention(8, 2, is_causal=True), L.PolarCache()
    with torch.no_grad():
        layer(points(2, 3, 8), cache=cache)
        other_layer, other_cache = way((layer, cache))
        x = points(2, 1, 8)
        assert same(layer(x, cache=cache), other_layer(x, cache=other_cache))
    assert cache.length == other_cache.length == 4


# --- 59: LorentzEmbedding ------------------------------------------------------------------------


def train(table, optimizer, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        x = table(torch.arange(6))
        (L.distance_to_origin(x).sum() + x.u[:, 0].sum()).backward()
        optimizer.step()


def test_case_59_points_off_the_manifold_warn_once_at_the_next_forward():
    table = L.LorentzEmbedding(6, 3, std=1.0)
    with pytest.warns(UserWarning, match="left the manifold.*RiemannianAdamW"):
        train(table, torch.optim.AdamW(table.parameters(), lr=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table(torch.arange(6))
        kept = L.LorentzEmbedding(6, 3, std=1.0)
        train(kept, L.RiemannianAdamW(kept.parameters(), lr=0.5))
        average = torch.optim.swa_utils.AveragedModel(kept)
        train(kept, L.RiemannianAdamW(kept.parameters(), lr=0.5))
        average.update_parameters(kept)
        average(torch.arange(6))


def test_case_59_k_is_saved_and_checked_on_load():
    saved = L.LorentzEmbedding(6, 3, k=2.0).state_dict()
    other = L.LorentzEmbedding(6, 3)
    with pytest.raises(RuntimeError, match=r"saved with k = 2, this embedding has k = 1"):
        other.load_state_dict(saved)
    same_k = nn.Sequential(L.LorentzEmbedding(6, 3, k=2.0))
    same_k.load_state_dict({f"0.{name}": value for name, value in saved.items()})
    assert torch.equal(same_k[0].weight, saved["weight"])
    del saved["k"]  # a file of before k was saved
    other.load_state_dict(saved)
    learned = L.LorentzEmbedding(6, 3, k=L.Curvature(2.0))
    twin = L.LorentzEmbedding(6, 3, k=L.Curvature(1.0))
    twin.load_state_dict(learned.state_dict())
    assert twin.curvature().item() == pytest.approx(2.0)


@pytest.mark.parametrize("flag", ["overwrite", "swap"])
def test_case_43_a_converted_table_keeps_its_manifold(flag):
    setter = {
        "overwrite": torch.__future__.set_overwrite_module_params_on_conversion,
        "swap": torch.__future__.set_swap_module_params_on_conversion,
    }[flag]
    table = L.LorentzEmbedding(6, 3, std=1.0)
    setter(True)
    try:
        table.double()
    finally:
        setter(False)
    assert isinstance(table.weight.manifold, L.LorentzManifold)
    with torch.device("meta"):
        lazy = L.LorentzEmbedding(6, 3, std=1.0)
    lazy.to_empty(device="cpu")
    lazy.reset_parameters()
    train(lazy, L.RiemannianAdamW(lazy.parameters(), lr=0.5))
    assert torch.allclose(L.unpack(lazy.weight).u.norm(dim=-1), torch.ones(6), atol=1e-5)

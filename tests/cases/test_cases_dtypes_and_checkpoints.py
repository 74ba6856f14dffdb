"""Acceptance cases 6 and 7: half precision, and what checkpoints keep."""

import copy
import io

import pytest
import torch
from optimizer_states import assert_bitwise, cosine, snapshot, through_a_file
from torch import nn

from rpt import ResidualPolarTransport

BACKENDS = ["auto", "full", "blocked", "low_rank"]


# -- 6: bf16 parameters meet float32-only linear algebra -------------------------------------------


def bf16_run(model, autocast=False):
    torch.manual_seed(6)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-3, max_root_staleness=5)
    optimizer.attach_model(model, observe_every=1)
    first = [p.detach().clone().float() for p in model.parameters()]
    direction = None
    for _ in range(12):
        optimizer.zero_grad()
        parameter = next(model.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x if autocast else x.to(parameter.dtype))
            loss = (out.float() - y).square().mean()
        loss.backward()
        optimizer.step()
        if direction is None:
            direction = [
                optimizer.state[p]["momentum"].clone().flatten() for p in model.parameters()
            ]
    assert len(first) == len(direction)
    return optimizer, direction


def float32_state(optimizer):
    for record in optimizer.state.values():
        for key, value in record.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert value.dtype == torch.float32, key
                assert value.isfinite().all(), key


def linear32():
    torch.manual_seed(60)
    return nn.Linear(32, 32)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear32().bfloat16(), linear32()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)).float())


def test_case_06_bf16_parameters():
    reference_model = linear32()
    low = linear32().bfloat16()
    reference_model.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
    _, reference = bf16_run(reference_model)
    optimizer, direction = bf16_run(low)
    assert all(p.dtype == torch.bfloat16 for p in low.parameters())
    float32_state(optimizer)
    for a, b in zip(direction, reference, strict=True):
        assert cosine(a, b) >= 0.999
    assert optimizer.state[low.weight]["observations"] == 12


def test_case_06_bf16_autocast():
    _, reference = bf16_run(linear32())
    model = linear32()
    optimizer, direction = bf16_run(model, autocast=True)
    assert model.weight.dtype == torch.float32
    float32_state(optimizer)
    for a, b in zip(direction, reference, strict=True):
        assert cosine(a, b) >= 0.999


def test_case_06_mixed_dtypes_in_one_group():
    model = MixedDtypes()
    optimizer, _ = bf16_run(model)
    assert model.first.weight.dtype == torch.bfloat16
    assert model.second.weight.dtype == torch.float32
    float32_state(optimizer)


# -- 7: checkpoints keep dtypes ---------------------------------------------------------------------


def train_16(model, optimizer, start, steps):
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("roots", BACKENDS)
def test_case_07_loading_keeps_every_dtype(dtype, roots):
    torch.manual_seed(7)
    model = nn.Linear(16, 16).to(dtype)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2, roots=roots)
    train_16(model, optimizer, 0, 6)
    factor = next(k for k in optimizer.state[model.weight] if k.startswith("metric.left"))
    entry = (0,) * optimizer.state[model.weight][factor].ndim
    optimizer.state[model.weight][factor][entry] = 1.001
    saved = through_a_file(optimizer.state_dict())

    twin = copy.deepcopy(model)
    loaded = ResidualPolarTransport(twin.parameters(), lr=1e-2, roots=roots)
    loaded.load_state_dict(saved)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_bitwise(dict(loaded.state[q]), dict(optimizer.state[p]))
    assert float(loaded.state[twin.weight][factor][entry]) == pytest.approx(1.001, abs=1e-7)
    assert loaded.state[twin.weight]["step"] == 6
    assert loaded.state[twin.weight]["step"].dtype == torch.int64
    train_16(model, optimizer, 6, 2)
    train_16(twin, loaded, 6, 2)
    assert_bitwise(snapshot(loaded), snapshot(optimizer))


def test_case_07_the_file_holds_plain_tensors_and_numbers():
    model = nn.Linear(16, 16)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model)
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()

    def plain(value):
        if isinstance(value, dict):
            return all(plain(k) and plain(v) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return type(value) in (int, float, bool, str, type(None), torch.Tensor)

    assert plain(optimizer.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_case_07_across_devices(saved_on, loaded_on):
    torch.manual_seed(7)
    model = nn.Linear(16, 16).to(saved_on)
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    model(torch.randn(4, 16, device=saved_on)).square().sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model).to(loaded_on)
    loaded = ResidualPolarTransport(twin.parameters(), lr=1e-2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, map_location=saved_on))
    for p in twin.parameters():
        for value in loaded.state[p].values():
            assert not isinstance(value, torch.Tensor) or value.device.type == loaded_on
    twin(torch.randn(4, 16, device=loaded_on)).square().sum().backward()
    loaded.step()
    assert twin.weight.isfinite().all()


def test_a_state_of_larger_roots_under_the_same_name_says_how_to_continue():
    def optimizer(weight, roots):
        made = ResidualPolarTransport([weight], roots=roots)
        weight.grad = torch.linspace(-1, 1, weight.numel()).view_as(weight)
        return made

    first, second = (torch.nn.Parameter(torch.ones(130, 3)) for _ in range(2))
    older = optimizer(first, "auto(full_side=256)")
    older.step()
    saved = older.state_dict()
    saved["param_groups"][0]["roots"] = "auto"
    second.data.copy_(first.data)
    newer = optimizer(second, "auto")
    with pytest.warns(UserWarning, match="full_side=256"):
        newer.load_state_dict(saved)
    newer.param_groups[0]["roots"] = "auto(full_side=256)"
    older.param_groups[0]["roots"] = "auto(full_side=256)"
    older.step()
    newer.step()
    assert torch.equal(first, second)

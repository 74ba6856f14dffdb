"""What `telemetry()` says: plain numbers that agree with what was done."""

import json
import math

import pytest
import torch
from torch import nn

from rpt import ResidualPolarTransport
from rpt.store.schema import ENTRIES, TRAVELLING


def trained(steps=3, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2, **options)
    optimizer.attach_model(model, observe_every=1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_before_any_step():
    _, optimizer = trained(steps=0)
    report = optimizer.telemetry()
    assert report["parameters"] == {}
    assert report["total"]["parameters"] == 0
    assert "0 parameters" in str(report)


def test_counts_and_names():
    model, optimizer = trained(3)
    report = optimizer.telemetry()
    assert list(report["parameters"]) == [
        f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()
    ]
    first = report["parameters"]["0.weight (5, 6)"]
    assert first["step"] == 3
    assert first["observations"] == 3
    assert 0 < first["residual_entropy_rank"] < 1
    assert 0 <= first["polar_weight"] <= 1
    assert first["root_refreshes"] >= 1
    assert first["root_condition"] >= 1
    assert report["parameters"]["0.bias (5,)"]["root_refreshes"] == 0
    total = report["total"]
    assert total["parameters"] == 4
    assert total["observations"] == 6
    assert total["state_bytes"] == sum(p["state_bytes"] for p in report["parameters"].values())


def test_state_bytes_are_what_is_held():
    """Case 41: whole stacks with their padding, each storage once, and the gradients' buffer."""
    model, optimizer = trained()
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for record in optimizer.state.values()
        for value in record.values()
        if isinstance(value, torch.Tensor)
    }
    stacks = {id(s): s for s in (optimizer._stacks.registry.home(p)[0] for p in model.parameters())}
    unseen = sum(s.buffer.nbytes + s.tensors["held"].nbytes for s in stacks.values())
    assert optimizer.telemetry()["total"]["state_bytes"] == sum(storages.values()) + unseen
    assert sum(storages.values()) > 2 * 4 * sum(p.numel() for p in model.parameters())


def test_everything_is_plain_finite_and_json():
    _, optimizer = trained(preset="paper")
    report = json.loads(json.dumps(optimizer.telemetry()))

    def numbers(value):
        if isinstance(value, dict):
            for v in value.values():
                yield from numbers(v)
        else:
            yield value

    for value in numbers(report):
        assert isinstance(value, (int, float))
        assert math.isfinite(value)


def test_it_prints_as_a_table():
    _, optimizer = trained()
    lines = str(optimizer.telemetry()).splitlines()
    assert lines[0].split()[:3] == ["parameter", "step", "rank"]
    assert any(line.startswith("0.weight (5, 6)") for line in lines)
    assert "0 skipped updates" in lines[-1]
    assert len({len(line) for line in lines[:6]}) == 1


def test_skipped_updates_are_counted_also_before_the_first_step():
    weight = nn.Parameter(torch.zeros(3, 3))
    optimizer = ResidualPolarTransport([weight], lr=1e-2)
    weight.grad = torch.full((3, 3), torch.nan)
    with pytest.warns(UserWarning, match="non-finite"):
        optimizer.step()
    report = optimizer.telemetry()
    assert report["total"]["skipped"] == 1
    assert "step" in report["parameters"]["parameter 0 of group 0 (3, 3)"]
    weight.grad = torch.randn(3, 3)
    optimizer.step()
    assert optimizer.telemetry()["total"]["skipped"] == 1
    assert optimizer.state[weight]["step"] == 1


def test_coherence_of_repeated_and_opposite_gradients():
    weight = nn.Parameter(torch.zeros(3, 3))
    optimizer = ResidualPolarTransport([weight], lr=1e-2, preset="paper")
    gradient = torch.eye(3) + 0.1
    for sign in (1, 1, -1):
        weight.grad = sign * gradient
        optimizer.step()
    total = optimizer.telemetry()["total"]
    assert total["frame_coherence"] == pytest.approx(-1, abs=1e-3)
    assert total["frame_confidence"] == 0
    assert total["turn"] == pytest.approx(1, abs=1e-3)


def test_reading_changes_nothing():
    _, optimizer = trained()
    before = {k: v.clone() for p in optimizer.state.values() for k, v in p.items()
              if isinstance(v, torch.Tensor)}  # fmt: skip
    optimizer.telemetry()
    after = {k: v for p in optimizer.state.values() for k, v in p.items()
             if isinstance(v, torch.Tensor)}  # fmt: skip
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_schema_says_what_is_reported():
    _, optimizer = trained()
    reported = optimizer.telemetry()["parameters"]["0.weight (5, 6)"].keys()
    shown = {entry.name for entry in ENTRIES if entry.telemetry}
    # The step of the last refresh is told as the roots' age.
    assert reported == shown - {"last_root_step"} | {"root_age", "state_bytes"}
    assert set(TRAVELLING) <= shown

"""Trajectories of an independent float64 implementation of the published rule, matched to 1e-9."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rpt import ResidualPolarTransport
from rpt.roots.packed import unpack

GOLDEN = Path(__file__).parents[1] / "golden"
ARRAYS = np.load(GOLDEN / "rpt_golden.npz", allow_pickle=False)
CASES = json.loads((GOLDEN / "cases.json").read_text())
HYPER = [
    "lr",
    "beta1",
    "beta2",
    "matrix_ridge",
    "weight_decay",
    "polar_beta",
    "polar_release_beta",
    "polar_steps",
    "root_drift_threshold",
    "max_root_staleness",
    "gain_rate",
    "min_gain",
    "max_gain",
    "target_coherence",
    "transport_eps",
    "eps",
]
TOLERANCE = 1e-9


def arrays(case, key):
    """The arrays CASE/key of every parameter: one, or one per `_p0`, `_p1`, ..."""
    if f"{case}/{key}" in ARRAYS:
        return [ARRAYS[f"{case}/{key}"]]
    found, i = [], 0
    while f"{case}/init_p{i}" in ARRAYS:
        found.append(ARRAYS.get(f"{case}/{key}_p{i}", None))
        i += 1
    return found


def build(case):
    key = f"{case}/hyper" if f"{case}/hyper" in ARRAYS else "a_matrix_noranks/hyper"
    hyper = dict(zip(HYPER, ARRAYS[key].tolist(), strict=True))
    hyper["betas"] = (hyper.pop("beta1"), hyper.pop("beta2"))
    for name in ("polar_steps", "max_root_staleness"):
        hyper[name] = int(hyper[name])
    parameters = [torch.nn.Parameter(torch.tensor(a)) for a in arrays(case, "init")]
    groups = CASES.get(case, {}).get("groups")
    params = parameters
    if groups:
        params = [{"params": [parameters[i] for i in members], **o} for members, o in groups]
    return parameters, ResidualPolarTransport(params, preset="paper", **hyper)


def close(actual, expected):
    actual = np.asarray(actual, dtype=np.float64)
    assert actual.shape == np.shape(expected)
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
    deviation = float(np.nanmax(np.abs(actual - expected), initial=0.0)) / scale
    assert deviation <= TOLERANCE, f"deviates by {deviation:.1e}"
    return deviation


def state_row(record):
    """The golden `state` row; what a vector does not have is NaN there."""
    matrix = "last_root_step" in record
    return [
        float(record["polar_weight"]),
        float(record["residual_entropy_rank"]),
        float(record["frame_confidence"]),
        float(record["root_condition"]) if matrix else np.nan,
        record["last_root_step"] if matrix else np.nan,
    ]


def telemetry_row(optimizer):
    total = optimizer.telemetry()["total"]
    return [
        total["turn"],
        total["gain"],
        total["history_alignment"],
        total["root_condition"],
        total["root_refresh_fraction"],
        total["root_age"],
        total["axial_closure"],
        total["frame_confidence"],
        total["residual_entropy_rank"],
        total["polar_weight"],
    ]


@pytest.mark.parametrize("case", sorted(CASES))
def test_trajectory(case):
    parameters, optimizer = build(case)
    gradients, ranks = arrays(case, "grads"), ARRAYS[f"{case}/ranks"]
    wanted, states = arrays(case, "params"), arrays(case, "state")
    for t in range(len(gradients[0])):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient[t])
        if not np.isnan(ranks[t]):
            optimizer.set_residual_entropy_rank(float(ranks[t]))
        optimizer.step()
        for parameter, expected, state in zip(parameters, wanted, states, strict=True):
            close(parameter.detach(), expected[t])
            close(state_row(optimizer.state[parameter]), state[t])
        close([float(g["gain"]) for g in optimizer.param_groups], ARRAYS[f"{case}/lr_gain"][t])
        close(telemetry_row(optimizer), ARRAYS[f"{case}/last"][t])
    momenta, lefts, rights = (arrays(case, f"final_{k}") for k in ("momentum", "left", "right"))
    for i, parameter in enumerate(parameters):
        record = optimizer.state[parameter]
        close(record["momentum"], momenta[i])
        if parameter.ndim >= 2:
            # Stored wide: the rows' factor of a tall matrix is its long side's.
            left, right = lefts[i], rights[i]
            sides = ("left", "right") if len(left) <= len(right) else ("right", "left")
            for side, factor in zip(sides, (left, right), strict=True):
                close(unpack(record[f"metric.{side}"], len(factor)).squeeze(0), factor)


def test_local_ranks_come_before_global_ones():
    case = "q_local_vs_global"
    parameters, optimizer = build(case)
    queued = ARRAYS[f"{case}/queued"]
    gradients, wanted = arrays(case, "grads"), arrays(case, "params")
    for t in range(len(queued)):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient[t])
        for rank in queued[t][:2]:
            optimizer.set_residual_entropy_rank(float(rank), parameters[0])
        for rank in queued[t][2:]:
            optimizer.set_residual_entropy_rank(float(rank))
        optimizer.step()
        for parameter, expected in zip(parameters, wanted, strict=True):
            close(parameter.detach(), expected[t])
        weights = [float(optimizer.state[p]["polar_weight"]) for p in parameters]
        close(weights, ARRAYS[f"{case}/polar_weight"][t])
    close([float(g["gain"]) for g in optimizer.param_groups], ARRAYS[f"{case}/lr_gain"][-1])

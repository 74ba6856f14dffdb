"""The two presets, and what each default was chosen from."""

from __future__ import annotations

from typing import Any

__all__ = ["OBSERVE_EVERY", "PRESETS", "preset_options"]

# The published rule, exact. Every number is the RPT guide's or its specification's.
_PAPER: dict[str, Any] = {
    "lr": 3e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-4,
    "matrix_ridge": 1e-4,
    "polar_beta": 0.9,
    "polar_release_beta": None,  # None: the same as polar_beta
    "polar_steps": 5,
    "polar_schedule": "quintic",
    "polar_prior": 0.0,
    "update_rms": None,
    "signal_length": False,
    "thin_as_vector": False,
    "max_relative_step": None,
    "root_drift_threshold": 0.05,
    "max_root_staleness": 10,
    "gain_rate": 0.02,
    "min_gain": 0.25,
    "max_gain": 4.0,
    "target_coherence": 0.0,
    "transport_eps": 1e-7,
    "roots": "full(drift_from='exact')",
    "transport": True,
    "closure": True,
    "nonfinite": "skip",
    "rounding": "nearest",
    "maximize": False,
    "capturable": False,
}

_DROP_IN: dict[str, Any] = _PAPER | {
    # A script that leaves AdamW's rate and decay alone gets AdamW's own defaults.
    "lr": 1e-3,
    "weight_decay": 1e-2,
    # β2 0.95: the value of the measurements that update_rms and polar_prior come from.
    "betas": (0.9, 0.95),
    # A step is as long as AdamW's would be, by the law that AdamW's own length follows, and never more
    # than a share of the matrix: that is what lets its rate carry over (docs/defaults.md).
    "update_rms": 1.2,
    "signal_length": True,
    "thin_as_vector": True,
    "max_relative_step": 0.07,
    # At weight 0 the battery's GPT ends 23 % higher, operator_1d at twice the loss.
    "polar_prior": 1.0,
    # A whitened request is nearly flat: three steps from a tight bound do what five do from ‖u‖_F.
    "polar_schedule": "tight",
    "polar_steps": 3,
    # An absolute floor would make tiny gradients behave differently from large ones.
    "eps": 0.0,
    # A hidden schedule on top of the user's is no drop-in. Where there is no schedule, and where few
    # steps at a small rate are all there is, RESULTS.md says which gain helps.
    "gain_rate": 0.0,
    "roots": "auto",
    # Age alone decides: no drift to measure, nothing for the host to wait for.
    "root_drift_threshold": None,
    "max_root_staleness": 50,
}

PRESETS: dict[str, dict[str, Any]] = {"drop_in": _DROP_IN, "paper": _PAPER}

# Steps from one observation to the next where `attach_model` is not told. The published rule measures
# in every one; in every fourth costs a quarter (examples/bench/observers.py: 2 % of forward and
# backward instead of 7 %) and leaves the polar weights within 0.03 of those of every step.
OBSERVE_EVERY = {"drop_in": 4, "paper": 1}


def preset_options(name: str) -> dict[str, Any]:
    """A fresh copy of a preset's options.

    Raises:
        ValueError: no such preset.
    """
    if name not in PRESETS:
        raise ValueError(
            f"preset={name!r} is unknown: choose one of {', '.join(map(repr, PRESETS))}"
        )
    return dict(PRESETS[name])

"""The options of the optimizer and of its parameter groups: one table of names, ranges, presets and words.

From it come the defaults that `help()` shows, what a wrong value is told, the documentation of the class,
and the numbers of the update rule.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from .roots import RootBackend, resolve_roots
from .rule.polar import polar_schedule

Preset = Literal["drop_in", "paper"]
PolarSchedule = Literal["tight", "quintic"]
PolarDtype = Literal["auto", "float32", "bfloat16"]
Nonfinite = Literal["skip", "raise"]
Rounding = Literal["nearest", "stochastic"]
ObserverNull = Literal["none", "shuffle", "analytic"]

# Takes the option's name with its group in front, and the value; returns a plain value or raises.
Check = Callable[[str, Any], Any]


class Option(NamedTuple):
    """One option of a parameter group: its value in either preset, what a value must be, what it does."""

    name: str
    drop_in: Any
    paper: Any
    check: Check
    says: str


# -- what a value must be --------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A number of NumPy, or an array of no dimensions, as Python's own."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    return value


def _number(
    low: float = 0.0,
    high: float = math.inf,
    *,
    above: bool = False,
    closed: bool = False,
    optional: bool = False,
) -> Check:
    """A number from `low` (or above it) to below `high` (or up to it); perhaps None."""

    def check(name: str, value: Any) -> float | None:
        value = _plain(value)
        if value is None and optional:
            return None
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} is a tensor of {value.numel()} elements, not one")
            # Read once, when the option is given.
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}={value!r} must be a number")
        inside = low < value if above else low <= value
        if not (inside and (value <= high if closed else value < high)):
            bounds = f"{'above' if above else 'at least'} {low:g}"
            limit = f"at most {high:g}" if closed else f"below {high:g}"
            raise ValueError(
                f"{name}={value!r} must be {bounds} and {limit if high < math.inf else 'finite'}"
            )
        return float(value)

    return check


def _rate(name: str, value: Any) -> float | Tensor:
    """A learning rate: as a number, but a tensor stays one, and its value is never waited for."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    return _number()(name, value)  # type: ignore[return-value]


def _betas(name: str, value: Any) -> tuple[float, float]:
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be a pair (beta1, beta2)")
    where = name.removesuffix("betas")
    for i, beta in enumerate(value, 1):
        if isinstance(beta, Tensor):
            raise TypeError(f"{where}beta{i} is a tensor; give a plain number")
        beta = _plain(beta)
        if not isinstance(beta, (int, float)) or not 0.0 <= beta < 1.0:
            raise ValueError(f"{where}beta{i}={beta!r} must be at least 0 and below 1")
    return float(value[0]), float(value[1])


def _positive(name: str, value: Any) -> int:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive whole number")
    return value


def _flag(name: str, value: Any) -> bool:
    value = _plain(value)
    if not isinstance(value, (bool, int)):
        raise TypeError(f"{name}={value!r} must be True or False")
    return bool(value)


def _choice(literal: Any) -> Check:
    values = get_args(literal)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, values))}")
        return value

    return check


def _polar_dtype(name: str, value: Any) -> str:
    text = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    return _choice(PolarDtype)(name, text)  # type: ignore[no-any-return]


def _roots(name: str, value: Any) -> str | RootBackend:
    try:
        resolve_roots(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name.removesuffix('roots')}{error}") from error
    return value  # type: ignore[no-any-return]


# -- the table -------------------------------------------------------------------------------------

# The published values are the RPT guide's or its specification's. What each default was chosen from is
# in docs/defaults.md.
# fmt: off
OPTIONS: tuple[Option, ...] = (
    # A script that leaves AdamW's rate and decay alone gets AdamW's own defaults.
    Option("lr", 1e-3, 3e-3, _rate, "learning rate, a number or a one-element tensor."),
    # β2 0.95: the value of the measurements that update_rms and polar_prior come from.
    Option("betas", (0.9, 0.95), (0.9, 0.999), _betas, "decay of the momentum and of the covariance."),
    # An absolute floor would make tiny gradients behave differently from large ones.
    Option("eps", 0.0, 1e-8, _number(), "absolute floor, in units of the gradient."),
    Option("weight_decay", 1e-2, 1e-4, _number(), "decoupled, as in AdamW."),
    # A step is as long as AdamW's would be, by the law that AdamW's own length follows, and never more
    # than a share of the matrix: that is what lets its rate carry over.
    Option("update_rms", 1.2, None, _number(above=True, optional=True),
           "root mean square that an update gets before the learning rate where successive requests are "
           "noise; None leaves every update its own length."),
    Option("signal_length", True, False, _flag,
           "whether that length follows the signal: longer where requests agree, shorter where they "
           "oppose each other, as AdamW's does (off: one fixed length)."),
    Option("thin_as_vector", True, False, _flag,
           "whether a matrix of one row or one column is stepped as a vector."),
    Option("max_relative_step", 0.07, None, _number(above=True, optional=True),
           "the largest share of its own root mean square by which one step may change a matrix, less "
           "where requests oppose each other; None for no bound."),
    # At weight 0 the battery's GPT ends 23 % higher, operator_1d at twice the loss.
    Option("polar_prior", 1.0, 0.0, _number(0.0, 1.0, closed=True),
           "polar weight of a matrix that no observation has reached."),
    Option("polar_beta", 0.9, 0.9, _number(0.0, 1.0), "smoothing of the polar weight while it rises."),
    Option("polar_release_beta", None, None, _number(0.0, 1.0, closed=True, optional=True),
           "smoothing while it falls; None means `polar_beta`, at 1 no observation lowers it."),
    # A whitened request is nearly flat: three steps from a tight bound do what five do from ‖u‖_F.
    Option("polar_steps", 3, 5, _positive, "Newton–Schulz steps of the polar factor."),
    Option("polar_schedule", "tight", "quintic", _choice(PolarSchedule),
           'their coefficients and start: "quintic" (Muon\'s, published) or "tight".'),
    Option("polar_dtype", "auto", "float32", _polar_dtype,
           'dtype of their products, "float32", "bfloat16" (or torch\'s) or "auto", which is bfloat16 on '
           "CUDA devices that have it; a float64 matrix always stays so, and lengths are float32."),
    Option("matrix_ridge", 1e-4, 1e-4, _number(),
           "smallest eigenvalue of a covariance that counts, relative to the mean one."),
    Option("roots", "auto", "full(drift_from='exact')", _roots,
           'the metric: "auto", "full", "blocked", "low_rank", "none", or a `RootBackend` instance.'),
    # Age alone decides: no drift to measure, nothing for the host to wait for.
    Option("root_drift_threshold", None, 0.05, _number(optional=True),
           "relative change of a covariance at which its root is recomputed; None: age alone decides."),
    Option("max_root_staleness", 50, 10, _positive,
           "steps after which it is recomputed in any case."),
    # A hidden schedule on top of the user's is no drop-in.
    Option("gain_rate", 0.0, 0.02, _number(),
           "rate of the coherence-controlled gain; 0 turns it off."),
    Option("min_gain", 0.25, 0.25, _number(above=True), "its lower bound."),
    Option("max_gain", 4.0, 4.0, _number(above=True), "its upper bound."),
    Option("target_coherence", 0.0, 0.0, _number(-1.0, 1.0, closed=True),
           "the frame coherence at which it stands still."),
    Option("transport_eps", 1e-7, 1e-7, _number(above=True),
           "length below which a request counts as zero."),
    Option("transport", True, True, _flag,
           "whether momentum is rotated into the live frame (off only for ablations)."),
    Option("closure", True, True, _flag, "whether the axial lag is closed (off only for ablations)."),
    Option("stacked", False, False, _flag,
           "whether a parameter of three or more dimensions is a stack of matrices, its last two "
           "dimensions, as experts are: each matrix then steps as a parameter of its own would. By "
           "default such a parameter is one matrix, all dimensions after the first its columns."),
    Option("maximize", False, False, _flag, "ascend instead."),
    Option("capturable", False, False, _flag,
           "keep every counter on the device, so that a CUDA graph can record a step: while one is "
           "recorded nothing waits for the host, roots come from matrix products, and a fixed number of "
           "them is made anew in each step; outside of a recording it changes nothing. The same in all "
           "groups; see docs/gpu.md."),
    Option("nonfinite", "skip", "skip", _choice(Nonfinite),
           '"skip" leaves a parameter with a non-finite gradient untouched, with one warning and a '
           'telemetry count; "raise" raises before anything changes.'),
    Option("rounding", "nearest", "nearest", _choice(Rounding),
           'how a bfloat16 weight is rounded after its step in float32: to "nearest", or "stochastic", '
           "which keeps on average what is smaller than the spacing of its numbers."),
)
# fmt: on

NAMES = tuple(option.name for option in OPTIONS)

# Steps from one observation to the next where `attach_model` is not told. The published rule measures
# in every one; in every fourth costs a quarter (examples/bench/observers.py: 2 % of forward and
# backward instead of 7 %) and leaves the polar weights within 0.03 of those of every step.
OBSERVE_EVERY = {"drop_in": 4, "paper": 1}


class _Default:
    """What an option is where the caller says nothing and the preset is "drop_in".

    It reads like the value and is not one: the same value, given, is kept with every preset.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == (other.value if isinstance(other, _Default) else other))

    __hash__ = None  # type: ignore[assignment]


# The signature's.
DEFAULTS: dict[str, Any] = {option.name: _Default(option.drop_in) for option in OPTIONS}


def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options among some arguments that were given; an `lr` of None was not."""
    return {
        name: value
        for name in NAMES
        if not isinstance(value := arguments[name], _Default)
        and not (name == "lr" and value is None)
    }


def preset_options(name: str) -> dict[str, Any]:
    """A preset's options.

    Raises:
        ValueError: no such preset.
    """
    if name not in get_args(Preset):
        choices = ", ".join(map(repr, get_args(Preset)))
        raise ValueError(f"preset={name!r} is unknown: choose one of {choices}")
    return {option.name: getattr(option, name) for option in OPTIONS}


def options_text() -> str:
    """The options in words, each with its value in both presets where they differ."""
    lines = []
    for option in OPTIONS:
        both = "" if option.drop_in == option.paper else f' {option.paper!r} with preset="paper".'
        lines += textwrap.wrap(
            f"{option.name}: {option.says}{both}",
            100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
    return "\n".join(lines)


def validated(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Every option checked, as plain values: numbers of other libraries become Python's.

    Raises:
        TypeError, ValueError: naming the option, its value, what it must be, and the group.
    """
    plain = {option.name: option.check(f"{where}: {option.name}", options[option.name])
             for option in OPTIONS}  # fmt: skip
    if plain["min_gain"] > plain["max_gain"]:
        raise ValueError(f"{where}: min_gain={plain['min_gain']} is above max_gain")
    try:
        polar_schedule(plain["polar_schedule"], plain["polar_steps"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return plain

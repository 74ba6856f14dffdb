"""Options of a parameter group: names, ranges, and what a wrong value is told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .polar import polar_schedule
from .presets import preset_options
from .roots import RootBackend, resolve_roots
from .rounding import ROUNDINGS
from .update import Rule

__all__ = [
    "IMPLEMENTATION_KEYWORDS",
    "OPTIONS",
    "adamw_keywords",
    "agree_on_capturable",
    "complete_group",
    "group_rule",
    "validate_capturable",
    "validate_options",
]

# AdamW's keywords that choose an implementation, not a rule.
IMPLEMENTATION_KEYWORDS = ("foreach", "fused", "differentiable", "amsgrad")

OPTIONS = tuple(preset_options("paper"))


def adamw_keywords(keywords: Mapping[str, Any]) -> None:
    """Accept, warn about or refuse the keywords of `torch.optim.AdamW` that RPT does not have.

    Raises:
        TypeError: a keyword nobody knows.
        ValueError: a keyword that asks for what RPT cannot do, with the remedy.
    """
    for name, value in keywords.items():
        if name not in IMPLEMENTATION_KEYWORDS:
            raise TypeError(
                f"ResidualPolarTransport has no option {name!r}; it takes {', '.join(OPTIONS)}"
            )
        if not value:
            continue
        if name == "amsgrad":
            raise ValueError("amsgrad=True: RPT has no running maximum; leave amsgrad out")
        if name == "differentiable":
            raise ValueError("differentiable=True: RPT's step is not differentiable; leave it out")
        warnings.warn(
            f"{name}=True has no effect: RPT always updates parameters in batches", stacklevel=3
        )


def complete_group(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Fill a group's missing options in place: its own preset if it names one, else the defaults."""
    if "preset" in group:
        base = preset_options(group["preset"])
    else:
        # Not everything there is an option of ours: torch adds entries of its own after a load.
        base = {name: defaults[name] for name in OPTIONS}
    for name, value in base.items():
        group.setdefault(name, value)
    if isinstance(group["betas"], list):
        group["betas"] = tuple(group["betas"])


def validate_options(options: Mapping[str, Any], where: str) -> None:
    """Check every option's type and range.

    Raises:
        TypeError, ValueError: naming the option, its value, what it must be, and the group.
    """

    def number(name: str, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
        value = options[name]
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"{where}: {name} is a tensor of {value.numel()} elements, not one"
                )
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{where}: {name}={value!r} must be a number")
        inside = low < value < high if low_open else low <= value < high
        if not inside:
            bounds = f"{'above' if low_open else 'at least'} {low:g}"
            bounds += f" and below {high:g}" if high < math.inf else " and finite"
            raise ValueError(f"{where}: {name}={value!r} must be {bounds}")

    for name in ("lr", "eps", "weight_decay", "matrix_ridge", "gain_rate"):
        number(name, 0.0)
    if options["root_drift_threshold"] is not None:
        number("root_drift_threshold", 0.0)
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{where}: betas={betas!r} must be a pair (beta1, beta2)")
    for i, beta in enumerate(betas, 1):
        if isinstance(beta, Tensor):
            raise TypeError(f"{where}: beta{i} is a tensor; give a plain number")
        if not isinstance(beta, (int, float)) or not 0.0 <= beta < 1.0:
            raise ValueError(f"{where}: beta{i}={beta!r} must be at least 0 and below 1")
    number("polar_beta", 0.0, 1.0)
    if options["polar_release_beta"] is not None:
        number("polar_release_beta", 0.0, 1.0)
    if options["update_rms"] is not None:
        number("update_rms", 0.0, low_open=True)
    if options["max_relative_step"] is not None:
        number("max_relative_step", 0.0, low_open=True)
    for name in ("min_gain", "max_gain", "transport_eps"):
        number(name, 0.0, low_open=True)
    if options["min_gain"] > options["max_gain"]:
        raise ValueError(f"{where}: min_gain={options['min_gain']} is above max_gain")
    number("target_coherence", -1.0, 1.0 + 1e-12)
    number("polar_prior", 0.0, 1.0 + 1e-12)
    for name in ("polar_steps", "max_root_staleness"):
        if (
            isinstance(options[name], bool)
            or not isinstance(options[name], int)
            or options[name] < 1
        ):
            raise ValueError(f"{where}: {name}={options[name]!r} must be a positive whole number")
    try:
        polar_schedule(options["polar_schedule"], options["polar_steps"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if options["nonfinite"] not in ("skip", "raise"):
        raise ValueError(f"{where}: nonfinite={options['nonfinite']!r} must be 'skip' or 'raise'")
    if options["rounding"] not in ROUNDINGS:
        raise ValueError(
            f"{where}: rounding={options['rounding']!r} must be 'nearest' or 'stochastic'"
        )
    if not isinstance(options["roots"], RootBackend):
        try:
            resolve_roots(options["roots"])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error


def validate_capturable(options: Mapping[str, Any], backend: RootBackend, where: str) -> None:
    """Refuse what a step without host decisions cannot do.

    Raises:
        ValueError: naming the option and the remedy.
    """
    if not options["capturable"]:
        return
    if options["root_drift_threshold"] is not None:
        raise ValueError(
            f"{where}: capturable=True leaves no drift to be judged on the host; pass "
            "root_drift_threshold=None (preset='paper' has a threshold), or leave capturable out"
        )
    if options["nonfinite"] == "raise":
        raise ValueError(
            f"{where}: capturable=True cannot raise for a value that only the device knows; pass "
            'nonfinite="skip", which leaves the parameter alone and counts it in telemetry()'
        )
    if not backend.capturable:
        raise ValueError(
            f"{where}: capturable=True needs roots made of matrix products, and {options['roots']!r} "
            'decomposes; pass roots="auto", "full", "blocked" or "none"'
        )


def agree_on_capturable(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups that differ in it.

    Raises:
        ValueError: with the remedy.
    """
    if len({bool(group["capturable"]) for group in groups}) > 1:
        raise ValueError(
            "parameter groups differ in capturable: one step serves all groups; give all the same, or "
            "use two optimizers"
        )


def group_rule(group: Mapping[str, Any]) -> Rule:
    """The numbers of a group as the update rule takes them."""

    def plain(value: Any) -> Any:
        # Arrays take no tensor beside them, and a number of NumPy's own would widen them to float64.
        # Where the host must not wait, all is tensors and the option may stay one.
        return value if group["capturable"] else float(value)

    beta1, beta2 = map(plain, group["betas"])
    release, rms = group["polar_release_beta"], group["update_rms"]
    return Rule(
        beta1=beta1,
        beta2=beta2,
        eps=plain(group["eps"]),
        matrix_ridge=group["matrix_ridge"],
        polar_beta=group["polar_beta"],
        polar_release_beta=group["polar_beta"] if release is None else release,
        polar_schedule=polar_schedule(group["polar_schedule"], group["polar_steps"]),
        transport_eps=plain(group["transport_eps"]),
        root_drift_threshold=group["root_drift_threshold"],
        max_root_staleness=group["max_root_staleness"],
        update_rms=None if rms is None else plain(rms),
        signal_length=bool(group["signal_length"]),
        transport=group["transport"],
        closure=group["closure"],
        host_reads=not group["capturable"],
    )

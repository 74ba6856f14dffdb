"""Parameter groups: completed, validated before every step, and their root backends under names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpt.observers.caller import warn

from .options import NAMES, preset_options, validated
from .roots import RootBackend, resolve_roots
from .rule.polar import polar_schedule
from .rule.update import Rule

_options_of = itemgetter(*(name for name in NAMES if name != "lr"))
# What a group may hold beside options: torch's own entries, and the state of the gain.
_OTHERS = (
    *("params", "param_names", "preset", "gain"),
    *("foreach", "fused", "differentiable", "amsgrad"),
)
# What the rule takes as it is.
_RULE = Rule.__annotations__.keys() - {"beta1", "beta2", "polar_release_beta", "polar_schedule"}


class _Seen(NamedTuple):
    """What a group was when it was last looked at, and the rule's numbers from it."""

    options: tuple[Any, ...]
    parameters: list[int]
    rule: Rule


class Groups:
    """How the groups of an optimizer are kept: plain values only, so that checkpoints hold no others.

    Args:
        custom: root backends that no text describes, by the names they go under.
    """

    def __init__(self, custom: dict[str, RootBackend]) -> None:
        self.custom = custom
        self.seen: list[_Seen] = []

    def complete(
        self, group: dict[str, Any], others: Sequence[dict[str, Any]], defaults: Mapping[str, Any]
    ) -> None:
        """Fill a new group's missing options, in place: its own preset's if it names one, else the defaults.

        Raises:
            TypeError, ValueError: naming the option, what it must be, and the group.
        """
        where = f"parameter group {len(others)}"
        refuse_adamw_keywords(group)
        unknown = [str(key) for key in group if key not in NAMES and key not in _OTHERS]
        for key in unknown:  # others are the caller's own
            for close in get_close_matches(key, [*NAMES, "preset"], n=1, cutoff=0.8):
                warn(
                    f"{where} has no option {key!r}, and it has no effect: did you mean {close!r}?"
                )
        fill(group, defaults)
        group |= self.validated(group, where)
        _agree_on_capturable([*others, group])
        # A number of the host's own, whatever the default device.
        group.setdefault("gain", torch.ones((), dtype=torch.float64, device="cpu"))

    def look(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Validate groups that were edited since they were last looked at; whether any was.

        Raises:
            TypeError, ValueError: as `complete`.
        """
        edited = False
        for g, group in enumerate(groups):
            rate, seen = group["lr"], self.seen[g] if g < len(self.seen) else None
            # The rate changes at every step of a schedule.
            if (
                seen is not None
                and (isinstance(rate, Tensor) or (type(rate) is float and 0.0 <= rate < math.inf))
                and seen.options == _options_of(group)
                and seen.parameters == list(map(id, group["params"]))
            ):
                continue
            _agree_on_capturable(groups)
            group |= self.validated(group, f"parameter group {g}")
            now = _Seen(_options_of(group), list(map(id, group["params"])), group_rule(group))
            self.seen[g : g + 1] = [now]
            edited = True
        return edited

    def validated(self, group: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A group's options, checked, as plain values and text."""
        roots = group["roots"]
        if isinstance(roots, str):
            roots = self.custom.get(roots, roots)
        plain = validated({**group, "roots": roots}, where)
        if plain["capturable"]:
            _refuse_uncapturable(plain, resolve_roots(roots), where)
        return plain | {"roots": self.name_roots(roots)}

    def name_roots(self, roots: str | RootBackend) -> str:
        """The backend as text."""
        if isinstance(roots, str):
            return roots
        for name, known in self.custom.items():
            if known is roots:
                return name
        text = roots.describe()
        try:
            if resolve_roots(text) == roots:
                return text
        except ValueError:
            pass
        name, count = text, 1
        while self.custom.setdefault(name, roots) is not roots:
            count += 1
            name = f"{text}#{count}"
        return name

    def backend(self, name: str) -> RootBackend:
        """The backend that goes under a name.

        Raises:
            ValueError: one that is not known here, with the remedy.
        """
        if name in self.custom:
            return self.custom[name]
        try:
            return resolve_roots(name)
        except ValueError as error:
            raise ValueError(
                f"{error}. If it is a backend of your own, build the optimizer with that instance as "
                "roots= before loading"
            ) from error


def fill(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Give a group the options it lacks: those of its own preset if it names one, else the defaults."""
    base = preset_options(group["preset"]) if "preset" in group else defaults
    for name in NAMES:
        group.setdefault(name, base[name])


def refuse_adamw_keywords(keywords: Mapping[str, Any]) -> None:
    """Accept, warn about or refuse those keywords of `torch.optim.AdamW` that choose an implementation.

    Raises:
        ValueError: a keyword that asks for what RPT cannot do, with the remedy.
    """
    if keywords.get("amsgrad"):
        raise ValueError("amsgrad=True: RPT has no running maximum; leave amsgrad out")
    if keywords.get("differentiable"):
        raise ValueError("differentiable=True: RPT's step is not differentiable; leave it out")
    for name in ("foreach", "fused"):
        if keywords.get(name):
            warn(f"{name}=True has no effect: RPT always updates parameters in batches")


def group_rule(group: Mapping[str, Any]) -> Rule:
    """The numbers of a group, validated, as the update rule takes them."""
    beta1, beta2 = group["betas"]
    release = group["polar_release_beta"]
    return Rule(
        beta1=beta1,
        beta2=beta2,
        polar_release_beta=group["polar_beta"] if release is None else release,
        polar_schedule=polar_schedule(group["polar_schedule"], group["polar_steps"]),
        **{name: group[name] for name in _RULE},
    )


def _refuse_uncapturable(options: Mapping[str, Any], backend: RootBackend, where: str) -> None:
    """Refuse what a step without host decisions cannot do."""
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


def _agree_on_capturable(groups: Sequence[Mapping[str, Any]]) -> None:
    if len({bool(group["capturable"]) for group in groups}) > 1:
        raise ValueError(
            "parameter groups differ in capturable: one step serves all groups; give all the same, or "
            "use two optimizers"
        )

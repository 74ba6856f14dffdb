"""`ResidualPolarTransport`: parameter groups, the order of events in a step, observation, checkpoints.

The rule is `rpt.rule`, the step over stacks `rpt.step`, the seam to ranks `rpt.ownership`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rpt.observers.attach import Attachment
from rpt.observers.caller import warn
from rpt.observers.rank import ObserverSettings

from . import options
from . import work as working
from .apply import SingleProcess
from .checkpoint import canonical_name, check_loadable, matched_by_name, restore_dtypes
from .groups import Groups
from .manifold import manifold_of, step_on_manifold
from .observing import NOTHING, Observing, own
from .options import DEFAULTS, Nonfinite, ObserverNull, PolarDtype, PolarSchedule, Preset, Rounding
from .ownership import (
    MODES,
    Agreement,
    Live,
    Outcome,
    Ownership,
    OwnershipMode,
    choose_ownership,
    unreadable,
)
from .refusals import interrupted, refuse_in_a_graph, refuse_parameter, refuse_sparse
from .roots import RootBackend
from .rule.update import Rule
from .step import advance, deliver, group_gain
from .store.layout import compute_dtype
from .store.registry import StackRegistry
from .store.schema import counted, holds_state, saved
from .telemetry import Telemetry, gather_telemetry
from .work import Work, plan

__all__ = ["ResidualPolarTransport"]

Self = TypeVar("Self", bound="ResidualPolarTransport")

_options_of = itemgetter(*(name for name in options.NAMES if name != "lr"))
# Plans for as many sets of parameters with a gradient are kept.
_PLANS = 16

# `_update` behind a wall for torch.compile, where a graph cannot hold the step (`rpt.compiled`): its host
# decisions would be traced anew each time. Made with the first optimizer: torch.compiler's machinery
# takes seconds to import, which `import rpt` saves.
_update_untraced: Callable[[ResidualPolarTransport], None] | None = None


class _Known(NamedTuple):
    """What about a parameter decided its place: when any of it changes, places are chosen anew."""

    facts: tuple[Any, ...]
    record: Any
    curved: bool


class _Group(NamedTuple):
    """What a parameter group was when it was last looked at, and the rule's numbers from it."""

    options: tuple[Any, ...]
    parameters: list[int]
    rule: Rule


class ResidualPolarTransport(Optimizer):
    """Residual Polar Transport: a two-sided matrix metric, transported momentum, a polar share.

    Replaces `torch.optim.AdamW` at the same learning rate. With the default preset nothing else needs
    to be said; `attach_model` additionally lets observed matrices adapt their polar weight.

    Every option up to `rounding` can be overridden per parameter group, `preset` included. Defaults are
    those of the preset "drop_in"; what `preset="paper"` has instead is said beside each.

    Args:
        params: parameters, named parameters, or parameter groups, as for every torch optimizer.
        preset: "drop_in", at which AdamW's learning rate carries over, or "paper", the published rule.
        {options}
        observer_dim: sketch width of observations.
        observer_ridge: relative ridge of the observed regression.
        observer_center: whether activations and cotangents are centred over samples.
        observer_null: null model of a calibrated rank, "none" (the published statistic), "shuffle" or
            "analytic".
        ownership: how several ranks share the work (see `rpt.distributed`): "owner" gives every matrix
            to one rank, "replicated" lets every rank compute all, "local" ignores other ranks, "auto"
            is "owner" wherever ranks hold the same parameters or shards of them.
        foreach, fused: as AdamW takes them; they have no effect.
        differentiable, amsgrad: as AdamW takes them; True is refused with the remedy.

    Raises:
        ValueError, TypeError: an option out of range, named with its value and its group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = DEFAULTS["lr"],
        *,
        preset: Preset = "drop_in",
        betas: tuple[float, float] = DEFAULTS["betas"],
        eps: float = DEFAULTS["eps"],
        weight_decay: float = DEFAULTS["weight_decay"],
        update_rms: float | None = DEFAULTS["update_rms"],
        signal_length: bool = DEFAULTS["signal_length"],
        thin_as_vector: bool = DEFAULTS["thin_as_vector"],
        max_relative_step: float | None = DEFAULTS["max_relative_step"],
        polar_prior: float = DEFAULTS["polar_prior"],
        polar_beta: float = DEFAULTS["polar_beta"],
        polar_release_beta: float | None = DEFAULTS["polar_release_beta"],
        polar_steps: int = DEFAULTS["polar_steps"],
        polar_schedule: PolarSchedule = DEFAULTS["polar_schedule"],
        polar_dtype: PolarDtype | torch.dtype = DEFAULTS["polar_dtype"],
        matrix_ridge: float = DEFAULTS["matrix_ridge"],
        roots: str | RootBackend = DEFAULTS["roots"],
        root_drift_threshold: float | None = DEFAULTS["root_drift_threshold"],
        max_root_staleness: int = DEFAULTS["max_root_staleness"],
        gain_rate: float = DEFAULTS["gain_rate"],
        min_gain: float = DEFAULTS["min_gain"],
        max_gain: float = DEFAULTS["max_gain"],
        target_coherence: float = DEFAULTS["target_coherence"],
        transport_eps: float = DEFAULTS["transport_eps"],
        transport: bool = DEFAULTS["transport"],
        closure: bool = DEFAULTS["closure"],
        stacked: bool = DEFAULTS["stacked"],
        maximize: bool = DEFAULTS["maximize"],
        capturable: bool = DEFAULTS["capturable"],
        nonfinite: Nonfinite = DEFAULTS["nonfinite"],
        rounding: Rounding = DEFAULTS["rounding"],
        observer_dim: int = 32,
        observer_ridge: float = 1e-7,
        observer_center: bool = True,
        observer_null: ObserverNull = "none",
        ownership: OwnershipMode | Ownership = "auto",
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        amsgrad: bool = False,
    ) -> None:
        arguments = locals()
        options.refuse_adamw_keywords(arguments)
        defaults = options.preset_options(preset) | options.given(arguments)
        self._groups = Groups({})
        defaults = options.validated(defaults, "defaults")
        defaults["roots"] = self._groups.name_roots(defaults["roots"])
        self.observer_settings = ObserverSettings(
            dim=observer_dim, ridge=observer_ridge, center=observer_center, null=observer_null
        )
        if isinstance(ownership, str) and ownership not in MODES:
            raise ValueError(
                f"ownership={ownership!r} is unknown: choose one of {', '.join(map(repr, MODES))}"
            )
        self._mode = ownership
        self._observe_every = options.OBSERVE_EVERY[preset]
        self._begin()
        super().__init__(params, defaults)

    def _begin(self, attachment: Attachment | None = None) -> None:
        """Set up what is never serialised; `attachment` is the copied model's, in a copy."""
        global _update_untraced
        if _update_untraced is None:
            _update_untraced = torch.compiler.disable(ResidualPolarTransport._update)
        from .compiled import Compiled  # late, as torch.compiler

        self._compiled = Compiled(self)
        self._observing = Observing(self.observer_settings, attachment)
        # What attached models call their parameters.
        self._names: dict[Tensor, str] = getattr(self, "_names", {})
        self._registry = StackRegistry()
        self._ownership: Ownership | None = None
        self._grown = False
        self._warned: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        """Look at everything anew in the next step."""
        self._registry.forget()
        self._looked_at: list[_Group] = []
        self._known: dict[int, _Known] = {}
        self._plans: dict[tuple[Any, ...], list[Work]] = {}
        self._settled = self._blind = self._curved = False
        self._compiled.ready = {}

    # -- parameter groups ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks come from its own `preset` or from the constructor's.

        Raises:
            ValueError, TypeError: an option out of range, or a parameter that is already in a group.
        """
        if isinstance(param_group, dict):
            where = f"parameter group {len(self.param_groups)}"
            options.refuse_adamw_keywords(param_group)
            options.warn_of_misspelt_keys(param_group, where)
            options.complete_group(param_group, self.defaults)
            param_group |= self._groups.validated(param_group, where)
            options.agree_on_capturable([*self.param_groups, param_group])
            # A number of the host's own, whatever the default device.
            param_group.setdefault("gain", torch.ones((), dtype=torch.float64, device="cpu"))
        super().add_param_group(param_group)
        self._grown = True
        self._settled = False
        self._compiled.ready = {}

    def _backend(self, name: str) -> RootBackend:
        return self._groups.backend(name)

    def parameter_name(self, group_index: int, index: int) -> str:
        """How messages call a parameter: as it was named, else as an attached model names it, else by
        group and shape."""
        group = self.param_groups[group_index]
        parameter = group["params"][index]
        shape, names = tuple(parameter.shape), group.get("param_names")
        name = names[index] if names else self._names.get(parameter)
        return f"{name} {shape}" if name else f"parameter {index} of group {group_index} {shape}"

    def _all(self) -> list[Tensor]:
        return [p for *_, p in self._enumerate()]

    def _enumerate(self) -> Iterator[tuple[int, int, Tensor]]:
        for g, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield g, i, parameter

    # -- the step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; compiled, as part of the function's graph.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient, a complex parameter or (with `nonfinite="raise"`) a
                non-finite gradient, before anything changed; or a failure in the middle of a step,
                naming which parameters were already updated.
            ValueError, TypeError: an option assigned to a group that is out of range, likewise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check = "_accelerator_graph_capture_health_check"  # its name since torch 2.10
        getattr(self, check, self._cuda_graph_capture_health_check)()
        observing = self._observing
        traced = torch.compiler.is_compiling() and not (observing.anything or observing.bereft)
        if not (traced and self._compiled.step()):
            assert _update_untraced is not None
            _update_untraced(self)
        return loss

    def _update(self) -> None:
        """The step without its closure: refuse, agree, compute and write stack by stack, conclude."""
        self._look_at_groups()
        try:
            live, kinds = self._live_gradients()
        except RuntimeError as error:
            self._ranks().refuse(error)
            raise
        for kind in kinds:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return self._update()
        ranks, capturable = self._ranks(), self.param_groups[0]["capturable"]
        recorded = self._blind or (capturable and working.is_recording())
        if capturable:
            observed = self._observing.attachment is not None
            refuse_in_a_graph(
                live,
                self.param_groups,
                alone=isinstance(ranks, SingleProcess),
                attached=observed and recorded,
            )
        seen = self._observing.commit() if self._observing.anything else NOTHING
        if recorded:
            agreed = Agreement(live, [], seen)
        else:
            agreed = ranks.agree(live, seen)
            if agreed.live is not live:
                # Other ranks may have had a gradient where this one has none.
                self._settled &= all(id(p) in self._known for _, p, _ in agreed.live)
            live, peaks = self._finite(agreed.live, agreed.peaks)
            agreed = Agreement(live, peaks, agreed.observed)
        self._observing.stage.last_counts = agreed.observed.counts
        curved: list[Live] = []
        if not self._settled or self._curved:
            agreed, curved = self._settle(agreed, ranks)
        outcomes, failed = self._step_stacks(agreed, ranks, recorded)
        for g, parameter, gradient in curved:
            step_on_manifold(parameter, gradient, self.state[parameter], self.param_groups[g])
        if failed and "roots" not in self._warned:
            self._warn_of_failed_roots(failed)
        for g, group in enumerate(self.param_groups):
            if group["gain_rate"]:
                self._move_gain(group, [o for o in outcomes if o.group == g], recorded)
        # Distributed checkpoints make the state's keys by a step on zero gradients, which no forward
        # led to: nothing was to be observed.
        made_up = bool(agreed.peaks) and not any(agreed.peaks)
        watched = self._observing.attachment is not None or self._observing.bereft
        if watched and not made_up:
            self._observing.end_step(
                {p: q for o in outcomes for p, q in zip(o.parameters, o.coherence, strict=True)}
            )

    def _look_at_groups(self) -> None:
        """Validate groups that were edited since they were last looked at, before any change."""
        groups = self.param_groups
        for g, group in enumerate(groups):
            rate, seen = group["lr"], self._looked_at[g] if g < len(self._looked_at) else None
            # The rate changes at every step of a schedule.
            if not (type(rate) is float and 0.0 <= rate < math.inf) and not isinstance(
                rate, Tensor
            ):
                seen = None
            if (
                seen is not None
                and seen.options == _options_of(group)
                and seen.parameters == list(map(id, group["params"]))
            ):
                continue
            options.agree_on_capturable(groups)
            group |= self._groups.validated(group, f"parameter group {g}")
            parameters = list(map(id, group["params"]))
            looked = _Group(_options_of(group), parameters, options.group_rule(group))
            self._looked_at[g : g + 1] = [looked]
            self._settled = False

    def _live_gradients(self) -> tuple[list[Live], set[str]]:
        """(group index, parameter, gradient) of all that take part, and the kinds of their devices.

        Notices whatever moved since places were chosen; refuses what cannot be updated.
        """
        live: list[Live] = []
        kinds = set()
        known, state, strided = self._known, self.state, torch.strided
        for g, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or not parameter.numel():
                    continue
                if gradient.layout is not strided:
                    refuse_sparse(parameter, self._name)
                device = parameter.device
                kinds.add(device.type)
                was = known.get(id(parameter))
                if (
                    was is None
                    or was.facts != (g, parameter.shape, parameter.dtype, device)
                    or was.record is not state.get(parameter)
                ):
                    refuse_parameter(parameter, self._name)
                    self._settled = False
                live.append((g, parameter, gradient))
        if not self._settled:
            self._blind = any(unreadable(parameter) for _, parameter, _ in live)
        return live, kinds

    def _settle(self, agreed: Agreement, ranks: Ownership) -> tuple[Agreement, list[Live]]:
        """Give all that take part a place; what lives on a manifold comes back apart."""
        live, peaks, observed = agreed
        curved = [manifold_of(parameter) is not None for _, parameter, _ in live]
        apart = list(compress(live, curved))
        if apart:
            flat = [not c for c in curved]
            live, peaks = list(compress(live, flat)), list(compress(peaks, flat))
        if not self._settled:
            self._registry.ensure(
                [(g, p) for g, p, _ in live if ranks.owns(p)],
                self.param_groups,
                self.state,
                self._backend,
            )
            self._plans.clear()
            self._compiled.ready = {}
            for (g, p, _), is_curved in zip(agreed.live, curved, strict=True):
                facts = (g, p.shape, p.dtype, p.device)
                self._known[id(p)] = _Known(facts, self.state.get(p), is_curved)
            self._settled = True
            self._curved = any(known.curved for known in self._known.values())
        return Agreement(live, peaks, observed), apart

    def _step_stacks(
        self, agreed: Agreement, ranks: Ownership, recorded: bool
    ) -> tuple[list[Outcome], list[tuple[Tensor, Tensor]]]:
        """Step all stacks, a portion at a time; also (parameter, 0-d bool) of roots that were due."""
        outcomes: list[Outcome] = []
        done: list[Work] = []
        tried: list[tuple[Tensor, Tensor]] = []
        by_id = None
        for portion in ranks.portions(agreed.live):
            peaks: list[float] = agreed.peaks
            if portion is not agreed.live and not recorded:
                if by_id is None:
                    by_id = {
                        id(p): peak for (_, p, _), peak in zip(agreed.live, peaks, strict=True)
                    }
                peaks = [by_id[id(p)] for _, p, _ in portion]
            works = self._plan(portion, recorded)
            # A host read costs nothing on a CPU: there each stack is finished before the next one
            # starts, and its intermediates are freed. On a device all share one synchronisation.
            here = {work.stack.on_host for work in works}
            for batch in [works] if False in here else [[work] for work in works]:
                try:
                    ranks_seen, overall = agreed.observed.ranks, agreed.observed.global_rank
                    advance(batch, portion, peaks, ranks_seen, overall, ranks)
                    for work in batch:
                        outcomes.append(deliver(work, ranks))
                        done.append(work)
                        if work.failed is not None:
                            tried += work.tried()
                except Exception as error:
                    ranks.fail(error)
                    self._settled = False  # what was opened may be half done
                    finished = {id(work) for work in done}
                    broken = [p for w in batch if id(w) not in finished for p in w.parameters]
                    updated = [p for w in done for p in w.parameters]
                    raise interrupted(error, broken, updated, self._name) from error
        return list(ranks.finish(outcomes)), tried

    def _plan(self, portion: list[Live], recorded: bool) -> list[Work]:
        """How to step some parameters; the same as last time while nothing moved."""
        key = (recorded, *map(id, map(itemgetter(1), portion)))
        works = self._plans.get(key)
        if works is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            rules = [looked.rule for looked in self._looked_at]
            works = plan(portion, self.param_groups, rules, self._registry.home, recorded)
            self._plans[key] = works
        for work in works:  # a group may have been replaced by one of the same options
            work.group = self.param_groups[work.group_index]
        return works

    def _ranks(self) -> Ownership:
        """Who owns what; decided when it is first needed, because then all parameters are known."""
        if self._ownership is None or self._grown:
            chosen = choose_ownership(self._mode, self, self._ownership)
            self._ownership = ownership = chosen or SingleProcess()
            self._grown = False
            self._warn_of_flat_parameters()
            return ownership
        return self._ownership

    def _finite(self, live: list[Live], peaks: list[float]) -> tuple[list[Live], list[float]]:
        """Leave out parameters whose gradient is not finite, or raise, as their group says.

        Args:
            live: what takes part.
            peaks: the largest absolute entry of each gradient.

        Returns:
            what stays of both.
        """
        if math.isfinite(sum(peaks)):
            return live, peaks
        finite = [math.isfinite(peak) for peak in peaks]
        bad = [entry for entry, ok in zip(live, finite, strict=True) if not ok]
        if not bad:
            return live, peaks
        parameters = [parameter for _, parameter, _ in bad]
        if any(self.param_groups[g]["nonfinite"] == "raise" for g, *_ in bad):
            raise RuntimeError(
                f"non-finite gradient in {self._listed(parameters)}; nothing was updated. Lower the "
                'learning rate, clip gradients, use a GradScaler with float16, or pass nonfinite="skip"'
            )
        for parameter in parameters:
            record = self.state[parameter]
            record["skipped"] = record.get("skipped", 0)
            record["skipped"] += 1  # in place where it is part of a stack
        self._warn_of_nonfinite(parameters)
        return list(compress(live, finite)), list(compress(peaks, finite))

    def _warn_of_nonfinite(self, bad: list[Tensor]) -> None:
        self._warn_once(
            "nonfinite",
            f"skipped non-finite gradients in {self._listed(bad)}; telemetry() counts them from here on",
        )

    def _listed(self, parameters: list[Tensor]) -> str:
        return ", ".join(map(self._name, parameters[:3])) + (", …" if len(parameters) > 3 else "")

    def _move_gain(self, group: dict[str, Any], mine: list[Outcome], recorded: bool) -> None:
        # Where the coherences are: here the host would wait for them.
        if mine and group["gain"].device != mine[0].coherence.device:
            group["gain"] = group["gain"].to(mine[0].coherence.device)
        if group["capturable"] and mine:
            # In place: a replay reads what the replay before it wrote.
            group["gain"].copy_(group_gain(group, mine))
        elif not recorded:
            group["gain"] = group_gain(group, mine)

    def _warn_of_failed_roots(self, tried: list[tuple[Tensor, Tensor]]) -> None:
        # Decompositions wait for the device anyway: whether one failed is known on the host by now.
        failed = [parameter for parameter, bad in tried if bad]
        if failed:
            self._warn_once(
                "roots",
                f"no root could be computed for {self._name(failed[0])}, also in float64: it keeps "
                "its previous root; telemetry() counts such failures from here on",
            )

    def _warn_of_flat_parameters(self) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.numel()]
        if len(every) == 1 and every[0].ndim == 1 and every[0].numel() >= 1024:
            self._warn_once(
                "flat",
                f"the only parameter is flat, {self._name(every[0])}: RPT works on matrices, and steps "
                "it as one vector. If a wrapper flattened a model, keep its parameters "
                "(use_orig_params=True in FSDP1, or fully_shard)",
            )

    def _name(self, parameter: Tensor) -> str:
        return next(self.parameter_name(g, i) for g, i, p in self._enumerate() if p is parameter)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

    # -- observation --------------------------------------------------------------------------------

    def attach_model(
        self,
        model: nn.Module,
        module_filter: Callable[[nn.Module], bool] | None = None,
        *,
        strategy: str = "hook",
        observe_every: int | None = None,
        sites: Iterable[Any] | None = None,
    ) -> list[str]:
        """Observe a model's boundaries, replacing an earlier attachment.

        Observed are the modules that the model, or any module inside it, names in
        `optimizer_observation_modules()`; without one, every `nn.Linear` (and `Conv1D` of
        transformers) of this optimizer whose smaller side is at least 2. `module_filter` and `sites`
        override both. One warning says what was found where that leaves nothing. Parameters that were
        given without names are called by the model's from here on.

        Args:
            model: the model that is trained.
            module_filter: True for modules to observe.
            strategy: "hook", or "compiled" for a model that `torch.compile` is to take whole.
            observe_every: measure at every k-th update; None: 4, or with `preset="paper"` in each.
            sites: modules, module names, or what `rpt.observers.derive_sites` returned.

        Returns:
            The names of the observed modules.

        Raises:
            TypeError, ValueError: what cannot be attached; an earlier attachment then stays.
        """
        names = self._observing.attach(
            model,
            self._all(),
            module_filter=module_filter,
            strategy=strategy,
            observe_every=self._observe_every if observe_every is None else observe_every,
            sites=sites,
        )
        found: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}
        self._names |= {p: found[p] for p in self._all() if p in found}
        self._observing.restore_ages(self.state)
        return names

    @contextmanager
    def observing(self: Self, model: nn.Module, **options: Any) -> Iterator[Self]:
        """Observe a model inside a `with` block; options as in `attach_model`."""
        self.attach_model(model, **options)
        try:
            yield self
        finally:
            self.remove_observers()

    def observe_residual(
        self,
        activations: Tensor,
        residuals: Tensor,
        parameters: Tensor | Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Queue one observation by hand, for maps that no module hook can see.

        Args:
            activations: X, (..., n): the input of the linear map.
            residuals: Δ, (..., m): the cotangent of its output.
            parameters: whose polar weight it concerns; None for every matrix without its own.

        Returns:
            The normalised entropy rank, 0-d.

        Raises:
            ValueError: widths that do not fit a named weight, or rows that do not match.
        """
        return self._observing.measure(activations, residuals, own(parameters, self._all))

    def set_residual_entropy_rank(
        self, rank: float | Tensor, parameters: Tensor | Iterable[Tensor] | None = None
    ) -> None:
        """Queue a known entropy rank in [0, 1] for the next step; parameters as above."""
        self._observing.queue(rank, own(parameters, self._all))

    def clear_observations(self) -> None:
        """Drop everything observed since the last step."""
        self._observing.clear()

    def remove_observers(self) -> None:
        """Detach from the model; polar weights keep their values."""
        self._observing.detach()
        for record in self.state.values():
            if "observation_age" in record:
                record["observation_age"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and drop observations of the backward passes they came from."""
        self.clear_observations()
        super().zero_grad(set_to_none)

    # -- telemetry and checkpoints ------------------------------------------------------------------

    def telemetry(self) -> Telemetry:
        """What happened in the last step, in plain Python; printing it gives a table."""
        return gather_telemetry(self)

    def __getstate__(self) -> dict[str, Any]:
        self._observing.note_ages(self.state)
        state = super().__getstate__()
        return state | {
            "state": defaultdict(dict, {p: saved(record) for p, record in self.state.items()}),
            "_custom_roots": self._groups.custom,
            "observer_settings": self.observer_settings,
            "_observe_every": self._observe_every,
            "_attachment": self._observing.attachment,
            "_names": self._names,
            "_mode": self._mode if isinstance(self._mode, str) else "auto",
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_groups"):
            self._groups = Groups(self.__dict__.pop("_custom_roots"))
            self._begin(self.__dict__.pop("_attachment", None))
            self._observing.restore_ages(self.state)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on: plain numbers, text, and tensors that later steps leave alone.

        Where ranks share the work this is a collective: call it on every rank, also if only one of
        them writes the file.
        """
        self._observing.note_ages(self.state)
        if not self.state:
            return super().state_dict()
        own = self.state
        compact = {parameter: saved(record) for parameter, record in own.items()}
        try:
            self.state = self._ranks().whole_state(compact)  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict()` gave, keeping every tensor's own dtype.

        Parameters are matched by name where both sides know all names, else by order, as torch
        matches them; a warning says where names are known but differ.

        Raises:
            ValueError: groups, parameter shapes or root backends that do not match.
        """
        state_dict = matched_by_name(self, state_dict)
        check_loadable(self, state_dict)
        for group in state_dict["param_groups"]:
            self._backend(group.get("roots", "auto"))
        seen: dict[str, Any] = {}
        # Registered last, so that it sees what the user's own hooks made of the state.
        handle = self.register_load_state_dict_pre_hook(lambda _, final: seen.update(final))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        restore_dtypes(self, seen)
        for group in self.param_groups:
            options.complete_group(group, self.defaults)
        if self.state:
            self._ranks().adopt_state(self.state)
        for parameter, record in self.state.items():
            if holds_state(record):
                record |= counted(record, compute_dtype(parameter))
        self._observing.restore_ages(self.state)


ResidualPolarTransport.__doc__ = (ResidualPolarTransport.__doc__ or "").replace(
    "{options}", options.options_text().lstrip()
)

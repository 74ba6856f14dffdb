"""`ResidualPolarTransport`: the order of events in a step, observation, checkpoints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rpt.observers.attach import Attachment
from rpt.observers.caller import warn
from rpt.observers.rank import ObserverSettings

from . import options
from . import work as working
from .checkpoint import canonical_name, load
from .groups import Groups, refuse_adamw_keywords
from .manifold import step_on_manifold
from .observing import NOTHING, Observing, own
from .options import DEFAULTS, Nonfinite, ObserverNull, PolarDtype, PolarSchedule, Preset, Rounding
from .ownership import Agreement, Live, Ownership, OwnershipMode, check_mode, choose_ownership
from .refusals import refuse_in_a_graph, warn_of_a_flat_parameter, without_nonfinite
from .roots import RootBackend
from .stacks import Stacks
from .step import move_gains
from .store.schema import saved
from .telemetry import Telemetry, gather_telemetry

# `_update` behind a wall for torch.compile, where a graph cannot hold the step: its host decisions would
# be traced anew each time. Made with the first optimizer, as torch.compiler takes seconds to import.
_update_untraced: Callable[[ResidualPolarTransport], None] | None = None


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
        foreach, fused, differentiable, amsgrad: as AdamW takes them; the first two have no effect, the
            others are refused where True.

    Raises:
        ValueError, TypeError: an option out of range, named with its value and its group.

    Example:
        >>> import torch, rpt
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rpt.ResidualPolarTransport(model.named_parameters(), lr=1e-3, weight_decay=0.01)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
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
        refuse_adamw_keywords(arguments)
        defaults = options.preset_options(preset) | options.given(arguments)
        self._groups = Groups({})
        defaults = options.validated(defaults, "defaults")
        defaults["roots"] = self._groups.name_roots(defaults["roots"])
        self.observer_settings = ObserverSettings(
            dim=observer_dim, ridge=observer_ridge, center=observer_center, null=observer_null
        )
        self._mode = check_mode(ownership)
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
        self._ownership: Ownership | None = None
        self._grown = False
        self._warned: set[str] = set()
        self._stacks = Stacks()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks come from its own `preset` or from the constructor's.

        Raises:
            ValueError, TypeError: an option out of range, or a parameter that is already in a group.
        """
        if isinstance(param_group, dict):
            self._groups.complete(param_group, self.param_groups, self.defaults)
        super().add_param_group(param_group)
        self._grown = True

    def parameter_name(self, group_index: int, index: int) -> str:
        """How messages call it: by its name, an attached model's name for it, or its place in a group."""
        group = self.param_groups[group_index]
        parameter = group["params"][index]
        shape, names = tuple(parameter.shape), group.get("param_names")
        name = names[index] if names else self._names.get(parameter)
        return f"{name} {shape}" if name else f"parameter {index} of group {group_index} {shape}"

    def _enumerate(self) -> Iterator[tuple[int, int, Tensor]]:
        for g, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield g, i, parameter

    def _all(self) -> list[Tensor]:
        return [p for *_, p in self._enumerate()]

    def _name(self, parameter: Tensor) -> str:
        places = ((g, i) for g, i, p in self._enumerate() if p is parameter)
        return self.parameter_name(*next(places))

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

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
        if not (traced and self._compiled.step(self._stacks)):
            _update_untraced(self)  # type: ignore[misc]
        return loss

    def _update(self) -> None:
        """The step without its closure: refuse, agree, compute and write stack by stack, conclude."""
        stacks, groups = self._stacks, self.param_groups
        try:
            live, kinds = stacks.live(self)
        except RuntimeError as error:
            self._ranks().refuse(error)
            raise
        for kind in kinds:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return self._update()
        ranks, capturable = self._ranks(), groups[0]["capturable"]
        recorded = stacks.blind or (capturable and working.is_recording())
        observing = self._observing
        if capturable:
            attached = recorded and observing.attachment is not None
            refuse_in_a_graph(live, groups, ranks, attached)
        seen = observing.commit() if observing.anything else NOTHING
        if recorded:
            agreed = Agreement(live, [], seen)
        else:
            agreed = ranks.agree(live, seen)
            if agreed.live is not live:
                # Other ranks may have had a gradient where this one has none.
                stacks.settled &= all(id(p) in stacks.registry.known for _, p, _ in agreed.live)
            if not math.isfinite(sum(agreed.peaks)):
                agreed = without_nonfinite(self, agreed)
        observing.stage.last_counts = agreed.observed.counts
        curved: list[Live] = []
        if not stacks.settled or stacks.curved:
            agreed, curved = stacks.settle(self, agreed, ranks)
        outcomes = stacks.step(self, agreed, ranks, recorded)
        for g, parameter, gradient in curved:
            step_on_manifold(parameter, gradient, self.state[parameter], groups[g])
        move_gains(groups, outcomes, recorded)
        if observing.attachment is not None or observing.bereft:
            observing.end_step(agreed.peaks, outcomes)

    def _ranks(self) -> Ownership:
        """Who owns what; decided when it is first needed, because then all parameters are known."""
        if self._ownership is None or self._grown:
            self._ownership = choose_ownership(self._mode, self, self._ownership)
            self._grown = False
            warn_of_a_flat_parameter(self)
        return self._ownership

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
        override both. Parameters given without names are called by the model's from here on.

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
        every = self._observe_every if observe_every is None else observe_every
        options = {"module_filter": module_filter, "strategy": strategy, "sites": sites}
        names = self._observing.attach(model, self._all(), observe_every=every, **options)
        found: dict[Tensor, str] = {p: canonical_name(name) for name, p in model.named_parameters()}
        self._names |= {p: found[p] for p in self._all() if p in found}
        self._observing.restore_ages(self.state)
        return names

    @contextmanager
    def observing(self, model: nn.Module, **options: Any) -> Iterator[ResidualPolarTransport]:
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
        self._observing.remove(self.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and drop observations of the backward passes they came from."""
        self.clear_observations()
        super().zero_grad(set_to_none)

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
        if hasattr(self, "_groups"):  # a load: everything is looked at anew in the next step
            self._groups.seen.clear()
            self._stacks = Stacks()
        else:
            self._groups = Groups(self.__dict__.pop("_custom_roots"))
            self._begin(self.__dict__.pop("_attachment", None))
            self._observing.restore_ages(self.state)

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
        load(self, state_dict, super().load_state_dict)
        self._observing.restore_ages(self.state)


ResidualPolarTransport.__doc__ = (ResidualPolarTransport.__doc__ or "").replace(
    "{options}", options.options_text().lstrip()
)

"""`ResidualPolarTransport`: parameter groups, state, `step`, checkpoints. The rule itself is `rpt.update`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from rpt.observers.rank import ObserverSettings
from rpt.observers.staging import ObservationStage

from .checkpoint import check_loadable, restore_dtypes
from .engine import StackWork, advance, deliver, group_gain, sort_into_stacks
from .manifold import manifold_of, step_on_manifold
from .observing import ObservingOptimizer
from .options import (
    IMPLEMENTATION_KEYWORDS,
    OPTIONS,
    adamw_keywords,
    complete_group,
    validate_options,
)
from .ownership import MODES, Live, Outcome, Ownership, choose_ownership
from .presets import preset_options
from .registry import StackRegistry
from .roots import RootBackend, resolve_roots
from .telemetry import Telemetry, gather_telemetry

__all__ = ["ResidualPolarTransport"]


class _FromPreset:
    """Marks an option the caller left to the preset; None is a value of its own for some options."""

    def __repr__(self) -> str:
        return "<from the preset>"


PRESET: Any = _FromPreset()


class ResidualPolarTransport(ObservingOptimizer):
    """Residual Polar Transport: a two-sided matrix metric, transported momentum, a polar share.

    Replaces `torch.optim.AdamW` at the same learning rate. With the default preset nothing else needs
    to be said; `attach_model` additionally lets observed matrices adapt their polar weight.

    Every option below can be overridden per parameter group, `preset` included.

    Args:
        params: parameters, named parameters, or parameter groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor. None: AdamW's default 1e-3, or the
            published 3e-3 with `preset="paper"`.
        preset: "drop_in", at which AdamW's learning rate carries over, or "paper", the published rule.
        betas: decay of the momentum and of the covariance.
        eps: absolute floor in gradient units (0 in "drop_in": every gradient scale then behaves alike).
        weight_decay: decoupled, as in AdamW.
        update_rms: root mean square that every update gets before the learning rate, None for none.
        polar_prior: polar weight of a matrix that no observation has reached.
        polar_beta: smoothing of the polar weight while it rises.
        polar_release_beta: smoothing while it falls; None means `polar_beta`.
        polar_steps: Newton–Schulz steps of the polar factor.
        polar_schedule: their coefficients and start: "quintic" (Muon's, published) or "tight".
        matrix_ridge: smallest eigenvalue of a covariance that counts, relative to the mean one.
        roots: the metric: "auto", "full", "blocked", "low_rank", "none", or a `RootBackend` instance.
        root_drift_threshold: relative change of a covariance at which its root is recomputed.
        max_root_staleness: steps after which it is recomputed in any case.
        gain_rate: rate of the coherence-controlled gain; 0 turns it off.
        min_gain: its lower bound.
        max_gain: its upper bound.
        target_coherence: the frame coherence at which it stands still.
        transport_eps: length below which a request counts as zero.
        transport: whether momentum is rotated into the live frame (off only for ablations).
        closure: whether the axial lag is closed (off only for ablations).
        maximize: ascend instead.
        nonfinite: "skip" leaves a parameter with a non-finite gradient untouched, with one warning and
            a telemetry count; "raise" raises before anything changes.
        observer_dim: sketch width of observations.
        observer_ridge: relative ridge of the observed regression.
        observer_center: whether activations and cotangents are centred over samples.
        observer_null: null model of a calibrated rank, "none" (the published statistic), "shuffle" or
            "analytic".
        ownership: how several ranks share the work (see `rpt.distributed`): "owner" gives every matrix
            to one rank, "replicated" lets every rank compute all, "local" ignores other ranks, "auto"
            is "owner" wherever ranks hold the same parameters or shards of them.
        **adamw: `foreach`, `fused`, `capturable`, `differentiable`, `amsgrad` are taken as AdamW takes
            them and have no effect, or are refused with the remedy.

    Raises:
        ValueError, TypeError: an option out of range, named with its value and its group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        *,
        preset: str = "drop_in",
        betas: tuple[float, float] = PRESET,
        eps: float = PRESET,
        weight_decay: float = PRESET,
        update_rms: float | None = PRESET,
        polar_prior: float = PRESET,
        polar_beta: float = PRESET,
        polar_release_beta: float | None = PRESET,
        polar_steps: int = PRESET,
        polar_schedule: str = PRESET,
        matrix_ridge: float = PRESET,
        roots: str | RootBackend = PRESET,
        root_drift_threshold: float = PRESET,
        max_root_staleness: int = PRESET,
        gain_rate: float = PRESET,
        min_gain: float = PRESET,
        max_gain: float = PRESET,
        target_coherence: float = PRESET,
        transport_eps: float = PRESET,
        transport: bool = PRESET,
        closure: bool = PRESET,
        maximize: bool = PRESET,
        nonfinite: str = PRESET,
        observer_dim: int = 32,
        observer_ridge: float = 1e-7,
        observer_center: bool = True,
        observer_null: str = "none",
        ownership: str | Ownership = "auto",
        **adamw: Any,
    ) -> None:
        given = {
            name: value
            for name, value in locals().items()
            if name in OPTIONS and value is not PRESET and not (name == "lr" and value is None)
        }
        adamw_keywords(adamw)
        defaults = preset_options(preset) | given
        self._custom_roots: dict[str, RootBackend] = {}
        validate_options(defaults, "defaults")
        defaults["roots"] = self._name_roots(defaults["roots"])
        self.observer_settings = ObserverSettings(
            dim=observer_dim, ridge=observer_ridge, center=observer_center, null=observer_null
        )
        if isinstance(ownership, str) and ownership not in MODES:
            raise ValueError(
                f"ownership={ownership!r} is unknown: choose one of {', '.join(map(repr, MODES))}"
            )
        self._mode = ownership
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        """Set up what is never serialised."""
        # Whoever compiles step() gets it as it is: its host decisions would be traced anew each time.
        # Done here because importing torch.compiler's machinery takes seconds that `import rpt` saves.
        update = ResidualPolarTransport._update
        if not hasattr(update, "_torchdynamo_disable"):
            ResidualPolarTransport._update = torch.compiler.disable(update)  # type: ignore[method-assign]
        self._registry = StackRegistry()
        self._stage = ObservationStage(self.observer_settings)
        self._attachment = None
        self._ownership: Ownership | None = None
        self._grown = False
        self._warned: set[str] = set()
        self._validated: dict[int, tuple[Any, ...]] = {}

    # -- parameter groups ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it lacks come from its own `preset` or from the constructor's.

        Raises:
            ValueError, TypeError: an option out of range, or a parameter that is already in a group.
        """
        if isinstance(param_group, dict):
            where = f"parameter group {len(self.param_groups)}"
            explicit = {k: v for k, v in param_group.items() if k != "params"}
            adamw_keywords({k: v for k, v in explicit.items() if k in IMPLEMENTATION_KEYWORDS})
            complete_group(param_group, self.defaults)
            self._validate(param_group, where)
            param_group["roots"] = self._name_roots(param_group["roots"])
            param_group.setdefault("gain", torch.ones((), dtype=torch.float64))
        super().add_param_group(param_group)
        self._grown = True

    def _validate(self, group: dict[str, Any], where: str) -> None:
        roots = group["roots"]
        if isinstance(roots, str):
            roots = self._custom_roots.get(roots, roots)
        validate_options(group | {"roots": roots}, where)

    def _check_edited_groups(self) -> None:
        """Validate groups whose options were assigned since they were last looked at."""
        for g, group in enumerate(self.param_groups):
            # The rate changes at every step of a schedule, and no value of it is dangerous.
            seen = tuple(group[name] for name in OPTIONS if name != "lr")
            if self._validated.get(g) != seen:
                self._validate(group, f"parameter group {g}")
                group["roots"] = self._name_roots(group["roots"])
                self._validated[g] = tuple(group[name] for name in OPTIONS if name != "lr")

    def _name_roots(self, roots: str | RootBackend) -> str:
        """The backend as text, so that groups and checkpoints hold plain values only."""
        if isinstance(roots, str):
            return roots
        text = roots.describe()
        try:
            if resolve_roots(text) == roots:
                return text
        except ValueError:
            pass
        name, count = text, 1
        while self._custom_roots.setdefault(name, roots) is not roots:
            count += 1
            name = f"{text}#{count}"
        return name

    def _backend(self, name: str) -> RootBackend:
        if name in self._custom_roots:
            return self._custom_roots[name]
        try:
            return resolve_roots(name)
        except ValueError as error:
            raise ValueError(
                f"{error}. If it is a backend of your own, build the optimizer with that instance as "
                "roots= before loading"
            ) from error

    def parameter_name(self, group_index: int, index: int) -> str:
        """How messages call a parameter: by its name where one was given, else by group and shape."""
        group = self.param_groups[group_index]
        shape = tuple(group["params"][index].shape)
        names = group.get("param_names")
        if names:
            return f"{names[index]} {shape}"
        return f"parameter {index} of group {group_index} {shape}"

    # -- the step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: a sparse gradient, a complex parameter or (with `nonfinite="raise"`) a
                non-finite gradient, before anything changed; or a failure in the middle of a step,
                naming which parameters were already updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        """The step without its closure, in full precision whatever autocast surrounds it."""
        kinds = {p.device.type for group in self.param_groups for p in group["params"]}
        with ExitStack() as precision:
            for kind in kinds:
                if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    precision.enter_context(torch.autocast(kind, enabled=False))
            self._update_in_full_precision()

    def _update_in_full_precision(self) -> None:
        self._check_edited_groups()
        ownership = self._ranks()
        try:
            live = self._live_gradients()
        except RuntimeError as error:
            ownership.refuse(error)
            raise
        agreed = ownership.agree(live, self._stage.commit())
        self._stage.last_counts = agreed.observed.counts
        live, peaks = self._finite(agreed.live, agreed.peaks)
        curved = [entry for entry in live if manifold_of(entry[1]) is not None]
        if curved:
            flat = [manifold_of(p) is None for _, p, _ in live]
            live, peaks = list(compress(live, flat)), list(compress(peaks, flat))
        peak_of = {id(p): peak for (_, p, _), peak in zip(live, peaks, strict=True)}
        self._registry.ensure(
            [(g, p) for g, p, _ in live if ownership.owns(p)],
            self.param_groups,
            self.state,
            self._backend,
        )
        done: list[StackWork] = []
        for portion in ownership.portions(live):
            work = sort_into_stacks(
                portion,
                [peak_of[id(p)] for _, p, _ in portion],
                self.param_groups,
                self._registry.home,
            )
            # A host read costs nothing on a CPU: there each stack is finished before the next one
            # starts, and its intermediates are freed. On a device all share one synchronisation.
            on_cpu = all(w.stack.device.type == "cpu" for w in work)
            for batch in [[w] for w in work] if on_cpu else [work]:
                try:
                    advance(batch, self.state, agreed.observed.ranks, agreed.observed.global_rank)
                    for item in batch:
                        deliver(item, self.state, ownership)
                        done.append(item)
                except Exception as error:
                    ownership.fail(error)
                    raise self._interrupted(error, batch, done) from error
        outcomes = ownership.finish(
            [
                Outcome(g, item.parameters, item.step.coherence, item.step.compared)
                for item in done
                for g, group in enumerate(self.param_groups)
                if item.group is group and item.step is not None
            ]
        )
        for g, parameter, gradient in curved:
            step_on_manifold(parameter, gradient, self.state[parameter], self.param_groups[g])
        self._warn_of_failed_roots(done)
        for g, group in enumerate(self.param_groups):
            if group["gain_rate"]:
                group["gain"] = group_gain(group, [o for o in outcomes if o.group == g])
        if self._attachment is not None:
            self._attachment.after_step(
                {p: q for o in outcomes for p, q in zip(o.parameters, o.coherence, strict=True)}
            )

    def _ranks(self) -> Ownership:
        """Who owns what; decided when it is first needed, because then all parameters are known."""
        if self._ownership is None or self._grown:
            self._ownership = choose_ownership(self._mode, self, self._ownership)
            self._grown = False
        return self._ownership

    def _live_gradients(self) -> list[Live]:
        """(group index, parameter, gradient) of all that take part; refuses before any change."""
        live = []
        for g, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                if gradient is None or parameter.numel() == 0:
                    continue
                if gradient.is_sparse or gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"{self.parameter_name(g, i)} has a sparse gradient, which RPT cannot use: "
                        "build its layer with sparse=False, or give it to torch.optim.SparseAdam"
                    )
                if parameter.is_complex():
                    raise RuntimeError(
                        f"{self.parameter_name(g, i)} is complex, which RPT cannot update: "
                        "store torch.view_as_real of it as the parameter"
                    )
                live.append((g, parameter, gradient))
        return live

    def _finite(self, live: list[Live], peaks: list[float]) -> tuple[list[Live], list[float]]:
        """Leave out parameters whose gradient is not finite, or raise, as their group says.

        Args:
            live: what takes part.
            peaks: the largest absolute entry of each gradient.

        Returns:
            what stays of both.
        """
        finite = [math.isfinite(peak) for peak in peaks]
        if all(finite):
            return live, peaks
        bad = [entry for entry, ok in zip(live, finite, strict=True) if not ok]
        names = {id(p): self.parameter_name(g, i) for g, i, p in self._enumerate()}
        listed = ", ".join(names[id(p)] for _, p, _ in bad[:3]) + (", …" if len(bad) > 3 else "")
        strict = [p for g, p, _ in bad if self.param_groups[g]["nonfinite"] == "raise"]
        if strict:
            raise RuntimeError(
                f"non-finite gradient in {listed}; nothing was updated. Lower the learning rate, clip "
                'gradients, use a GradScaler with float16, or pass nonfinite="skip"'
            )
        for _, parameter, _ in bad:
            record = self.state[parameter]
            record["skipped"] = record.get("skipped", 0) + 1
        self._warn_once(
            "nonfinite",
            f"skipped non-finite gradients in {listed}; telemetry() counts them from here on",
        )
        return (
            [entry for entry, ok in zip(live, finite, strict=True) if ok],
            [peak for peak in peaks if math.isfinite(peak)],
        )

    def _warn_of_failed_roots(self, done: list[StackWork]) -> None:
        tried = [item for item in done if item.step is not None and item.step.failed is not None]
        if "roots" in self._warned or not tried:
            return
        # Decompositions wait for the device anyway: whether one failed is known on the host by now.
        failed = [
            item.parameters[k]
            for item in tried
            if item.step is not None and item.step.failed is not None
            for k, bad in zip(item.step.refreshed, item.step.failed.tolist(), strict=True)
            if bad
        ]
        if failed:
            names = {id(p): self.parameter_name(g, i) for g, i, p in self._enumerate()}
            self._warn_once(
                "roots",
                f"no root could be computed for {names[id(failed[0])]}, also in float64: it keeps "
                "its previous root; telemetry() counts such failures from here on",
            )

    def _interrupted(
        self, error: Exception, batch: list[StackWork], done: list[StackWork]
    ) -> Exception:
        names = {id(p): self.parameter_name(g, i) for g, i, p in self._enumerate()}

        def listed(work: list[StackWork]) -> str:
            found = [names[id(p)] for item in work for p in item.parameters]
            return ", ".join(found) or "none"

        finished = [id(item) for item in done]
        broken = [item for item in batch if id(item) not in finished]
        return RuntimeError(
            f"step() failed in the stack of {listed(broken)}: {type(error).__name__}: {error}. "
            f"Already updated: {listed(done)}. Of the failed stack no weight was changed, but its "
            "moments may already hold this gradient; every other parameter and its state are as before"
        )

    def _enumerate(self) -> Iterator[tuple[int, int, Tensor]]:
        for g, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                yield g, i, parameter

    # -- telemetry ----------------------------------------------------------------------------------

    def telemetry(self) -> Telemetry:
        """What happened in the last step, in plain Python; printing it gives a table."""
        return gather_telemetry(self)

    # -- checkpoints --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._note_observation_ages()
        state = super().__getstate__()
        return state | {
            "_custom_roots": self._custom_roots,
            "observer_settings": self.observer_settings,
            "_mode": self._mode if isinstance(self._mode, str) else "auto",
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_stage"):
            self._begin()
        self._registry.forget()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on: plain numbers, text and tensors.

        Where ranks share the work this is a collective: call it on every rank, also if only one of
        them writes the file.
        """
        self._note_observation_ages()
        if not self.state:
            return super().state_dict()
        own = self.state
        try:
            self.state = self._ranks().whole_state(own)  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict()` gave, keeping every tensor's own dtype.

        Raises:
            ValueError: groups, parameter shapes or root backends that do not match.
        """
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
            complete_group(group, self.defaults)
        if self.state:
            self._ranks().adopt_state(self.state)
        self._restore_observation_ages()

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=3)

"""`ResidualPolarTransport`: parameter groups, state, `step`, checkpoints. The rule itself is `rpt.update`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rpt.observers.attach import Attachment
from rpt.observers.rank import ObserverSettings
from rpt.observers.staging import ObservationStage

from .checkpoint import check_loadable, matched_by_name, restore_dtypes
from .options import (
    IMPLEMENTATION_KEYWORDS,
    OPTIONS,
    adamw_keywords,
    agree_on_capturable,
    complete_group,
    validate_capturable,
    validate_options,
)
from .ownership import MODES, Ownership
from .presets import OBSERVE_EVERY, preset_options
from .registry import StackRegistry
from .roots import RootBackend, resolve_roots
from .stepping import SteppingOptimizer
from .telemetry import Telemetry, gather_telemetry

__all__ = ["ResidualPolarTransport"]


class _FromPreset:
    """Marks an option the caller left to the preset; None is a value of its own for some options."""

    def __repr__(self) -> str:
        return "<from the preset>"


PRESET: Any = _FromPreset()


class ResidualPolarTransport(SteppingOptimizer):
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
        update_rms: root mean square that an update gets before the learning rate where successive
            requests are noise; None leaves every update its own length.
        signal_length: whether that length follows the signal: longer where requests agree, shorter
            where they oppose each other, as AdamW's does (off: one fixed length).
        thin_as_vector: whether a matrix of one row or one column is stepped as a vector.
        max_relative_step: the largest share of its own root mean square by which one step may change a
            matrix, None for no bound.
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
        capturable: take steps without any host synchronisation, which a CUDA graph can record: roots
            come from matrix products, a fixed number in each step. The same in all groups; see
            docs/speed.md.
        nonfinite: "skip" leaves a parameter with a non-finite gradient untouched, with one warning and
            a telemetry count; "raise" raises before anything changes.
        rounding: how a bfloat16 weight is rounded after its step in float32: to "nearest", or
            "stochastic", which keeps on average what is smaller than the spacing of its numbers.
        observer_dim: sketch width of observations.
        observer_ridge: relative ridge of the observed regression.
        observer_center: whether activations and cotangents are centred over samples.
        observer_null: null model of a calibrated rank, "none" (the published statistic), "shuffle" or
            "analytic".
        ownership: how several ranks share the work (see `rpt.distributed`): "owner" gives every matrix
            to one rank, "replicated" lets every rank compute all, "local" ignores other ranks, "auto"
            is "owner" wherever ranks hold the same parameters or shards of them.
        **adamw: `foreach`, `fused`, `differentiable`, `amsgrad` are taken as AdamW takes
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
        signal_length: bool = PRESET,
        thin_as_vector: bool = PRESET,
        max_relative_step: float | None = PRESET,
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
        capturable: bool = PRESET,
        nonfinite: str = PRESET,
        rounding: str = PRESET,
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
        self._observe_every = OBSERVE_EVERY[preset]
        self._begin()
        super().__init__(params, defaults)

    def _begin(self, attachment: Attachment | None = None) -> None:
        """Set up what is never serialised; `attachment` is the copied model's, in a copy."""
        # Whoever compiles step() gets it as it is: its host decisions would be traced anew each time.
        # Done here because importing torch.compiler's machinery takes seconds that `import rpt` saves.
        update = ResidualPolarTransport._update
        if not hasattr(update, "_torchdynamo_disable"):
            ResidualPolarTransport._update = torch.compiler.disable(update)  # type: ignore[method-assign]
        self._registry = StackRegistry()
        self._attachment = attachment
        self._stage = attachment.stage if attachment else ObservationStage(self.observer_settings)
        self._bereft = False
        self._names = getattr(self, "_names", {})
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
            agree_on_capturable([*self.param_groups, param_group])
            param_group["roots"] = self._name_roots(param_group["roots"])
            param_group.setdefault("gain", torch.ones((), dtype=torch.float64))
        super().add_param_group(param_group)
        self._grown = True

    def _validate(self, group: dict[str, Any], where: str) -> None:
        roots = group["roots"]
        if isinstance(roots, str):
            roots = self._custom_roots.get(roots, roots)
        validate_options(group | {"roots": roots}, where)
        backend = roots if isinstance(roots, RootBackend) else resolve_roots(roots)
        validate_capturable(group, backend, where)

    def _check_edited_groups(self) -> None:
        """Validate groups whose options were assigned since they were last looked at."""
        agree_on_capturable(self.param_groups)
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
        check = "_accelerator_graph_capture_health_check"  # its name since torch 2.10
        getattr(self, check, self._cuda_graph_capture_health_check)()
        self._update()
        return loss

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
            "_observe_every": self._observe_every,
            "_attachment": self._attachment,
            "_names": self._names,
            "_mode": self._mode if isinstance(self._mode, str) else "auto",
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_stage"):
            self._begin(state.get("_attachment"))
            self._restore_observation_ages()
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
            complete_group(group, self.defaults)
        if self.state:
            self._ranks().adopt_state(self.state)
        self._restore_observation_ages()

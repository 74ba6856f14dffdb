"""One step of the optimizer, from gradients to weights: who takes part, in what order, and what is said.

The rule is `rpt.update`, the batching `rpt.engine`, the ranks `rpt.ownership`; this is the order of events.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import compress

import torch
from torch import Tensor

from rpt.observers.caller import warn

from .capturable import update_on_device
from .engine import StackWork, advance, deliver, group_gain, sort_into_stacks
from .manifold import manifold_of, step_on_manifold
from .observing import ObservingOptimizer
from .ownership import Live, Outcome, Ownership, choose_ownership
from .registry import StackRegistry
from .roots import RootBackend

__all__ = ["SteppingOptimizer"]


class SteppingOptimizer(ObservingOptimizer):
    """The step of `ResidualPolarTransport`; groups, options and checkpoints are there."""

    _mode: str | Ownership
    _ownership: Ownership | None
    _grown: bool
    _registry: StackRegistry
    _warned: set[str]

    def _backend(self, name: str) -> RootBackend:
        raise NotImplementedError

    def _check_edited_groups(self) -> None:
        raise NotImplementedError

    def parameter_name(self, group_index: int, index: int) -> str:
        """How messages call a parameter: as it was named, else as an attached model names it, else by
        group and shape."""
        group = self.param_groups[group_index]
        parameter = group["params"][index]
        shape = tuple(parameter.shape)
        names = group.get("param_names")
        name = names[index] if names else self._names.get(parameter)
        if name:
            return f"{name} {shape}"
        return f"parameter {index} of group {group_index} {shape}"

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
        if self.param_groups[0]["capturable"]:
            update_on_device(self, live, self._stage.commit())
            return
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
                    advance(
                        batch,
                        self.state,
                        agreed.observed.ranks,
                        agreed.observed.global_rank,
                        ownership,
                    )
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
        # Distributed checkpoints make the state's keys by a step on zero gradients, which no forward
        # led to: nothing was to be observed.
        made_up = bool(peaks) and not any(peaks)
        if not made_up:
            self._end_observed_step(
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

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)

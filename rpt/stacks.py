"""All stacks of an optimizer: who takes part in a step, where each lives, one step through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .manifold import manifold_of
from .ownership import Agreement, Live, Outcome, Ownership, unreadable
from .refusals import interrupted, refuse_parameter, refuse_sparse, warn_of_failed_roots
from .step import advance, deliver
from .store.registry import StackRegistry
from .work import Work, plan

# Plans for as many sets of parameters with a gradient are kept.
_PLANS = 16


class Stacks:
    """Nothing in here is saved. Methods take the optimizer, whose groups and state are read anew.

    Attributes:
        registry: the places.
        plans: how to step some parameters, by who they are.
        traced: what the latest graph of torch.compile was made of, by its handle (`rpt.compiled`). Like
            plans, it is gone when places are chosen anew.
        settled: whether all is as it was when places were last looked at.
        curved: whether any parameter lives on a manifold.
        blind: whether parameters have no values, as on the meta device.
    """

    def __init__(self) -> None:
        self.registry = StackRegistry()
        self.plans: dict[tuple[Any, ...], list[Work]] = {}
        self.traced: dict[str, Any] = {}
        self.settled = self.curved = self.blind = False
        self._moved = True

    def live(self, optimizer: Any) -> tuple[list[Live], set[str]]:
        """(group index, parameter, gradient) of all that take part, and the kinds of their devices.

        Notices whatever moved since places were chosen; refuses what cannot be updated.

        Raises:
            ValueError, TypeError: an option assigned to a group that is out of range.
            RuntimeError: a sparse gradient, or a parameter of a kind that no step can update.
        """
        if optimizer._groups.look(optimizer.param_groups):
            self.settled = False
        live: list[Live] = []
        kinds = set()
        known, state, strided = self.registry.known, optimizer.state, torch.strided
        for g, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or not parameter.numel():
                    continue
                if gradient.layout is not strided:
                    refuse_sparse(parameter, optimizer._name)
                device = parameter.device
                kinds.add(device.type)
                was = known.get(id(parameter))
                if (
                    was is None
                    or was[0] != (g, parameter.shape, parameter.dtype, device)
                    or was[1] is not state.get(parameter)
                ):
                    refuse_parameter(parameter, optimizer._name)
                    self.settled, self._moved = False, True
                live.append((g, parameter, gradient))
        if not self.settled:
            self.blind = any(unreadable(parameter) for _, parameter, _ in live)
        return live, kinds

    def settle(
        self, optimizer: Any, agreed: Agreement, ranks: Ownership
    ) -> tuple[Agreement, list[Live]]:
        """Give all that take part a place; what lives on a manifold comes back apart."""
        live, peaks, observed = agreed
        if not self.settled:
            self.registry.ensure(
                [p for _, p, _ in live],
                optimizer.param_groups,
                optimizer.state,
                optimizer._groups.backend,
                mine=lambda p: ranks.owns(p) and manifold_of(p) is None,
                # Other ranks may have a gradient where this one has none.
                moved=self._moved or not all(id(p) in self.registry.known for _, p, _ in live),
            )
            self.plans.clear()
            self.traced = {}
            self.curved = any(manifold_of(p) is not None for p in optimizer._all())
            self.settled, self._moved = True, False
        if not self.curved:
            return agreed, []
        flat = [manifold_of(parameter) is None for _, parameter, _ in live]
        apart = list(compress(live, [not f for f in flat]))
        return Agreement(list(compress(live, flat)), list(compress(peaks, flat)), observed), apart

    def step(
        self, optimizer: Any, agreed: Agreement, ranks: Ownership, recorded: bool
    ) -> Sequence[Outcome]:
        """Step all stacks, a portion at a time."""
        outcomes: list[Outcome] = []
        done: list[Work] = []
        tried: list[tuple[Tensor, Tensor]] = []
        peak_of: dict[int, float] = {}
        for portion in ranks.portions(agreed.live):
            peaks = agreed.peaks
            if portion is not agreed.live and not recorded:
                peak_of = peak_of or {
                    id(p): peak for (_, p, _), peak in zip(agreed.live, peaks, strict=True)
                }
                peaks = [peak_of[id(p)] for _, p, _ in portion]
            works = self.planned(optimizer, portion, recorded)
            # A host read costs nothing on a CPU: there each stack is finished before the next one
            # starts, and its intermediates are freed. On a device all share one synchronisation.
            here = {work.stack.on_host for work in works}
            for batch in [works] if False in here else [[work] for work in works]:
                try:
                    ranks_seen, overall, _ = agreed.observed
                    advance(batch, portion, peaks, ranks_seen, overall, ranks)
                    for work in batch:
                        outcomes.append(deliver(work, ranks))
                        done.append(work)
                        if work.failed is not None:
                            tried += work.tried()
                except Exception as error:
                    ranks.fail(error)
                    self.settled = False  # what was opened may be half done
                    finished = {id(work) for work in done}
                    broken = [p for w in batch if id(w) not in finished for p in w.parameters]
                    updated = [p for w in done for p in w.parameters]
                    raise interrupted(error, broken, updated, optimizer._name) from error
        if tried:
            warn_of_failed_roots(optimizer, tried)
        return ranks.finish(outcomes)

    def planned(self, optimizer: Any, portion: list[Live], recorded: bool) -> list[Work]:
        """How to step some parameters; the same as last time while nothing moved."""
        groups, key = optimizer.param_groups, (recorded, *map(id, map(itemgetter(1), portion)))
        works = self.plans.get(key)
        if works is None:
            if len(self.plans) >= _PLANS:
                self.plans.clear()
            rules = [seen.rule for seen in optimizer._groups.seen]
            works = self.plans[key] = plan(portion, groups, rules, self.registry.home, recorded)
        for work in works:  # a group may have been replaced by one of the same options
            work.group = groups[work.group_index]
        return works

"""Ownership over several ranks: what the optimizer asks, answered by teams of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpt.observers.staging import Committed

from ..apply import StepSize, apply_updates, weight_norms
from ..ownership import Agreement, Live, Outcome, Ownership, is_sharded
from .agreement import Findings, exchange_findings, rendezvous
from .holding import box_slices
from .state import adopt_state, share_new_keys, whole_state
from .team import Team

_STATE_DICT_REMEDY = (
    "With ownership='owner' the state is spread over the ranks and state_dict() collects it: call it on "
    "every rank and write the file on one of them, or use torch.distributed.checkpoint, or build the "
    "optimizer with ownership='replicated'"
)


# Averaged gradients are equal bit for bit, or nearly so where machines differ. This share apart they are
# not averaged.
_APART = 0.01


class _Ranks(Ownership):
    """What both modes share: agreeing on a step. `number` is the same on every rank."""

    # What becomes of replicas whose gradients differ.
    _unsynchronised = ""

    def __init__(self, teams: Sequence[Team], optimizer: Any, number: int) -> None:
        self.teams, self.optimizer, self.number = list(teams), optimizer, number
        self.team_of = {id(p): team for team in self.teams for p in team.parameters}
        self.observed = Committed({}, None, {})

    def agree(self, live: Sequence[Live], observed: Committed) -> Agreement:
        """One small all-reduce: who has a gradient, how large it is, what was observed.

        A parameter takes part if any rank has a gradient for it. Ranks that lack one take the mean of
        those that have one (replicas), or count their shard as zero (shards).
        """
        gradients = {id(p): gradient for _, p, gradient in live}
        out: list[Live] = []
        peaks: list[float] = []
        ranks: dict[Tensor, Tensor] = {}
        counts: dict[Tensor, int] = {}
        overall: Tensor | None = None
        refused: set[int] = set()
        for team in self.teams:
            local = {
                id(p): holding.local(gradients[id(p)])
                for p, (_, holding) in zip(team.parameters, team.members, strict=True)
                if id(p) in gradients
            }
            found = exchange_findings(team.parameters, local, observed, team.group, team.device)
            refused |= {dist.get_global_rank(team.group, rank) for rank in found.refusals}
            if refused:
                continue
            self._warn_of_unsynchronised(team, found)
            for i, parameter in enumerate(team.parameters):
                if not found.present[i]:
                    continue
                g, holding = team.members[i]
                gradient = local.get(id(parameter))
                if gradient is None:
                    gradient = torch.zeros_like(holding.local(parameter))
                peak = found.peaks[i]
                if found.missing[i] and not holding.sharded and peak < torch.inf:
                    gradient = _mean_of_present(gradient, id(parameter) in local, team)
                    peak = float(gradient.abs().max())  # Rare: a gradient was missing somewhere.
                out.append((g, parameter, gradient))
                peaks.append(peak)
            ranks |= found.observed.ranks
            counts |= found.observed.counts
            overall = found.observed.global_rank if overall is None else overall
        if refused:
            raise RuntimeError(
                f"rank(s) {sorted(refused)} refused this step; the error there says why. "
                "Nothing was updated"
            )
        self.observed = Committed(ranks, overall, counts)
        return Agreement(out, peaks, self.observed)

    def _warn_of_unsynchronised(self, team: Team, found: Findings) -> None:
        """Once: replicas that nothing synchronises, told by gradients that differ."""
        apart = [
            i
            for i, (low, high) in enumerate(zip(found.lows, found.peaks, strict=True))
            if low < high < torch.inf and high - low > _APART * high
            if not team.members[i][1].sharded
        ]
        if not apart:
            return
        worst = max(apart, key=lambda i: (found.peaks[i] - found.lows[i]) / found.peaks[i])
        name = self.optimizer._name(team.parameters[worst])
        self.optimizer._warn_once(
            "unsynchronised",
            f"the gradients of {len(apart)} parameter(s) differ between ranks (the largest entries are "
            f"{found.lows[worst]:.3g} and {found.peaks[worst]:.3g} in {name}): nothing "
            f"averages them, and {self._unsynchronised}. "
            "If ranks hold replicas, wrap the model in DistributedDataParallel or average its gradients "
            "before step(); if each rank trains on its own, as under PostLocalSGDOptimizer, pass "
            "ownership='local'",
        )

    def refuse(self, error: Exception) -> None:
        """Take part in the step's first collective only, so that no rank waits for this one."""
        nothing = Committed({}, None, {})
        for team in self.teams:
            exchange_findings(team.parameters, {}, nothing, team.group, team.device, refuses=True)


def _mean_of_present(gradient: Tensor, present: bool, team: Team) -> Tensor:
    total = gradient.clone() if present else gradient
    total = total.to(team.device).contiguous()
    number = torch.tensor(float(present), device=team.device)
    dist.all_reduce(total, group=team.group)
    dist.all_reduce(number, group=team.group)
    return (total / number.to(total.dtype)).to(gradient.device)


class OwnerRanks(_Ranks):
    """Every matrix belongs to one rank, which keeps its state and computes its update.

    Example:
        >>> import torch, torch.distributed as dist, rpt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> ranks = rpt.distributed.distribute("owner", rpt.RPT([weight]))
        >>> isinstance(ranks, rpt.distributed.OwnerRanks), ranks.owns(weight)
        (True, True)
        >>> dist.destroy_process_group()
    """

    _unsynchronised = "all ranks take the step of the one that owns the parameter"

    def __init__(self, teams: Sequence[Team], optimizer: Any, number: int) -> None:
        super().__init__(teams, optimizer, number)
        self._calls = 0

    def owns(self, parameter: Tensor) -> bool:
        team = self.team_of[id(parameter)]
        return team.owns(team.position[id(parameter)])

    def weight_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """Those of sharded weights came with their gradients."""
        return self.team_of[id(parameters[0])].weight_norms(parameters)

    @property
    def owners(self) -> dict[int, int]:
        """By id of a parameter the rank, in its team, that owns it."""
        return {key: team.plan.owner[team.position[key]] for key, team in self.team_of.items()}

    def portions(self, live: Sequence[Live]) -> Iterator[list[Live]]:
        """A bucket at a time: its gradients arrive while the bucket before is computed, and its
        results travel while the next one is."""
        for team in self.teams:
            team.begin(
                {
                    team.position[id(p)]: (g, p, gradient)
                    for g, p, gradient in live
                    if self.team_of[id(p)] is team
                }
            )
        order = [(team, bucket) for team in self.teams for bucket in range(team.plan.buckets)]
        self._remaining = list(order)
        for n, (team, bucket) in enumerate(order):
            team.gather(bucket)
            if n + 1 < len(order):
                order[n + 1][0].gather(order[n + 1][1])
            yield team.portion(bucket)
            team.deliver(bucket)
            self._remaining.pop(0)

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        size: StepSize,
        compared: Tensor,
        refreshed: Sequence[int],
    ) -> None:
        fresh = set(refreshed)
        for k, (parameter, update) in enumerate(zip(parameters, updates, strict=True)):
            self.team_of[id(parameter)].accept(parameter, update, size, compared[k], k in fresh)

    def fail(self, error: Exception) -> None:
        """Go through the rest of the step's collectives with empty hands, then let the caller raise."""
        for team in self.teams:
            team.failed = True
        for n, (team, bucket) in enumerate(self._remaining):
            if n:
                team.portion(bucket)
            team.deliver(bucket)
        self._settle()

    def finish(self, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        failed = self._settle()
        if failed:
            raise RuntimeError(
                f"rank(s) {sorted(failed)} failed in this step; the error there says why. The "
                "parameters they own keep their weights, all others were updated"
            )
        out = []
        for g in range(len(self.optimizer.param_groups)):
            for team in self.teams:
                parameters, coherence, compared = team.outcome(g)
                if parameters:
                    out.append(Outcome(g, parameters, coherence, compared))
        return out

    def _settle(self) -> set[int]:
        failed = set()
        for team in self.teams:
            for bucket in range(team.plan.buckets):
                for rank in team.settle(bucket):
                    failed.add(dist.get_global_rank(team.group, rank))
            team.publish(self.observed)
            share_new_keys(team, self.optimizer.state)
        return failed

    def whole_state(self, state: Mapping[Tensor, Any]) -> Mapping[Tensor, Any]:
        self._calls += 1
        for n, team in enumerate(self.teams):
            rendezvous(
                f"state_dict()#{self.number}.{n}.{self._calls}", _STATE_DICT_REMEDY, team.group
            )
        whole = dict(state)
        for team in self.teams:
            whole_state(team, state, whole)
        # In the order of the parameters: the same on every rank.
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {p: whole[p] for p in every if p in whole}

    def adopt_state(self, state: Mapping[Tensor, Any]) -> None:
        for team in self.teams:
            adopt_state(team, state, keep=team.owns)


class ReplicatedRanks(_Ranks):
    """Every rank computes every update and keeps all state; only observations are averaged.

    Example:
        >>> import torch, torch.distributed as dist, rpt
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> weight = torch.nn.Parameter(torch.ones(4, 3))
        >>> ranks = rpt.distributed.distribute("replicated", rpt.RPT([weight]))
        >>> isinstance(ranks, rpt.distributed.ReplicatedRanks), ranks.owns(weight)
        (True, True)
        >>> dist.destroy_process_group()
    """

    _unsynchronised = "replicas drift apart"

    def weight_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """A collective where they are sharded, in the same order on every rank."""
        sharded: Sequence[Any] = parameters
        return weight_norms([p.full_tensor() if is_sharded(p) else p for p in sharded])

    def portions(self, live: Sequence[Live]) -> Iterator[list[Live]]:
        out = []
        for g, parameter, gradient in live:
            team = self.team_of[id(parameter)]
            out.append((g, parameter, team.whole_everywhere(parameter, gradient)))
        yield out

    def deliver(
        self,
        parameters: Sequence[Tensor],
        updates: Sequence[Tensor],
        size: StepSize,
        compared: Tensor,
        refreshed: Sequence[int],
    ) -> None:
        local, pieces = [], []
        for parameter, update in zip(parameters, updates, strict=True):
            team = self.team_of[id(parameter)]
            holding = team.members[team.position[id(parameter)]][1]
            local.append(holding.local(parameter))
            pieces.append(update[box_slices(holding.boxes[team.rank])])
        filled = [k for k, part in enumerate(local) if part.numel()]
        apply_updates([local[k] for k in filled], [pieces[k] for k in filled], size)

    def adopt_state(self, state: Mapping[Tensor, Any]) -> None:
        for team in self.teams:
            adopt_state(team, state, keep=lambda index: True)

"""The ranks that share some parameters: one step of theirs, from local gradients to new weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpt.observers.staging import Committed

from ..apply import StepSize, apply_updates, step_size, weight_norms
from ..manifold import manifold_of
from ..ownership import Live
from ..store.layout import compute_dtype, form_of
from ..store.schema import TRAVELLING
from .holding import Holding, box_numel, box_shape, box_slices
from .plan import Plan
from .wire import Exchange, Parcel, communication_device

# Was it updated, its frame compared with an earlier one, were its roots recomputed; and what travels.
EVENTS = ("updated", "compared", "refreshed")
FACTS = (*EVENTS, *TRAVELLING)


class Team:
    """Parameters that the same ranks hold, each owned by one of them.

    A step is: `gather` a bucket's gradients to the owners, compute there, `deliver` the results,
    `finish`. Buckets follow each other, so that one travels while the next is computed.

    Args:
        members: (group index, holding) of every parameter, in the optimizer's order.
        optimizer: whose groups and state are read anew in every step.
    """

    def __init__(
        self,
        members: Sequence[tuple[int, Holding]],
        plan: Plan,
        group: dist.ProcessGroup,
        optimizer: Any,
    ) -> None:
        self.members, self.plan, self.group = list(members), plan, group
        self.optimizer = optimizer
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = [holding.parameter for _, holding in members]
        self.position = {id(p): i for i, p in enumerate(self.parameters)}
        self.device = communication_device(group, self.parameters[0].device)
        self.live: dict[int, Live] = {}
        self.failed = False
        self._laid_out: set[int] = set()
        self._facts = torch.zeros(len(members), len(FACTS), dtype=torch.float64, device=self.device)
        self._columns: dict[str, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        # Records whose small numbers are views of the columns; a load replaces them.
        self._linked: dict[int, dict[str, Any]] = {}
        # Parameters whose owners have told the others what their records hold.
        self.announced: set[int] = set()
        buckets = range(plan.buckets)
        # Points on a manifold do not travel: every rank steps those that it holds.
        flat = [i for i, p in enumerate(self.parameters) if manifold_of(p) is None]
        self._inside = [[i for i in flat if plan.bucket[i] == k] for k in buckets]
        self._gathers = [self._gathering(k) for k in buckets]
        self._deliveries = [self._delivering(k) for k in buckets]

    def owns(self, index: int) -> bool:
        return self.plan.owner[index] == self.rank

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return sum(e.nbytes_sent for e in (*self._gathers, *self._deliveries))

    # -- layouts ------------------------------------------------------------------------------------

    def _gathering(self, bucket: int) -> Exchange:
        outgoing, incoming = [], []
        for i in self._inside[bucket]:
            holding, owner = self.members[i][1], self.plan.owner[i]
            if not holding.sharded:
                continue
            dtype = holding.parameter.dtype
            for box in dict.fromkeys(holding.boxes):
                source = holding.source(box, owner)
                if source == owner or not box_numel(box):
                    continue
                # Beside each piece of the gradient, the length of that piece of the weight.
                for parcel in ((i, box_shape(box), dtype), (("norm", i), (), torch.float64)):
                    if source == self.rank:
                        outgoing.append(Parcel(owner, *parcel))
                    elif owner == self.rank:
                        incoming.append(Parcel(source, *parcel))
        return Exchange(outgoing, incoming, self.group, self.device)

    def _delivering(self, bucket: int) -> Exchange:
        outgoing, incoming = [], []
        others = [rank for rank in range(self.size) if rank != self.rank]
        owned = [
            [i for i in self._inside[bucket] if self.plan.owner[i] == r] for r in range(self.size)
        ]
        for peer in others:
            outgoing.append(self._facts_parcel(peer, len(owned[self.rank])))
            incoming.append(self._facts_parcel(peer, len(owned[peer])))
            for i in owned[self.rank]:
                outgoing.append(self._piece(i, peer, holder=peer))
            for i in owned[peer]:
                incoming.append(self._piece(i, peer, holder=self.rank))
        return Exchange(outgoing, incoming, self.group, self.device)

    def _facts_parcel(self, peer: int, count: int) -> Parcel:
        # One row more than parameters: whether the sender's step succeeded.
        return Parcel(peer, "facts", (1 + count, len(FACTS)), torch.float64)

    def _piece(self, i: int, peer: int, *, holder: int) -> Parcel:
        holding = self.members[i][1]
        dtype = holding.parameter.dtype
        if holding.sharded:
            dtype = compute_dtype(holding.parameter)
        return Parcel(peer, i, box_shape(holding.boxes[holder]), dtype)

    # -- one step -----------------------------------------------------------------------------------

    def begin(self, live: Mapping[int, Live]) -> None:
        """Note which parameters take part (position → entry); the same positions on every rank."""
        self.live, self.failed = dict(live), False
        self._laid_out.clear()
        for exchange in (*self._gathers, *self._deliveries):
            exchange.clear()
        self._facts[:, : len(EVENTS)].zero_()

    def gather(self, bucket: int) -> None:
        """Send this rank's pieces of a bucket's gradients to their owners, without waiting."""
        exchange = self._gathers[bucket]
        if exchange.launched or not any(self.members[i][1].sharded for i in self._inside[bucket]):
            return
        for i in self._inside[bucket]:
            holding, owner = self.members[i][1], self.plan.owner[i]
            box = holding.boxes[self.rank]
            if i not in self.live or not holding.sharded or owner == self.rank:
                continue
            if holding.source(box, owner) == self.rank and box_numel(box):
                exchange.outgoing(owner, i).copy_(holding.local(self.live[i][2]))
                length = weight_norms([holding.local(holding.parameter)])
                exchange.outgoing(owner, ("norm", i)).copy_(length[0])
        exchange.launch()

    def portion(self, bucket: int) -> list[Live]:
        """What this rank has to compute of a bucket: (group index, parameter, whole gradient)."""
        self.gather(bucket)
        if self._gathers[bucket].launched:
            self._gathers[bucket].wait()
        out = []
        for i in self._inside[bucket]:
            if i in self.live and self.owns(i):
                g, parameter, gradient = self.live[i]
                out.append((g, parameter, self._whole(i, bucket, gradient)))
        self._gathers[bucket].clear()
        return out

    def _whole(self, i: int, bucket: int, gradient: Tensor) -> Tensor:
        holding = self.members[i][1]
        local = holding.local(gradient)
        if not holding.sharded:
            return local
        whole = local.new_empty(tuple(holding.parameter.shape))
        squares = []
        for box in dict.fromkeys(holding.boxes):
            if not box_numel(box):
                continue
            source = holding.source(box, self.rank)
            piece = local if source == self.rank else self._gathers[bucket].incoming(source, i)
            whole[box_slices(box)].copy_(piece)
            if source == self.rank:
                length = weight_norms([holding.local(holding.parameter)])[0].double()
            else:
                length = self._gathers[bucket].incoming(source, ("norm", i)).to(local.device)
            squares.append(length * length)
        self._norms[i] = torch.stack(squares).sum().sqrt() if squares else local.new_zeros(())
        return whole

    def weight_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """‖W‖ of whole parameters of the present bucket, (k,)."""
        lengths = []
        for parameter in parameters:
            i = self.position[id(parameter)]
            if self.members[i][1].sharded:
                lengths.append(self._norms[i])
            else:
                lengths.append(weight_norms([self.members[i][1].local(parameter)])[0])
        return torch.stack([length.to(compute_dtype(parameters[0])) for length in lengths])

    def accept(
        self,
        parameter: Tensor,
        update: Tensor,
        size: StepSize,
        compared: Tensor,
        refreshed: bool,
    ) -> None:
        """Take the finished update of an owned parameter: apply it here, lay it out for the others."""
        i = self.position[id(parameter)]
        holding = self.members[i][1]
        here = box_slices(holding.boxes[self.rank])
        apply_updates([holding.local(parameter)], [update[here]], size)
        self._facts[i, 0] = 1.0
        self._facts[i, 1] = compared
        self._facts[i, 2] = float(refreshed)
        self._lay_out(i, update)

    def _lay_out(self, i: int, update: Tensor | None) -> None:
        """Put every peer's piece of an update, or the parameter's new value, where it is sent from."""
        holding, exchange = self.members[i][1], self._deliveries[self.plan.bucket[i]]
        for peer in range(self.size):
            if peer == self.rank:
                continue
            place = exchange.outgoing(peer, i)
            if not holding.sharded:
                place.copy_(holding.parameter)
            elif update is None:
                place.zero_()
            else:
                place.copy_(update[box_slices(holding.boxes[peer])])
        self._laid_out.add(i)

    def deliver(self, bucket: int) -> None:
        """Send a bucket's results to the ranks that hold a part of them, without waiting."""
        exchange = self._deliveries[bucket]
        mine = [i for i in self._inside[bucket] if self.owns(i)]
        for i in mine:
            if i in self.live and i not in self._laid_out:
                # Its update failed: the others receive what leaves their weights as they are.
                self._lay_out(i, None)
        self._read_scalars([i for i in mine if i in self.live])
        for peer in range(self.size):
            if peer != self.rank:
                place = exchange.outgoing(peer, "facts")
                place[0].fill_(float(self.failed))
                place[1:].copy_(self._facts[mine])
        exchange.launch()

    def _read_scalars(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        records = [self.optimizer.state.get(self.parameters[i], {}) for i in indices]
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        for column, key in enumerate(FACTS):
            if key in TRAVELLING:
                values = [record.get(key, nothing) for record in records]
                self._facts[indices, column] = torch.stack([v.to(nothing).mean() for v in values])

    def settle(self, bucket: int) -> list[int]:
        """Wait for a bucket's results and write them; returns the ranks that failed."""
        exchange = self._deliveries[bucket]
        exchange.wait()
        failed = []
        arrived: list[tuple[int, Tensor]] = []
        for peer in range(self.size):
            theirs = [i for i in self._inside[bucket] if self.plan.owner[i] == peer]
            if peer == self.rank:
                continue
            facts = exchange.incoming(peer, "facts")
            # The flag of a failed rank is looked at where that costs nothing; on a device its
            # results are harmless (unchanged values, zero updates) and the next step refuses.
            if theirs:
                self._facts[theirs] = facts[1:]
            usable = [i for i in theirs if i in self.live]
            if facts.device.type == "cpu" and facts[0, 0] != 0:
                failed.append(peer)
                usable = [i for i in usable if self._facts[i, 0] != 0]
            arrived += [(i, exchange.incoming(peer, i)) for i in usable]
        self._write(arrived)
        exchange.clear()
        return failed

    @torch.no_grad()
    def _write(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        batches: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for i, value in arrived:
            g, holding = self.members[i]
            local = holding.local(holding.parameter)
            if not holding.sharded:
                local.copy_(value)
            elif local.numel():
                parameters, updates = batches.setdefault((g, value.dtype), ([], []))
                parameters.append(local)
                updates.append(value.to(local.device))
        for (g, dtype), (parameters, updates) in batches.items():
            size = step_size(self.optimizer.param_groups[g], parameters[0].device, dtype)
            apply_updates(parameters, updates, size)

    def whole_everywhere(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The whole gradient on every rank (replicated mode), from this rank's local part."""
        holding = self.members[self.position[id(parameter)]][1]
        if not holding.sharded:
            return gradient
        from torch.distributed.tensor import DTensor

        sharded: Any = parameter
        placed = DTensor.from_local(
            gradient,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
        return placed.full_tensor()

    # -- what every rank knows ----------------------------------------------------------------------

    def publish(self, observed: Committed) -> None:
        """Bring the records of parameters owned elsewhere up to date with what their owners sent."""
        remote = [i for i in self.live if not self.owns(i)]
        if self.device.type == "cpu":
            # A rank that failed has updated only a part of what it owns.
            remote = [i for i in remote if self._facts[i, 0] != 0]
        if not remote:
            return
        self._ensure_columns()
        for column, key in enumerate(FACTS):
            if key in TRAVELLING:
                self._columns[key].copy_(self._facts[:, column])
        for i in remote:
            record = self.optimizer.state[self.parameters[i]]
            record["step"] = record.get("step", 0) + 1
            group = self.optimizer.param_groups[self.members[i][0]]
            matrix = form_of(self.parameters[i], group).matrix
            seen = self.parameters[i] in observed.ranks or observed.global_rank is not None
            record["observations"] = record.get("observations", 0) + (matrix and seen)
            record.setdefault("skipped", 0)
            if self._linked.get(i) is not record:
                for key in TRAVELLING:
                    if matrix or not key.startswith("root_"):
                        record[key] = self._columns[key][i]
                if matrix:
                    record.setdefault("last_root_step", 0)
                    record.setdefault("root_refreshes", 0)
                self._linked[i] = record
        if self.device.type == "cpu":  # where a host read waits for nothing
            for i, refreshed in zip(remote, self._facts[remote, 2].tolist(), strict=True):
                if refreshed:
                    record = self.optimizer.state[self.parameters[i]]
                    record["last_root_step"] = record["step"]
                    record["root_refreshes"] += 1

    def _ensure_columns(self) -> None:
        if not self._columns:
            wide = any(compute_dtype(p) == torch.float64 for p in self.parameters)
            real = torch.float64 if wide else torch.float32
            for key in TRAVELLING:
                dtype = torch.int64 if key == "root_failures" else real
                self._columns[key] = torch.zeros(
                    len(self.parameters), dtype=dtype, device=self.device
                )

    def outcome(self, g: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Parameters of a group that took part, their coherence q and whether it compares frames."""
        indices = [i for i in self.live if self.members[i][0] == g]
        facts = self._facts[indices]
        coherence = facts[:, FACTS.index("frame_coherence")]
        return [self.parameters[i] for i in indices], coherence, facts[:, 1] > 0

"""One exchange of bytes among all ranks of a group, with a layout that every rank knows beforehand.

A single collective carries tensors of any shape and dtype between any pairs of ranks, uneven and
empty shares included, without padding: `all_to_all_single` on a buffer of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Every parcel starts at a multiple of this, so that its bytes can be seen as any dtype.
ALIGNMENT = 16


class Parcel(NamedTuple):
    """A tensor that travels to a peer, or comes from it; `key` is what it is called here."""

    peer: int
    key: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


class _Side:
    """Where every parcel lies in the buffer that is sent, or received."""

    def __init__(self, parcels: Sequence[Parcel], size: int) -> None:
        self.splits = [0] * size
        self.places: dict[tuple[int, Hashable], tuple[int, Parcel]] = {}
        offset = 0
        for parcel in sorted(parcels, key=lambda parcel: parcel.peer):
            self.places[parcel.peer, parcel.key] = (offset, parcel)
            self.splits[parcel.peer] += parcel.nbytes
            offset += parcel.nbytes
        self.nbytes = offset

    def view(self, buffer: Tensor, peer: int, key: Hashable) -> Tensor:
        offset, parcel = self.places[peer, key]
        nbytes = math.prod(parcel.shape) * parcel.dtype.itemsize
        return buffer[offset : offset + nbytes].view(parcel.dtype).view(parcel.shape)


class Exchange:
    """`outgoing` parcels to their peers, `incoming` ones from theirs.

    For every pair of ranks the parcels must be listed in the same order on both.
    """

    def __init__(
        self,
        outgoing: Sequence[Parcel],
        incoming: Sequence[Parcel],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        size = dist.get_world_size(group)
        self._out, self._in = _Side(outgoing, size), _Side(incoming, size)
        self.nbytes_sent = self._out.nbytes
        self._group, self._device = group, device
        self._sent: Tensor | None = None
        self._received: Tensor | None = None
        self._work: Any = None

    @property
    def launched(self) -> bool:
        return self._received is not None

    def outgoing(self, peer: int, key: Hashable) -> Tensor:
        """The place of a parcel to fill in before `launch`."""
        return self._out.view(self._sending(), peer, key)

    def _sending(self) -> Tensor:
        if self._sent is None:
            self._sent = torch.zeros(self._out.nbytes, dtype=torch.uint8, device=self._device)
        return self._sent

    def launch(self) -> None:
        """Send everything, without waiting."""
        self._received = torch.empty(self._in.nbytes, dtype=torch.uint8, device=self._device)
        self._work = dist.all_to_all_single(
            self._received, self._sending(), self._in.splits, self._out.splits, self._group, True
        )

    def wait(self) -> None:
        """Return when everything has arrived (on a device: when its stream may use it)."""
        self._work.wait()
        self._work = self._sent = None

    def incoming(self, peer: int, key: Hashable) -> Tensor:
        """A parcel that has arrived; a view of the buffer, gone with `clear`."""
        assert self._received is not None
        return self._in.view(self._received, peer, key)

    def clear(self) -> None:
        """Free the buffers and be ready for the next step."""
        self._sent = self._received = self._work = None


def communication_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where buffers must live for `group`: `device`, or the accelerator if the group has no other.

    Parameters offloaded to the CPU are sent through the accelerator where the backend is NCCL alone.
    """
    served = dist.get_backend_config(group)
    if f"{device.type}:" in served or device.type == "meta":
        return device
    kind = served.split(":", 1)[0]
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, getattr(torch, kind).current_device())

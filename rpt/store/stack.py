"""Parameters that are stepped together: permanent batched state, with a view of it per parameter.

A matrix is flattened to a row of (b, rows·cols) in its own orientation, so that neither its gradient
nor its update is ever transposed in memory. Vectors of several lengths share a stack, and small matrices
of several shapes do, turned wide and padded with zeros: no inner product, Gram matrix or polar factor
sees them. Which ones do is the choice of `rpt.store.layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..roots import RootBackend
from .layout import Form
from .schema import ENTRIES, METRIC

__all__ = ["Index", "Seat", "Stack"]

_ENTRIES = {entry.name: entry for entry in ENTRIES}


class Seat(NamedTuple):
    """A parameter's place in a stack: `form.pieces` rows from `start` on."""

    parameter: Tensor
    start: int
    form: Form


class Index(NamedTuple):
    """Rows of some members of a stack, int64 on its device.

    Attributes:
        all: where they are in what every row has.
        matrix: those of matrices, in what only matrices have.
        vector: those of vectors, in what only vectors have.
    """

    all: Tensor
    matrix: Tensor
    vector: Tensor

    def of(self, name: str) -> Tensor:
        """The rows of a state entry."""
        who = "matrix" if name.startswith(METRIC) else _ENTRIES[name].who
        return getattr(self, who)  # type: ignore[no-any-return]


class Stack:
    """State of some parameters, in tensors whose first dimension is the stack's rows.

    Args:
        members: (parameter, form): those that are matrices come first.
        backend: the metric of the matrices.
        dtype: the working dtype.
        like: an empty tensor where the state is to live.
        polar_prior: the polar weight of matrices that no observation has reached.
        layout: (rows, cols) of a row: its matrices' own, or a wide one that holds them all; (1,
            length) for vectors.
        capturable: whether counters live on the device.

    Attributes:
        seats: by id of the parameter.
        extents: (rows, cols) of every matrix as it is, where decisions are made.
        tensors: what `rpt.store.schema` lists: rows (b, rows·cols), numbers (b, 1), and (matrices, 1)
            or (vectors, 1) where only those have it; and the metric's entries.
        matrices: how many of its rows are matrices; they come first.
        on_host: whether its numbers may be read without waiting for a device.
        readable: whether its numbers have values at all, and are no meta or fake tensors.
    """

    def __init__(
        self,
        members: Sequence[tuple[Tensor, Form]],
        backend: RootBackend | None,
        *,
        dtype: torch.dtype,
        like: Tensor,
        polar_prior: float,
        layout: tuple[int, int],
        capturable: bool,
    ) -> None:
        like = like.to(dtype)
        self.dtype, self.device, self.layout = dtype, like.device, layout
        self.width = layout[0] * layout[1]
        self.on_host = like.device.type == "cpu"
        self.readable = type(like) is Tensor and like.device.type != "meta"
        counting = like if capturable or not self.readable else torch.empty(0, device="cpu")
        self.seats: dict[int, Seat] = {}
        forms: list[Form] = []
        for parameter, form in members:
            self.seats[id(parameter)] = Seat(parameter, len(forms), form)
            forms += [form] * form.pieces
        shapes = [(form.rows, form.cols) for form in forms if form.matrix]
        self.count, self.matrices = len(forms), len(shapes)
        # A stack with room for matrices may so far hold vectors only.
        self.backend = backend = backend if shapes else None
        self.padded = any(shape != layout for shape in shapes)
        self.ragged = self.padded or self.matrices < len(forms)
        self.sizes = like.new_tensor([[float(form.rows * form.cols)] for form in forms])
        # float64: what is decided by them must not depend on rounding.
        self.extents = counting.new_tensor(shapes or [(1.0, 1.0)], dtype=torch.float64)
        wide = [(min(shape), max(shape)) for shape in shapes]
        self.true_shapes = like.new_tensor(wide) if self.padded else None
        self._indices: dict[tuple[int, ...], Index] = {}

        lengths = {"all": len(forms), "matrix": len(shapes), "vector": len(forms) - len(shapes)}
        self.tensors: dict[str, Tensor] = {}
        for entry in ENTRIES:
            if not lengths[entry.who]:
                continue
            width = self.width if entry.kind == "row" else 1
            where = counting if entry.kind == "counter" else like
            shape = (lengths[entry.who], width)
            kept_in = torch.bool if entry.name == "held" else entry.dtype(dtype)
            self.tensors[entry.name] = where.new_full(shape, entry.start, dtype=kept_in)
        self.tensors["polar_weight"][: self.matrices] = polar_prior
        if backend is not None:
            rows, cols = sorted(layout)
            metric = backend.create(len(shapes), rows, cols, dtype=dtype, device=like.device)
            self.tensors |= {METRIC + key: value for key, value in metric.items()}
        # Where gradients and updates of unlike members are laid out, (b, rows·cols), and each one's place
        # there in its own shape; what pads them stays zero. Slicing costs more than small copies do.
        self.buffer = like.new_zeros(self.count if self.ragged else 0, self.width)
        self.places: list[Tensor] = []
        if self.ragged:
            self.places = self.unpacked(self.buffer, list(self.seats.values()))

    def share_of_bytes(self, seat: Seat) -> float:
        """A parameter's part of what is held, padding and buffer included."""
        total = 0.0
        for name, tensor in self.tensors.items():
            if seat.form.matrix or not (name.startswith(METRIC) or _ENTRIES[name].who == "matrix"):
                total += tensor.numel() * tensor.element_size() / len(tensor)
        total += self.buffer.numel() * self.buffer.element_size() / self.count
        return total * seat.form.pieces

    # -- views ------------------------------------------------------------------------------------------

    def keys(self, form: Form) -> list[str]:
        """The tensor entries of one parameter's state."""
        others = "vector" if form.matrix else "matrix"
        keys = [e.name for e in ENTRIES if e.kept and e.who != others]
        return keys + [key for key in self.tensors if key.startswith(METRIC) and form.matrix]

    def view(self, key: str, seat: Seat) -> Tensor:
        """One parameter's share of a state tensor, shaped like the parameter where that applies."""
        start, form = seat.start, seat.form
        metric = key.startswith(METRIC)
        if not metric and _ENTRIES[key].who == "vector":
            start -= self.matrices
        value = self.tensors[key][start : start + form.pieces]
        if not metric:
            if _ENTRIES[key].kind == "row":
                return self.unpack(value, seat)
            return value.view(form.lead)
        if form.lead:
            return value
        if self.padded and self.backend is not None:
            rows, cols = sorted((form.rows, form.cols))
            return self.backend.crop(key[len(METRIC) :], value[0], rows, cols)
        return value[0]

    def unpack(self, rows: Tensor, seat: Seat) -> Tensor:
        """(count, rows·cols) as a view in the parameter's own shape."""
        form, shape = seat.form, seat.parameter.shape
        if not form.matrix:
            return rows[:, : form.cols].view(shape)  # stacked vectors fill their rows
        if not self.padded:
            return rows.view(shape)
        low, high = sorted((form.rows, form.cols))
        matrix = rows.view(self.layout)[:low, :high]  # stacked matrices are never padded
        return (matrix.mT if form.rows > form.cols else matrix).view(shape)

    def unpacked(self, rows: Tensor, seats: Sequence[Seat]) -> list[Tensor]:
        """Views of some members' rows in their own shapes."""
        parts = rows.split([seat.form.pieces for seat in seats])
        return [self.unpack(part, seat) for part, seat in zip(parts, seats, strict=True)]

    def adopt(self, seat: Seat, record: dict[str, Any]) -> None:
        """Take over one parameter's earlier state and leave views of the stack in its place.

        A metric that does not fit the backend any more starts anew: in all its entries, with no roots
        and a bias correction of its own.
        """
        keys = self.keys(seat.form)
        others = [e.name for e in ENTRIES if e.who != "all" and e.name not in keys]
        metric = [key for key in record if key.startswith(METRIC)]
        fits = not any(key in record for key in others) and all(
            key in keys and record[key].shape == self.view(key, seat).shape for key in metric
        )
        if not fits:
            for key in [*metric, *others]:
                record.pop(key, None)
            record["metric_start"] = record.get("step", 0)
            if seat.form.matrix:
                record["last_root_step"] = 0
        step = record.get("step", 0)
        older = self.readable and bool(step.any() if isinstance(step, Tensor) else step)
        for key in keys:
            view, value = self.view(key, seat), record.get(key)
            entry = _ENTRIES.get(key)
            if value is None and older and entry is not None and entry.missing is not None:
                value = entry.missing
            if isinstance(value, Tensor):
                if value.shape == view.shape or value.numel() == 1:
                    view.copy_(value)
            elif value is not None:
                view.fill_(value)
            record[key] = view
        if self.readable:
            rows = slice(seat.start, seat.start + seat.form.pieces)
            self.tensors["held"][rows] = self.tensors["frame"][rows].any(dim=1, keepdim=True)
        if seat.form.matrix:
            record.setdefault("observation_age", 0)

    # -- some members -----------------------------------------------------------------------------------

    def index(self, seats: Sequence[Seat]) -> Index | None:
        """The rows of some members; None for all."""
        if len(seats) == len(self.seats):
            return None
        key = tuple(seat.start for seat in seats)
        if key in self._indices:  # on the device already: a graph can be recorded with it
            return self._indices[key]
        rows = [row for s in seats for row in range(s.start, s.start + s.form.pieces)]
        parts = (
            rows,
            [row for row in rows if row < self.matrices],
            [row - self.matrices for row in rows if row >= self.matrices],
        )
        tensors = (torch.tensor(part, dtype=torch.int64, device=self.device) for part in parts)
        self._indices[key] = Index(*tensors)
        return self._indices[key]

    def select(self, index: Index | None) -> dict[str, Tensor]:
        """Tensors to work on: the stack's own for all members, gathered copies otherwise."""
        if index is None:
            return self.tensors
        return {
            name: tensor[index.of(name).to(tensor.device)] for name, tensor in self.tensors.items()
        }

    def write_back(self, tensors: dict[str, Tensor], index: Index) -> None:
        """Return gathered copies to the stack."""
        for name, value in tensors.items():
            self.tensors[name][index.of(name).to(value.device)] = value

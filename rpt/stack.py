"""Same-shaped parameters as one stack: permanent batched state, with a view of it per parameter.

A matrix is flattened to a row of (b, rows·cols) in its own orientation, so that neither its gradient
nor its update is ever transposed in memory. Vectors of several lengths share a stack, and small matrices
of several shapes do, turned wide and padded with zeros: no inner product, Gram matrix or polar factor
sees them. Which ones do is the choice of `rpt.stacking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .length import UNKNOWN
from .roots import RootBackend
from .stacking import COMPANY_SIDE

__all__ = [
    "HELD",
    "MEASURED",
    "METRIC",
    "Rows",
    "Stack",
    "compute_dtype",
    "matrix_shape",
]

# Prefix of the root backend's entries among a parameter's state.
METRIC = "metric."
# What a step measures of itself, one row per parameter in the stack, four entries in its state.
MEASURED = "measured"
_MEASURED = (
    "frame_confidence",
    "frame_coherence",
    "axial_closure",
    "gradient_alignment",
    "step_signal",
    "step_capped",
)
# The column after those: 1 where a frame is stored. It can be told from the frame, so nothing saves it.
HELD = len(_MEASURED)


def compute_dtype(parameter: Tensor) -> torch.dtype:
    """float64 for float64 parameters, float32 for every other floating type."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def matrix_shape(parameter: Tensor, thin_as_vector: bool) -> tuple[int, int] | None:
    """(shape[0], numel/shape[0]) for two or more dimensions, None for vectors and scalars.

    With `thin_as_vector` a matrix of one row or one column is a vector: its covariance sees one
    rank-one sample a step, and whitening by it amplifies whatever was absent of late.
    """
    if parameter.ndim < 2:
        return None
    rows, cols = parameter.shape[0], parameter.numel() // max(parameter.shape[0], 1)
    return None if thin_as_vector and min(rows, cols) == 1 else (rows, cols)


# What only matrices have, and what only vectors have, among the entries of a stack.
_MATRIX_ONLY = (METRIC, "root_", "last_root_step", "metric_start")
_VECTOR_ONLY = ("second_moment",)


class Rows(NamedTuple):
    """Some members of a stack as index tensors, int64.

    Attributes:
        all: where they are in what every member has.
        matrices: those of matrices, in what only matrices have.
        vectors: those of vectors, in what only vectors have.
    """

    all: Tensor
    matrices: Tensor
    vectors: Tensor

    def of(self, key: str) -> Tensor:
        """The rows of a tensor of the stack."""
        if key.startswith(_MATRIX_ONLY):
            return self.matrices
        return self.vectors if key.startswith(_VECTOR_ONLY) else self.all


class Stack:
    """State of `b` parameters of one shape, in tensors whose first dimension is the stack.

    Args:
        parameters: the members: matrices of one stack shape, then vectors no longer than one of them.
        backend: the metric of the matrices; None for a stack of vectors alone.
        dtype: the working dtype.
        device: where the state lives.
        polar_prior: the polar weight of matrices that no observation has reached.
        ordinals: running number of each among all parameters like it, those of other ranks included:
            refreshes by age are spread by it, on every number of ranks alike.
        shape: (rows, cols) of the stack: its matrices' own, or a wide one that holds them all; (1,
            length) for vectors.
        capturable: whether counters live on the device, as float64 tensors of the stack.

    Attributes:
        layout: (rows, cols) as its matrices lie in memory, wide or tall.
        rows, cols: the same, wide.
        matrices: how many of its members are matrices; they come first.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        backend: RootBackend | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        polar_prior: float,
        ordinals: Sequence[int],
        shape: tuple[int, int],
        thin_as_vector: bool = False,
        capturable: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.capturable = capturable
        # Steps since the youngest member's roots began; counted for capturable stacks only.
        self.age: int | None = None
        self._constants: dict[tuple[Any, ...], Tensor] = {}
        self.ordinals = list(ordinals)
        self.dtype, self.device = dtype, device
        batch = len(self.parameters)
        self.layout = shape
        self.rows, self.cols = sorted(shape)
        shapes = [own for p in self.parameters if (own := matrix_shape(p, thin_as_vector))]
        self.matrices = len(shapes)
        # A stack with room for matrices may so far hold vectors only.
        self.backend = backend = backend if shapes else None
        self.tall = [rows > cols for rows, cols in shapes]
        self.wide = [(min(own), max(own)) for own in shapes]
        self.padded = any(own != self.layout for own in shapes)
        self.sizes = torch.tensor(
            [[float(p.numel())] for p in self.parameters], dtype=dtype, device=device
        )
        # What a step writes gradients and updates through where members differ in shape: places in one
        # buffer whose padding stays zero. Made once, because slicing costs more than small copies do.
        self._buffer: Tensor | None = None
        self._places: list[Tensor] = []
        self.shapes = torch.tensor(self.wide, dtype=dtype, device=device) if self.padded else None
        like = torch.empty(0, dtype=dtype, device=device)
        width = self.rows * self.cols
        self.tensors: dict[str, Tensor] = {
            "momentum": like.new_zeros(batch, width),
            "frame": like.new_zeros(batch, width),
            MEASURED: like.new_tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]).repeat(batch, 1),
            "request_energy": like.new_zeros(batch),
            "polar_weight": like.new_zeros(batch),
            "residual_entropy_rank": like.new_ones(batch),
        }
        self.tensors["polar_weight"][: self.matrices] = polar_prior
        if vectors := batch - self.matrices:
            self.tensors["second_moment"] = like.new_zeros(vectors)
        if backend is not None:
            metric = backend.create(self.matrices, self.rows, self.cols, dtype=dtype, device=device)
            self.tensors |= {METRIC + key: value for key, value in metric.items()}
            self.tensors["root_condition"] = like.new_ones(self.matrices)
            self.tensors["root_failures"] = like.new_zeros(self.matrices, dtype=torch.int64)
        if capturable:
            self.tensors |= {
                key: torch.zeros(batch, dtype=torch.float64, device=device)
                for key in self._counters(self.matrices > 0)
            }

    @property
    def mixed(self) -> bool:
        """Whether there are both matrices and vectors among its members."""
        return 0 < self.matrices < len(self.parameters)

    @property
    def ragged(self) -> bool:
        """Whether members differ in shape, or may."""
        return self.padded or self.matrices < len(self.parameters)

    @property
    def company(self) -> bool:
        """Whether a matrix whose roots are due takes along those due soon."""
        return self.cols <= COMPANY_SIDE and self.dtype != torch.float64

    def view(self, key: str, index: int) -> Tensor:
        """One parameter's share of a state tensor, shaped like the parameter where that applies."""
        if key in _MEASURED:
            return self.tensors[MEASURED][index, _MEASURED.index(key)]
        start = self.matrices if key.startswith(_VECTOR_ONLY) else 0
        value = self.tensors[key][index - start]
        if self.padded and self.backend is not None and key.startswith(METRIC):
            return self.backend.crop(key[len(METRIC) :], value, *self.wide[index])
        if key not in ("momentum", "frame"):
            return value
        return self.unpack(value, index)

    def unpack(self, row: Tensor, index: int) -> Tensor:
        """A row of a (b, rows·cols) tensor as a view in the parameter's own shape."""
        parameter = self.parameters[index]
        if index >= self.matrices:
            return row[: parameter.numel()].view(parameter.shape)
        if not self.padded:
            return row.view(parameter.shape)
        rows, cols = self.wide[index]
        matrix = row.view(self.layout)[:rows, :cols]
        return (matrix.mT if self.tall[index] else matrix).view(parameter.shape)

    def keys(self, index: int) -> list[str]:
        """The tensor entries of one parameter's state."""
        others = _VECTOR_ONLY if index < self.matrices else _MATRIX_ONLY
        keys = [key for key in self.tensors if key != MEASURED and not key.startswith(others)]
        return keys + list(_MEASURED)

    def constant(self, *values: float, dtype: torch.dtype) -> Tensor:
        """Numbers on the device, copied there once: no later step waits for the copy."""
        if (dtype, values) not in self._constants:
            self._constants[dtype, values] = torch.tensor(values, dtype=dtype, device=self.device)
        return self._constants[dtype, values]

    def host_state(self, index: int) -> dict[str, float]:
        """What a parameter's state holds on the host beside its views."""
        is_matrix = index < self.matrices
        age: dict[str, float] = {"observation_age": 0} if is_matrix else {}
        return age if self.capturable else self._counters(is_matrix) | age

    @staticmethod
    def _counters(is_matrix: bool) -> dict[str, float]:
        """Counters and the gradient's unit, as they begin."""
        counters: dict[str, float] = {"step": 0, "observations": 0, "skipped": 0}
        # 0 until the first non-zero gradient. float32 then works in units of a power of two near its
        # largest entry, float64 in ones.
        counters["unit"] = 0.0
        # The largest gradient entry in the covariance's memory, and what it was at the last refresh.
        counters["peak"] = 0.0
        roots = {"last_root_step": 0, "root_refreshes": 0, "root_peak": 0.0}
        # The step before which the metric's statistics began: 0, or where it started anew.
        roots["metric_start"] = 0
        return counters | (roots if is_matrix else {})

    def adopt(self, index: int, record: dict[str, Any]) -> None:
        """Take over one parameter's earlier state and leave views of the stack in its place.

        A metric that does not fit the backend any more starts anew: in all its entries, with no roots
        and a bias correction of its own.
        """
        known, others = self.keys(index), _VECTOR_ONLY if index < self.matrices else _MATRIX_ONLY
        fits = all(
            key in known and record[key].shape == self.view(key, index).shape
            for key in record
            if key.startswith(METRIC)
        ) and not any(key.startswith(_VECTOR_ONLY) and key not in known for key in record)
        if not fits:
            for key in [k for k in record if k.startswith((METRIC, *others))]:
                del record[key]
            record["last_root_step"], record["metric_start"] = 0, record.get("step", 0)
        for key in self.keys(index):
            view = self.view(key, index)
            value = record.get(key)
            if isinstance(value, Tensor) and value.shape == view.shape:
                view.copy_(value)
            elif value is not None and not isinstance(value, Tensor):
                view.fill_(value)
            elif key == "request_energy" and record.get("step", 0):
                view.fill_(UNKNOWN)
            record[key] = view
        self.tensors[MEASURED][index, HELD] = self.view("frame", index).any()
        for key, start in self.host_state(index).items():
            value = record.setdefault(key, start)
            if isinstance(value, Tensor):  # from a capturable optimizer's checkpoint
                record[key] = type(start)(value.item())
        if self.capturable:
            # Read once, when the stack is built. Without roots a matrix is as young as can be.
            step = int(record["step"])
            if index < self.matrices:
                step = step - int(record["metric_start"]) if int(record["last_root_step"]) else 0
            self.age = step if self.age is None else min(self.age, step)

    def gradients(
        self,
        members: Sequence[int],
        gradients: Sequence[Tensor],
        divisors: Sequence[float] | Tensor,
    ) -> Tensor:
        """Stack gradients, each divided by its divisor, as (k, rows·cols) in the working dtype."""
        shape = (len(members), self.rows * self.cols)
        if not self.ragged:
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
            at_once = self.device.type == "cpu" and not isinstance(divisors, Tensor)
            if at_once and all(g.dtype == self.dtype for g in gradients):
                # One pass over memory for both. A device prefers few launches.
                for i, row, gradient, scale in zip(members, out, gradients, divisors, strict=True):
                    torch.div(gradient, scale, out=self.unpack(row, i))
                return out
        elif len(members) == len(self.parameters):
            if self._buffer is None:
                self._buffer = torch.zeros(shape, dtype=self.dtype, device=self.device)
            out = self._buffer
        else:
            out = torch.zeros(shape, dtype=self.dtype, device=self.device)
        places = self._places_in(out, members)
        torch._foreach_copy_(places, list(gradients))
        if isinstance(divisors, Tensor):
            return out.div_(divisors.to(self.dtype)[:, None])
        scales = set(divisors)
        if scales == {1.0}:
            return out
        if len(scales) == 1:
            return out.div_(divisors[0])
        return out.div_(torch.tensor(divisors, dtype=self.dtype, device=self.device)[:, None])

    def updates(self, members: Sequence[int], update: Tensor) -> list[Tensor]:
        """Rows of (k, rows·cols) in the members' own shapes; valid until the next step."""
        if self._buffer is not None and len(members) == len(self.parameters):
            update = self._buffer.copy_(update)
        return self._places_in(update, members)

    def _places_in(self, rows: Tensor, members: Sequence[int]) -> list[Tensor]:
        if rows is not self._buffer:
            return [self.unpack(row, i) for i, row in zip(members, rows, strict=True)]
        if not self._places:
            self._places = [self.unpack(row, i) for i, row in enumerate(rows)]
        return self._places

    def select(self, members: Sequence[int]) -> tuple[dict[str, Tensor], Rows | None]:
        """Working tensors of some members: the stack itself for all, gathered copies otherwise."""
        if len(members) == len(self.parameters):
            return self.tensors, None
        parts = (
            list(members),
            [i for i in members if i < self.matrices],
            [i - self.matrices for i in members if i >= self.matrices],
        )
        if self.capturable:
            rows = Rows(*(self.constant(*part, dtype=torch.int64) for part in parts))
        else:
            rows = Rows(
                *(torch.tensor(part, dtype=torch.int64, device=self.device) for part in parts)
            )
        return {key: value[rows.of(key)] for key, value in self.tensors.items()}, rows

    def write_back(self, working: dict[str, Tensor], rows: Rows | None) -> None:
        """Return gathered copies to the stack."""
        if rows is not None:
            for key, value in working.items():
                self.tensors[key][rows.of(key)] = value

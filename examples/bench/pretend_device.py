"""A device that is not there: what a step asks of one, counted on a machine without a GPU.

    with PretendDevice() as device:
        parameter = nn.Parameter(torch.randn(64, 64, device=device.device))
        ...
        optimizer.step()
    device.waits, device.calls

Inside, tensors made on it are wrappers that say so and compute on the CPU, or on no device at all
(`values=False`), where every value that is read comes back as one: a model of any size then costs
nothing. Code takes the path that it takes on a GPU. Counted are

    waits     whatever makes the host wait for the device: a value read, a blocking copy in either
              direction, an index by a mask, a decomposition
    calls     operators that launch a kernel: all but views and the allocation of empty tensors; one of a
              list of tensors (`_foreach_…`) counts once, though a long list takes several launches

and operands on different devices are refused, as CUDA does. An operator may launch more than one kernel
(a reduction in two passes, a product that splits): compare counts, do not take them for exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["Call", "PretendDevice"]

NAME = "pretended"


@cache
def pretended() -> torch.device:
    """The device; torch keeps one name free for a backend written in Python (from torch 2.9 on).

    A registration is for good: the device says that it is available only while it is in use, or torch
    would prefer it to the CPU from now on.
    """

    class Module(backend_registration._DummyBackendModule):  # type: ignore[misc]
        def is_available(self) -> bool:
            return PretendDevice.inside > 0

    class Hook(backend_registration._DummyPrivateUse1Hook):  # type: ignore[misc]
        def is_available(self) -> bool:
            return PretendDevice.inside > 0

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module(), Hook())
    return torch.device(NAME, 0)


# Operators that hand a value to the host, or that wait for a status.
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
    "_linalg_eigh",
    "_linalg_svd",
    "linalg_qr",
    "linalg_cholesky_ex",
    "linalg_inv_ex",
    "linalg_lu_factor_ex",
)
_DECOMPOSING: dict[str, Callable[[int, int], float]] = {
    "_linalg_eigh": lambda m, n: 9 * n**3,
    "linalg_qr": lambda m, n: 4 * m * n**2 - 4 / 3 * n**3,
    "_linalg_svd": lambda m, n: 14 * m * n**2 + 8 * n**3,
}
_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_READS = ("tolist", "numpy")


class Call(NamedTuple):
    """One operator: the dtype it works in, the operations of a product, the bytes of all operands."""

    name: str
    dtype: torch.dtype
    flops: int
    bytes: int


class _There(Tensor):
    """A tensor that says it is on the device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _There:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=pretended(),
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    def __repr__(self) -> str:
        return f"There({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"{func} outside of the pretended device")


class PretendDevice(TorchDispatchMode):
    """Count what is asked of a device that is not there.

    Args:
        values: whether its tensors hold values, on the CPU; without, they are meta tensors.
        waiting: called with the name of each operator that waits; to find where.

    Attributes:
        waits: by operator.
        calls: in their order.
    """

    inside = 0

    def __init__(self, values: bool = True, waiting: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.device = pretended()
        self.home = torch.device("cpu" if values else "meta")
        self.waiting = waiting
        self.clear()

    def clear(self) -> None:
        """Count from zero."""
        self.waits: Counter[str] = Counter()
        self.calls: list[Call] = []

    def wait(self, name: str) -> None:
        self.waits[name] += 1
        if self.waiting is not None:
            self.waiting(name)

    def read(self, tensor: Tensor) -> Tensor:
        """Its values; where there are none, ones, and False."""
        if self.home.type == "cpu":
            return tensor
        return torch.full(tensor.shape, tensor.dtype != torch.bool, dtype=tensor.dtype)

    def __enter__(self):  # type: ignore[no-untyped-def]
        PretendDevice.inside += 1
        # These read memory without an operator.
        self.methods = {name: getattr(Tensor, name) for name in _READS}
        for name, method in self.methods.items():
            setattr(Tensor, name, self._reading(name, method))
        # What is made from Python's numbers is made here, and copied.
        self.lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, method in self.methods.items():
            setattr(Tensor, name, method)
        torch._C._set_only_lift_cpu_tensors(self.lifts)
        PretendDevice.inside -= 1
        super().__exit__(*error)

    def _reading(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, _There):
                self.wait(name)
                tensor = self.read(tensor.inner)
            return method(tensor, *args, **kwargs)

        return reading

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = [x for x in given if isinstance(x, _There)]
        wanted = kwargs.get("device")
        target = torch.device(wanted) if wanted is not None else None
        if not there and (target is None or target.type != NAME):
            return func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs, target)
        if target is not None:
            kwargs = kwargs | {"device": self.home}
            if target.type != NAME:
                raise NotImplementedError(f"{func} from the device to {target}")
        strangers = [x for x in given if not isinstance(x, _There) and x.ndim]
        if there and strangers and not (name.startswith("index") or name == "lift_fresh"):
            raise RuntimeError(f"{func}: operands on the device and on the CPU")
        chosen = args[1] if name.startswith("index") and isinstance(args[1], list) else ()
        masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in chosen)
        if name in _WAITING or masks:
            self.wait(f"{name} by a mask" if masks else name)
        if name == "_local_scalar_dense":
            return func(self.read(there[0].inner))
        args, kwargs = tree_map(self._inside, (args, kwargs))
        if name == "nonzero" and self.home.type == "meta":
            return _There(torch.empty(0, args[0].ndim, dtype=torch.int64, device="meta"))
        found = func(*args, **kwargs)
        self._count(func, name, args, kwargs, found)
        return self._outside(found, given)

    def _inside(self, value: Any) -> Any:
        if isinstance(value, _There):
            return value.inner
        if self.home.type == "meta" and isinstance(value, Tensor) and not value.is_meta:
            return value.to("meta")
        return value

    def _outside(self, found: Any, given: list[Tensor]) -> Any:
        """Results on the device; of an operator in place, the tensor that was given."""
        known = {id(x.inner): x for x in given if isinstance(x, _There)}

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, _There):
                return value
            return known[id(value)] if id(value) in known else _There(value)

        return tree_map(wrap, found)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any, target: Any) -> Any:
        """Between devices, or from dtype to dtype."""
        if name == "copy_":
            to, source = args[0], args[1]
            asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        else:
            source, asynchronous = args[0], kwargs.get("non_blocking", False)
            to = source if target is None else target
        arrives = isinstance(to, _There) or (isinstance(to, torch.device) and to.type == NAME)
        leaves = isinstance(source, _There)
        if arrives != leaves and (leaves or not asynchronous):
            self.wait("copy from the device" if leaves else "blocking copy to the device")
        values = source.inner if leaves else source
        if leaves and not arrives:
            values = self.read(values)
        elif arrives and not leaves and self.home.type == "meta":
            values = values.to("meta")
        if name == "copy_":
            target_values = to.inner if isinstance(to, _There) else to
            target_values.copy_(values)
            self.calls.append(Call(name, values.dtype, 0, 2 * _bytes([values])))
            return to
        made = func(values, **(kwargs | {"device": self.home if arrives else torch.device("cpu")}))
        self.calls.append(Call(name, made.dtype, 0, _bytes([values, made])))
        return _There(made) if arrives else made

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
        returns = func._schema.returns
        view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        if view or name in _ALLOCATING:
            return
        touched = (
            found if name.startswith("new_") or name.endswith("_like") else (args, kwargs, found)
        )
        operands = [x for x in tree_flatten(touched)[0] if isinstance(x, Tensor)]
        dtype = operands[0].dtype if operands else torch.float32
        self.calls.append(Call(name, dtype, _operations(name, args), _bytes(operands)))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _operations(name: str, args: Any) -> int:
    """Multiplications and additions of a product or a decomposition, 0 for everything else.

    Decompositions as in Golub and Van Loan, "Matrix Computations", 4th edition: eigenvalues and vectors
    9 n³ (8.3.3), a QR with its Q 4 m n² - 4/3 n³ (5.2), a thin
    singular value decomposition 14 m n² + 8 n³ (8.6.4).
    """
    if name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = args[-2:]
        batch = left.shape[0] if left.ndim == 3 else 1
        return 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]
    if name not in _DECOMPOSING:
        return 0
    rows, cols = args[0].shape[-2:]
    m, n = max(rows, cols), min(rows, cols)
    return math.prod(args[0].shape[:-2]) * round(_DECOMPOSING[name](m, n))

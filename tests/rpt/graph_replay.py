"""What a CUDA graph does to a step, on any device: operators recorded and run again on their memory."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that hand a value to Python, or decompose and therefore wait for the host on a GPU.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "unique",
    "masked_select",
    "eigh",
    "eigvalsh",
    "svd",
    "qr",
    "cholesky",
    "linalg_inv",
    "lu_factor",
)


def waits(func) -> bool:
    name = func._schema.name.split("::")[1]
    return any(part == name or f"_{part}" in name for part in WAITING)


def _refused(tensor, *args, **kwargs):
    raise AssertionError("a read of a whole tensor waits for the device")


class NoHostReads(TorchDispatchMode):
    """Raises at the first operator for which the host would have to wait."""

    def __enter__(self):
        # No operator on a CPU, but a copy and a wait on a device.
        self.patches = [(name, getattr(torch.Tensor, name)) for name in ("tolist", "numpy", "cpu")]
        for name, _ in self.patches:
            setattr(torch.Tensor, name, _refused)
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self.patches:
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not waits(func), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Records operators with the tensors they read and made; `replay` runs them on those again."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not waits(func), f"{func} waits for the device"
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self.tape.append((func, args, kwargs, made))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.tape:
            returns = func._schema.returns
            if returns and all(
                r.alias_info is not None and not r.alias_info.is_write for r in returns
            ):
                continue  # a view: it sees what its base has become
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)

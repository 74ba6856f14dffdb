"""Which stack each parameter lives in, and the restacking when anything about it moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from .roots import RootBackend
from .stack import Stack, compute_dtype, matrix_shape, padded_shape, vector_length_class

__all__ = ["StackRegistry"]


class StackRegistry:
    """Stacks of all parameters that have had a gradient, kept from step to step.

    Nothing in here is saved: the stacks' tensors are seen through views in the optimizer's state, and
    are rebuilt from that state after a load, a copy, a change of device or of root backend.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Rebuild all stacks from the optimizer's state before the next step."""
        self._home: dict[int, tuple[Stack, int]] = {}
        self._records: dict[int, Any] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}

    def home(self, parameter: Tensor) -> tuple[Stack, int]:
        """The stack of a parameter and its position there."""
        return self._home[id(parameter)]

    def ensure(
        self,
        live: Iterable[tuple[int, Tensor]],
        groups: Sequence[Mapping[str, Any]],
        state: MutableMapping[Tensor, Any],
        backend: Callable[[str], RootBackend],
    ) -> None:
        """Give every parameter that takes part a place.

        Args:
            live: (group index, parameter) of those with a gradient.
            groups: the optimizer's parameter groups.
            state: its state, in which records are filled with views.
            backend: the root backend behind a group's `roots` text.
        """
        live = list(live)
        settled = all(
            self._keys.get(id(p)) == _stack_key(g, groups[g], p, backend)
            and state.get(p) is self._records.get(id(p))
            for g, p in live
        )
        if settled:
            return
        taking_part = {id(p) for _, p in live}
        shelves: dict[tuple[Any, ...], list[Tensor]] = {}
        ordinals: dict[tuple[Any, ...], list[int]] = {}
        seen: dict[tuple[Any, ...], int] = {}
        for g, parameter in _members(groups):
            key = _stack_key(g, groups[g], parameter, backend)
            if id(parameter) in taking_part or "momentum" in state.get(parameter, {}):
                shelves.setdefault(key, []).append(parameter)
                ordinals.setdefault(key, []).append(seen.get(key, 0))
            seen[key] = seen.get(key, 0) + 1
        self.forget()
        for key, parameters in shelves.items():
            group = groups[key[0]]
            is_matrix = matrix_shape(parameters[0]) is not None
            roots = backend(group["roots"]) if is_matrix else None
            if roots is not None and group["root_drift_threshold"] is None:
                roots = roots.without_drift()
            stack = Stack(
                parameters,
                roots,
                dtype=key[1],
                device=key[2],
                polar_prior=group["polar_prior"],
                shape=(key[3], key[4]) if is_matrix else None,
                ordinals=ordinals[key],
                capturable=group["capturable"],
            )
            for i, parameter in enumerate(parameters):
                record = state[parameter]
                stack.adopt(i, record)
                self._home[id(parameter)] = (stack, i)
                self._records[id(parameter)] = record
                self._keys[id(parameter)] = key


def _members(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    for g, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.numel():  # an empty one has nothing to keep
                yield g, parameter


def _stack_key(
    index: int,
    group: Mapping[str, Any],
    parameter: Tensor,
    backend: Callable[[str], RootBackend],
) -> tuple[Any, ...]:
    """What the members of one stack have in common."""
    shape, dtype = matrix_shape(parameter), compute_dtype(parameter)
    common = (index, dtype, parameter.device)
    capturable = group["capturable"]
    if shape is None:
        return (*common, vector_length_class(parameter.numel()), capturable)
    drifts = group["root_drift_threshold"] is not None
    if not drifts:
        # The published rule keeps every matrix to itself: rounding then has no company either.
        shape = padded_shape(*shape, backend(group["roots"]), dtype)
    return (*common, *shape, group["roots"], drifts, capturable)

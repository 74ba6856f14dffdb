"""Which stack each parameter lives in, and the restacking when anything about it moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .roots import RootBackend
from .stack import Stack, compute_dtype, matrix_shape
from .stacking import matrix_layouts, vector_layouts, vector_length_class

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
        # What the stacks were chosen by: facts of each parameter in them, and of the groups.
        self._facts: dict[int, tuple[Any, ...]] = {}
        self._groups: list[tuple[Any, ...]] = []

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
        described = [_group_facts(group) for group in groups]
        settled = described == self._groups and all(
            self._facts.get(id(p)) == (g, p.shape, p.dtype, p.device)
            and state.get(p) is self._records.get(id(p))
            for g, p in live
        )
        if settled:
            return
        taking_part = {id(p) for _, p in live}
        taking_part |= {id(p) for _, p in _members(groups) if "momentum" in state.get(p, {})}
        shelves: dict[_Key, list[tuple[int, Tensor]]] = {}
        seen: Counter[_Key] = Counter()
        for key, parameter in _choose(groups, backend):
            if id(parameter) in taking_part:
                shelves.setdefault(key, []).append((seen[key], parameter))
            seen[key] += 1
        self.forget()
        self._groups = described
        for key, members in shelves.items():
            group, parameters = groups[key.group], [parameter for _, parameter in members]
            roots = backend(group["roots"]) if key.is_matrix else None
            if roots is not None and group["root_drift_threshold"] is None:
                roots = roots.without_drift()
            stack = Stack(
                parameters,
                roots,
                dtype=key.dtype,
                device=key.device,
                polar_prior=group["polar_prior"],
                shape=key.shape,
                ordinals=[ordinal for ordinal, _ in members],
                capturable=group["capturable"],
            )
            for i, parameter in enumerate(parameters):
                record = state[parameter]
                stack.adopt(i, record)
                self._home[id(parameter)] = (stack, i)
                self._records[id(parameter)] = record
                self._facts[id(parameter)] = _facts(key.group, parameter)


class _Key(NamedTuple):
    """What the members of one stack have in common."""

    group: int
    dtype: torch.dtype
    device: torch.device
    is_matrix: bool
    shape: tuple[int, int]


def _members(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    for g, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.numel():  # an empty one has nothing to keep
                yield g, parameter


def _facts(index: int, parameter: Tensor) -> tuple[Any, ...]:
    """What about a parameter decides its stack."""
    return index, parameter.shape, parameter.dtype, parameter.device


def _group_facts(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What about a group decides its stacks; compared in every step."""
    by_age = group["root_drift_threshold"] is None
    return group["roots"], by_age, group["capturable"], [id(p) for p in group["params"]]


def _choose(
    groups: Sequence[Mapping[str, Any]], backend: Callable[[str], RootBackend]
) -> list[tuple[_Key, Tensor]]:
    """The stack of every parameter, whether it takes part or not: all ranks choose alike."""
    everyone = [
        (
            _Key(
                g,
                compute_dtype(parameter),
                parameter.device,
                (shape := matrix_shape(parameter)) is not None,
                shape or (1, vector_length_class(parameter.numel())),
            ),
            parameter,
        )
        for g, parameter in _members(groups)
    ]
    pools: dict[_Key, Counter[tuple[int, int]]] = {}
    for key, _ in everyone:
        pools.setdefault(_pool(key), Counter())[key.shape] += 1
    layouts = {
        pool: _layouts(pool, shapes, groups[pool.group], backend) for pool, shapes in pools.items()
    }
    return [
        (key._replace(shape=layouts[_pool(key)].get(key.shape, key.shape)), parameter)
        for key, parameter in everyone
    ]


def _pool(key: _Key) -> _Key:
    """Those that could share a stack if shapes did not matter."""
    return key._replace(shape=(0, 0))


def _layouts(
    pool: _Key,
    shapes: Mapping[tuple[int, int], int],
    group: Mapping[str, Any],
    backend: Callable[[str], RootBackend],
) -> dict[tuple[int, int], tuple[int, int]]:
    """The stack's shape for every shape that does not keep its own."""
    if pool.dtype == torch.float64:
        return {}  # it is there for exactness, not for speed
    if not pool.is_matrix:
        return vector_layouts(shapes)
    if group["root_drift_threshold"] is not None:
        # The published rule keeps every matrix to itself: rounding then has no company either.
        return {}
    return matrix_layouts(shapes, backend(group["roots"]).pads)

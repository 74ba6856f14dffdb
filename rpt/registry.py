"""Which stack each parameter lives in, and the restacking when anything about it moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ownership import holds_state
from .roots import RootBackend
from .stack import Stack, compute_dtype, matrix_shape
from .stacking import host_layout, matrix_layouts, vector_layouts, vector_length_class

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
            self._facts.get(id(p)) == _facts(g, p) and state.get(p) is self._records.get(id(p))
            for g, p in live
        )
        if settled:
            return
        taking_part = {id(p) for _, p in live}
        taking_part |= {id(p) for _, p in _members(groups) if holds_state(state.get(p, {}))}
        shelves: dict[_Key, list[tuple[int, Tensor]]] = {}
        seen: Counter[tuple[_Key, bool]] = Counter()
        for key, parameter in _choose(groups, backend):
            vector = _is_vector(groups[key.group], parameter)
            kind = key, vector
            if id(parameter) in taking_part:
                shelves.setdefault(key, []).append((seen[kind], parameter))
            seen[kind] += 1
        self.forget()
        self._groups = described
        for key, members in shelves.items():
            group = groups[key.group]
            members.sort(key=lambda member: _is_vector(groups[key.group], member[1]))
            parameters = [parameter for _, parameter in members]
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
                thin_as_vector=group["thin_as_vector"],
                capturable=group["capturable"],
            )
            for i, parameter in enumerate(parameters):
                record = state[parameter]
                stack.adopt(i, record)
                self._home[id(parameter)] = (stack, i)
                self._records[id(parameter)] = record
                self._facts[id(parameter)] = _facts(key.group, parameter)


def _is_vector(group: Mapping[str, Any], parameter: Tensor) -> bool:
    return matrix_shape(parameter, group["thin_as_vector"]) is None


class _Key(NamedTuple):
    """What the members of one stack have in common; `is_matrix` where it has room for matrices."""

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
    ids = [id(p) for p in group["params"]]
    return group["roots"], by_age, group["capturable"], group["thin_as_vector"], ids


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
                (shape := matrix_shape(parameter, groups[g]["thin_as_vector"])) is not None,
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
    chosen = [
        (key._replace(shape=layouts[_pool(key)].get(key.shape, key.shape)), parameter)
        for key, parameter in everyone
    ]
    hosts = _hosts(Counter(key for key, _ in chosen), layouts, groups)
    return [(hosts.get(key, key), parameter) for key, parameter in chosen]


def _hosts(
    stacks: Mapping[_Key, int],
    layouts: Mapping[_Key, Mapping[tuple[int, int], tuple[int, int]]],
    groups: Sequence[Mapping[str, Any]],
) -> dict[_Key, _Key]:
    """For stacks of vectors that are better kept behind the matrices of another: that one."""
    found = {}
    for key, count in stacks.items():
        pool = _pool(key)._replace(is_matrix=True)
        group = groups[key.group]
        # Recorded steps cost no dispatch, and exactness goes before speed.
        if key.is_matrix or group["capturable"] or not _shares(pool, group):
            continue
        matrices = {k.shape: n for k, n in stacks.items() if k.is_matrix and _pool(k) == pool}
        own = layouts.get(pool, {})
        padded = {layout for shape, layout in own.items() if shape != layout}
        host = host_layout(key.shape[1], count, matrices, padded)
        if host is not None:
            found[key] = pool._replace(shape=host)
    return found


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
    if pool.is_matrix:
        pads = backend(group["roots"]).pads
        return matrix_layouts(shapes, pads) if _shares(pool, group) else {}
    return vector_layouts(shapes) if pool.dtype != torch.float64 else {}


def _shares(pool: _Key, group: Mapping[str, Any]) -> bool:
    """Whether a matrix may share a stack with anything that differs from it in shape.

    float64 is there for exactness, not for speed, and the published rule keeps every matrix to itself:
    rounding then has no company either.
    """
    return pool.dtype != torch.float64 and group["root_drift_threshold"] is None

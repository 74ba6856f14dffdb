"""Which stack each parameter lives in, and the restacking when anything about it moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..roots import RootBackend
from .layout import (
    Form,
    compute_dtype,
    form_of,
    host_layout,
    is_fake,
    matrix_layouts,
    vector_layouts,
    vector_length_class,
)
from .schema import holds_state
from .stack import Seat, Stack


class StackRegistry:
    """Stacks of all parameters that have had a gradient, kept from step to step.

    Nothing in here is saved: the stacks' tensors are seen through views in the optimizer's state, and
    are rebuilt from that state after a load, a copy, a change of device or of root backend.

    Attributes:
        known: by id of a parameter that has taken part, what its place was chosen by: (group index,
            shape, dtype, device), and its record in the optimizer's state.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[tuple[Any, ...], Any]] = {}
        self._home: dict[int, Stack] = {}
        # What about the groups the stacks were chosen by.
        self._groups: list[tuple[Any, ...]] = []

    def home(self, parameter: Tensor) -> tuple[Stack, Seat]:
        """The stack of a parameter and its place there."""
        stack = self._home[id(parameter)]
        return stack, stack.seats[id(parameter)]

    def nbytes(self, parameter: Tensor) -> int | None:
        """A parameter's part of what the stacks hold; None where it is in none."""
        if id(parameter) not in self._home:
            return None
        stack, seat = self.home(parameter)
        return round(stack.share_of_bytes(seat))

    def ensure(
        self,
        live: Iterable[Tensor],
        groups: Sequence[Mapping[str, Any]],
        state: MutableMapping[Tensor, Any],
        backend: Callable[[str], RootBackend],
        *,
        mine: Callable[[Tensor], bool],
        moved: bool,
    ) -> None:
        """Give every parameter that takes part a place.

        Args:
            live: those with a gradient.
            groups: the optimizer's parameter groups.
            state: its state, in which records are filled with views.
            backend: the root backend behind a group's `roots` text.
            mine: whether a parameter's state is kept here, in a stack.
            moved: whether any of those with a gradient is not what is `known`.
        """
        described = [_group_facts(group) for group in groups]
        if not moved and described == self._groups:
            return
        taking_part = {id(p) for p in live}
        taking_part |= {id(p) for _, p in _members(groups) if holds_state(state.get(p, {}))}
        shelves: dict[_Key, list[tuple[Tensor, Form]]] = {}
        for key, parameter, form in _choose(groups, backend):
            if id(parameter) in taking_part and mine(parameter):
                shelves.setdefault(key, []).append((parameter, form))
        self._home, self._groups = {}, described
        self.known = {
            id(p): ((g, p.shape, p.dtype, p.device), state[p])
            for g, p in _members(groups)
            if id(p) in taking_part
        }
        for key, members in shelves.items():
            members.sort(key=lambda member: not member[1].matrix)
            group = groups[key.group]
            roots = backend(group["roots"]) if key.is_matrix else None
            if roots is not None and group["root_drift_threshold"] is None:
                roots = roots.without_drift()
            stack = Stack(
                members,
                roots,
                dtype=key.dtype,
                like=_empty_like(members[0][0]),
                polar_prior=group["polar_prior"],
                layout=key.shape,
                capturable=group["capturable"],
            )
            for parameter, _ in members:
                stack.adopt(stack.seats[id(parameter)], state[parameter])
                self._home[id(parameter)] = stack


def _empty_like(parameter: Tensor) -> Tensor:
    """An empty tensor of the kind that a parameter's state is made of: plain, or as fake as it is."""
    if is_fake(parameter):
        return parameter.detach().new_empty(0)
    return torch.empty(0, device=parameter.device)


class _Key(NamedTuple):
    """What the members of one stack have in common; `is_matrix` where it has room for matrices."""

    group: int
    dtype: torch.dtype
    device: torch.device
    is_matrix: bool
    # Whether members may share the stack with anything that differs from them in shape.
    shares: bool
    shape: tuple[int, int]


def _members(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Tensor]]:
    for g, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.numel():  # an empty one has nothing to keep
                yield g, parameter


def _group_facts(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What about a group decides its stacks; compared in every step."""
    by_age = group["root_drift_threshold"] is None
    forms = group["stacked"], group["thin_as_vector"]
    return group["roots"], by_age, group["capturable"], forms, [id(p) for p in group["params"]]


def _choose(
    groups: Sequence[Mapping[str, Any]], backend: Callable[[str], RootBackend]
) -> list[tuple[_Key, Tensor, Form]]:
    """The stack of every parameter, whether it takes part or not: all ranks choose alike."""
    everyone = []
    for g, parameter in _members(groups):
        form = form_of(parameter, groups[g])
        shape = (form.rows, form.cols) if form.matrix else (1, vector_length_class(form.cols))
        dtype = compute_dtype(parameter)
        # float64 is there for exactness, not for speed, and the published rule keeps every matrix to
        # itself: rounding then has no company either.
        by_age = groups[g]["root_drift_threshold"] is None
        shares = dtype != torch.float64 and not form.lead and (by_age or not form.matrix)
        key = _Key(g, dtype, parameter.device, form.matrix, shares, shape)
        everyone.append((key, parameter, form))
    pools: dict[_Key, Counter[tuple[int, int]]] = {}
    for key, _, form in everyone:
        pools.setdefault(_pool(key), Counter())[key.shape] += form.pieces
    layouts = {
        pool: _layouts(pool, shapes, groups[pool.group], backend) for pool, shapes in pools.items()
    }
    chosen = [
        (key._replace(shape=layouts[_pool(key)].get(key.shape, key.shape)), parameter, form)
        for key, parameter, form in everyone
    ]
    hosts = _hosts(Counter(key for key, *_ in chosen), layouts)
    return [(hosts.get(key, key), parameter, form) for key, parameter, form in chosen]


def _hosts(
    stacks: Mapping[_Key, int], layouts: Mapping[_Key, Mapping[tuple[int, int], tuple[int, int]]]
) -> dict[_Key, _Key]:
    """For stacks of vectors that are better kept behind the matrices of another: that one."""
    found = {}
    for key, count in stacks.items():
        if key.is_matrix or not key.shares:
            continue
        pool = _pool(key)._replace(is_matrix=True)
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
    if not pool.shares:
        return {}
    if pool.is_matrix:
        return matrix_layouts(shapes, backend(group["roots"]).pads)
    return vector_layouts(shapes)

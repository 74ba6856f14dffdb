"""Matrices and vectors that share a padded stack take the steps they would take alone."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rpt
from rpt.roots import resolve_roots
from rpt.store import layout as stacking

SHAPES = {
    "small": [(2, 24), (24, 48), (48, 24), (4, 12), (1, 12), (16, 3, 2), (5, 5), (40, 64)],
    "tall and wide": [(96, 8), (8, 96), (64, 2), (97, 48), (3, 64), (1,), (65,), ()],
    "kernels": [(8, 1, 3, 3), (16, 8, 3, 3), (8, 8, 3, 3), (10, 16), (2, 3, 2, 2), (8,), (300,)],
    "with large ones": [(64, 64), (3, 64), (300, 20), (130, 140), (7, 130), (5000,), (3,)],
}


@pytest.fixture
def overhead(monkeypatch):
    """Sets what a stack is said to cost."""

    def say(value):
        monkeypatch.setattr(stacking, "OVERHEAD", value)

    return say


def build(shapes, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]
    return rpt.ResidualPolarTransport(parameters, lr=1e-2, **options), parameters


def train(optimizer, parameters, steps=6, seed=1, absent=()):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for i, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if i in absent else gradient.to(parameter.dtype)
        optimizer.step()


def stacks(optimizer, parameters):
    homes = [optimizer._stacks.registry.home(p)[0] for p in parameters]
    return list({id(stack): stack for stack in homes}.values())


def trajectory(shapes, steps=6, **options):
    optimizer, parameters = build(shapes, **options)
    train(optimizer, parameters, steps)
    return optimizer, parameters


def assert_alike(optimizer, parameters, twin, twins):
    for a, b in zip(parameters, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        one, other = optimizer.state[a], twin.state[b]
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == other[key].shape, key
        for key in ("momentum", "frame"):
            torch.testing.assert_close(one[key], other[key], rtol=1e-3, atol=1e-4)
        if a.ndim > 1 and "root_condition" in one:
            condition, expected = one["root_condition"], other["root_condition"]
            torch.testing.assert_close(condition, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("preset", ["drop_in", "paper"])
@pytest.mark.parametrize("roots", ["full", "auto", "blocked"])
def test_padding_changes_no_step(overhead, preset, roots):
    options = {"preset": preset, "roots": roots, "polar_prior": 0.6, "max_root_staleness": 1}
    options |= {"root_drift_threshold": None}
    optimizer, parameters = trajectory(SHAPES["small"], **options)
    assert len(stacks(optimizer, parameters)) == 1, "all eight shapes fit into one padded stack"
    overhead(0.0)
    alone, twins = trajectory(SHAPES["small"], **options)
    assert len(stacks(alone, twins)) == 8
    assert_alike(optimizer, parameters, alone, twins)


RANDOM = random.Random(7)
SAMPLES = [
    [
        tuple(RANDOM.choice((1, 2, 5, 16, 33, 64, 90, 160)) for _ in range(RANDOM.randint(1, 2)))
        for _ in range(9)
    ]
    for _ in range(3)
]


@pytest.mark.parametrize("shapes", [*SHAPES.values(), *SAMPLES])
@pytest.mark.parametrize("capturable", [False, True])
def test_padding_changes_no_step_of_any_shape(overhead, shapes, capturable):
    options = {"max_root_staleness": 1, "capturable": capturable}
    optimizer, parameters = trajectory(shapes, **options)
    overhead(0.0)
    alone, twins = trajectory(shapes, **options)
    assert len(stacks(optimizer, parameters)) < len(stacks(alone, twins))
    assert_alike(optimizer, parameters, alone, twins)


def test_a_shape_of_its_own_is_not_padded():
    optimizer, parameters = trajectory([(48, 24), (48, 24), (4, 2, 12), (2, 3)], steps=1)
    assert [s.padded for s in stacks(optimizer, parameters)] == [True]
    optimizer, parameters = trajectory([(48, 24), (48, 24), (48, 24)], steps=1)
    (stack,) = stacks(optimizer, parameters)
    assert (stack.layout, stack.padded) == ((48, 24), False)


@pytest.mark.parametrize("change", ["no drift", "double", "low_rank"])
def test_what_is_never_padded(change):
    options = {
        "no drift": {"preset": "paper"},
        "double": {"dtype": torch.float64},
        "low_rank": {"roots": "low_rank(rank=2)"},
    }[change]
    optimizer, parameters = trajectory(SHAPES["small"], **options)
    assert not any(stack.padded for stack in stacks(optimizer, parameters))


def mixed(stack):
    return 0 < stack.matrices < stack.count


def test_refreshes_are_spread_by_shape_and_small_matrices_keep_company():
    shapes = [(24, 24), (24, 10), (64, 64), (96, 80), (80, 96), (96, 82), (100, 90)]
    optimizer, parameters = trajectory(shapes, steps=140)
    last = [int(optimizer.state[p]["last_root_step"]) for p in parameters]
    assert last[0] == last[1] == last[2], "small: one call decomposes all"
    assert last[3] == last[4], "one shape, in either orientation"
    assert len(set(last)) >= 4
    assert all(75 < step <= 140 for step in last)


@pytest.mark.parametrize(
    "rounds",
    [
        [{0, 3}, {5}, {1, 4, 5}, {0, 2, 3, 4}],  # every kind of part of a stack
        [{0, 1, 2}, {0, 1, 2, 4}, set()],  # vectors first: the stack has room and no matrices
        [{3, 4, 5}, {3, 4}, set()],  # matrices first
    ],
)
def test_vectors_behind_matrices_step_as_in_a_stack_of_their_own(overhead, rounds):
    shapes = [(24, 48), (16, 8), (3, 24), (48,), (), (7,)]
    options = {"max_root_staleness": 1, "eps": 1e-6}
    runs = []
    for together in (True, False):
        if not together:
            overhead(0.0)
        optimizer, parameters = build(shapes, **options)
        for seed, absent in enumerate(rounds):
            train(optimizer, parameters, 2, seed, absent)
        train(optimizer, parameters, 1)
        assert any(mixed(stack) for stack in stacks(optimizer, parameters)) == together
        runs.append((optimizer, parameters))
    assert_alike(*runs[0], *runs[1])
    steps = [runs[0][0].state[p]["step"] for p in runs[0][1]]
    assert steps == [1 + 2 * sum(i not in absent for absent in rounds) for i in range(6)]


def test_the_published_rule_keeps_vectors_to_themselves():
    optimizer, parameters = trajectory([(24, 48), (48,)], steps=1, preset="paper")
    assert not any(mixed(stack) for stack in stacks(optimizer, parameters))


def layouts(optimizer, parameters):
    return [optimizer._stacks.registry.home(p)[0].layout for p in parameters]


def test_the_choice_depends_on_all_parameters_and_on_none_of_their_gradients():
    shapes = SHAPES["kernels"]
    optimizer, parameters = trajectory(shapes, steps=1)
    for absent in ({0}, {1, 3}, {1, 2, 4, 5}):
        other, others = build(shapes)
        train(other, others, 1, absent=absent)
        present = [i for i in range(len(shapes)) if i not in absent]
        everyone = layouts(optimizer, parameters)
        assert layouts(other, [others[i] for i in present]) == [everyone[i] for i in present]


def test_new_parameters_and_new_options_choose_anew():
    optimizer, parameters = trajectory([(48, 24), (48, 24)], steps=2)
    assert layouts(optimizer, parameters) == [(48, 24)] * 2
    added = torch.nn.Parameter(torch.ones(60, 2))
    optimizer.param_groups[0]["params"].append(added)
    # It counts before it has a gradient of its own.
    train(optimizer, parameters, 1)
    assert layouts(optimizer, parameters) == [(24, 60)] * 2
    train(optimizer, [*parameters, added], 1)
    assert layouts(optimizer, [*parameters, added]) == [(24, 60)] * 3
    assert [optimizer.state[p]["step"] for p in (*parameters, added)] == [4, 4, 1]
    optimizer.param_groups[0]["root_drift_threshold"] = 0.05
    train(optimizer, [*parameters, added], 1)
    assert layouts(optimizer, parameters) == [(48, 24)] * 2


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_checkpoints_move_between_stackings(overhead, shapes):
    optimizer, parameters = trajectory(shapes, max_root_staleness=1)
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in parameters]
    overhead(0.0)
    twin, twins = build(shapes, max_root_staleness=1)
    twin.load_state_dict(saved)
    with torch.no_grad():
        for p, weight in zip(twins, weights, strict=True):
            p.copy_(weight)
    for each, params in ((twin, twins), (optimizer, parameters)):
        train(each, params, 2, seed=5)
    assert_alike(optimizer, parameters, twin, twins)
    assert len(stacks(optimizer, parameters)) < len(stacks(twin, twins))


# -- the choice itself ---------------------------------------------------------------------------

SIDES = st.sampled_from([1, 2, 3, 8, 16, 31, 64, 65, 96, 128, 192, 256, 257, 1000])
COUNTS = st.dictionaries(st.tuples(SIDES, SIDES), st.integers(1, 9), max_size=10)
PADS = st.sampled_from([resolve_roots(r).pads for r in ("full", "auto", "blocked", "low_rank")])


def total(counts, chosen):
    """The cost of a choice, said anew."""
    homes = {}
    for shape, home in chosen.items():
        homes.setdefault(home, []).append(shape)
    cost = 0.0
    for home, shapes in homes.items():
        each = stacking.matrix_work(*home)
        if shapes != [home]:
            each += 100.0 * home[0] * home[1]
        cost += stacking.OVERHEAD + sum(counts[shape] for shape in shapes) * each
    return cost


@settings(max_examples=150, deadline=None)
@given(COUNTS, PADS, st.randoms())
def test_the_choice_of_layouts(counts, pads, randomness):
    chosen = stacking.matrix_layouts(counts, pads)
    assert chosen.keys() == counts.keys()
    shared = [home for home in chosen.values() if list(chosen.values()).count(home) > 1]
    for shape, home in chosen.items():
        assert min(shape) <= min(home)
        assert max(shape) <= max(home)
        if home in shared:
            assert home[0] <= home[1]
            assert pads(*home)
            assert stacking.matrix_work(*home) <= stacking.LARGEST
        else:
            assert home == shape, "alone it keeps its own"
        if min(shape) >= 192 or max(shape) > 1000:
            assert home == shape
    assert total(counts, chosen) <= total(counts, {s: s for s in counts}) * (1 + 1e-12)
    order = list(counts.items())
    randomness.shuffle(order)
    assert stacking.matrix_layouts(dict(order), pads) == chosen
    if chosen.values() and len(set(chosen.values())) < len(chosen):
        assert total(counts, chosen) < total(counts, {s: s for s in counts})


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from([1, 64, 100, 300, 5000, 70_000]), st.integers(1, 40)))
def test_the_choice_of_lengths(lengths):
    counts = {}
    for length, count in lengths.items():
        shape = (1, stacking.vector_length_class(length))
        counts[shape] = counts.get(shape, 0) + count
    chosen = stacking.vector_layouts(counts)
    assert all(home in counts and home[1] >= shape[1] for shape, home in chosen.items())
    if all(shape[1] <= 512 for shape in counts):
        assert len(set(chosen.values())) <= 1, "no padding among these costs a stack"
    padding = sum(n * (chosen[s][1] - s[1]) for s, n in counts.items())
    merged = len(counts) - len(set(chosen.values()))
    assert 200.0 * padding <= merged * stacking.OVERHEAD


def test_vectors_join_the_cheapest_stack_that_holds_them():
    padded = {(24, 48), (64, 64)}
    assert stacking.host_layout(64, 4, {(24, 48): 3, (64, 64): 2}, padded) == (24, 48)
    assert stacking.host_layout(2048, 4, {(24, 48): 3, (64, 64): 2}, padded) == (64, 64)
    assert stacking.host_layout(8192, 4, {(24, 48): 3, (64, 64): 2}, padded) is None
    assert stacking.host_layout(64, 4000, {(24, 48): 3}, padded) is None, "too many"
    assert stacking.host_layout(64, 4, {(256, 256): 24}, set()) is None, "too large"
    assert stacking.host_layout(64, 1, {}, set()) is None


def test_large_matrices_are_never_merged():
    sides = (256, 257, 300, 512, 768, 1024, 3072)
    counts = {(a, b): 1 for a in sides for b in sides}
    always = stacking.matrix_layouts(counts, lambda *_: True)
    assert always == {shape: shape for shape in counts}

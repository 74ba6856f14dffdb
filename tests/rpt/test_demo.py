"""The demonstration: text, models, training loop, checkpoints, command line."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rpt.__main__ import main as rpt_main
from rpt.demo.cli import adamw_factory, main, rpt_factory, summary_table
from rpt.demo.model import LanguageModel, PlainBlock
from rpt.demo.race import CheckpointError, Race, read_checkpoint, write_atomically
from rpt.demo.text import (
    OTHER,
    VOCABULARY_SIZE,
    Corpus,
    decode,
    encode,
    load_corpus,
    source_files,
)
from rpt.demo.train import Batches, History, Run, TrainConfig, train

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "eval_every": 3,
    "eval_batches": 2,
}
ARGUMENTS = [
    "--width",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--eval-every",
    "3",
]


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(max_characters=300_000)


def _factories():
    return {"AdamW": adamw_factory(1e-3), "RPT": rpt_factory(1e-3)}


# -- text ------------------------------------------------------------------------------------------


def test_encoding_round_trips_what_the_vocabulary_holds():
    text = "def f(x):\n    return x # ~{}"
    assert decode(encode(text)) == text
    assert encode("a\té漢b").tolist() == [
        encode("a").item(),
        OTHER,
        OTHER,
        OTHER,
        encode("b").item(),
    ]
    assert encode("").numel() == 0
    assert int(encode("".join(map(chr, range(300)))).max()) == VOCABULARY_SIZE - 1


def test_corpus_is_deterministic_bounded_and_split_by_file(corpus):
    again = load_corpus(max_characters=300_000)
    assert corpus.fingerprint == again.fingerprint
    assert torch.equal(corpus.train, again.train)
    assert len(corpus.train) + len(corpus.validation) == 300_000
    assert corpus.train.dtype == torch.uint8
    held_out = source_files()[9].read_text(encoding="utf-8", errors="replace")[:500]
    assert decode(corpus.validation[:500]) == decode(encode(held_out))
    assert load_corpus(max_characters=250_000).fingerprint != corpus.fingerprint


def test_a_python_without_sources_is_named(tmp_path):
    (tmp_path / "tiny.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match="holds 6 characters of Python source in 1 files"):
        load_corpus(tmp_path)


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["plain", "self_context"])
def test_models_are_causal_and_declare_their_sites(block):
    from rpt.observers.protocol import declared_sites

    model = LanguageModel(VOCABULARY_SIZE, context=8, width=16, layers=2, heads=2, block=block)
    codes = torch.randint(VOCABULARY_SIZE, (2, 8))
    changed = codes.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY_SIZE
    before, after = model(codes), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert len(declared_sites(model)) == (4 if block == "plain" else 6)


def test_the_plain_model_has_about_350_thousand_parameters():
    count = sum(p.numel() for p in LanguageModel(VOCABULARY_SIZE).parameters())
    assert 330_000 < count < 370_000


def test_plain_block_matches_attention_by_hand():
    block = PlainBlock(8, 2).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    q, k, v = block.qkv(block.norm1(x)).split(8, dim=-1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        scores = q[0, :, part] @ k[0, :, part].T / 2.0
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v[0, :, part])
    y = x + torch.cat(heads, -1) @ block.attention_output.weight.T
    y = y + block.mlp_down(torch.nn.functional.gelu(block.mlp_up(block.norm2(y))))
    torch.testing.assert_close(block(x), y)


# -- training loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"heads": 5}, "heads must divide width"),
        ({"block": "mamba"}, "block must be one of self_context, plain"),
        ({"schedule": "linear"}, "schedule must be one of cosine, constant"),
    ],
)
def test_configuration_errors_name_the_field(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_context_longer_than_the_text(corpus):
    short = Corpus(corpus.train[:10], corpus.validation, 1, "")
    with pytest.raises(ValueError, match="context 16 is longer than the text of 10"):
        Batches(short, TrainConfig(**TINY))
    short = Corpus(corpus.train, corpus.validation[:10], 1, "")
    with pytest.raises(ValueError, match="held-out text of 10"):
        Run(TrainConfig(**TINY), adamw_factory(1e-3), short)


def test_batches_hold_each_character_and_the_next(corpus):
    codes, targets = Batches(corpus, TrainConfig(**TINY)).next()
    assert codes.shape == targets.shape == (4, 16)
    assert torch.equal(codes[:, 1:], targets[:, :-1])
    assert decode(codes[0].tolist() + [int(targets[0, -1])]) in decode(corpus.train)


def test_history_counts_what_it_says(corpus):
    history = train(TrainConfig(steps=7, **TINY), adamw_factory(3e-3), corpus)
    assert history.step == [0, 3, 6, 7]
    assert history.seconds == sorted(history.seconds)
    assert history.seconds[0] == 0
    assert len(history.validation_loss) == 4
    assert history.validation_loss[-1] < history.validation_loss[0]
    assert history.polar_weight == {}  # AdamW keeps none


def test_arms_share_initialisation_and_batches(corpus):
    race = Race(TrainConfig(steps=2, **TINY), _factories(), corpus)
    first, second = race.runs.values()
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    alone = train(TrainConfig(steps=6, **TINY), adamw_factory(1e-3), corpus)
    race = Race(TrainConfig(steps=6, **TINY), _factories(), corpus)
    assert race.go()
    assert race.runs["AdamW"].history.validation_loss == alone.validation_loss


def test_cosine_schedule_ends_at_zero(corpus):
    run = Run(TrainConfig(steps=4, **TINY), adamw_factory(1e-2), corpus)
    batches, rates = Batches(corpus, run.config), []
    while not run.finished:
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.train_step(*batches.next())
    assert rates == pytest.approx([1e-2, 8.535534e-3, 5e-3, 1.464466e-3])


def test_first_at_or_below():
    history = History(step=[0, 5, 10], seconds=[0, 1, 2], validation_loss=[3.0, 2.0, 1.0])
    assert history.first_at_or_below(2.0) == (5, 1)
    assert history.first_at_or_below(0.5) is None
    slow = History(step=[0, 10], seconds=[0, 4], validation_loss=[3.0, 2.5])
    table = summary_table({"AdamW": history, "RPT": slow}, "AdamW")
    assert table.splitlines()[1].endswith("10 steps, 2.0 s")
    assert table.splitlines()[2].endswith("never")


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_resumed_race_ends_bitwise_where_an_uninterrupted_one_does(corpus, tmp_path):
    config = TrainConfig(steps=12, **TINY)
    whole = Race(config, _factories(), corpus)
    whole.go()
    first = Race(config, _factories(), corpus)
    for _ in range(5):
        first.step()
    first.save(tmp_path / "race.pt")
    del first
    torch.manual_seed(99)
    second = Race(config, _factories(), corpus)
    second.load(read_checkpoint(tmp_path / "race.pt"))
    assert second.steps_taken == 5
    second.go()
    for name, run in second.runs.items():
        reference = whole.runs[name]
        for a, b in zip(run.model.parameters(), reference.model.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert run.history.step == reference.history.step[1:]  # no evaluation before step()
        assert run.history.validation_loss == reference.history.validation_loss[1:]
    weights = second.runs["RPT"].history.polar_weight
    assert weights.keys() == whole.runs["RPT"].history.polar_weight.keys()
    assert weights


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "race.pt"
    write_atomically(path, {"format": "rpt-demo-1", "value": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, {"format": "rpt-demo-1", "value": 2})
    assert read_checkpoint(path)["value"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoints_that_cannot_be_continued_say_why(corpus, tmp_path):
    race = Race(TrainConfig(steps=3, **TINY), _factories(), corpus)
    path = tmp_path / "race.pt"
    race.save(path)
    payload = read_checkpoint(path)
    with pytest.raises(CheckpointError, match="another Python's standard library"):
        race.load({**payload, "text": "other"})
    with pytest.raises(CheckpointError, match="the checkpoint holds AdamW, RPT"):
        Race(race.config, {"AdamW": adamw_factory(1e-3)}, corpus).load(payload)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        read_checkpoint(path)
    torch.save({"format": 3}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of this demonstration"):
        read_checkpoint(path)


def test_interrupt_saves_and_stops(corpus, tmp_path):
    race = Race(TrainConfig(steps=50, **TINY), {"AdamW": adamw_factory(1e-3)}, corpus)
    handler = signal.getsignal(signal.SIGINT)

    def interrupt(race):
        if race.steps_taken == 4:
            signal.raise_signal(signal.SIGINT)

    assert not race.go(interrupt, tmp_path / "race.pt")
    assert race.steps_taken == 4
    assert read_checkpoint(tmp_path / "race.pt")["runs"]["AdamW"]["steps_taken"] == 4
    assert signal.getsignal(signal.SIGINT) is handler


# -- command line ----------------------------------------------------------------------------------


def test_demo_prints_a_table_and_writes_a_picture(tmp_path, capsys):
    picture, history = tmp_path / "demo.png", tmp_path / "demo.json"
    files = ["--out", str(picture), "--history", str(history)]
    assert main([*ARGUMENTS, "--plain", "--steps", "6", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("AdamW ") for line in lines)
    assert any(line.startswith("RPT ") for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")
    arms = json.loads(history.read_text())["arms"]
    assert arms["RPT"]["step"] == [0, 3, 6]
    observed = arms["RPT"]["entropy_rank"]["blocks.0.mlp_down.weight"]
    assert 0 <= observed[-1] <= 1


@pytest.mark.parametrize(
    "options", [["--no-attach"], ["--observe", "all", "--plain"], ["--preset", "paper"]]
)
def test_demo_variants_run(options, tmp_path, capsys):
    assert main([*ARGUMENTS, "--steps", "3", "--out", str(tmp_path / "x.png"), *options]) == 0
    assert "RPT" in capsys.readouterr().out


def test_resume_from_the_command_line(tmp_path, capsys):
    files = ["--out", str(tmp_path / "x.png"), "--save", str(tmp_path / "x.pt")]
    assert main([*ARGUMENTS, "--steps", "4", *files]) == 0
    first = capsys.readouterr().out
    assert main(["--resume", str(tmp_path / "x.pt"), "--out", str(tmp_path / "x.png")]) == 0
    assert _losses(capsys.readouterr().out) == _losses(first)
    with pytest.raises(SystemExit) as exit_info:
        main(["--resume", str(tmp_path / "x.pt"), "--steps", "9"])
    assert exit_info.value.code == 2
    assert "was trained with steps 4, not 9" in capsys.readouterr().err


def _losses(output):
    rows = [line.split() for line in output.splitlines() if line.startswith(("AdamW ", "RPT "))]
    return [row[1:3] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "'0' is not an integer of at least 1"),
        (["--steps", "many"], "'many' is not an integer"),
        (["--lr", "nan"], "'nan' is not a number"),
        (["--heads", "5"], "heads must divide width, got heads 5 and width 64"),
        (["--observe", "some"], "invalid choice"),
        (["--device", "abacus"], "device 'abacus' is not available"),
        (["--resume", "/nonexistent.pt"], "/nonexistent.pt does not exist"),
        (["--out", "/nonexistent/x.png"], "the folder of /nonexistent/x.png does not exist"),
        (["--out", "x.docx"], "x.docx must end in one of .png"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("python -m rpt demo: error: ")


def test_missing_extras_are_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_info:
        main(["--steps", "1"])
    assert exit_info.value.code == 2
    line = "needs matplotlib and tqdm: pip install 'residual-polar-transport[demo]'"
    assert line in capsys.readouterr().err


def test_dispatch(capsys):
    assert rpt_main([]) == 2
    assert rpt_main(["--help"]) == 0
    assert "demo" in capsys.readouterr().out
    assert rpt_main(["dmeo"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as exit_info:
        rpt_main(["demo", "--help"])
    assert exit_info.value.code == 0


def test_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "rpt", "demo", *ARGUMENTS, "--steps", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "x.png")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "picture: " in done.stdout

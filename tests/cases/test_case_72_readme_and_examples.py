"""Case 72: README's blocks needed the ones before them; examples trained on --help, or left files about."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(p for p in EXAMPLES.glob("*.py") if "__main__" in p.read_text())
PAGES = [ROOT / "docs" / name for name in ("getting-started.md", "roots.md", "self_context.md")]


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _blocks(*pages):
    for page in pages:
        found = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        for number, block in enumerate(found, 1):
            yield pytest.param(block, id=f"{page.name}:{number}")


def _said(block):
    """What a block's prints say that they print: the comments that are a list or a size."""
    comments = re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    values = [re.sub(r"^torch\.Size\((.*)\)$", r"\1", comment) for comment in comments]
    return [value for value in values if value.startswith(("[", "torch.Size"))]


def _prints_what_it_says(block, printed):
    assert [value for value in _said(block) if value not in printed] == []


def test_pages_say_what_some_of_their_prints_print():
    """Without one the comparison would compare nothing."""
    for page, least in (
        ("README.md", 3),
        ("docs/getting-started.md", 1),
        ("docs/self_context.md", 1),
    ):
        assert sum(len(_said(block.values[0])) for block in _blocks(ROOT / page)) >= least, page


@pytest.mark.parametrize("block", _blocks(ROOT / "README.md"))
def test_a_block_of_the_readme_runs_in_a_fresh_process(block, tmp_path):
    """Blocks 2 to 5 raised NameError."""
    done = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\n{block}"
    _prints_what_it_says(block, done.stdout)


@pytest.mark.parametrize("block", _blocks(*PAGES))
def test_a_block_of_a_page_needs_no_other(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "a page's block", "exec"), {"__name__": "__main__"})
    _prints_what_it_says(block, capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_explains_and_trains_nothing(script, tmp_path, monkeypatch, capsys):
    """`drop_in.py --help` trained; others had no `--quick`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: ")
    assert "--quick" in shown
    assert "figures mean nothing" in shown
    assert list(tmp_path.iterdir()) == []


def test_the_distributed_example_runs_alone(tmp_path):
    """Without torchrun it was a raw traceback."""
    script, root = EXAMPLES / "distributed_lm.py", EXAMPLES.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--width", "16", "--layers", "1"],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "too short for its figures to mean anything" in done.stdout.splitlines()[0]
    assert "rank 0: " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_pictures_go_where_git_does_not_look():
    """They were left in the working tree."""
    ignored = (EXAMPLES.parent / ".gitignore").read_text().splitlines()
    assert "/runs/" in ignored
    for script in SCRIPTS:
        text = script.read_text()
        assert not re.search(r'default=(Path\()?"[^"/]*\.png"', text), script.name

"""The README's Python runs as printed, and what it points at exists."""

import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 5
    namespace: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, block in enumerate(BLOCKS, 1):
            try:
                exec(compile(block, f"README block {number}", "exec"), namespace)
            except Exception as error:
                pytest.fail(f"README block {number}: {type(error).__name__}: {error}\n{block}")
    assert "torch.Size([2, 10, 32])" in capsys.readouterr().out


def test_files_it_names_exist():
    named = set(re.findall(r"\b(?:examples|docs|rpt)/[\w/]+\.\w+", TEXT))
    assert len(named) >= 7
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_extras_it_installs_exist():
    extras = set(re.findall(r"pip install -e '\.\[(\w+)\]'", TEXT))
    assert {"demo", "test", "examples"} <= extras
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, flags=re.MULTILINE) for extra in extras)

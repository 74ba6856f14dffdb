"""What is uploaded: one version, a whole source distribution, a page without dead links."""

import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import rpt

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_said_once():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cited == rpt.__version__
    assert changes[:2] == ["Unreleased", rpt.__version__]
    assert rpt.__version__ not in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def index_page(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path(str(ROOT / "setup.py"))["index_page"]


def test_the_index_page_has_no_link_that_leads_nowhere(index_page):
    page = index_page((ROOT / "README.md").read_text(encoding="utf-8"))
    assert re.findall(r"\]\((?!https?:|#)", page) == []
    assert "docs/rate.md" in page
    assert "[a](https://a.b/c)" in index_page("[a](https://a.b/c)")
    assert index_page("see [x.md](x.md) and [y](z/y.md#w)") == "see x.md and y (`z/y.md`)"


def test_the_source_distribution_is_whole(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no checkout: nothing says which files belong to it")
    source = tmp_path / "source"
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("docs/data/", "cases/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.splitlines()[-1]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    expected = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()}
    expected = {name for name in expected if not name.startswith((".", "residual_polar"))}
    assert expected - inside == set()
    assert "RESULTS.md" in inside

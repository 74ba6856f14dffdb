"""The README is short, and what it and the other pages point at exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "RESULTS.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
]


def test_a_reader_needs_a_minute():
    assert len(TEXT.splitlines()) <= 150
    after = TEXT[TEXT.index("<!-- Every figure") :]
    rows = [line for line in after[: after.index("[RESULTS.md]")].splitlines() if line[:1] == "|"]
    assert 3 <= len(rows) - 2 <= 6


def test_files_it_names_exist():
    named = set(re.findall(r"\b(?:examples|docs|rpt|notebooks)/[\w/-]+\.\w+", TEXT))
    assert len(named) >= 20
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_extras_it_installs_exist():
    extras = set(re.findall(r"pip install (?:-e )?'[\w.-]+\[(\w+)\]'", TEXT))
    extras |= set(re.findall(r"`\[(\w+)\]` extra", TEXT))
    assert {"demo", "test", "examples", "bench", "docs"} <= extras
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, flags=re.MULTILINE) for extra in extras)


def _anchor(heading):
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
    return re.sub(r"\s+", "-", kept)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), flags=re.M)
            assert anchor in map(_anchor, headings), f"{page.name} links to {target}"

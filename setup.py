"""What pyproject.toml cannot say: the layout of the packages, and the README on a package index.

The sibling folders `observers/` and `geometry/` are mapped to `rpt.observers` and `rpt.geometry`. One
import root: nothing but `rpt` lands in site-packages. New subpackages are found by themselves.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

PARTS = ("observers", "geometry")


def index_page(text: str) -> str:
    """README's text with nothing relative in it: an index page has no files beside it.

    Pictures go; a link becomes its text, followed by the file's place in the source distribution.
    """
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    link = r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)[^)]*\)"
    return re.sub(link, lambda m: m[1] if m[2] in m[1] else f"{m[1]} (`{m[2]}`)", text)


setup(
    packages=find_packages(include=["rpt", "rpt.*"])
    + [f"rpt.{p}" for part in PARTS for p in find_packages(include=[part, f"{part}.*"])],
    package_dir={"rpt": "rpt", **{f"rpt.{part}": part for part in PARTS}},
    package_data={"rpt": ["py.typed"]},
    long_description=index_page(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)

"""Map the sibling folders `observers/` and `geometry/` to `rpt.observers` and `rpt.geometry`.

One import root: nothing but `rpt` lands in site-packages. New subpackages are found by themselves.
"""

from setuptools import find_packages, setup

PARTS = ("observers", "geometry")

setup(
    packages=find_packages(include=["rpt", "rpt.*"])
    + [f"rpt.{p}" for part in PARTS for p in find_packages(include=[part, f"{part}.*"])],
    package_dir={"rpt": "rpt", **{f"rpt.{part}": part for part in PARTS}},
    package_data={"rpt": ["py.typed"]},
)

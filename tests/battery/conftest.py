"""The examples are no installed package: make the checkout's root, and their own folder, importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (str(ROOT / "examples"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

"""docs/clients.md: every block runs alone, against the real libraries."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## (.+?)\n(?:(?!^## ).)*?^```python\n(.*?)^```", TEXT, re.M | re.S)

TINY = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


model = Model()
data = [{"x": torch.randn(6), "labels": torch.tensor(i % 3)} for i in range(64)]
"""
NEEDS = {
    "Hugging Face Trainer": "transformers",
    "accelerate": "accelerate",
    "PEFT": "peft",
    "Lightning": "lightning",
    "Telemetry": "tensorboard",
}


@pytest.mark.integration
@pytest.mark.parametrize(("title", "block"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_block_runs_alone(title, block, tmp_path):
    pytest.importorskip(NEEDS[title])
    (tmp_path / "tiny.py").write_text(TINY)
    done = subprocess.run(
        [sys.executable, "-c", block],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip()


def test_every_block_has_a_client():
    assert {title for title, _ in BLOCKS} == set(NEEDS)

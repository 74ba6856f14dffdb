"""A training process killed at any point resumes from its last checkpoint to the same weights, bitwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rpt

SCRIPT = Path(__file__).with_name("interrupted_training.py")


def interrupted(folder, kills, seed):
    root = str(Path(rpt.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(kills), str(seed)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_few_kills(tmp_path):
    result = interrupted(tmp_path, 3, seed=3)
    assert result["kills"] >= 3
    assert result["in_write"] >= 1
    assert result["bitwise"] == result["runs"]


@pytest.mark.slow
def test_sixty_kills(tmp_path):
    result = interrupted(tmp_path, 60, seed=0)
    print(result)
    assert result["kills"] >= 60
    assert result["in_write"] >= 12
    assert result["bitwise"] == result["runs"]

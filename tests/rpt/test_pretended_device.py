"""What is asked of a device, counted on one that is not there: host_waits.py, counted_operations.py.

In a process of its own: a device that was registered once starts threads in every backward from then on,
which processes that fork do not survive.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch has no backend in Python before 2.9",
)
def test_waits_and_operations_are_the_documented_ones():
    files = [str(HERE / name) for name in ("host_waits.py", "counted_operations.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

"""Real clients train with RPT in AdamW's place, are killed, resume, and end bitwise where they would have.

pip install -e '.[test,integration]'
python -m pytest -m integration tests/integration
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rpt

SCRIPT = Path(__file__).with_name("run_client.py")
NEEDS = {
    "transformers_fp32": ["transformers", "accelerate"],
    "transformers_bf16": ["transformers", "accelerate"],
    "transformers_accumulation": ["transformers", "accelerate"],
    "transformers_gradient_checkpointing": ["transformers", "accelerate"],
    "peft_lora": ["transformers", "accelerate", "peft"],
    "accelerate": ["accelerate"],
    "lightning_automatic": ["lightning"],
    "lightning_manual": ["lightning"],
    "timm_ema": ["timm"],
    "swa_utils": [],
    "grad_scaler": [],
    "gradient_checkpointing": [],
}


@pytest.mark.integration
@pytest.mark.parametrize("client", NEEDS)
def test_client_resumes_bitwise_after_a_kill(client, tmp_path):
    missing = [name for name in NEEDS[client] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[integration]'")
    root = str(Path(rpt.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        [sys.executable, str(SCRIPT), client, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    result = json.loads(run.stdout.splitlines()[-1])
    print(client, result)
    assert result["bitwise"]
    assert result["resumed"] == result["whole"]

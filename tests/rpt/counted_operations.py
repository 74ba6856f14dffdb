"""What docs/speed.md says of operations, counted on a device that is not there.

Run by test_pretended_device.py, or by name: `python -m pytest tests/rpt/counted_operations.py`.
"""

import pytest

from examples.bench import operations
from examples.peers import Float32Muon


def ordinary(arm, *shapes, steps=8):
    return operations.flops(operations.count(arm, shapes, steps=steps).ordinary)


@pytest.mark.parametrize(("shape", "cubes"), [((64, 64), 30), ((64, 256), 90)])
def test_muon_takes_thirty_and_ninety_cubes(shape, cubes):
    assert ordinary(operations.plus_adamw(Float32Muon), shape) == cubes * 64**3


@pytest.mark.parametrize(("shape", "cubes"), [((64, 64), 18), ((64, 256), 34)])
def test_the_polar_factor_takes_eighteen_and_thirty_four(shape, cubes):
    assert ordinary(operations.transported(roots="none"), shape) == cubes * 64**3


def test_blocks_save_a_quarter_on_a_cpu():
    arm = operations.transported(roots="none")
    with operations.as_on_a_cpu():
        assert ordinary(arm, (512, 512)) == 13.5 * 512**3
    assert ordinary(arm, (512, 512)) == 18 * 512**3


def test_the_metric_takes_eight_blocks_per_entry():
    metric = ordinary(operations.transported(), (512, 512), steps=16)
    assert metric - ordinary(operations.transported(roots="none"), (512, 512)) == 8 * 128 * 512**2


@pytest.mark.parametrize("shape", [(256, 256), (512, 512), (256, 1024)])
def test_a_step_takes_less_than_four_fifths_of_muon_s_operations(shape):
    muon = ordinary(operations.plus_adamw(Float32Muon), shape)
    with operations.as_on_a_cpu():
        counted = operations.count(operations.transported(), [shape], steps=14)
    assert counted.mean(operations.flops) < 0.8 * muon

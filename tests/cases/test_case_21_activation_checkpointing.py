"""Case 21: activation checkpointing runs the forward twice, but observes once."""

import gc
import weakref

import pytest
import torch
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import nn
from torch.utils.checkpoint import checkpoint


def run(strategy: str, reentrant: bool | None, single: bool, micro_batches: int):
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model = block[0] if single else block
    stage = ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    retained = []
    for _ in range(micro_batches):
        x = torch.randn(4, 3, requires_grad=True)
        inner = x * 1.0  # An activation of the surrounding model, not a leaf.
        retained.append(weakref.ref(inner))
        out = (
            model(inner) if reentrant is None else checkpoint(model, inner, use_reentrant=reentrant)
        )
        loss = out.square().mean()
        del inner, out
        loss.backward()
        del loss
    gc.collect()
    assert all(reference() is None for reference in retained)
    committed = stage.commit()
    assert len(stage) == 0
    return [
        (float(committed.ranks[p]), committed.counts[p]) for p in model.parameters() if p.ndim == 2
    ]


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_case_21_ranks_and_counts_equal_the_plain_run(strategy, reentrant, single, micro_batches):
    plain = run(strategy, None, single, micro_batches)
    checkpointed = run(strategy, reentrant, single, micro_batches)
    assert len(plain) == len(checkpointed) == (1 if single else 2)
    for (rank, count), (expected, expected_count) in zip(checkpointed, plain, strict=True):
        assert rank == pytest.approx(expected, abs=1e-6)
        assert count == expected_count == micro_batches

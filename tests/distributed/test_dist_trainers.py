"""Accelerate and Lightning with two processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import needs_processes, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rpt

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from client_parts import load_torchvision

pytestmark = [needs_processes, pytest.mark.integration]


def _data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 6, generator=generator)
    return TensorDataset(x, torch.randn(32, 3, generator=generator))


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def _environment():
    os.environ.update(
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29577",
        ACCELERATE_USE_CPU="true",
    )


def _accelerate(folder):
    accelerate = pytest.importorskip("accelerate")
    _environment()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer_of = _net()
    net, optimizer, loader = accelerator.prepare(
        optimizer_of,
        rpt.ResidualPolarTransport(optimizer_of.parameters(), 3e-3),
        DataLoader(_data(), batch_size=8),
    )
    for x, y in loader:
        accelerator.backward((net(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    for x, y in loader:
        accelerator.backward((net(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return type(net).__name__, [p.detach().clone() for p in net.parameters()]


def test_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    (kind, first), (_, second) = run(_accelerate, 2, str(tmp_path / "state"), limit=120)
    assert kind == "DistributedDataParallel"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _lightning(folder):
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    _environment()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = _net()

        def training_step(self, batch, _):
            x, y = batch
            return (self.net(x) - y).square().mean()

        def configure_optimizers(self):
            return rpt.ResidualPolarTransport(self.net.parameters(), 3e-3)

    def fit(epochs, checkpoint=None):
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            plugins=[TorchElasticEnvironment()],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(_data(), batch_size=8), ckpt_path=checkpoint)
        return module, trainer

    module, trainer = fit(1)
    path = os.path.join(folder, "one.ckpt")
    trainer.save_checkpoint(path)
    module, _ = fit(2, path)
    return [p.detach().clone() for p in module.parameters()]


def test_lightning(tmp_path):
    load_torchvision()
    pytest.importorskip("lightning")
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    try:
        first, second = run(_lightning, 2, str(tmp_path), limit=180)
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

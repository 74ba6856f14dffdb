"""Telemetry reaches each logger: against the real libraries (`-m integration` for those that are heavy)."""

import csv
import json

import pytest
import torch
from torch import nn

import rpt
from rpt.integrations import telemetry_scalars, transport_of, write_tensorboard


class Wrapper:
    """As accelerate and Lightning wrap an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.fixture
def trained():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = rpt.ResidualPolarTransport(model.named_parameters(), lr=3e-3)
    model(torch.randn(16, 6)).square().mean().backward()
    optimizer.step()
    return optimizer


def test_scalars_are_plain_finite_numbers_under_one_prefix(trained):
    numbers = telemetry_scalars(Wrapper(Wrapper(trained)), prefix="opt.")
    assert numbers
    assert all(type(value) is float for value in numbers.values())
    assert all(name.startswith("opt.") for name in numbers)
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert "opt.polar_weight" in numbers
    each = telemetry_scalars(trained, "opt.", parameters=True)
    assert numbers.items() <= each.items()
    assert each["opt.0.weight/polar_weight"] == 1.0


def test_the_wrong_optimizer_is_named():
    adamw = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="AdamW is no ResidualPolarTransport and wraps none"):
        transport_of(adamw)


def test_tensorboard_reads_back_what_was_written(trained, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        write_tensorboard(writer, trained, step=7)
    events = EventAccumulator(str(tmp_path)).Reload()
    for name, value in telemetry_scalars(trained).items():
        (point,) = events.Scalars(name)
        assert point.step == 7
        assert point.value == pytest.approx(value, rel=1e-6)
    assert "rpt/matrices/polar_weight" in events.Tags()["histograms"]


@pytest.mark.integration
@pytest.mark.parametrize("first", [False, True])
def test_hugging_face_trainer_logs_telemetry(first, tmp_path):
    transformers = pytest.importorskip("transformers")
    from rpt.integrations.huggingface import TelemetryCallback

    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.head(self.body(x).tanh()), labels)}

    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, logging_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
        per_device_train_batch_size=4,
    )  # fmt: skip
    data = [{"x": torch.randn(6), "labels": torch.tensor(i % 3)} for i in range(16)]
    callback = TelemetryCallback(attach=True, observe_every=1)
    trainer = transformers.Trainer(
        Net(),
        settings,
        train_dataset=data,
        callbacks=[Reporter()] if first else [Reporter(), callback],
        optimizer_cls_and_kwargs=(rpt.ResidualPolarTransport, {"lr": 3e-3}),
    )
    if first:
        callback.add_to(trainer)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == 2
    assert history[-1]["rpt/observations"] > history[0]["rpt/observations"] > 0
    assert ("rpt/observations" in seen[0]) == first
    json.dumps(trainer.state.log_history)


@pytest.mark.integration
def test_lightning_logs_telemetry(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    from rpt.integrations.lightning import TelemetryCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return rpt.ResidualPolarTransport(self.named_parameters(), lr=3e-3)

    data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.arange(48) % 3)
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=logger, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=2,
        callbacks=[TelemetryCallback(every=2, attach=True, observe_every=1)],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data, 4))
    assert trainer.global_step == 6
    with open(logger.experiment.metrics_file_path) as stream:
        steps = [int(row["step"]) for row in csv.DictReader(stream) if row["rpt/polar_weight"]]
    assert steps == [2, 4, 6]
    assert trainer.callback_metrics["rpt/observations"] > 0


@pytest.mark.integration
def test_accelerates_wrapper_is_seen_through(trained):
    accelerate = pytest.importorskip("accelerate")
    wrapped = accelerate.Accelerator(cpu=True).prepare(trained)
    assert transport_of(wrapped) is trained
    assert telemetry_scalars(wrapped) == telemetry_scalars(trained)

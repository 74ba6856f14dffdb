"""Trains with one client three times: whole, killed with SIGKILL in the middle, and resumed after the kill.

`python run_client.py CLIENT FOLDER` prints one line of JSON: the last losses of the whole and of the
resumed run, and whether their weights are equal bit for bit. Every model is tiny and random, every data
set real and at hand: scikit-learn's digits, or the text of the Python standard library.
"""

import contextlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from client_parts import (
    SAVE_EVERY,
    STEPS,
    Net,
    batches,
    die_at,
    digits,
    finish,
    load,
    load_torchvision,
    save,
    text,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rpt import ResidualPolarTransport

# -- clients -----------------------------------------------------------------------------------------


def tiny_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96,
        n_positions=32,
        n_embd=24,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def trainer(folder, model=None, attach=True, **arguments):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Killer(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            die_at(state.global_step)

    model = model or tiny_gpt2()
    optimizer = ResidualPolarTransport([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    if attach:
        optimizer.attach_model(model, observe_every=3)
    settings = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, save_steps=SAVE_EVERY, logging_steps=1,
        per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, seed=5,
        dataloader_pin_memory=False, **arguments,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in text()]
    training = Trainer(
        model=model, args=settings, train_dataset=data, optimizers=(optimizer, None),
        callbacks=[Killer()],
    )  # fmt: skip
    resume = any(folder.glob("checkpoint-*"))
    training.train(resume_from_checkpoint=True if resume else None)
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    finish(folder, model, losses[-1])


def transformers_fp32(folder):
    trainer(folder)


def transformers_bf16(folder):
    trainer(folder, bf16=True)


def transformers_accumulation(folder):
    trainer(folder, gradient_accumulation_steps=2, max_grad_norm=0.5)


def transformers_gradient_checkpointing(folder):
    trainer(folder, gradient_checkpointing=True)


def peft_lora(folder):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_gpt2(), LoraConfig(r=4, target_modules=["c_attn", "c_fc"]))
    trainer(folder, model=model, attach=False)
    factors = [p for n, p in model.named_parameters() if "lora_" in n]
    assert all(bool(p.abs().sum() > 0) for p in factors)


def accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    optimizer = ResidualPolarTransport(model.parameters(), lr=3e-3)
    optimizer.attach_model(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(digits(), 8, generator=torch.Generator()), schedule
    )
    start = 0
    if (folder / "state").exists():
        accelerator.load_state(str(folder / "state"))
        start = json.loads((folder / "state" / "step.json").read_text())
    step = 0
    for images, labels in loader:
        if step >= STEPS:
            break
        with accelerator.accumulate(model):
            if step < start:
                step += accelerator.sync_gradients
                continue
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            die_at(step)
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / "next"))
                (folder / "next" / "step.json").write_text(json.dumps(step))
                if (folder / "state").exists():
                    os.rename(folder / "state", folder / f"old{step}")
                os.rename(folder / "next", folder / "state")
    finish(folder, accelerator.unwrap_model(model), loss.detach())


def lightning(folder, manual=False):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not manual
            self.last = 0.0

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.last = loss.detach()
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(
                    optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm"
                )
                optimizer.step()
                self.lr_schedulers().step()
            return loss

        def on_train_batch_end(self, *_):
            die_at(self.global_step)

        def configure_optimizers(self):
            optimizer = ResidualPolarTransport(self.named_parameters(), lr=3e-3)
            optimizer.attach_model(self.net, observe_every=2)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS + 1)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    pl.seed_everything(5, verbose=False)
    module = Module()
    data = TensorDataset(*(t[: 16 * SAVE_EVERY] for t in digits().tensors))
    clip = {} if manual else {"gradient_clip_val": 0.5}
    keep = pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_epochs=1, save_top_k=0)
    training = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=STEPS // SAVE_EVERY, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[keep], **clip,
    )  # fmt: skip
    last = folder / "last.ckpt"
    if last.exists():
        # Lightning keeps no random state of its own: dropout continues from what the epoch began with.
        torch.manual_seed(1)
    Module.on_train_epoch_start = lambda self: torch.manual_seed(100 + self.current_epoch)
    loader = DataLoader(data, 16, generator=torch.Generator())
    training.fit(module, loader, ckpt_path=last if last.exists() else None)
    finish(folder, module, module.last)


def lightning_automatic(folder):
    lightning(folder)


def lightning_manual(folder):
    lightning(folder, manual=True)


def timm_ema(folder):
    load_torchvision()
    from timm.models.vision_transformer import VisionTransformer
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV2, NativeScaler

    model = VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=24, depth=2, num_heads=2
    )
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=3e-3)
    optimizer.attach_model(model)
    average = ModelEmaV2(model, decay=0.8)
    schedule = CosineLRScheduler(optimizer, STEPS, warmup_t=3, warmup_lr_init=1e-4)
    scaler = NativeScaler("cpu")
    parts = {"model": model, "optimizer": optimizer, "average": average, "scaler": scaler}
    start = load(folder, **parts)
    data = batches(digits())
    for step in range(STEPS):
        images, labels = next(data)
        if step < start:
            continue
        schedule.step_update(step)
        schedule.step(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        average.update(model)
        die_at(step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, **parts, step=step + 1, random=torch.get_rng_state())
    finish(folder, average, loss.detach())


def swa_utils(folder):
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    model = Net()
    optimizer = ResidualPolarTransport(model.parameters(), lr=3e-3)
    optimizer.attach_model(model)
    average = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    schedule = SWALR(optimizer, swa_lr=1e-3, anneal_epochs=4)
    parts = {
        "model": model, "optimizer": optimizer, "average": average, "ema": ema,
        "schedule": schedule,
    }  # fmt: skip
    start = load(folder, **parts)
    data = batches(digits())
    for step in range(STEPS):
        images, labels = next(data)
        if step < start:
            continue
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        ema.update_parameters(model)
        die_at(step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, **parts, step=step + 1, random=torch.get_rng_state())
    update_bn(DataLoader(digits(), 32), average)
    finish(folder, average, loss.detach())


def grad_scaler(folder, dtype=torch.float16):
    model = Net()
    optimizer = ResidualPolarTransport(model.parameters(), lr=3e-3)
    optimizer.attach_model(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=5)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    start = load(folder, **parts)
    data, skipped = batches(digits()), 0
    for step in range(STEPS):
        images, labels = next(data)
        if step < start:
            continue
        while True:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                break
            skipped += 1
        die_at(step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, **parts, step=step + 1, random=torch.get_rng_state())
    assert start or skipped, "the first scale was meant to overflow"
    finish(folder, model, loss.detach())


def gradient_checkpointing(folder):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(5)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
    model = nn.ModuleDict({"blocks": blocks, "out": nn.Linear(64, 10)})
    optimizer = ResidualPolarTransport(model.parameters(), lr=3e-3)
    optimizer.attach_model(model, observe_every=1)
    parts = {"model": model, "optimizer": optimizer}
    start = load(folder, **parts)
    data = batches(digits())
    for step in range(STEPS):
        images, labels = next(data)
        if step < start:
            continue
        optimizer.zero_grad()
        x = images.flatten(1).requires_grad_()
        for i, block in enumerate(blocks):
            x = x + checkpoint(block, x, use_reentrant=bool(i % 2))
        loss = F.cross_entropy(model["out"](x), labels)
        loss.backward()
        optimizer.step()
        assert optimizer.state[blocks[0][0].weight]["observations"] == step + 1
        die_at(step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, **parts, step=step + 1, random=torch.get_rng_state())
    finish(folder, model, loss.detach())


CLIENTS = {
    f.__name__: f
    for f in (
        transformers_fp32, transformers_bf16, transformers_accumulation,
        transformers_gradient_checkpointing, peft_lora, accelerate, lightning_automatic,
        lightning_manual, timm_ema, swa_utils, grad_scaler, gradient_checkpointing,
    )
}  # fmt: skip


# -- three runs -------------------------------------------------------------------------------------


def run(client, folder, kill=False):
    """The wait status of a child process that trains in a folder."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    try:
        if kill:
            os.environ["KILL"] = "1"
        torch.manual_seed(5)
        with open(folder / "out.txt", "a") as out, contextlib.redirect_stdout(out):
            client(folder)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def main(name, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    client = CLIENTS[name]
    if name.startswith(("transformers", "peft")):
        load_torchvision()
        import transformers  # noqa: F401  once, for all three
    elif name.startswith("lightning"):
        load_torchvision()
        import lightning.pytorch  # noqa: F401
    whole, cut = folder / "whole", folder / "cut"
    for place in (whole, cut):
        place.mkdir(parents=True)
    assert run(client, whole) == 0, "the whole run raised"
    status = run(client, cut, kill=True)
    assert os.WIFSIGNALED(status), "the run to be killed was not"
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (cut / "final.pt").exists()
    assert run(client, cut) == 0, "the resumed run raised"
    first, second = (torch.load(place / "final.pt") for place in (whole, cut))
    equal = first["model"].keys() == second["model"].keys() and all(
        torch.equal(first["model"][k], second["model"][k]) for k in first["model"]
    )
    print(json.dumps({"whole": first["loss"], "resumed": second["loss"], "bitwise": equal}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

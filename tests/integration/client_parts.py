"""What the clients of `run_client.py` train, and how they stop and go on."""

import inspect
import json
import os
import re
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS, SAVE_EVERY, KILL_AT = 12, 4, 10


def load_torchvision():
    """Let torchvision import where its operators were built for another torch than this one."""
    for _ in range(9):
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            missing = re.search(r"operator (\S+::\S+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor x) -> Tensor")
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]
        except ImportError:
            return
        else:
            return


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(images[:192], torch.tensor(data.target)[:192])


def text(length=32, count=64):
    codes = torch.tensor(list(inspect.getsource(json).encode()[: length * count])) % 96
    return codes.view(count, length)


def die_at(step):
    if step == KILL_AT and "KILL" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)


def finish(folder, model, loss):
    torch.save({"model": model.state_dict(), "loss": float(loss)}, folder / "final.pt")


def save(folder, **parts):
    partial = folder / "checkpoint.partial"
    torch.save({k: getattr(v, "state_dict", lambda v=v: v)() for k, v in parts.items()}, partial)
    os.replace(partial, folder / "checkpoint.pt")


def load(folder, **parts):
    """Load what `save` wrote into the parts; the number of steps already made."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    saved = torch.load(path)
    for key, part in parts.items():
        part.load_state_dict(saved[key])
    torch.set_rng_state(saved["random"])
    return saved["step"]


def batches(data, size=16):
    # A loader draws a seed for its workers at every epoch: not from the stream that dropout uses.
    loader = DataLoader(data, size, generator=torch.Generator())
    while True:
        yield from loader


class Net(nn.Module):
    """A small convolutional classifier of 8×8 digits, with dropout so that random state matters."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.hidden, self.out = nn.Linear(6 * 16, 24), nn.Linear(24, 10)

    def forward(self, images):
        x = F.max_pool2d(torch.relu(self.norm(self.conv(images))), 2).flatten(1)
        return self.out(F.dropout(torch.relu(self.hidden(x)), 0.1, self.training))

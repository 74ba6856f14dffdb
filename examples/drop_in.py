"""The three-line change: an ordinary training script, with RPT in AdamW's place.

    python examples/drop_in.py

An MLP on scikit-learn's handwritten digits (1,797 images of 8×8), trained twice from the same
start: with `torch.optim.AdamW`, and with the three lines that are marked.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import rpt  # line 1

BATCH = 64


def train(use_rpt: bool, lr: float = 3e-3, epochs: int = 12) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(labels)
    order = torch.randperm(len(x))
    train_rows, held_out = order[:1400], order[1400:]
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )

    optimizer: torch.optim.Optimizer
    if use_rpt:
        optimizer = rpt.ResidualPolarTransport(model.parameters(), lr=lr)  # line 2, for AdamW's
        optimizer.attach_model(model)  # line 3, optional: observed matrices adapt
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    started = time.perf_counter()
    for _ in range(epochs):
        for rows in train_rows[torch.randperm(len(train_rows))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        logits = model(x[held_out])
        loss = nn.functional.cross_entropy(logits, y[held_out])
        accuracy = (logits.argmax(-1) == y[held_out]).float().mean()
    print(
        f"{type(optimizer).__name__:24} held-out loss {loss:.4f}, accuracy {accuracy:.1%}, "
        f"{seconds:.1f} s"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(use_rpt=False)
    train(use_rpt=True)

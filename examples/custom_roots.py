"""A metric of your own: write a root backend, have it checked, train with it.

    python examples/custom_roots.py [--quick]

`DiagonalRoots` keeps one number per row and one per column, the diagonals of the two covariances of
the full metric: its state is rows + cols numbers where the full one's is rows² + cols².
"""

import argparse
import time

import torch
from quick import announce
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rpt
from rpt.roots import Damping, Refresh, RootBackend, check_backend

BATCH = 64


class DiagonalRoots(RootBackend):
    """Rows and columns are scaled each by the inverse fourth root of their mean square."""

    def create(
        self, batch: int, rows: int, cols: int, *, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        def column(size: int, value: float) -> Tensor:
            return torch.full((batch, size, 1), value, dtype=dtype, device=device)

        return {
            "row_square": column(rows, 0.0),
            "col_square": column(cols, 0.0),
            "row_root": column(rows, 1.0),
            "col_root": column(cols, 1.0),
        }

    def accumulate(self, state: dict[str, Tensor], gradient: Tensor, beta2: float) -> None:
        square = gradient.square()
        state["row_square"].lerp_(square.mean(-1, keepdim=True), 1 - beta2)
        state["col_square"].lerp_(square.mean(-2).unsqueeze(-1), 1 - beta2)

    def refresh(
        self,
        state: dict[str, Tensor],
        shape: tuple[int, int],
        correction: Tensor,
        damping: Damping,
    ) -> Refresh:
        spread, failed = torch.ones_like(correction), torch.zeros_like(correction).bool()
        for side in ("row", "col"):
            square = state[f"{side}_square"] / correction[:, None, None]
            floor = damping.ridge * square.mean(1, keepdim=True) + damping.absolute[:, None, None]
            floored = torch.maximum(square, floor)
            # A matrix that has seen no gradient yet, or a broken one, keeps the root it has.
            usable = floored.isfinite().all(1, keepdim=True) & (floored > 0)
            root = state[f"{side}_root"]
            root.copy_(torch.where(usable, torch.where(usable, floored, 1.0) ** -0.25, root))
            spread = spread * (root.amax((1, 2)) / root.amin((1, 2))).square()
            failed = failed | ~floored.isfinite().all(1)[:, 0]
        return Refresh(condition=spread, failed=failed)

    def apply(self, state: dict[str, Tensor], gradient: Tensor) -> Tensor:
        return state["row_root"] * gradient * state["col_root"].mT


def train(roots: str | RootBackend, epochs: int) -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(labels)
    order = torch.randperm(len(x))
    train_rows, held_out = order[:1400], order[1400:]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = rpt.ResidualPolarTransport(model.parameters(), lr=3e-3, roots=roots)
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
        loss = nn.functional.cross_entropy(model(x[held_out]), y[held_out])
    total = optimizer.telemetry()["total"]
    name = roots if isinstance(roots, str) else type(roots).__name__
    print(
        f"{name:14} held-out loss {loss:.4f}, {seconds:4.1f} s, {total['state_bytes']:>8,} bytes "
        f"of state, {total['root_refreshes']} refreshes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch; figures mean nothing")
    options = parser.parse_args()
    announce(options.quick)
    torch.set_num_threads(1)
    check_backend(DiagonalRoots())  # raises, and says in words what is wrong
    print("DiagonalRoots keeps the contract")
    for choice in ("full", DiagonalRoots()):
        train(choice, epochs=1 if options.quick else 8)


if __name__ == "__main__":
    main()

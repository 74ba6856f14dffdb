"""A balanced tree embedded in hyperbolic space, so that distances are those along its edges.

    python examples/tree_embedding.py [--branching 3] [--depth 4] [--quick]

Every node is a row of a `LorentzEmbedding`, stepped by `RiemannianAdamW`; the loss is the mean of
(d/(edge · d_tree) − 1)² over all pairs. Where geoopt is installed (`pip install geoopt`), its
RiemannianAdam trains the same points, with the same rate and loss, in its ambient Lorentz model.

Printed: distortion, the mean of |d/(edge · d_tree) − 1|, and MAP, the mean average precision of
reading a node's neighbours off the order of distances (1 is perfect). A picture of both embeddings
in the Poincaré disk (of the first two coordinates) is written to --out, under `runs/`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch
from quick import RUNS, announce, writable
from rpt.geometry import lorentz
from torch import Tensor

Distances = Callable[[], Tensor]


def balanced_tree(branching: int, depth: int) -> tuple[Tensor, Tensor]:
    """Parents (N,) of the nodes in breadth-first order, −1 for the root, and the distances (N, N)
    along the edges."""
    count = sum(branching**level for level in range(depth + 1))
    parents = (torch.arange(count) - 1).div(branching, rounding_mode="floor")
    parents[0] = -1
    distances = torch.zeros(count, count)
    for node in range(1, count):
        # A new leaf is one edge farther from every earlier node than its parent is.
        row = distances[parents[node], :node] + 1.0
        distances[node, :node] = row
        distances[:node, node] = row
    return parents, distances


def distortion(found: Tensor, wanted: Tensor) -> float:
    """The mean of |d/wanted − 1| over pairs."""
    pairs = torch.triu_indices(len(wanted), len(wanted), 1)
    return float((found[pairs[0], pairs[1]] / wanted[pairs[0], pairs[1]] - 1.0).abs().mean())


def mean_average_precision(found: Tensor, tree: Tensor) -> float:
    """How well a node's neighbours are the nearest points: the mean over nodes and neighbours of the
    share of neighbours among the points at least as near."""
    adjacent = tree == 1
    inside = found.unsqueeze(1) <= found.unsqueeze(2)  # node, neighbour, other
    inside = inside & ~torch.eye(len(tree), dtype=torch.bool).unsqueeze(1)
    share = (inside & adjacent.unsqueeze(1)).sum(-1) / inside.sum(-1).clamp(min=1)
    per_node = (share * adjacent).sum(-1) / adjacent.sum(-1)
    return float(per_node.mean())


def train(
    distances: Distances, optimizer: torch.optim.Optimizer, wanted: Tensor, steps: int
) -> float:
    """Minimise the loss; seconds taken. The rate falls to a tenth along a cosine."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, steps, eta_min=0.1 * optimizer.param_groups[0]["lr"]
    )
    rows, columns = torch.triu_indices(len(wanted), len(wanted), 1)
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        ratio = distances()[rows, columns] / wanted[rows, columns]
        (ratio - 1.0).square().mean().backward()
        optimizer.step()
        schedule.step()
    return time.perf_counter() - start


def ours(
    start: Tensor, rate: float
) -> tuple[Distances, torch.optim.Optimizer, Callable[[], Tensor]]:
    """Distances of all pairs, the optimizer, and Poincaré coordinates, in polar form."""
    manifold = lorentz.Lorentz()
    nodes = manifold.embedding(len(start), start.shape[-1] - 1)
    with torch.no_grad():
        nodes.weight.copy_(lorentz.pack(manifold.to_polar(start)))
    index = torch.arange(len(start))

    def distances() -> Tensor:
        x = nodes(index)
        return lorentz.pairwise_distance(x, x)

    optimizer = lorentz.RiemannianAdamW(nodes.parameters(), lr=rate, weight_decay=0.0)
    return distances, optimizer, lambda: lorentz.to_poincare(nodes(index))


def geoopts(
    start: Tensor, rate: float
) -> tuple[Distances, torch.optim.Optimizer, Callable[[], Tensor]]:
    """The same in geoopt's ambient Lorentz model."""
    import geoopt

    manifold = geoopt.Lorentz()
    nodes = geoopt.ManifoldParameter(start.clone(), manifold=manifold)

    def distances() -> Tensor:
        return manifold.dist(nodes.unsqueeze(1), nodes.unsqueeze(0))

    def disk() -> Tensor:
        return nodes[:, 1:] / (nodes[:, :1] + 1.0)

    return distances, geoopt.optim.RiemannianAdam([nodes], lr=rate), disk


def draw(pictures: dict[str, Tensor], parents: Tensor, path: Path) -> None:
    """The embeddings side by side, edges as straight lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(pictures), figsize=(5 * len(pictures), 5), squeeze=False)
    for axis, (name, p) in zip(axes[0], pictures.items(), strict=True):
        axis.add_patch(plt.Circle((0, 0), 1.0, fill=False, color="0.7"))
        for node in range(1, len(parents)):
            pair = torch.stack([p[node], p[parents[node]]])
            axis.plot(pair[:, 0], pair[:, 1], "-", color="0.5", linewidth=0.5)
        axis.plot(p[:, 0], p[:, 1], ".", markersize=3)
        axis.set(title=name, aspect="equal", xticks=[], yticks=[])
    figure.tight_layout()
    figure.savefig(writable(path), dpi=120)


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--branching", type=int, default=3)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dimension", type=int, default=5)
    parser.add_argument("--edge", type=float, default=1.0, help="hyperbolic length of an edge")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RUNS / "tree_embedding.png")
    parser.add_argument(
        "--quick", action="store_true", help="a small tree, few steps: figures mean nothing"
    )
    options = parser.parse_args()
    announce(options.quick)
    if options.quick:
        options.depth, options.steps = min(options.depth, 2), min(options.steps, 200)
    torch.manual_seed(options.seed)
    parents, tree = balanced_tree(options.branching, options.depth)
    start = lorentz.Lorentz().random_normal(len(tree), 1 + options.dimension, std=0.1)
    arms = {"rpt.geometry.lorentz": ours}
    if importlib.util.find_spec("geoopt"):
        arms["geoopt"] = geoopts
    else:
        print("geoopt is not installed: only this package runs")
    print(f"{len(tree)} nodes, dimension {options.dimension}, {options.steps} steps")
    pictures = {}
    for name, arm in arms.items():
        distances, optimizer, disk = arm(start, options.rate)
        seconds = train(distances, optimizer, options.edge * tree, options.steps)
        with torch.no_grad():
            found, pictures[name] = distances(), disk()
        print(
            f"{name:22} distortion {distortion(found, options.edge * tree):.4f}   "
            f"MAP {mean_average_precision(found, tree):.4f}   {seconds:.1f} s"
        )
    draw(pictures, parents, options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()

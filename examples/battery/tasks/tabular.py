"""scikit-learn's tables: two regressions, two classifications."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..task import Problem, Task, classification, regression, split, standardised


def _mlp(columns: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def _table(x: Tensor, y: Tensor, seed: int, classes: int = 0) -> Problem:
    (x1, y1), (x2, y2) = split(x, y, seed)
    x1, x2 = standardised(x1, x1), standardised(x2, x1)
    if classes:
        return classification(seed, lambda: _mlp(x.shape[1], classes), (x1, y1), (x2, y2), batch=64)
    y1, y2 = standardised(y1, y1), standardised(y2, y1)
    return regression(seed, lambda: _mlp(x.shape[1], 1), (x1, y1), (x2, y2), batch=64)


def _load(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return torch.tensor(x).float(), torch.tensor(y)


def diabetes(seed: int) -> Problem:
    x, y = _load("diabetes")
    return _table(x, y.float()[:, None], seed)


def friedman(seed: int) -> Problem:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(2000, n_features=10, noise=0.5, random_state=seed)
    return _table(torch.tensor(x).float(), torch.tensor(y).float()[:, None], seed)


def breast_cancer(seed: int) -> Problem:
    return _table(*_load("breast_cancer"), seed, classes=2)


def wine(seed: int) -> Problem:
    return _table(*_load("wine"), seed, classes=3)


TASKS = [
    Task("diabetes", "tabular", diabetes, 150),
    Task("friedman", "tabular", friedman, 400),
    Task("breast_cancer", "tabular", breast_cancer, 150),
    Task("wine", "tabular", wine, 100),
]

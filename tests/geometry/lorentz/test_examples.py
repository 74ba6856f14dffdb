"""The vision examples, at a size that takes seconds."""

import argparse
import importlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def example(monkeypatch):
    def load(name):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)

    return load


def test_digits_are_split_once_and_shifted_as_a_whole(example):
    data = example("vision_data").load("digits", 64, seed=3)
    images, labels = next(iter(data.train))
    assert images.shape == (64, 1, 8, 8)
    assert len(data.train.labels) + len(data.test.labels) == 1797
    again = example("vision_data").load("digits", 64, seed=4)
    assert torch.equal(again.test.images, data.test.images)
    assert not torch.equal(next(iter(again.train))[1], labels)
    marked = torch.full((50, 1, 8, 8), -1.0)
    marked[:, :, 3, 4] = 1.0
    moved = data.train.shifted(marked)
    rows, columns = (moved[:, 0] == 1).nonzero()[:, 1:].T
    assert len(rows) == 50
    assert set(rows.tolist()) == {2, 3, 4}
    assert set(columns.tolist()) == {3, 4, 5}
    with pytest.raises(SystemExit, match="neither"):
        example("vision_data").load("no such thing", 64, 0)


def test_digits_example_runs_and_resumes(example, tmp_path, monkeypatch, capsys):
    module = example("polar_vit_digits")
    monkeypatch.setattr(
        module, "DIGIT_SIZES", {"width": 8, "depth": 1, "num_heads": 2, "mlp_width": 8}
    )
    runs, picture = tmp_path / "runs.jsonl", tmp_path / "out.png"
    command = ["x", "--quick", "--epochs", "1", "--batch", "512", "--device", "cpu"]
    command += ["--arms", "Polar-ViT", "--runs", str(runs), "--output", str(picture)]
    monkeypatch.setattr(sys, "argv", command)
    for _ in range(2):
        module.main()
        assert len(runs.read_text().splitlines()) == 2
    assert picture.stat().st_size > 1000
    assert "| Polar-ViT, RPT |" in capsys.readouterr().out
    for study, rows in (("ablation", 7), ("radius", 8), ("compare", 6)):
        assert len(module.arms(study)) == rows


def test_unet_example_draws_masks_and_reads_directories(example, tmp_path):
    module = example("polar_unet")
    images, masks = module.drawn_digits(3, 32, True, 0)
    assert images.shape == (3, 3, 32, 32)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert all(0.02 < float(mask.float().mean()) < 0.6 for mask in masks)
    from PIL import Image

    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(np.full((20, 40, 3), 200, np.uint8)).save(tmp_path / "images" / name)
        Image.fromarray(np.full((20, 40), 255, np.uint8)).save(tmp_path / "masks" / name)
    pixels, found = module.from_directory(tmp_path, 16)
    assert pixels.shape == (2, 3, 16, 16)
    assert found.unique().tolist() == [0, 1]  # zero-padded to a square
    options = argparse.Namespace(device="cpu", steps=1, batch=1, rate=1e-3)
    data = (images[:1, :, :16, :16], masks[:1, :16, :16]) * 2
    run, guess = module.train("polar U-Net", "AdamW", 0, data, options)
    assert 0 <= run["dice"] <= 1
    assert guess.shape == (1, 16, 16)


def test_stability_example_starts_both_twins_alike(example):
    module = example("polar_vit_stability")
    runs = {
        name: module.run(name, 2.0, 0, 1, 1e-3, "distance", "cluster") for name in module.MODELS
    }
    assert runs["polar"]["losses"][0] == pytest.approx(runs["ambient"]["losses"][0], rel=1e-3)
    assert runs["polar"]["failed"] is None


def test_cifar_and_tiny_imagenet_directories(example, tmp_path):
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # absent, or built for another torch
        pytest.skip("no working torchvision")
    module = example("vision_data")
    from PIL import Image

    cifar = tmp_path / "cifar-100-python"
    cifar.mkdir()
    stored = {"data": np.zeros((4, 3072), np.uint8), "fine_labels": [0, 1, 2, 99]}
    for name in ("train", "test"):
        (cifar / name).write_bytes(pickle.dumps(stored))
    data = module.load(str(tmp_path), 2, 0, workers=0)
    assert (data.num_classes, data.side, data.steps_per_epoch) == (100, 32, 2)
    images, labels = next(iter(data.train))
    assert images.shape == (2, 3, 32, 32)
    assert labels.shape in ((2,), (2, 100))
    tiny = tmp_path / "tiny"
    for name in ("n1", "n2"):
        (tiny / "train" / name / "images").mkdir(parents=True)
        picture = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
        picture.save(tiny / "train" / name / "images" / "0.png")
    (tiny / "val" / "images").mkdir(parents=True)
    picture.save(tiny / "val" / "images" / "v.png")
    (tiny / "val" / "val_annotations.txt").write_text("v.png\tn2\t0\t0\t63\t63\n")
    (tiny / "wnids.txt").write_text("n1\nn2\n")
    data = module.load(str(tiny), 1, 0, workers=0)
    assert (data.num_classes, data.side) == (2, 64)
    assert next(iter(data.test))[1].tolist() == [1]


def test_run_keys_tell_recipes_apart(example):
    module = example("polar_vit_digits")
    base = {"data": "digits", "size": "digits", "epochs": 2, "batch": 64, "rate": 1e-3}
    plain = argparse.Namespace(**base, bf16=False)
    arms = {**module.arms("compare"), **module.arms("ablation")}
    keys = {name: module.key_of(arm, 0, plain) for name, arm in arms.items()}
    # What two studies have in common is one run.
    assert keys["Polar-ViT, AdamW"] == keys["+ horospherical encoding (Polar-ViT)"]
    assert keys["ambient Lorentz ViT, AdamW"] == keys[module.START]
    assert len(set(keys.values())) == len(arms) - 2
    arm = arms["Polar-ViT, AdamW"]
    others = {
        module.key_of(arm, 1, plain),
        module.key_of(arm, 0, argparse.Namespace(**base, bf16=True)),
    }
    assert len(others - set(keys.values())) == 2

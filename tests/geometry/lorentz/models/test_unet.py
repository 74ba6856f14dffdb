"""The polar U-Net, and its loss and score."""

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from baselines import AmbientUNet
from rpt.observers.protocol import declared_sites
from torch import nn

import rpt


def test_unet_sizes_and_sites():
    polar, twin = lorentz.PolarUNet(), AmbientUNet()
    sizes = [sum(p.numel() for p in model.parameters()) for model in (polar, twin)]
    assert abs(sizes[0] / 215.5e3 - 1) < 0.01  # the paper's Table 9
    assert abs(sizes[1] / 216.0e3 - 1) < 0.01
    assert len(declared_sites(polar)) == len(declared_sites(twin)) == 19
    small = lorentz.PolarUNet(1, 2, channels=(4, 8))
    assert small(torch.rand(2, 1, 8, 12)).shape == (2, 2, 8, 12)
    with pytest.raises(ValueError, match="multiples of 4"):
        small(torch.rand(2, 1, 6, 12))
    with pytest.raises(ValueError, match=r"batch, 1, height"):
        small(torch.rand(2, 3, 8, 12))
    with pytest.raises(ValueError, match="channels"):
        lorentz.PolarUNet(channels=())


def test_unet_learns_a_mask_and_survives_autocast_and_files():
    model = lorentz.PolarUNet(1, 2, channels=(4, 8))
    optimizer = rpt.ResidualPolarTransport(lorentz.parameter_groups(model, 0.05), lr=1e-2)
    optimizer.attach_model(model)
    images = torch.rand(4, 1, 16, 16)
    target = (nn.functional.avg_pool2d(images, 3, 1, 1).squeeze(1) > 0.5).long()
    before = float(lorentz.segmentation_loss(model(images), target).detach())
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
            loss = lorentz.segmentation_loss(model(images), target)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.9 * before
    model.eval()
    again = lorentz.PolarUNet(1, 2, channels=(4, 8)).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(model(images), again(images))


def test_dice_score_by_hand():
    target = torch.tensor([[[0, 0], [1, 1]]])
    predicted = torch.tensor([[[0, 1], [1, 1]]])
    logits = nn.functional.one_hot(predicted, 2).movedim(-1, 1).float()
    # background: 2·1/(1 + 2), foreground: 2·2/(3 + 2)
    assert float(lorentz.dice_score(logits, target)) == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert float(lorentz.dice_score(logits, predicted)) == 1.0
    nothing = torch.zeros_like(target)
    empty = torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)], 1)
    assert float(lorentz.dice_score(empty, nothing)) == 1.0
    loss = lorentz.segmentation_loss(20.0 * logits, predicted)
    assert float(loss) == pytest.approx(0.0, abs=1e-5)

"""Convolutions and U-Net against receptive fields formed one by one and the ambient formulas."""

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from baselines import ambient

CURVATURES = [0.3, 1.0, 2.7]


def image(batch, height, width, n, *, scale=1.0, dtype=torch.float64):
    return lorentz.exp_map_origin(scale * torch.randn(batch, height, width, n, dtype=dtype))


def receptive_field(x, row, column, size, stride, padding, dilation):
    """The points under a window, the origin outside the image."""
    height, width = x.a.shape[1:]
    points = []
    for i in range(size):
        for j in range(size):
            r = row * stride - padding + i * dilation
            c = column * stride - padding + j * dilation
            if 0 <= r < height and 0 <= c < width:
                points.append(lorentz.Point(x.a[:, r, c], x.u[:, r, c]))
            else:
                points.append(lorentz.origin_like(x.u[:, 0, 0]))
    return lorentz.Point(
        torch.stack([p.a for p in points], 1), torch.stack([p.u for p in points], 1)
    )


@pytest.mark.parametrize("k", CURVATURES)
@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilation"), [(3, 1, 1, 1), (3, 2, 0, 2), (1, 1, 0, 1)]
)
def test_convolution_is_a_polar_linear_layer_on_concatenated_fields(
    k, size, stride, padding, dilation
):
    n, m = 3, 5
    layer = lorentz.PolarConv2d(n, m, size, stride=stride, padding=padding, dilation=dilation, k=k)
    layer = layer.double()
    linear = lorentz.PolarLinear(n * size**2, m, k=k).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn_like(p))
        kernel = layer.direction.weight.permute(0, 2, 3, 1).flatten(1)
        linear.direction.weight[:, 0] = layer.time_weight
        linear.direction.weight[:, 1:] = kernel[:-1]
        linear.radius_direction.copy_(kernel[-1])
        linear.norm_power_change.copy_(layer.norm_power_change)
        linear.radius_gain.copy_(layer.radius_gain)
        linear.radius_bias.copy_(layer.radius_bias)
    x = image(2, 6, 7, n)
    out = layer(x)
    for row in range(out.a.shape[1]):
        for column in range(out.a.shape[2]):
            field = receptive_field(x, row, column, size, stride, padding, dilation)
            expected = linear(lorentz.join_heads(field))
            assert torch.allclose(out.a[:, row, column], expected.a, rtol=1e-10, atol=1e-12)
            assert torch.allclose(out.u[:, row, column], expected.u, rtol=1e-10, atol=1e-12)


def test_convolution_starts_as_the_lorentz_convolution():
    layer = lorentz.PolarConv2d(3, 4, 3, padding=1).double()
    plain = lorentz.PolarConv2d(3, 4, 3, padding=1, radius="lorentz").double()
    with torch.no_grad():
        plain.direction.weight.copy_(layer.direction.weight[:-1])
        plain.time_weight.copy_(layer.time_weight)
    x = image(2, 5, 5, 3)
    for ours, theirs in zip(layer(x), plain(x), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_convolution_far_out_and_over_black_pixels():
    layer = lorentz.PolarConv2d(3, 4, 3, padding=1)
    x = image(1, 6, 6, 3, dtype=torch.float32)
    far = lorentz.Point(torch.full_like(x.a, 60.0), x.u.clone().requires_grad_())
    black = torch.zeros(1, 6, 6, 3, requires_grad=True)
    for point, leaf in ((far, far.u), (lorentz.exp_map_origin(black), black)):
        layer.zero_grad()
        with torch.no_grad():
            layer.radius_gain.fill_(0.1)
        out = layer(point)
        (out.a.sum() + out.u.sum()).backward()
        assert torch.isfinite(out.a).all()
        assert torch.isfinite(leaf.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    with pytest.raises(ValueError, match=r"height, width, 3"):
        layer(image(1, 6, 6, 2))
    with pytest.raises(ValueError, match="must be"):
        lorentz.PolarConv2d(3, 4, 3, radius="cap")


@pytest.mark.parametrize("k", CURVATURES)
def test_batch_norm_is_the_ambient_formula_and_keeps_estimates(k):
    layer = lorentz.PolarBatchNorm2d(4, k=k, momentum=0.25).double()
    with torch.no_grad():
        layer.bias.normal_()
        layer.log_gain.fill_(0.3)
    x = image(3, 4, 5, 4)
    points = lorentz.to_ambient(x, k=k).flatten(0, 2)
    mean = ambient.ambient_centroid(
        points, torch.full((len(points),), 1 / len(points), dtype=torch.float64), k=k
    )
    distance = ambient.ambient_distance(points, mean, k=k).mean()
    logarithm = ambient.ambient_log_map(mean.expand_as(points), points, k=k)
    origin = torch.zeros_like(points)
    origin[:, 0] = k**0.5
    tangent = ambient.ambient_parallel_transport(mean.expand_as(points), origin, logarithm, k=k)
    tangent = tangent * (torch.exp(layer.log_gain) / (distance + layer.eps))
    bias = ambient.ambient_exp_map_origin(layer.bias, k).expand_as(points)
    tangent = ambient.ambient_parallel_transport(origin, bias, tangent, k=k)
    expected = ambient.ambient_exp_map(bias, tangent, k=k)
    out = lorentz.to_ambient(layer(x), k=k).flatten(0, 2)
    assert torch.allclose(out, expected, rtol=1e-9, atol=1e-9)
    start = origin[0]
    moved = ambient.ambient_centroid(
        torch.stack([start, mean]), torch.tensor([0.75, 0.25], dtype=torch.float64), k=k
    )
    running = lorentz.to_ambient((layer.running_radius, layer.running_direction), k=k)
    assert torch.allclose(running, moved, rtol=1e-10)
    assert torch.allclose(layer.running_distance, 0.75 + 0.25 * distance)
    for _ in range(80):
        layer(x)
    train = layer(x)
    layer.eval()
    for ours, theirs in zip(layer(x), train, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-8)


def test_upsampling_is_the_centroid_of_bilinear_neighbours():
    x = image(2, 3, 4, 3, scale=2.0)
    out = lorentz.upsample2x(x)
    assert out.a.shape == (2, 6, 8)
    for row in range(6):
        for column in range(8):
            weights, a, u = [], [], []
            for r, wr in neighbours(row, 3):
                for c, wc in neighbours(column, 4):
                    weights.append(wr * wc)
                    a.append(x.a[:, r, c])
                    u.append(x.u[:, r, c])
            points = lorentz.to_ambient((torch.stack(a, 1), torch.stack(u, 1)))
            w = torch.tensor(weights, dtype=torch.float64).expand(2, -1)
            expected = ambient.ambient_centroid(points, w)
            ours = lorentz.to_ambient((out.a[:, row, column], out.u[:, row, column]))
            assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)


def neighbours(index, size):
    """Source indices and weights of bilinear interpolation by 2, borders repeated."""
    near = index // 2
    other = near - 1 if index % 2 == 0 else near + 1
    return [(near, 0.75), (min(max(other, 0), size - 1), 0.25)]


def test_upsampling_is_accurate_far_out_in_float32():
    torch.manual_seed(1)
    start = lorentz.exp_map_origin(torch.tensor([12.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    steps = lorentz.exp_map_origin(0.5 * torch.randn(1, 4, 4, 4, dtype=torch.float64))
    x = lorentz.gyro_add((start.a.expand(1, 4, 4), start.u.expand(1, 4, 4, 4)), steps)
    single = lorentz.Point(x.a.float(), x.u.float())
    double = lorentz.Point(single.a.double(), single.u.double())
    error = lorentz.distance(
        tuple(t.double() for t in lorentz.upsample2x(single)), lorentz.upsample2x(double)
    )
    assert error.median() < 2e-2  # the resolution of float32 directions at this radius
    naive = ambient.ambient_centroid(
        torch.stack([lorentz.to_ambient((single.a[:, 0, j], single.u[:, 0, j])) for j in (0, 1)], 1),
        torch.tensor([[0.75, 0.25]]),
    )  # fmt: skip
    assert abs(float(lorentz.from_ambient(naive).a) - 12.0) > 1.0


def test_pooling_and_concatenation():
    x, y = image(2, 4, 6, 3), image(2, 4, 6, 2)
    space = lorentz.to_space(x)
    pooled = lorentz.to_space(lorentz.max_pool2d(x, 2))
    windows = space.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    assert torch.allclose(pooled, windows.amax((2, 4)))
    assert torch.equal(lorentz.PolarMaxPool2d(2)(x).a, lorentz.max_pool2d(x, 2).a)
    middle = lorentz.CentroidPool2d(2)(x)
    points = lorentz.to_ambient(x)
    window = points[:, 2:4, 4:6].flatten(1, 2)
    expected = ambient.ambient_centroid(window, torch.ones(2, 4, dtype=torch.float64))
    ours = lorentz.to_ambient((middle.a[:, 1, 2], middle.u[:, 1, 2]))
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)
    joined = lorentz.to_space(lorentz.concatenate(x, y))
    assert torch.allclose(joined, torch.cat([space, lorentz.to_space(y)], -1))
    with pytest.raises(ValueError, match="tile"):
        lorentz.centroid_pool2d(x, 5)


def test_gradients_of_image_operations():
    v = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    layer = lorentz.PolarConv2d(2, 2, 3, padding=1).double()

    def through(v):
        x = lorentz.upsample2x(layer(lorentz.exp_map_origin(v)))
        return lorentz.to_space(lorentz.concatenate(x, lorentz.PolarReLU()(x)))

    assert torch.autograd.gradcheck(through, (v,))

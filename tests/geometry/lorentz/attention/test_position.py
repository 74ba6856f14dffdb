"""Positional encodings of queries and keys."""

import pytest
import rpt.geometry.lorentz as lorentz
import torch


def points(*shape, scale=1.0, dtype=torch.float32):
    return lorentz.exp_map_origin(scale * torch.randn(*shape, dtype=dtype))


@pytest.mark.parametrize("positions", [16, (4, 4)])
def test_shared_scheme_is_exactly_relative(positions):
    """Moving every token by the same steps leaves all scores as they are, both axes at once."""
    encoding = lorentz.HorosphericalEncoding(2, positions, initial_rate=2.0).double()
    x = points(1, 2, 5, 6, dtype=torch.float64)
    where = torch.randint(0, 4, (5, 2)) if isinstance(positions, tuple) else torch.arange(5)
    moved = where + (torch.tensor([3, 7]) if isinstance(positions, tuple) else 11)
    from rpt.geometry.lorentz.attention.scores import pairwise_c

    here, there = encoding(x, where), encoding(x, moved)
    assert torch.allclose(pairwise_c(here, here), pairwise_c(there, there), rtol=1e-9)
    one_axis = encoding(x, where + 1)
    assert not torch.allclose(pairwise_c(here, one_axis), pairwise_c(here, here), rtol=1e-2)


def test_paper_scheme_is_relative_along_each_axis_and_only_nearly_across():
    encoding = lorentz.HorosphericalEncoding(2, (4, 4), scheme="paper", initial_rate=0.5).double()
    x = points(1, 2, 5, 6, dtype=torch.float64)
    from rpt.geometry.lorentz.attention.scores import pairwise_c

    rows = torch.stack([torch.arange(5), torch.zeros(5, dtype=torch.long)], -1)
    here = pairwise_c(encoding(x, rows), encoding(x, rows))
    there = pairwise_c(*2 * [encoding(x, rows + torch.tensor([3, 0]))])
    assert torch.allclose(here, there, rtol=1e-9)
    columns = rows.flip(-1)
    here = pairwise_c(encoding(x, columns), encoding(x, columns))
    there = pairwise_c(*2 * [encoding(x, columns + torch.tensor([0, 2]))])
    assert torch.allclose(here, there, rtol=1e-9)
    both = torch.tensor([[0, 0], [1, 2], [3, 1], [2, 2], [0, 3]])
    here = pairwise_c(*2 * [encoding(x, both)])
    there = pairwise_c(*2 * [encoding(x, both + torch.tensor([2, 2]))])
    assert not torch.allclose(here, there, rtol=1e-6)


def test_encoding_is_the_shift():
    encoding = lorentz.HorosphericalEncoding(1, 10, initial_rate=3.0).double()
    x = points(1, 1, 4, 5, dtype=torch.float64)
    level, _, vector = encoding(x)
    shifted = lorentz.horospherical_shift(x, 0.3 * torch.arange(4, dtype=torch.float64))
    expected = lorentz.to_half_space(shifted)
    assert torch.allclose(level, expected.log_nu)
    assert torch.allclose(vector, expected.w)


def test_boost_encoding_moves_points_along_its_axis():
    encoding = lorentz.BoostEncoding(2, 4)
    x = points(2, 2, 4, 5)
    level, _, vector = encoding(x)
    assert torch.allclose(level[:, :, 0], x.a[:, :, 0], atol=1e-5)
    expected = lorentz.axis_boost(x, torch.arange(4.0) / 4)
    assert torch.allclose(level, expected.a)
    assert torch.allclose(vector, expected.u)

"""First and second derivatives, derivatives at the origin, and what torch does around the calls."""

import pytest
import rpt.geometry.lorentz as lorentz
import torch
from torch.autograd import gradcheck, gradgradcheck

K = torch.tensor(1.7, dtype=torch.float64)


def make(*shape, seed, scale=1.5, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    v = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
    x = lorentz.exp_map_origin(v)
    return tuple(t.detach().requires_grad_(requires_grad) for t in x)


def operations():
    x, y = make(3, 4, seed=0), make(3, 4, seed=1)
    step = make(3, 4, seed=2)
    weights = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    k = K.clone().requires_grad_()
    pair = (*x, *y, k)
    two = lambda f: lambda a, u, b, v, k: f((a, u), (b, v), k=k)  # noqa: E731
    return {
        "squared_distance": (two(lorentz.squared_distance), pair),
        "distance": (two(lorentz.distance), pair),
        "pairwise_squared_distance": (two(lorentz.pairwise_squared_distance), pair),
        "pairwise_distance": (two(lorentz.pairwise_distance), pair),
        "gyro_add": (two(lorentz.gyro_add), pair),
        "log_map": (two(lorentz.log_map), pair),
        "exp_map": (two(lorentz.exp_map), (*x, *step, k)),
        "exp_map_inward": (
            lambda a, u, r, p, k: lorentz.exp_map((a, u), (-r, p), k=k),
            (*x, *step, k),
        ),
        "parallel_transport": (
            lambda a, u, b, v, r, p: lorentz.parallel_transport((a, u), (b, v), (r, p)),
            (*x, *y, *step),
        ),
        "centroid": (lambda a, u, w: lorentz.centroid((a, u), w), (*x, weights[0])),
        "centroids": (lambda a, u, w: lorentz.centroids((a, u), w), (*x, weights)),
        "exp_map_origin": (lambda v, k: lorentz.exp_map_origin(v, k=k), (step[1], k)),
        "log_map_origin": (lambda a, u, k: lorentz.log_map_origin((a, u), k=k), (*x, k)),
        "to_ambient": (lambda a, u, k: lorentz.to_ambient((a, u), k=k), (*x, k)),
        "from_space": (lambda s, k: lorentz.from_space(s, k=k), (step[1], k)),
        "horospherical_shift": (
            lambda a, u, t: lorentz.horospherical_shift((a, u), t),
            (*x, step[0]),
        ),
        "gyro_scale": (lambda t, a, u: lorentz.gyro_scale(t, (a, u)), (step[0], *x)),
        "boost_step": (
            lambda a, u, b, v, s: lorentz.boost_step(
                (a, u), (b, v), s, torch.full((3,), 1 / 3, dtype=torch.float64)
            ),
            (*x, *y, torch.tensor(0.3, dtype=torch.float64, requires_grad=True)),
        ),
        "axis_boost": (lambda a, u, t: lorentz.axis_boost((a, u), t, axis=2), (*x, step[0])),
    }


@pytest.mark.parametrize("name", sorted(operations()))
def test_first_and_second_derivatives(name):
    function, inputs = operations()[name]
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


def test_derivatives_at_coincidence():
    """d² is smooth where the points meet, also to second order; d has gradient 0 by choice."""
    x = make(3, 4, seed=0)
    y = tuple(t.detach().clone().requires_grad_() for t in x)
    squared = lambda a, u, b, v: lorentz.squared_distance((a, u), (b, v))  # noqa: E731
    assert (squared(*x, *y) == 0).all()
    assert gradcheck(squared, (*x, *y), atol=1e-7)
    assert gradgradcheck(squared, (*x, *y), atol=1e-6)
    pairs = lambda a, u: lorentz.pairwise_squared_distance((a, u), (a, u))  # noqa: E731
    assert gradgradcheck(pairs, x, atol=1e-6)
    for gradient in torch.autograd.grad(lorentz.distance(x, y).sum(), (*x, *y)):
        assert (gradient == 0).all()


def test_exp_map_of_zero_tangent_has_all_derivatives():
    x = make(3, 4, seed=0)
    zero = tuple(torch.zeros_like(t).requires_grad_() for t in x)
    function = lambda r, p: lorentz.to_space(lorentz.exp_map(x, (r, p)))  # noqa: E731
    assert gradcheck(function, zero)
    assert gradgradcheck(function, zero)


def through_origin(function, n=3):
    """Jacobian at v = 0 of a function of exp_o(v), and by central differences."""
    step = 1e-6
    zero = torch.zeros(n, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda v: function(lorentz.exp_map_origin(v)), zero
    )
    columns = [
        (function(lorentz.exp_map_origin(step * e)) - function(lorentz.exp_map_origin(-step * e)))
        / (2 * step)
        for e in torch.eye(n, dtype=torch.float64)
    ]
    return jacobian, torch.stack(columns, -1)


Y = tuple(t[0] for t in make(1, 3, seed=5, requires_grad=False))
SET = make(3, 3, seed=6, requires_grad=False)


def with_first(x, points):
    return torch.cat([x.a[None], points[0]]), torch.cat([x.u[None], points[1]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lorentz.to_ambient(x, k=2.7),
        lambda x: lorentz.log_map_origin(x),
        lambda x: lorentz.squared_distance(x, Y),
        lambda x: lorentz.squared_distance(Y, x),
        lambda x: lorentz.squared_distance(x, x),
        lambda x: lorentz.distance(x, Y),
        lambda x: lorentz.to_space(lorentz.gyro_add(x, Y)),
        lambda x: lorentz.to_space(lorentz.gyro_add(Y, x)),
        lambda x: lorentz.to_space(lorentz.gyro_scale(-0.7, x)),
        lambda x: torch.cat([t.reshape(-1) for t in lorentz.log_map(Y, x)]),
        lambda x: lorentz.to_space(lorentz.centroid(with_first(x, SET))),
        lambda x: lorentz.to_space(lorentz.centroid((x.a[None], x.u[None]))),
        lambda x: lorentz.to_space(lorentz.horospherical_shift(x, 0.8)),
        lambda x: torch.cat([t.reshape(-1) for t in lorentz.to_half_space(x)]),
        lambda x: lorentz.to_space(lorentz.axis_boost(x, 0.4)),
    ],
)
def test_gradients_pass_through_the_origin(function):
    jacobian, differences = through_origin(function)
    assert torch.allclose(jacobian, differences, atol=1e-5)


def test_pairwise_distances_do_not_form_all_differences():
    """n = 4096 would make (N, M, n) 4 GB; the result has 64 KB."""
    x = lorentz.exp_map_origin(torch.randn(128, 4096))
    x = tuple(t.detach().requires_grad_() for t in x)
    lorentz.pairwise_squared_distance(x, x).sum().backward()
    assert x[0].grad.isfinite().all()


def test_pair_chord_is_exact_for_small_angles():
    from rpt.geometry.lorentz.ops.distance import pair_chord

    base = torch.nn.functional.normalize(torch.randn(16, dtype=torch.float64), dim=0)
    u = torch.nn.functional.normalize(base + 1e-6 * torch.randn(5, 16, dtype=torch.float64))
    u = u.float()
    exact = 0.5 * (u.double()[:, None] - u.double()[None]).square().sum(-1)
    ours = pair_chord(u, u).double()
    assert ((ours - exact).abs() <= 1e-6 * exact).all()
    gradient = torch.rand(5, 5)
    v = u.clone().requires_grad_()
    pair_chord(v, u).backward(gradient)
    true = (gradient.double()[..., None] * (u.double()[:, None] - u.double()[None])).sum(1)
    assert (v.grad.double() - true).norm() <= 1e-5 * true.norm()


def single(x, y):
    z = lorentz.gyro_add(lorentz.gyro_negate(x), y, k=1.5)
    z = lorentz.exp_map(z, lorentz.log_map(z, y, k=1.5), k=1.5)
    z = lorentz.horospherical_shift(z, 0.3, k=1.5)
    return lorentz.squared_distance(z, y, k=1.5) + lorentz.distance(x, z, k=1.5)


def test_vmap_and_functional_gradients():
    x, y = make(5, 3, seed=1), make(5, 3, seed=2)
    batched = single(x, y)
    mapped = torch.vmap(single)(lorentz.Point(*x), lorentz.Point(*y))
    assert torch.allclose(mapped, batched)
    by_vmap = torch.vmap(torch.func.grad(single))(lorentz.Point(*x), lorentz.Point(*y))
    by_autograd = torch.autograd.grad(batched.sum(), x)
    assert isinstance(by_vmap, lorentz.Point)
    for ours, expected in zip(by_vmap, by_autograd, strict=True):
        assert torch.allclose(ours, expected)
    sets = tuple(t.expand(4, *t.shape) for t in x)
    mapped = torch.vmap(lorentz.pairwise_squared_distance)(sets, sets)
    assert torch.allclose(mapped[0], lorentz.pairwise_squared_distance(x, x))


def test_every_operation_traces_without_a_graph_break():
    """All of them in one function: a break anywhere is an error under fullgraph."""
    named = operations()
    inputs = {name: arguments for name, (_, arguments) in named.items()}

    def everything(inputs):
        parts = []
        for name, (function, _) in named.items():
            result = function(*inputs[name])
            parts += list(result) if isinstance(result, tuple) else [result]
        return parts

    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for ours, expected in zip(compiled(inputs), everything(inputs), strict=True):
        assert torch.allclose(ours, expected)
    torch._dynamo.reset()


def test_compiled_backward():
    """Forward and backward ahead of time, through both custom autograd functions."""
    x, y = make(3, 4, seed=0), make(3, 4, seed=1)

    def function(a, u, b, v):
        pairs = lorentz.pairwise_squared_distance((a, u), (b, v), k=1.7)
        return pairs.sum() + lorentz.squared_distance((a, u), (b, v), k=1.7).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*x, *y), (*x, *y))
    expected = torch.autograd.grad(function(*x, *y), (*x, *y))
    assert all(torch.allclose(p, q) for p, q in zip(ours, expected, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, y = make(6, 4, seed=1, scale=4.0), make(6, 4, seed=2, scale=4.0)
    x, y = (tuple(t.detach().to(dtype).requires_grad_() for t in p) for p in (x, y))
    exact_x, exact_y = (tuple(t.detach().double() for t in p) for p in (x, y))
    for function in (lorentz.squared_distance, lorentz.distance, lorentz.gyro_add, lorentz.log_map):
        ours, exact = function(x, y), function(exact_x, exact_y)
        ours, exact = (r if isinstance(r, tuple) else (r,) for r in (ours, exact))
        for got, true in zip(ours, exact, strict=True):
            assert got.dtype == torch.float32
            assert torch.allclose(got.double(), true, rtol=1e-3, atol=1e-3)
        sum(part.sum() for part in ours).backward()
        assert all(t.grad.isfinite().all() and t.grad.dtype == dtype for t in (*x, *y))


def test_autocast_changes_nothing():
    x = tuple(t.detach().float().requires_grad_() for t in make(6, 4, seed=1, scale=5.0))
    weights = torch.rand(3, 6)

    def run(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pairs = lorentz.pairwise_squared_distance(x, x)
            mean = lorentz.centroids(x, weights)
        result = pairs.sum() + mean.a.sum() + mean.u.sum()
        return [pairs, *mean, *torch.autograd.grad(result, x)]

    plain, inside = run(False), run(True)
    assert all(torch.equal(p, q) for p, q in zip(plain, inside, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: lorentz.distance(x[0], x), "expected a point"),
        (lambda x: lorentz.distance((x[0].int(), x[1]), x), "floating-point"),
        (lambda x: lorentz.distance((x[0][:2], x[1]), x), "shapes"),
        (lambda x: lorentz.distance((x[0], x[1][:, :3]), x), "same dimension"),
        (lambda x: lorentz.distance(x, x, k=0.0), "positive"),
        (lambda x: lorentz.distance(x, x, k=float("nan")), "positive"),
        (lambda x: lorentz.centroid(x, torch.ones(4, 3)[:, :2]), "one per point"),
        (lambda x: lorentz.horospherical_shift(x, 1.0, axis=1), "differ"),
        (lambda x: lorentz.horospherical_shift(x, 1.0, axis=9), "out of range"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(make(3, 4, seed=0, requires_grad=False))


def test_norms_and_origins_are_the_same_whether_values_may_be_looked_at_or_not():
    """On a CPU Python branches on values; one zero row, or `vmap`, takes the careful path."""
    from rpt.geometry.lorentz.ops.point import is_origin
    from rpt.geometry.lorentz.ops.scalar import norm_and_direction

    x = torch.randn(5, 7, requires_grad=True)
    careful = torch.cat([x, torch.zeros(1, 7)])
    weights = torch.randn(5, 7)
    results = []
    for vectors in (x, careful):
        norm, direction = norm_and_direction(vectors)
        loss = (norm[:5] * weights[:, 0]).sum() + (direction[:5] * weights).sum()
        results.append((norm[:5], direction[:5], *torch.autograd.grad(loss, x)))
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert torch.equal(ours, theirs)  # a row does not depend on its batch
    mapped = torch.vmap(norm_and_direction)(x)
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(results[0], mapped, strict=False):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    for scale in (1e-37, 1e-18, 1e18, 1e37):  # squares vanish or overflow
        norm, direction = norm_and_direction(scale * x.detach())
        assert torch.allclose(norm / scale, results[0][0], rtol=1e-5)
        assert torch.allclose(direction, results[0][1], rtol=1e-5, atol=1e-6)
    a = torch.tensor([0.0, 0.0, 1.0])
    u = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert is_origin(a, u).tolist() == [True, False, False]
    assert torch.vmap(is_origin)(a, u).tolist() == [True, False, False]
    assert is_origin(a[2:], u[2:]).tolist() == [False]

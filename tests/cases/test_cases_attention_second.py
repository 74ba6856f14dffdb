"""Second round of acceptance cases for the RT filter's and the self-context layers' attention.

The numbers name the cases of the acceptance list that these tests stand for.
"""

import copy
import math
import pickle

import pytest
import torch
from rpt.geometry.rt_filter import (
    FilterCache,
    PolarAttention,
    PolarTransformer,
    PolarTransformerBlock,
    RobustFilterAttention,
    isotropic_filter,
    rt_filter,
)
from rpt.geometry.rt_filter.paths import slab_math
from rpt.geometry.self_context import ContextTransformerBlock

LAYERS = {
    "polar": lambda **o: PolarAttention(8, 2, **o),
    "robust": lambda **o: RobustFilterAttention(8, 2, **o),
    "standard": lambda **o: PolarAttention.standard(8, 2, **o),
    "block": lambda **o: PolarTransformerBlock(8, 2, **o),
    "context": lambda **o: ContextTransformerBlock(8, 2, **o),
}
PATHS = [
    (layer, backend)
    for layer in (*LAYERS, "bayes")
    for backend in ("auto", "dense", "chunked")
    if (layer, backend) != ("context", "chunked")  # it has no such path
]
INTEGERS = [torch.int64, torch.uint8, torch.int32]


# 49: integer masks


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_case_49_integer_masks_are_refused(layer, dtype):
    layer, x = LAYERS[layer](), torch.randn(2, 4, 8)
    with pytest.raises(TypeError, match="key_padding_mask"):
        layer(x, key_padding_mask=torch.zeros(2, 4, dtype=dtype))
    with pytest.raises(TypeError, match="attn_mask"):
        layer(x, attn_mask=torch.ones(4, 4, dtype=dtype))


def test_case_49_integer_masks_are_refused_with_a_cache_and_in_the_filter():
    layer, x = PolarAttention(8, 2), torch.randn(2, 4, 8)
    cache = layer.new_cache()
    with pytest.raises(TypeError, match="key_padding_mask"):
        layer(x, key_padding_mask=torch.zeros(2, 4).long(), cache=cache)
    with pytest.raises(TypeError, match="valid"):
        rt_filter(x, torch.arange(4), valid=torch.ones(4).long(), start="consensus")


@pytest.mark.parametrize("layer", LAYERS)
def test_case_49_a_wider_mask_is_named(layer):
    with pytest.raises(TypeError, match=r"attn_mask is torch\.float64"):
        LAYERS[layer]()(torch.randn(2, 4, 8), attn_mask=torch.zeros(4, 4, dtype=torch.float64))


def test_one_convention_of_masks_and_names_in_all_attentions():
    x = torch.randn(3, 4, 8)
    mask = torch.rand(3, 4, 4) > 0.4
    padding = torch.tensor([[False] * 4, [True] + [False] * 3, [True, True, False, False]])
    for make in LAYERS.values():
        layer = make(is_causal=False)
        for row in range(3):
            alone = layer(x[row : row + 1], attn_mask=mask[row])
            torch.testing.assert_close(layer(x, attn_mask=mask)[row : row + 1], alone)
            kept = layer(x[row : row + 1, ~padding[row]])
            padded = layer(x, key_padding_mask=padding)[row : row + 1, ~padding[row]]
            torch.testing.assert_close(padded, kept, rtol=1e-5, atol=1e-6)


def test_old_names_work_for_one_release_with_a_warning():
    for make in (PolarAttention, RobustFilterAttention, PolarTransformerBlock):
        with pytest.warns(DeprecationWarning, match="embed_dim"):
            layer = make(d_model=8, num_heads=2)
        with pytest.warns(DeprecationWarning, match="is_causal"):
            layer(torch.randn(1, 3, 8), causal=False)
    with pytest.warns(DeprecationWarning, match="is now called") as seen:
        block = ContextTransformerBlock(d_model=8, heads=2, causal=True)
    assert len(seen) == 3
    assert seen[0].filename == __file__
    x, mask = torch.randn(1, 3, 8), torch.ones(3, 3, dtype=torch.bool)
    with pytest.warns(DeprecationWarning, match="attn_mask"):
        block(x, mask=mask)
    with pytest.raises(TypeError, match="alone"):
        PolarAttention(8, 2, causal=True, is_causal=True)


# 50: a refused call leaves the cache alone


@pytest.mark.parametrize("kind", [PolarAttention, RobustFilterAttention, PolarTransformerBlock])
def test_case_50_a_refused_call_stays_out_of_the_cache(kind):
    layer, x = kind(8, 2).eval(), torch.randn(2, 6, 8)
    cache = (layer.attention if kind is PolarTransformerBlock else layer).new_cache()
    layer(x[:, :4], cache=cache, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    for wrong in (
        {"attn_mask": torch.ones(2, 3, dtype=torch.bool)},
        {"attn_mask": torch.ones(2, 6).long()},
        {"key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)},
        {"key_padding_mask": torch.zeros(2, 2)},
        {"times": torch.arange(2)},
    ):
        with pytest.raises((ValueError, TypeError)):
            layer(x[:, 4:], cache=cache, **wrong)
        assert cache.length == 4
    with pytest.raises(ValueError, match="batch of 2"):
        layer(x[:1], cache=cache)
    with pytest.raises(ValueError, match="layers"):
        layer(x, cache=FilterCache(2))
    last = layer(x[:, 4:], cache=cache, attn_mask=torch.zeros(2, 6))
    torch.testing.assert_close(last, layer(x)[:, 4:], rtol=1e-4, atol=1e-5)


def test_case_50_a_call_that_fails_late_is_forgotten_by_the_next_one():
    model = PolarTransformer(9, 8, 2, 2).eval()
    tokens, cache = torch.randint(9, (2, 5)), model.new_cache()
    model(tokens[:, :3], cache=cache)
    hook = model.blocks[1].feed_forward.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(tokens[:, 3:], cache=cache)
    hook.remove()
    cache.reorder(torch.tensor([1, 0]))
    flipped = model(tokens[:, 3:].flip(0), cache=cache)
    torch.testing.assert_close(flipped.flip(0), model(tokens)[:, 3:], rtol=1e-4, atol=1e-5)


def _fail(*_):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_caches_and_layers_go_on_alike_and_apart(make_copy):
    layer, x = PolarAttention(8, 2), torch.randn(2, 6, 8)
    cache = layer.new_cache()
    layer(x[:, :4], cache=cache, times=torch.arange(4) * 0.5)  # with gradients: not leaves
    layer_2, cache_2 = make_copy(layer), make_copy(cache)
    wanted = layer(x[:, 4:], cache=cache, times=torch.tensor([2.0, 3.5]))
    assert cache_2.length == 4
    assert torch.equal(layer_2(x[:, 4:], cache=cache_2, times=torch.tensor([2.0, 3.5])), wanted)
    for module in (PolarTransformer(9, 8, 2, 1), ContextTransformerBlock(8, 2)):
        again = make_copy(module)
        given = torch.randint(9, (1, 3)) if isinstance(module, PolarTransformer) else x
        assert torch.equal(again(given), module(given))


# 51: sampling, and empty sequences


@pytest.mark.parametrize(
    "option", [{"top_k": 0}, {"top_k": -1}, {"top_k": 1.5}, {"temperature": -1.0},
               {"temperature": math.nan}, {"count": -1}, {"count": 2.5}]
)  # fmt: skip
def test_case_51_options_of_generate_are_named(option):
    model = PolarTransformer(9, 8, 2, 1)
    with pytest.raises(ValueError, match=next(iter(option))):
        model.generate(torch.zeros(1, 3, dtype=torch.long), **{"count": 2, **option})


def test_case_51_nothing_to_generate():
    model = PolarTransformer(9, 8, 2, 1)
    prompt = torch.zeros(2, 3, dtype=torch.long)
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert model.generate(prompt[:0], 4).shape == (0, 7)
    assert model.generate(prompt, 4, top_k=100).shape == (2, 7)


@pytest.mark.parametrize(("layer", "backend"), PATHS)
def test_case_51_empty_batches_and_sequences(layer, backend):
    makers = {**LAYERS, "bayes": lambda **o: PolarAttention(8, 2, gain="bayes", **o)}
    layer = makers[layer](backend=backend)
    for shape in ((2, 0, 8), (0, 3, 8), (0, 0, 8)):
        padding = torch.zeros(shape[:2], dtype=torch.bool)
        for call in ({}, {"key_padding_mask": padding}):
            y = layer(torch.randn(shape, requires_grad=True), **call)
            assert y.shape == shape
            y.sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert all(float(g.abs().max()) == 0.0 for g in gradients)


def test_case_51_empty_sequences_with_times_memory_cache_model_and_filter():
    for kind in (PolarAttention, RobustFilterAttention):
        layer, x = kind(8, 2), torch.randn(2, 4, 8)
        assert layer(x[:, :0], times=torch.zeros(0)).shape == (2, 0, 8)
        assert float(layer(x, x[:, :0]).detach().abs().max()) == 0.0
        assert layer(x[:, :0], x).shape == (2, 0, 8)
        cache, times = layer.new_cache(), torch.arange(4) * 0.5
        padding = torch.tensor([[False] * 4, [True] + [False] * 3])
        nothing = {"times": times[:0], "key_padding_mask": padding[:, :0]}
        assert layer(x[:, :0], cache=cache, **nothing).shape == (2, 0, 8)
        y = layer(x, cache=cache, times=times, key_padding_mask=padding)
        torch.testing.assert_close(y, layer(x, times=times, key_padding_mask=padding))
        assert layer(x[:, :0], cache=cache, **nothing).shape == (2, 0, 8)
        assert cache.length == 4
    assert PolarTransformer(9, 8, 2, 1)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 9)
    for shape in ((2, 0, 4), (0, 3, 4), (0, 4)):
        times = torch.arange(shape[-2])
        assert rt_filter(torch.zeros(shape), times, start="consensus").state.shape == shape
        assert isotropic_filter(torch.zeros(shape), times).shape == shape


# 60: padding that holds NaN


@pytest.mark.parametrize("kind", ["padding", "boolean", "additive"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("layer", "backend"), [p for p in PATHS if p[0] != "bayes"])
def test_case_60_damaged_tokens_stay_where_they_are(layer, value, kind, backend):
    layer = LAYERS[layer](is_causal=False, backend=backend)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    allowed = ~hidden[:, None, :].expand(2, 5, 5)
    call = {
        "padding": {"key_padding_mask": hidden},
        "boolean": {"attn_mask": allowed},
        "additive": {"attn_mask": torch.zeros(2, 5, 5).masked_fill(~allowed, -math.inf)},
    }[kind]
    clean = torch.randn(2, 5, 8).masked_fill(hidden[..., None], 0.0)
    results = []
    for x in (clean, clean.masked_fill(hidden[..., None], value)):
        x.requires_grad_()
        layer.zero_grad()
        rows = layer(x, **call)[~hidden]
        rows.square().sum().backward()
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        results.append((rows, x.grad[~hidden], *gradients))
    for damaged, reference in zip(*reversed(results), strict=True):
        assert torch.isfinite(damaged).all()
        assert torch.equal(damaged, reference)


@pytest.mark.parametrize("layer", LAYERS)
def test_case_60_in_sight_it_is_not_hidden(layer):
    layer, x = LAYERS[layer](is_causal=True), torch.randn(1, 5, 8)
    x[0, 2] = math.nan
    y = layer(x)
    assert torch.isfinite(y[:, :2]).all()
    assert torch.isnan(y[:, 2:]).all()
    y[:, :2].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


# 61: second derivatives


def second_derivative(layer, **call):
    x = torch.randn(1, 5, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x, **call).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_case_61_the_dense_backend_has_second_derivatives(layer):
    assert torch.isfinite(second_derivative(LAYERS[layer](backend="dense"))).all()


@pytest.mark.parametrize("call", [{}, {"times": torch.arange(5) * 0.5}], ids=["grid", "times"])
def test_case_61_other_paths_name_the_switch(call):
    torch.manual_seed(1)
    layers = [
        PolarAttention(8, 2, backend="chunked"),
        PolarAttention.standard(8, 2),
        PolarAttention.standard(8, 2, backend="chunked"),
        PolarTransformerBlock(8, 2, standard=True),
    ]
    if not call:
        layers.append(ContextTransformerBlock(8, 2))
    for layer in layers:
        with pytest.raises(RuntimeError, match="backend='dense'"):
            second_derivative(layer, **call)
        (layer.attention if isinstance(layer, PolarTransformerBlock) else layer).backend = "dense"
        assert torch.isfinite(second_derivative(layer, **call)).all()


def test_case_61_sliced_paths_have_right_second_derivatives():
    for kind in (RobustFilterAttention, lambda *a, **o: PolarAttention(*a, gain="bayes", **o)):
        layer = kind(4, 1, backend="chunked").double()
        x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(layer, (x,), atol=1e-6)


# 62: given times cost little more than the default ones


def test_case_62_given_times_skip_the_keys_that_no_query_sees():
    times = torch.rand(2, 300, dtype=torch.float64).sort(-1).values
    x = torch.empty(2, 1, 300, 4)
    work = slab_math.Work(
        x, x, x, x[..., 0], x[..., 0], torch.ones(13, 1), times, times, None, torch.zeros(()),
        slab_math.CAUSAL, -1, 0.0,
    )  # fmt: skip
    slabs = list(work.slabs())
    seen = [s.keys.stop - s.keys.start for s in slabs]
    pairs = sum((s.queries.stop - s.queries.start) * k for s, k in zip(slabs, seen, strict=True))
    assert pairs < 0.75 * 300 * 300
    for slab, count in zip(slabs, seen, strict=True):
        query, key = times[:, slab.queries, None], times[:, None]
        assert not (key[..., count:] <= query).any()
        assert slab.hidden is not None
        assert (key[..., : count - slab.hidden.shape[-1]] <= query).all()


@pytest.mark.parametrize("radial", ["own", "shared", "off"])
@pytest.mark.parametrize("weights", ["student_t", "exponential"])
@pytest.mark.parametrize("clock", ["one", "each"])
def test_case_62_given_times_in_closed_form_equal_the_dense_path(
    clock, weights, radial, monkeypatch
):
    monkeypatch.setattr(slab_math, "SLAB_ELEMENTS", 600)
    layer = PolarAttention(12, 3, radial=radial, weights=weights, decay_range=(0.05, 0.5)).double()
    with torch.no_grad():
        for parameter in layer.scalars.parameters():
            parameter += 0.5 * torch.rand_like(parameter) - 0.25
    x, memory = torch.randn(2, 2, 23, 12, dtype=torch.float64).requires_grad_()
    own, theirs = torch.rand(2, 1 if clock == "one" else 2, 23, dtype=torch.float64) * 30
    for call in (
        {"times": own},
        {"times": own, "is_causal": False},
        {"memory": memory, "times": own, "memory_times": theirs, "is_causal": True},
    ):
        results = []
        for backend in ("dense", "chunked"):
            layer.backend = backend
            y = layer(x, **call)
            loss = (y * y.detach().sin()).sum()
            results.append((y, *torch.autograd.grad(loss, [x, *layer.parameters()])))
        for mine, reference in zip(*results, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)

"""ContextMLP and ContextTransformerBlock: structure, boundaries, masks, compilation."""

import numpy as np
import pytest
import self_context_oracle as oracle
import torch
from rpt.geometry.self_context import LELU, ContextMLP, ContextTransformerBlock, SoftEikonalLinear
from rpt.observers.protocol import ObservableModel, declared_sites
from torch import nn


def _block(**options):
    torch.manual_seed(3)
    return ContextTransformerBlock(12, 3, **options).double()


def _tokens(*leading, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, 12, dtype=torch.float64, generator=generator)


def test_mlp_is_the_chain_it_says():
    model = ContextMLP(2, 3, width=8)
    x = torch.randn(5, 2)
    by_hand = model.output(model.down(LELU()(model.up(model.embed(x)))))
    torch.testing.assert_close(model(x), by_hand)
    assert (model.up.n_in, model.up.n_out, model.down.n_in, model.down.n_out) == (8, 16, 16, 8)
    assert model.up.self_context_strength == model.down.self_context_strength == 0.25
    assert model(torch.randn(2, 4, 2)).shape == (2, 4, 3)


def test_sites_are_declared_and_collected_from_nested_modules():
    model = ContextMLP(2, 1, width=8)
    assert isinstance(model, ObservableModel)
    assert model.optimizer_observation_modules() == (model.down.base, model.down.metric)
    stack = nn.Sequential(_block(), nn.Linear(12, 12), _block())
    expected = [
        site
        for block in (stack[0], stack[2])
        for site in (block.attention_output, block.context_down.base, block.context_down.metric)
    ]
    assert declared_sites(stack) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("additive", [None, False, True])
def test_block_matches_loops_over_heads_and_queries(causal, additive):
    block = _block(is_causal=causal)
    x = _tokens(2, 5)
    allowed = torch.ones(5, 5, dtype=torch.bool)
    mask = None
    if additive is not None:
        allowed = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
        mask = allowed
        if additive:
            mask = torch.zeros(5, 5, dtype=x.dtype).masked_fill(~allowed, float("-inf"))
    if causal:
        allowed = allowed.tril()
    expected = [oracle.transformer_block(block, row.numpy(), allowed.numpy()) for row in x]
    torch.testing.assert_close(
        block(x, mask), torch.tensor(np.stack(expected)), rtol=1e-9, atol=1e-10
    )


def test_mask_per_sample_and_head():
    block = _block()
    x = _tokens(2, 4)
    per_head = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(4)) > 0.3
    y = block(x, per_head)
    for sample in range(2):
        alone = block(x[sample : sample + 1], per_head[sample : sample + 1])
        torch.testing.assert_close(y[sample : sample + 1], alone)


def test_any_leading_dimensions():
    block = _block(is_causal=True)
    x = _tokens(2, 3, 4)
    flat = block(x.flatten(0, 1)).unflatten(0, (2, 3))
    torch.testing.assert_close(block(x), flat)
    torch.testing.assert_close(block(x[0, 0]), flat[0, 0])
    assert block(_tokens(2, 1)).shape == (2, 1, 12)


def test_causal_block_does_not_look_ahead():
    block = _block(is_causal=True)
    x = _tokens(1, 6)
    changed = x.clone()
    changed[:, 4] += 1.0
    before, after = block(x), block(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    assert not torch.allclose(_block()(x)[:, :4], _block()(changed)[:, :4])


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_fully_masked_query_is_zero_and_harmless(additive, causal):
    block = _block(is_causal=causal)
    allowed = torch.ones(3, 3, dtype=torch.bool)
    allowed[1] = False
    mask = allowed
    if additive:
        mask = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    x = _tokens(1, 3).requires_grad_()
    attended = block.attend(x, mask)
    assert torch.equal(attended[:, 1], torch.zeros(1, 12, dtype=torch.float64))

    kept = torch.tensor([0, 2])
    outputs = [block(x, mask)[:, kept], block(x, torch.where(allowed, 0.0, -1e4).double())[:, kept]]
    gradients = [torch.autograd.grad(y.square().sum(), [x, *block.parameters()]) for y in outputs]
    for masked, reference in zip(*gradients, strict=True):
        assert masked.isfinite().all()
        torch.testing.assert_close(masked, reference, rtol=1e-6, atol=1e-10)


def test_dropout_acts_in_training_only():
    block = _block(dropout=0.5)
    x = _tokens(1, 4)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("causal", [False, True])
def test_block_compiles_without_graph_breaks(causal):
    torch._dynamo.reset()
    block = ContextTransformerBlock(12, 3, is_causal=causal)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    mask = torch.rand(5, 5) > 0.2
    for arguments in ((torch.randn(2, 5, 12),), (torch.randn(2, 5, 12), mask)):
        torch.testing.assert_close(compiled(*arguments), block(*arguments))
        compiled(*arguments).sum().backward()
        assert all(p.grad is not None for p in block.parameters())
        block.zero_grad()


def test_mlp_compiles_without_graph_breaks():
    model = ContextMLP(2, 1, width=8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(16, 2)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 5), "num_heads must divide embed_dim"),
        ((12, 0), "num_heads"),
        ((12, 3, 1.0), "drop"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ContextTransformerBlock(*arguments)


def test_block_contains_two_self_context_layers_of_the_published_shape():
    block = ContextTransformerBlock(16, 4)
    layers = [m for m in block.modules() if isinstance(m, SoftEikonalLinear)]
    assert [(m.n_in, m.n_out, m.directions, m.rank) for m in layers] == [
        (16, 64, 12, 4),
        (64, 16, 12, 4),
    ]
    assert block.qkv.bias is None
    assert block.attention_output.bias is None

"""Blocks and the language model: limits, observation sites, generation, training."""

import pytest
import torch
from rpt.geometry.rt_filter import PolarAttention, PolarTransformer, PolarTransformerBlock
from rpt.observers.protocol import ObservableModel, declared_sites
from torch import nn
from torch.nn import functional as F


def test_block_is_steps_9_and_10():
    block = PolarTransformerBlock(16, 2)
    z = torch.randn(2, 7, 16)
    after = z + block.attention(z)
    normed = F.rms_norm(after, (16,), block.feed_forward_norm.weight, 1e-6)
    hidden = F.gelu(normed @ block.feed_forward.up.weight.T)
    torch.testing.assert_close(block(z), after + hidden @ block.feed_forward.down.weight.T)


class StandardBlock(nn.Module):
    """A pre-norm transformer block with rotary positions, written from scratch."""

    def __init__(self, like):
        super().__init__()
        self.like = like

    def forward(self, z):
        block, attention = self.like, self.like.attention
        x = F.rms_norm(z, (z.shape[-1],), block.attention_norm.weight, 1e-6)
        heads, d = attention.num_heads, attention.head_dim
        q, k, v = (
            (x @ p.weight.T).unflatten(-1, (heads, 2 * d)).transpose(1, 2)
            for p in (
                attention.query_projection, attention.key_projection, attention.value_projection
            )
        )  # fmt: skip
        omega = 10000.0 ** (-torch.arange(d) / d)
        angle = torch.arange(z.shape[1])[:, None] * omega
        cosine, sine = angle.cos(), angle.sin()

        def rotary(t):
            a, b = t[..., 0::2], t[..., 1::2]
            return torch.stack((a * cosine - b * sine, a * sine + b * cosine), -1).flatten(-2)

        mean = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        # The step α = ½ and the sphere's radius are absorbed in the output projection.
        z = z + 0.5 * mean.transpose(1, 2).flatten(2) @ attention.output_projection.weight.T
        y = F.rms_norm(z, (z.shape[-1],), block.feed_forward_norm.weight, 1e-6)
        return z + F.gelu(y @ block.feed_forward.up.weight.T) @ block.feed_forward.down.weight.T


def test_with_everything_off_the_block_is_the_standard_transformer():
    block = PolarTransformerBlock(32, 4, standard=True)
    z = torch.randn(2, 19, 32)
    torch.testing.assert_close(block(z), StandardBlock(block)(z), rtol=1e-5, atol=1e-5)


def test_blocks_declare_their_observation_boundaries():
    model = PolarTransformer(11, 16, 2, 3)
    assert isinstance(model.blocks[0], ObservableModel)
    sites = declared_sites(model)
    assert sites == [
        site
        for block in model.blocks
        for site in (block.attention.output_projection, block.feed_forward.down)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"standard": True}, {"gain": "bayes"}, {"context_rotation": True}]
)
def test_cached_passes_equal_the_full_one(options):
    model = PolarTransformer(20, 16, 2, 3, **options).double()
    tokens = torch.randint(20, (2, 12))
    full = model(tokens)
    cache = model.new_cache()
    parts = [model(tokens[:, :5], cache=cache), model(tokens[:, 5:8], cache=cache)]
    for index in range(8, 12):
        assert cache.length == index
        parts.append(model(tokens[:, index : index + 1], cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-10)


def test_a_failed_forward_leaves_the_cache_alone():
    model = PolarTransformer(20, 16, 2, 2)
    tokens, cache = torch.randint(20, (1, 6)), model.new_cache()
    model(tokens[:, :3], cache=cache)
    hook = model.blocks[1].feed_forward.register_forward_pre_hook(_fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(tokens[:, 3:4], cache=cache)
    hook.remove()
    assert cache.length == 3
    last = model(tokens[:, 3:], cache=cache)
    torch.testing.assert_close(last, model(tokens)[:, 3:], rtol=1e-4, atol=1e-5)


def _fail(*_):
    raise RuntimeError("on purpose")


def test_generation_continues_greedily_with_and_without_padding():
    model = PolarTransformer(20, 16, 2, 2).double()
    prompt = torch.randint(20, (1, 4))
    found = model.generate(prompt, 6, temperature=0)
    expected = prompt
    for _ in range(6):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, expected)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), prompt), 1)
    mask = torch.arange(7)[None] < 3
    both = model.generate(padded, 6, temperature=0, key_padding_mask=mask)
    assert torch.equal(both[:, 3:], expected)
    sampled = model.generate(prompt, 6, top_k=3, generator=torch.Generator().manual_seed(0))
    assert sampled.shape == (1, 10)


def test_later_tokens_never_reach_earlier_logits():
    model = PolarTransformer(20, 16, 2, 2)
    tokens = torch.randint(20, (1, 10))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 20
    torch.testing.assert_close(model(tokens)[:, :6], model(changed)[:, :6], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gain": "bayes", "radial": "shared"}, {"standard": True}])
def test_it_learns_to_copy(options):
    """Repeat the first half of a sequence: needs attention by position and content."""
    model = PolarTransformer(8, 32, 2, 2, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(150):
        half = torch.randint(8, (32, 6))
        tokens = torch.cat((half, half), 1)
        logits = model(tokens[:, :-1])[:, 5:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5 * 2.08


def test_model_arguments_are_checked():
    model = PolarTransformer(20, 16, 2, 2)
    for call in (
        lambda: model(torch.randint(20, (4,))),
        lambda: model(torch.randn(1, 4)),
        lambda: model(torch.randint(20, (1, 4)), cache=PolarAttention(16, 2).new_cache()),
        lambda: model.generate(torch.zeros(1, 0, dtype=torch.long), 3),
        lambda: PolarTransformer(20, 16, 2, 0),
    ):
        with pytest.raises(ValueError):
            call()


def test_state_survives_saving(tmp_path):
    model = PolarTransformer(20, 16, 2, 2, learn_frequencies=True)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = PolarTransformer(20, 16, 2, 2, learn_frequencies=True)
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    tokens = torch.randint(20, (1, 5))
    assert torch.equal(again(tokens), model(tokens))

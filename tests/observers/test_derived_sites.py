"""Derived sites: the guide's own declarations, foreign architectures, and awkward graphs."""

import pytest
import torch
import torch.nn.functional as F
from rpt.geometry import lorentz, rt_filter
from rpt.geometry.self_context import ContextMLP, ContextTransformerBlock
from rpt.observers import derive_sites
from rpt.observers.attach import attach
from rpt.observers.protocol import declared_sites
from rpt.observers.staging import ObservationStage
from torch import nn


def points(*shape: int) -> lorentz.Point:
    return lorentz.Point(torch.rand(*shape[:-1]) + 0.5, F.normalize(torch.randn(*shape), dim=-1))


TOKENS = torch.randint(0, 20, (2, 7))
OURS = [
    lambda: (ContextMLP(5, 3, 16), torch.randn(9, 5)),
    lambda: (ContextMLP(2, 1, 16), torch.randn(9, 2)),
    lambda: (ContextTransformerBlock(16, 4), torch.randn(2, 7, 16)),
    lambda: (rt_filter.RobustFilterAttention(16, 4), torch.randn(2, 7, 16)),
    lambda: (rt_filter.PolarAttention(16, 4), torch.randn(2, 7, 16)),
    lambda: (rt_filter.PolarTransformerBlock(16, 4), torch.randn(2, 7, 16)),
    lambda: (rt_filter.PolarTransformer(20, 16, 4, 2), TOKENS),
    lambda: (lorentz.PolarLinear(8, 6), points(2, 5, 8)),
    lambda: (lorentz.PolarMLP(8, 12), points(2, 5, 8)),
    lambda: (lorentz.PolarMultiheadAttention(8, 2), points(2, 5, 8)),
    lambda: (lorentz.LorentzMLR(8, 4), points(2, 5, 8)),
    lambda: (lorentz.GyroLayerNorm(8), points(2, 5, 8)),
    lambda: (lorentz.LorentzEmbedding(20, 8), TOKENS),
    lambda: (lorentz.PatchEmbedding(3, 4, 8), torch.rand(2, 3, 8, 8)),
]


@pytest.mark.parametrize("case", OURS, ids=lambda case: type(case()[0]).__name__)
def test_hand_declared_sites_are_reproduced(case):
    model, *inputs = case()
    names = {id(module): name for name, module in model.named_modules()}
    declared = declared_sites(model)
    assert declared is not None
    derived = derive_sites(model, *inputs)
    assert set(derived.paths) == {names[id(module)] for module in declared}
    # Whatever is derived can be attached as it is.
    attachment = attach(model, model.parameters(), ObservationStage(), sites=derived)
    assert [site.name for site in attachment.sites] == derived.paths


class BasicBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.downsample = None
        if stride > 1 or n_in != n_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += skip
        return self.relu(y)


class ResNet(nn.Module):
    """torchvision's layout in small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


@pytest.mark.parametrize("training", [True, False])
def test_resnet(training):
    model = ResNet().train(training)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sites = derive_sites(model, torch.randn(2, 3, 32, 32))
    assert set(sites.paths) == {
        "layer1.0.conv1",
        "layer1.0.conv2",
        "layer2.0.conv1",
        "layer2.0.conv2",
        "layer2.0.downsample.0",
        "fc",
    }
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class VisionBlock(nn.Module):
    """torchvision's ViT encoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 16, 8, 8)
        self.encoder = nn.Sequential(VisionBlock(16, 4), VisionBlock(16, 4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.encoder(self.conv_proj(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x)[:, 0])


def verdicts(sites, verdict):
    return {site.path for site in sites if site.verdict == verdict}


def test_vision_transformer():
    sites = derive_sites(ViT(), torch.randn(2, 3, 32, 32))
    assert set(sites.paths) == {"encoder.0.mlp.3", "encoder.1.mlp.3"}
    assert verdicts(sites, "expose") == {
        f"encoder.{i}.self_attention.out_proj.weight" for i in (0, 1)
    }
    hidden = next(site for site in sites if site.verdict == "expose")
    assert hidden.boundary == "softmax mixing"
    assert "observe_residual" in hidden.reason


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(norm_first, training):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    sites = derive_sites(model, torch.randn(2, 7, 16))
    assert set(sites.paths) == {"layers.0.linear2", "layers.1.linear2"}
    assert verdicts(sites, "expose") == {f"layers.{i}.self_attn.out_proj.weight" for i in (0, 1)}


def test_recurrent_layers_are_named_with_what_to_do():
    sites = derive_sites(nn.LSTM(5, 6, num_layers=2), torch.randn(4, 2, 5))
    assert sites.paths == []
    assert {"weight_hh_l0", "weight_hh_l1"} <= verdicts(sites, "expose")
    assert all("recurrent" in site.reason for site in sites if site.verdict == "expose")


class Awkward(nn.Module):
    """Gates, routing, frozen and functional matrices, a scalar head, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.after_gate = nn.Linear(8, 8)
        self.functional = nn.Linear(8, 8)
        self.routed = nn.Linear(8, 8)
        self.scalar = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.first(self.table(tokens))
        x = self.frozen(torch.tanh(x))
        x = self.after_gate(self.gate(x) * self.value(x))
        x = F.linear(F.silu(x), self.functional.weight)
        best = x.sum(-1).topk(3, dim=1).indices
        x = x.gather(1, best[..., None].expand(-1, -1, 8))
        x = self.routed(x)
        return self.scalar(torch.tanh(x))


def test_awkward_graphs():
    sites = derive_sites(Awkward(), TOKENS)
    by_path = {site.path: site for site in sites}
    assert verdicts(sites, "observe") == {"gate", "value", "after_gate", "routed"}
    assert by_path["gate"].boundary == "tanh"  # Straight through the frozen matrix.
    assert by_path["after_gate"].boundary == "multiplicative gate"
    assert by_path["routed"].boundary == "routing"
    assert by_path["functional.weight"].verdict == "expose"
    assert "functionally" in by_path["functional.weight"].reason
    assert "side of 1" in by_path["scalar"].reason
    assert "embedding" in by_path["table"].reason
    assert by_path["frozen"].reason == "frozen"
    assert by_path["unused"].verdict == by_path["first"].verdict == "skip"


def test_hand_written_norms_are_no_boundary_of_their_own():
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, x):
            x = self.a(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain)
            x = self.b((x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt())
            x = self.c(F.normalize(x, dim=-1))
            return self.d(F.rms_norm(F.layer_norm(x, (8,)), (8,)))

    assert derive_sites(Norms(), torch.randn(4, 8)).paths == []


def test_the_table_and_the_random_state():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 4))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    sites = derive_sites(model, torch.ones(5, 4))
    assert torch.equal(torch.rand(1), expected)
    text = str(sites)
    assert "ReLU" in text
    assert "1 to observe, 0 to expose, 1 skipped" in text
    assert len(text.splitlines()) == 5


def test_transformers_gpt2_and_llama():
    transformers = pytest.importorskip("transformers")
    small = transformers.GPT2Config(vocab_size=99, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    ids = torch.randint(0, 99, (2, 12))
    mask = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])
    sites = derive_sites(transformers.GPT2LMHeadModel(small), ids, attention_mask=mask)
    assert set(sites.paths) == {
        f"transformer.h.{i}.{layer}" for i in (0, 1) for layer in ("attn.c_proj", "mlp.c_proj")
    }
    for attention in ("sdpa", "eager"):
        config = transformers.LlamaConfig(
            vocab_size=99,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=attention,
        )
        sites = derive_sites(transformers.LlamaForCausalLM(config), ids, attention_mask=mask)
        assert set(sites.paths) == {
            f"model.layers.{i}.{layer}"
            for i in (0, 1)
            for layer in ("self_attn.o_proj", "mlp.down_proj")
        }

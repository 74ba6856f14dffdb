"""Cases 40, 47, 70, 71 of the second round: first use, names and messages."""

import copy
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rpt.observers import derive_sites
from rpt.observers.attach import attach
from rpt.observers.staging import ObservationStage
from torch import nn

from rpt import ResidualPolarTransport

STRATEGIES = ("hook", "compiled")


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def batch(seed):
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))


def step(model, optimizer, seed):
    optimizer.zero_grad()
    model(batch(seed)).square().mean().backward()
    optimizer.step()


def observed_run(model=None, **options):
    model = model or network()
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    optimizer.attach_model(model, observe_every=1, **options)
    for seed in range(3):
        step(model, optimizer, seed)
    return model, optimizer


# -- case 47: nothing is observed -----------------------------------------------------------------------


def weight_normed():
    parametrize = nn.utils.parametrizations.weight_norm
    return nn.Sequential(parametrize(nn.Linear(4, 4)), nn.Tanh(), parametrize(nn.Linear(4, 4)))


def spectral_normed_the_old_way():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(4, 4)


class Thin(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)


def attention():
    return nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})


@pytest.mark.parametrize(
    ("build", "owned", "says"),
    [
        (weight_normed, True, r"'0', '2', whose weight is computed.*observe_residual"),
        (spectral_normed_the_old_way, True, r"'0', whose weight is computed"),
        (network, False, r"'0', '2', whose weight this optimizer does not own.*deep copy"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 2)), True, r"convolutions '0'.*sites= names them"),
        (Recurrent, True, r"'memory'.*recurrent.*observe_residual"),
        (Thin, True, r"'head', whose weight has a side of 1"),
        (attention, True, r"'attention.out_proj'.*without calling it.*observe_residual"),
        (lambda: nn.Sequential(nn.LayerNorm(3)), True, r"found none.*sites="),
    ],
)
def test_a_model_without_an_observed_layer_is_warned_of_once(build, owned, says):
    """Case 47: what was looked for, what was found, what to do."""
    model = build()
    optimizer = ResidualPolarTransport(model.parameters() if owned else network().parameters())
    with pytest.warns(UserWarning, match=r"nothing is observed: looked for.*" + says) as caught:
        assert optimizer.attach_model(model) == []
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_what_was_meant_to_be_empty_is_not_warned_of():
    """Case 47: an empty list, a declaration of no site, observation by hand."""
    model = attention()
    optimizer = ResidualPolarTransport(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.attach_model(model, sites=[])
        optimizer.attach_model(model, strategy="explicit")
        model.optimizer_observation_modules = list
        optimizer.attach_model(model)


def test_a_lazy_layer_is_told_to_run_first():
    """Case 47."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    optimizer = ResidualPolarTransport(model.parameters())
    with pytest.raises(ValueError, match=r"'0'.*no shape yet: run the model once.*then attach"):
        optimizer.attach_model(model)
    model(torch.randn(2, 5))
    assert optimizer.attach_model(model) == ["0", "1"]


class Conv1D(nn.Module):
    """The linear layer that GPT-2 of transformers is made of: weight (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        shape = (*x.shape[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transposed_linear_layers_are_observed_like_linear_ones(strategy):
    """Case 47."""
    plain = network()
    model = nn.Sequential(Conv1D(10, 6), nn.Tanh(), Conv1D(6, 10))
    counterparts = [(model[i], plain[i]) for i in (0, 2)]
    with torch.no_grad():
        for twin, layer in counterparts:
            twin.weight.copy_(layer.weight.mT)
            twin.bias.copy_(layer.bias)
    found = []
    for net in (model, plain):
        stage = ObservationStage()
        attachment = attach(net, net.parameters(), stage, strategy=strategy)
        assert [site.name for site in attachment.sites] == ["0", "2"]
        net(batch(0)).square().mean().backward()
        found.append(stage.commit().ranks)
    for twin, layer in counterparts:
        assert float(found[0][twin.weight]) == pytest.approx(float(found[1][layer.weight]))
    other = nn.Sequential(nn.Conv1d(4, 4, 1))  # Its namesake in torch is no linear layer.
    with pytest.warns(UserWarning, match="convolutions"):
        assert attach(other, other.parameters(), ObservationStage()).sites == []


def test_derived_sites_know_the_transposed_layer():
    """Case 47."""
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), Conv1D(5, 6))
    assert derive_sites(model, torch.randn(4, 6)).paths == ["2"]


def test_the_projection_inside_fused_attention_is_left_out():
    """Case 47: also in a whole encoder, and without a later warning."""
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    expected = [f"layers.{i}.linear{j}" for i in range(2) for j in (1, 2)]
    assert optimizer.attach_model(model, observe_every=1) == expected
    assert optimizer.attach_model(model, lambda m: isinstance(m, nn.Linear)) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 5, 8)).square().mean().backward()
            optimizer.step()
    with pytest.raises(ValueError, match="without calling it"):
        optimizer.attach_model(model, sites=["layers.0.self_attn.out_proj"])


# -- case 70: messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (("model",), {}, r"must be an nn.Module, got str"),
        ((list,), {}, r"must be an nn.Module, got type"),
        ((None, ["0"]), {}, r"got list: .*sites="),
        ((None, "0"), {}, r"got str: .*sites="),
        ((None, nn.Linear(2, 2)), {}, r"got Linear: .*sites="),
        ((None,), {"strategy": 3}, r"strategy must be a name or an Observer, got int"),
    ],
)
def test_wrong_arguments_of_attach_model_are_named(arguments, options, says):
    """Case 70; an earlier attachment outlives the mistake."""
    model = network()
    optimizer = ResidualPolarTransport(model.parameters())
    optimizer.attach_model(model, observe_every=1)
    with pytest.raises(TypeError, match=says):
        optimizer.attach_model(arguments[0] or model, *arguments[1:], **options)
    with pytest.raises(ValueError, match="no module named"):
        optimizer.attach_model(model, sites=["nothing"])
    model(batch(0)).square().mean().backward()
    assert len(optimizer._observing.stage) == 2


def test_widths_that_do_not_fit_the_named_weight_are_refused():
    """Case 70."""
    model = nn.ModuleList([nn.Linear(6, 10), nn.Conv2d(3, 4, 2), Conv1D(10, 6)])
    stacked = nn.Parameter(torch.randn(2, 10, 6))
    optimizer = ResidualPolarTransport([*model.parameters(), stacked])
    ours, weights = optimizer.observe_residual, [model[0].weight, model[2].weight, stacked]
    ours(torch.randn(9, 6), torch.randn(9, 10), weights)
    ours(torch.randn(9, 12), torch.randn(9, 4), model[1].weight)
    ours(torch.randn(9, 5), torch.randn(9, 7))
    with pytest.raises(ValueError, match="width 2"):
        ours(torch.randn(9, 2), torch.randn(9, 2), model[1].weight)
    for weight in [*weights, model[1].weight]:
        before = len(optimizer._observing.stage)
        with pytest.raises(ValueError, match=r"width 6 .* width 9 .* weight \("):
            ours(torch.randn(9, 6), torch.randn(9, 9), [model[0].bias, weight])
        assert len(optimizer._observing.stage) == before


def test_warnings_point_to_the_users_line():
    """Case 70: not into this package, nor into torch."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.called, self.silent = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return F.linear(self.called(x), self.silent.weight)

    model = Net()
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model, observe_every=1)
    unattached = ResidualPolarTransport(model.parameters(), lr=1e-2)
    thin = nn.Sequential(nn.Linear(6, 1), nn.Linear(6, 6))
    other = ResidualPolarTransport(thin.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, optimizer, 0)  # A silent layer.
        model.called.bias.grad[0] = math.nan
        unattached.step()  # A gradient that is skipped.
        other.attach_model(thin, sites=["0", "1"])  # A side of 1.
        with other.observing(thin, module_filter=lambda m: m is thin[0]):  # Nothing is observed.
            pass
    lines = Path(__file__).read_text().splitlines()
    assert len(caught) == 4
    assert {w.filename for w in caught} == {__file__}
    assert all(".step()" in lines[w.lineno - 1] or "thin, " in lines[w.lineno - 1] for w in caught)


# -- case 71: telemetry ----------------------------------------------------------------------------------


def test_parameters_are_called_by_the_attached_models_names():
    """Case 71: also in a compiled or wrapped model, in messages, and after the observers are gone."""
    model = network()
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(nn.ModuleDict({"module": torch.compile(model)}))
    expected = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()]
    for run in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        run.remove_observers()
        for p in run.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        run.step()
        assert list(run.telemetry()["parameters"]) == expected
    model[0].weight.grad = torch.full_like(model[0].weight, math.nan)
    with pytest.warns(UserWarning, match=r"non-finite gradients in 0\.weight \(10, 6\)"):
        optimizer.step()
    # Names that were given stay.
    named = ResidualPolarTransport([(f"mine{i}", p) for i, p in enumerate(model.parameters())])
    named.attach_model(model)
    assert named.parameter_name(0, 0) == "mine0 (10, 6)"


@pytest.mark.parametrize("roots", ["auto", "none"])
def test_a_bias_is_no_polar_zero(roots):
    """Case 71."""
    model = network()
    optimizer = ResidualPolarTransport(model.named_parameters(), lr=1e-2, roots=roots)
    step(model, optimizer, 0)
    report = optimizer.telemetry()
    assert "polar_weight" not in report["parameters"]["0.bias (10,)"]
    assert (
        report["total"]["polar_weight"] == report["parameters"]["0.weight (10, 6)"]["polar_weight"]
    )
    (line,) = [line for line in str(report).splitlines() if line.startswith("0.bias")]
    assert line.split()[3:5] == ["–", "–"]


def test_the_printed_table_explains_its_columns():
    """Case 71."""
    _, optimizer = observed_run()
    lines = str(optimizer.telemetry()).splitlines()
    for column in lines[0].split()[1:]:
        (meaning,) = [line for line in lines if line.strip().startswith(f"{column}  ")]
        assert len(meaning.split()) > 2


def test_scalars_are_one_flat_dict_of_floats():
    """Case 71."""
    _, optimizer = observed_run()
    report = optimizer.telemetry()
    scalars = report.scalars()
    assert all(type(value) is float for value in scalars.values())
    assert scalars["total/step_signal"] == report["total"]["step_signal"]
    entry = report["parameters"]["0.weight (10, 6)"]
    assert scalars["0.weight/polar_weight"] == entry["polar_weight"]
    assert "0.bias/polar_weight" not in scalars
    unnamed = ResidualPolarTransport(network().parameters(), lr=1e-2)
    for p in unnamed.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    unnamed.step()
    assert len(unnamed.telemetry().scalars()) > 4 * 10  # No two share a name.

"""Cases 39, 40, 47, 48, 70, 71 of the second round: observers and first use."""

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
from torch.utils.checkpoint import checkpoint

from rpt import ResidualPolarTransport

STRATEGIES = ("hook", "compiled")


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))


def batch(seed):
    return torch.randn(32, 6, generator=torch.Generator().manual_seed(seed))


# -- case 48: backwards that give a weight no gradient ----------------------------------------------


def input_gradient(call, model):
    x = batch(9).requires_grad_()
    torch.autograd.grad(call(x).square().sum(), x)


def input_gradient_through_backward(call, model):
    x = batch(9).requires_grad_()
    call(x).square().sum().backward(inputs=[x])


def jacobian(call, model):
    torch.autograd.functional.jacobian(lambda x: call(x).sum(0), batch(9))


def batched_input_gradients(call, model):
    x = batch(9).requires_grad_()
    y = call(x)
    torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)


def batched_weight_gradients(call, model):
    y = call(batch(9))
    torch.autograd.grad(y, model[0].weight, torch.randn(3, *y.shape), is_grads_batched=True)


def frozen_from_the_start(call, model):
    model.requires_grad_(False)
    call(batch(9).requires_grad_()).square().sum().backward()
    model.requires_grad_(True)


def frozen_before_the_backward(call, model):
    loss = call(batch(9).requires_grad_()).square().sum()
    model.requires_grad_(False)
    loss.backward()
    model.requires_grad_(True)


def unfrozen_before_the_backward(call, model):
    model.requires_grad_(False)
    loss = call(batch(9).requires_grad_()).square().sum()
    model.requires_grad_(True)
    loss.backward()


def forward_mode(call, model):
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(batch(9), batch(8)))


def other_weights(call, model):
    teacher = {name: nn.Parameter(p.detach() * 2) for name, p in model.named_parameters()}
    torch.func.functional_call(model, teacher, (batch(9),)).square().sum().backward()


def weights_gradient_for_the_log(call, model):
    torch.autograd.grad(call(batch(9)).square().sum(), list(model.parameters()))


INTERLUDES = [
    input_gradient,
    input_gradient_through_backward,
    jacobian,
    batched_input_gradients,
    batched_weight_gradients,
    frozen_from_the_start,
    frozen_before_the_backward,
    unfrozen_before_the_backward,
    forward_mode,
    other_weights,
    weights_gradient_for_the_log,
]


def observed_ranks(model, stage, call, interlude=None):
    model.zero_grad()
    for seed in range(2):
        call(batch(seed)).square().mean().backward()
        if interlude is not None:
            interlude(call, model)
    found = stage.commit()
    return [(float(found.ranks[m.weight]), found.counts[m.weight]) for m in (model[0], model[2])]


def attached(strategy):
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    return model, stage


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("interlude", INTERLUDES)
def test_backwards_without_a_gradient_for_the_weight_are_not_observed(strategy, interlude):
    """Case 48."""
    model, stage = attached(strategy)
    expected = observed_ranks(model, stage, model)
    assert observed_ranks(model, stage, model, interlude) == expected


def test_nor_are_they_in_a_compiled_model():
    """Case 48; a compiled backward can be neither batched nor differentiated by row."""
    torch._dynamo.reset()
    model, stage = attached("compiled")
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = observed_ranks(model, stage, call)
    for interlude in INTERLUDES:
        if "batched" not in interlude.__name__ and interlude is not jacobian:
            assert observed_ranks(model, stage, call, interlude) == expected, interlude
    assert observed_ranks(model, stage, call) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_observation_by_hand_is_untouched_by_other_backwards(strategy):
    """Case 48: what a caller staged has no backward to be judged by."""
    model = network()
    optimizer = ResidualPolarTransport(model.parameters())
    optimizer.attach_model(model, strategy="explicit")
    model(batch(0)).square().mean().backward()
    optimizer.observe_residual(torch.randn(9, 6), torch.randn(9, 10), model[0].weight)
    for interlude in INTERLUDES:
        interlude(model, model)
    assert optimizer._stage.commit().counts == {model[0].weight: 1}


@pytest.mark.parametrize("compiled", [False, True])
def test_own_and_other_weights_in_one_backward_count_the_own(compiled):
    """Case 48: student and teacher share a loss, a layer's modules and one backward."""
    torch._dynamo.reset()
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy="compiled" if compiled else "hook")
    call = torch.compile(model, backend="aot_eager") if compiled else model
    names = [name for name, _ in call.named_parameters()]
    teacher = {
        n: nn.Parameter(p.detach() * 2) for n, p in zip(names, model.parameters(), strict=True)
    }
    for _ in range(2):  # The second time, compiled graphs are reused.
        other = torch.func.functional_call(call, teacher, (batch(1),))
        (call(batch(0)) - other).square().sum().backward()
        assert stage.commit().counts == {model[0].weight: 1, model[2].weight: 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_a_caller_assigns_are_observed(strategy):
    """Case 48: autograd.grad, then `p.grad = g`, is a training loop like any other."""
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(model(batch(0)).square().mean(), weights)
    for p, g in zip(weights, gradients, strict=True):
        p.grad = g
    model(batch(1)).square().mean().backward()
    assert stage.commit().counts == {model[0].weight: 2, model[2].weight: 2}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_are_judged_by_their_own_backward(reentrant):
    """Case 48."""
    model, stage = network(), ObservationStage()
    attach(model, model.parameters(), stage)
    x = batch(0).requires_grad_()
    if not reentrant:  # Reentrant ones refuse autograd.grad.
        y = checkpoint(model, x, use_reentrant=False)
        torch.autograd.grad(y.square().sum(), x)
        assert len(stage) == 0
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert stage.commit().counts == {model[0].weight: 1, model[2].weight: 1}


# -- case 39: copies and loaded runs ------------------------------------------------------------------


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


def silently(model, optimizer, seed=3):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, seed)


def assert_equal_weights(left, right):
    for p, q in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_first", [True, False])
def test_a_copy_of_model_and_optimizer_observes_what_the_original_did(strategy, model_first):
    """Case 39."""
    model, optimizer = observed_run(strategy=strategy)
    if model_first:
        twin, copied = copy.deepcopy((model, optimizer))
    else:
        copied, twin = copy.deepcopy((optimizer, model))
    for seed in range(3, 6):
        silently(model, optimizer, seed)
        silently(twin, copied, seed)
    assert_equal_weights(model, twin)
    for weight in (twin[0].weight, twin[2].weight):
        assert int(copied.state[weight]["observations"]) == 6
    copied.remove_observers()
    assert not any(m._forward_hooks for m in twin.modules())
    assert all(len(model[i]._forward_hooks) == 1 for i in (0, 2))
    again = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(again)
    del again
    silently(*third)
    silently(model, optimizer)
    assert_equal_weights(model, third[0])


def test_a_copied_convolution_is_observed_too():
    """Case 39."""
    net = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 3))
    optimizer = ResidualPolarTransport(net.parameters(), lr=1e-2)
    optimizer.attach_model(net, sites=["0", "2"], observe_every=1)
    copied, twin = copy.deepcopy((optimizer, net))
    twin(torch.randn(5, 2, 3, 3)).square().mean().backward()
    assert copied._stage.commit().counts == {twin[0].weight: 1, twin[2].weight: 1}


def test_the_cadence_is_copied_with_its_phase():
    """Case 39."""
    model = network()
    optimizer = ResidualPolarTransport(model.parameters(), lr=1e-2)
    optimizer.attach_model(model, observe_every=3)
    for seed in range(2):
        step(model, optimizer, seed)
    twin, copied = copy.deepcopy((model, optimizer))
    counts = []
    for seed in range(2, 8):
        step(twin, copied, seed)
        counts.append(int(copied.state[twin[0].weight]["observations"]))
    assert counts == [1, 2, 2, 2, 3, 3]


def test_a_model_copied_alone_observes_nothing():
    """Case 39: an averaged model's copy costs nothing and leaves nothing."""
    model, optimizer = observed_run()
    twin = copy.deepcopy(model)
    twin(batch(0)).square().mean().backward()
    assert len(optimizer._stage) == 0
    assert not any("Tap" in type(n).__name__ for n in graph_nodes(twin(batch(0))))


def graph_nodes(tensor):
    waiting, seen = [tensor.grad_fn], []
    while waiting:
        node = waiting.pop()
        seen.append(node)
        waiting += [n for n, _ in node.next_functions if n is not None]
    return seen


def unpickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def copied_apart(model, optimizer):
    twin = copy.deepcopy(optimizer)
    names = dict(zip(dict(model.named_parameters()), twin.param_groups[0]["params"], strict=True))
    other = network()
    for name, p in names.items():
        module, _, attribute = name.rpartition(".")
        other.get_submodule(module)._parameters[attribute] = p
    return other, twin


def loaded(model, optimizer):
    other = network()
    other.load_state_dict(model.state_dict())
    fresh = ResidualPolarTransport(other.named_parameters(), lr=1e-2)
    fresh.load_state_dict(optimizer.state_dict())
    return other, fresh


@pytest.mark.parametrize("through", [unpickled, copied_apart, loaded])
@pytest.mark.parametrize("answer", ["none", "attach", "remove"])
def test_a_run_that_lost_its_model_says_so_once(through, answer):
    """Case 39."""
    model, optimizer = observed_run()
    twin, copied = through(model, optimizer)
    if answer == "attach":
        copied.attach_model(twin, observe_every=1)
        for seed in range(3, 6):
            silently(twin, copied, seed)
            silently(model, optimizer, seed)
        assert_equal_weights(model, twin)
        return
    if answer == "remove":
        copied.remove_observers()
        silently(twin, copied)
        return
    with pytest.warns(UserWarning, match="attach_model") as caught:
        step(twin, copied, 3)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    silently(twin, copied, 4)


@pytest.mark.parametrize("through", [unpickled, copied_apart, loaded])
def test_a_run_that_ended_its_observation_says_nothing(through):
    """Case 39."""
    model, optimizer = observed_run()
    optimizer.state_dict()
    optimizer.remove_observers()
    silently(*through(model, optimizer))


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
    assert len(optimizer._stage) == 2


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
        before = len(optimizer._stage)
        with pytest.raises(ValueError, match=r"width 6 .* width 9 .* weight \("):
            ours(torch.randn(9, 6), torch.randn(9, 9), [model[0].bias, weight])
        assert len(optimizer._stage) == before


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


# -- case 40: names on both sides ----------------------------------------------------------------------------


def two_layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def give(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        p.grad = torch.randn(p.shape, generator=generator)


def split(named):
    named = list(named)
    return [{"params": named[:2], "lr": 1e-3}, {"params": named[2:], "lr": 2e-3}]


@pytest.mark.parametrize("groups", [list, split])
def test_states_are_matched_by_name(groups):
    """Case 40: another order on the other side, within a group and across groups."""
    model = two_layers(0)
    whole = ResidualPolarTransport(groups(model.named_parameters()), max_root_staleness=1)
    for seed in range(3):
        give(model, seed)
        whole.step()
    saved = copy.deepcopy(whole.state_dict())
    order = [list(group["params"]) for group in saved["param_groups"]]
    twin = two_layers(1)
    twin.load_state_dict(model.state_dict())
    turned = list(twin.named_parameters())[::-1]
    other = ResidualPolarTransport(groups(turned), max_root_staleness=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    assert [group["params"] for group in saved["param_groups"]] == order
    for name, p in twin.named_parameters():
        mine = other.state[p]["momentum"]
        assert torch.equal(mine, whole.state[model.get_parameter(name)]["momentum"])
    names = [other.parameter_name(g, i) for g, i, _ in other._enumerate()]
    assert names == [f"{name} {tuple(p.shape)}" for name, p in turned]
    for group in (*whole.param_groups, *other.param_groups):
        group["lr"] = 1e-2
    give(model, 9)
    give(twin, 9)
    whole.step()
    other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_wrappers_do_not_change_a_name():
    """Case 40: DDP and torch.compile prefix every name."""
    model = two_layers(0)
    plain = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    give(model, 0)
    plain.step()
    wrapped = nn.ModuleDict({"module": torch.compile(model)})
    other = ResidualPolarTransport(list(wrapped.named_parameters())[::-1], lr=1e-2)
    other.load_state_dict(plain.state_dict())
    for p in model.parameters():
        assert torch.equal(other.state[p]["momentum"], plain.state[p]["momentum"])


def test_names_that_occur_twice_match_within_their_group():
    """Case 40: two models in two groups share their names; twice in one group, they say nothing."""
    nets = [two_layers(0), two_layers(1)]
    groups = [{"params": list(net.named_parameters())} for net in nets]
    turned = [{"params": list(net.named_parameters())[::-1]} for net in nets]
    whole, other = ResidualPolarTransport(groups), ResidualPolarTransport(turned)
    for seed, net in enumerate(nets):
        give(net, seed)
    whole.step()
    other.load_state_dict(whole.state_dict())
    for p in (*nets[0].parameters(), *nets[1].parameters()):
        assert torch.equal(other.state[p]["momentum"], whole.state[p]["momentum"])
    weights = [("weight", net[0].weight) for net in nets]
    one, two = ResidualPolarTransport(weights), ResidualPolarTransport(weights[::-1])
    one.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.load_state_dict(one.state_dict())
    assert torch.equal(
        two.state[nets[1][0].weight]["momentum"], one.state[nets[0][0].weight]["momentum"]
    )


def test_names_that_differ_are_warned_of():
    """Case 40: then order counts, as in torch; states without names are matched in silence."""
    model = two_layers(0)
    whole = ResidualPolarTransport(model.named_parameters(), lr=1e-2)
    give(model, 0)
    whole.step()
    renamed = [(f"net.{name}", p) for name, p in two_layers(1).named_parameters()]
    other = ResidualPolarTransport(renamed, lr=1e-2)
    with pytest.warns(UserWarning, match=r"'0.weight'.*by order, not by name") as caught:
        other.load_state_dict(whole.state_dict())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert other.parameter_name(0, 0).startswith("net.0.weight")
    for (_, p), q in zip(renamed, model.parameters(), strict=True):
        assert torch.equal(other.state[p]["momentum"], whole.state[q]["momentum"])
    unnamed = ResidualPolarTransport(two_layers(1).parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unnamed.load_state_dict(whole.state_dict())
        whole.load_state_dict(unnamed.state_dict())

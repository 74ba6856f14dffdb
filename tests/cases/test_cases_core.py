"""Acceptance cases of the second round that concern the optimizer's core; each names its number."""

import copy
import inspect
import io
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import rpt
from rpt import ResidualPolarTransport


def mlp(*widths, dtype=torch.float32):
    torch.manual_seed(0)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def size_of(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


# -- 41: saved views save whole stacks -------------------------------------------------------------


def test_case_41_a_saved_state_has_its_tensors_own_bytes():
    model = mlp(3, 5, 7, 60, 2, 30, 9)
    optimizer = ResidualPolarTransport(model.parameters())
    give_gradients(model.parameters(), 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for record in saved["state"].values():
        own = sum(v.nbytes for v in record.values() if isinstance(v, torch.Tensor))
        assert size_of(record) <= size_of(copy.deepcopy(record))
        assert all(
            v.untyped_storage().nbytes() == v.nbytes
            for v in record.values()
            if isinstance(v, torch.Tensor)
        )
        assert size_of(record) < own + 12_000  # what an archive of some twenty tensors takes
    before = copy.deepcopy(saved)
    give_gradients(model.parameters(), 1)
    optimizer.step()
    for old, kept in zip(before["state"].values(), saved["state"].values(), strict=True):
        assert all(torch.equal(torch.as_tensor(old[k]), torch.as_tensor(kept[k])) for k in old)


def test_case_41_telemetry_reports_what_is_held():
    model = mlp(64, 64, 10)
    optimizer = ResidualPolarTransport(model.parameters())
    give_gradients(model.parameters(), 0)
    optimizer.step()
    storages = {}
    for record in optimizer.state.values():
        for value in record.values():
            if isinstance(value, torch.Tensor):
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    reported = optimizer.telemetry()["total"]["state_bytes"]
    assert sum(storages.values()) <= reported < 1.3 * sum(storages.values())


# -- 42: the default device ------------------------------------------------------------------------


@pytest.mark.parametrize("during", [False, True])
def test_case_42_a_default_device_stays_out_of_groups_and_steps(during):
    def run(device):
        model = mlp(4, 6, 2)
        with torch.device(device):
            optimizer = ResidualPolarTransport(model.parameters(), gain_rate=0.05)
        for t in range(3):
            give_gradients(model.parameters(), t)
            if during:
                with torch.device(device):
                    optimizer.step()
            else:
                optimizer.step()
        with torch.device(device):
            twin = ResidualPolarTransport(model.parameters(), gain_rate=0.05)
            twin.load_state_dict(optimizer.state_dict())
            twin.step()
        assert optimizer.param_groups[0]["gain"].device.type == "cpu"
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(run("meta"), run("cpu"), strict=True):
        assert torch.equal(a, b)


# -- 44: wrapper subclasses ------------------------------------------------------------------------


def test_case_44_a_tensor_that_wraps_others_is_named():
    from torch.testing._internal.two_tensor import TwoTensor

    other = nn.Parameter(torch.ones(3, 3))
    wrapped = nn.Parameter(TwoTensor(torch.randn(4, 3), torch.randn(4, 3)))
    optimizer = ResidualPolarTransport([("other", other), ("pair", wrapped)])
    other.grad = torch.ones(3, 3)
    wrapped.grad = TwoTensor(torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"pair \(4, 3\) is a TwoTensor.*torch\.optim\.AdamW"):
        optimizer.step()
    assert torch.equal(other, torch.ones(3, 3))


# -- 45: expert stacks -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"preset": "paper", "gain_rate": 0.0}], ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 8), (2, 3, 5, 9), (3, 1, 6)])
def test_case_45_a_stack_of_matrices_is_its_matrices(shape, options):
    torch.manual_seed(45)
    start = torch.randn(shape)
    stack = nn.Parameter(start.clone())
    apart = [nn.Parameter(m.clone()) for m in start.flatten(0, -3)]
    one = ResidualPolarTransport([stack], 3e-3, stacked=True, **options)
    many = ResidualPolarTransport(apart, 3e-3, **options)
    for t in range(20):
        stack.grad = torch.randn(shape) * (0.0 if t == 7 else 1.0)
        if t % 3 == 0:  # experts without tokens
            stack.grad[1:] = 0.0
        for p, g in zip(apart, stack.grad.flatten(0, -3), strict=True):
            p.grad = g.clone()
        if t == 5:
            one.set_residual_entropy_rank(0.4)
            many.set_residual_entropy_rank(0.4)
        if t == 10:  # through a checkpoint
            saved = one.state_dict()
            one = ResidualPolarTransport([stack], 3e-3, stacked=True, **options)
            one.load_state_dict(saved)
        one.step()
        many.step()
    assert torch.equal(stack.flatten(0, -3), torch.stack([p.detach() for p in apart]))
    assert one.state[stack]["momentum"].shape == shape
    assert one.state[stack]["polar_weight"].shape == shape[:-2]
    assert one.telemetry()["total"]["parameters"] == 1
    assert not torch.equal(stack.detach(), start)


def test_case_45_it_is_an_option_of_the_group_beside_others():
    torch.manual_seed(1)
    experts, router = nn.Parameter(torch.randn(4, 16, 8)), nn.Parameter(torch.randn(4, 16))
    bias = nn.Parameter(torch.randn(8))
    optimizer = ResidualPolarTransport(
        [{"params": [experts], "stacked": True}, {"params": [router, bias]}], 1e-2
    )
    for t in range(4):
        give_gradients([experts, router, bias], t)
        if t == 2:
            experts.grad = None
        optimizer.step()
    assert optimizer.state[experts]["step"].tolist() == [3] * 4
    assert "stacked" in rpt.RPT.__doc__


# -- 46: one flat parameter ------------------------------------------------------------------------


def test_case_46_one_flat_parameter_is_a_warning():
    flat = nn.Parameter(torch.randn(4096))
    optimizer = ResidualPolarTransport([flat])
    flat.grad = torch.randn(4096)
    with pytest.warns(UserWarning, match="use_orig_params=True"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        small = nn.Parameter(torch.randn(8))
        other = ResidualPolarTransport([small])
        small.grad = torch.randn(8)
        other.step()


# -- 66: numbers of NumPy, and edits between steps -------------------------------------------------


def test_case_66_numpy_scalars_are_numbers():
    def run(number, whole):
        model = mlp(4, 6, 2)
        optimizer = ResidualPolarTransport(
            model.parameters(),
            lr=number(2**-10),
            weight_decay=number(0.125),
            polar_steps=whole(5),
            max_root_staleness=whole(3),
            betas=(number(0.875), number(0.75)),
            transport=np.bool_(True) if number is not float else True,
        )
        for t in range(3):
            give_gradients(model.parameters(), t)
            optimizer.param_groups[0]["lr"] = number(2**-9)
            optimizer.step()
        assert type(optimizer.param_groups[0]["lr"]) is float
        assert type(optimizer.param_groups[0]["polar_steps"]) is int
        return list(model.parameters())

    expected = run(float, int)
    for kinds in ((np.float32, np.int64), (np.float64, np.int32), (np.array, np.array)):
        for a, b in zip(run(*kinds), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, None, "fast", np.float32(-1)])
def test_case_66_a_wrong_rate_after_the_first_step_changes_nothing(value):
    model = mlp(4, 6, 2)
    optimizer = ResidualPolarTransport(model.parameters())
    give_gradients(model.parameters(), 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises((ValueError, TypeError), match="parameter group 0: lr="):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    for p, old in zip(model.parameters(), before[0], strict=True):
        assert torch.equal(p, old)
    for key, record in optimizer.state_dict()["state"].items():
        for name, now in record.items():
            was = before[1]["state"][key][name]
            assert torch.equal(torch.as_tensor(now), torch.as_tensor(was)), name
    optimizer.step()


# -- 67: neighbours --------------------------------------------------------------------------------


def fed_back(groups_of, dtype, steps=20, widths=(12, 24, 24, 24, 3), change=0.0):
    model = mlp(*widths, dtype=dtype)
    torch.manual_seed(1)
    x = torch.randn(64, widths[0], dtype=dtype)
    y = torch.sin(x @ torch.randn(widths[0], widths[-1], dtype=dtype))
    with torch.no_grad():
        model[0].weight[0, 0] += change
    parameters = list(model.parameters())
    optimizers = [ResidualPolarTransport(group, 3e-3) for group in groups_of(parameters)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    times = [int(optimizers[0].state[p]["last_root_step"]) for p in parameters
             if "last_root_step" in optimizers[0].state[p]]  # fmt: skip
    return nn.utils.parameters_to_vector(parameters).detach(), times


def joint(parameters):
    return [parameters]


def each(parameters):
    return [[p] for p in parameters]


def swapped(parameters):
    return [parameters[::-1]]


@pytest.mark.parametrize("other", [each, swapped])
def test_case_67_a_result_does_not_depend_on_grouping_or_order(other):
    """Case 67, in float64; what float32 can do is below."""
    one, _ = fed_back(joint, torch.float64)
    two, _ = fed_back(other, torch.float64)
    assert (one - two).abs().max() < 1e-9


@pytest.mark.parametrize("widths", [(12, 24, 24, 24, 3), (64, 64, 64, 10), (64, 96, 8, 96, 64)])
def test_case_67_in_float32_neighbours_matter_as_little_as_one_rounding(widths):
    """Case 67: a padded stack rounds otherwise, and training feeds that back.

    The bound is what one changed rounding of one weight does; the second holds roots to float64, without
    which the last network's runs part by 1e-3.
    """
    one, _ = fed_back(joint, torch.float32, widths=widths)
    two, _ = fed_back(each, torch.float32, widths=widths)
    apart = (one - two).abs().max()
    rounded = [fed_back(joint, torch.float32, widths=widths, change=c)[0] for c in (1e-7, -1e-7)]
    assert apart < 4 * max((one - other).abs().max() for other in rounded)
    assert apart < 4e-4


def test_case_67_order_changes_no_bit():
    one, times = fed_back(joint, torch.float32)
    two, reversed_times = fed_back(swapped, torch.float32)
    assert torch.equal(one, two)
    assert times == reversed_times[::-1] or sorted(times) == sorted(reversed_times)


@pytest.mark.parametrize("other", [each, swapped])
def test_case_67_gradients_given_the_weights_agree_in_float32(other):
    shapes = [(24, 24)] * 3 + [(10, 24), (24,), (96, 80), (96, 80), ()]

    def run(groups_of):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        optimizers = [ResidualPolarTransport(group, 3e-3) for group in groups_of(parameters)]
        for _ in range(20):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in parameters]

    for a, b in zip(run(joint), run(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


# -- 69: values that do not exist ------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"preset": "paper"}, {"gain_rate": 0.1}], ids=str)
def test_case_69_a_step_on_meta_tensors(options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = ResidualPolarTransport(model.parameters(), **options)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        optimizer.step()
    record = optimizer.state[model[0].weight]
    assert record["momentum"].shape == (64, 70)
    assert record["momentum"].device.type == "meta"
    assert len(optimizer.state_dict()["state"]) == 4


def test_case_69_a_step_on_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = ResidualPolarTransport(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 70)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.state[model[0].weight]["frame"].shape == (64, 70)


# -- 70: first use -----------------------------------------------------------------------------


def test_case_70_a_misspelt_key_of_a_group_is_a_warning():
    p, q = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    with pytest.warns(UserWarning, match="'weigth_decay'.*did you mean 'weight_decay'"):
        ResidualPolarTransport([{"params": [p], "weigth_decay": 0.0}, {"params": [q]}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in ("lr_scale", "name", "initial_lr", "weight_decay", "layer", "swa_lr", "fused"):
            ResidualPolarTransport([{"params": [p], key: False if key == "fused" else 1.0}])


def test_case_70_the_signature_says_what_there_is():
    signature = inspect.signature(ResidualPolarTransport)
    assert not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    text = str(signature)
    for part in ("lr: 'float | Tensor | None' = 0.001", "polar_steps: 'int' = 3", "= (0.9, 0.95)"):
        assert part in text
    assert "from the preset" not in text
    with pytest.raises(TypeError, match="weigth_decay"):
        ResidualPolarTransport([nn.Parameter(torch.ones(2, 2))], weigth_decay=0.1)


def test_case_70_a_value_given_is_kept_with_every_preset():
    p = nn.Parameter(torch.ones(2, 2))
    (group,) = ResidualPolarTransport(
        [p], preset="paper", betas=(0.9, 0.95), polar_steps=3, root_drift_threshold=None
    ).param_groups
    assert (group["betas"], group["polar_steps"]) == ((0.9, 0.95), 3)
    assert group["root_drift_threshold"] is None
    (group,) = ResidualPolarTransport([p], preset="paper").param_groups
    assert (group["lr"], group["betas"], group["polar_steps"]) == (3e-3, (0.9, 0.999), 5)
    assert group["root_drift_threshold"] == 0.05

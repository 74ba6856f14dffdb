"""Parameter groups: what may be in one, what differs between them, and what is refused."""

import pytest
import torch
from inputs import FEW, fill_gradients, make_parameters, over, run, same, values
from torch import nn


@over(only=FEW)
@pytest.mark.parametrize(
    ("parameters", "error", "says"),
    [
        (lambda p: [], ValueError, "empty parameter list"),
        (lambda p: p[0], TypeError, "iterable"),
        (lambda p: [0.5], TypeError, "Tensor"),
        (lambda p: [p[0] * 2], ValueError, "non-leaf"),
        (lambda p: [{"lr": 1e-3}], KeyError, "params"),
        (lambda p: [{"params": set(p)}], TypeError, "ordered|set"),
        (lambda p: [{"params": p[:1]}, {"params": p[:1]}], ValueError, "more than one"),
        (lambda p: [("named", p[0]), p[1]], (ValueError, TypeError), "names|Tensor"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(build, parameters, error, says):
    with pytest.raises(error, match=says):
        build(parameters(make_parameters()))


@over(only=FEW)
def test_a_parameter_twice_in_one_group_is_warned_of(build):
    (weight, *_) = make_parameters()
    with pytest.warns(UserWarning, match="duplicate"):
        build([weight, weight])


@over(only=FEW)
def test_parameters_may_come_from_a_generator_and_alone(build):
    parameters = make_parameters()
    assert build(p for p in parameters).param_groups[0]["params"] == parameters
    optimizer = build([{"params": parameters[0]}])
    assert optimizer.param_groups[0]["params"] == parameters[:1]


@over()
@pytest.mark.parametrize("late", [False, True], ids=["at once", "added"])
def test_groups_keep_options_of_their_own(build, late):
    parameters = make_parameters()
    first = {"params": parameters[:2], "lr": 1e-2, "weight_decay": 0.0}
    second = {"params": parameters[2:]}
    if late:
        optimizer = build([first], lr=1e-3)
        run(optimizer, parameters[:2], 1)
        optimizer.add_param_group(second)
    else:
        optimizer = build([first, second], lr=1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert optimizer.param_groups[1]["weight_decay"] == optimizer.defaults["weight_decay"]
    before = values(parameters)
    run(optimizer, parameters, 2)
    assert not any(map(torch.equal, parameters, before))


@over("gain", "paper")
def test_groups_of_equal_options_step_like_one(build):
    together, apart = make_parameters(), make_parameters()
    one = build(together)
    two = build([{"params": apart[:2]}, {"params": apart[2:]}])
    for seed in range(2):  # Roots are fresh for every order and grouping.
        fill_gradients(together, seed)
        fill_gradients(apart, seed)
        one.step()
        two.step()
    for p, q in zip(together, apart, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@over("tensor rate")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_rate_steps_like_the_number(build, shape):
    numbers, tensors = make_parameters(), make_parameters()
    rate = torch.full(shape, 1e-2)
    one, other = build(numbers, lr=1e-2), build(tensors, lr=rate)
    run(one, numbers, 3)
    run(other, tensors, 3)
    for p, q in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    assert other.param_groups[0]["lr"] is rate
    before = values(tensors)
    rate.zero_()  # The tensor is the rate: what changes it, changes the next step.
    run(other, tensors, 1)
    assert same(values(tensors), before)


@over(only=FEW)
@pytest.mark.parametrize("rate", [torch.tensor([1e-2, 1e-3]), -1.0])
def test_what_is_no_rate_is_refused(build, rate):
    with pytest.raises((ValueError, TypeError), match=r"lr|learning rate"):
        build(make_parameters(), lr=rate)


@over(only=FEW)
def test_it_prints_every_group_and_option(build):
    parameters = make_parameters()
    optimizer = build([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.125}])
    text = repr(optimizer)
    assert text.startswith(type(optimizer).__name__)
    assert "Parameter Group 1" in text
    assert "lr: 0.125" in text
    assert all(name in text for name in optimizer.defaults)


@over()
def test_groups_are_the_users_to_edit(build):
    parameters = make_parameters()
    optimizer = build([{"params": parameters[:2]}, {"params": parameters[2:]}])
    run(optimizer, parameters, 2)
    fresh = nn.Parameter(torch.randn(6, 5))
    optimizer.state.pop(parameters[0])
    optimizer.param_groups[0]["params"][0] = fresh
    before = values([fresh, *parameters])
    run(optimizer, [fresh, *parameters], 1)
    assert torch.equal(parameters[0], before[1])
    assert not torch.equal(fresh, before[0])
    assert int(optimizer.state[fresh]["step"]) == 1
    assert int(optimizer.state[parameters[1]]["step"]) == 3
    del optimizer.param_groups[1]
    kept = values(parameters[2:])
    run(optimizer, [fresh, *parameters], 1)
    assert same(values(parameters[2:]), kept)


@over()
def test_clearing_the_state_begins_afresh(build):
    used, new = make_parameters(), make_parameters()
    optimizer = build(used)
    run(optimizer, used, 3)
    optimizer.state.clear()
    if "gain" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["gain"].fill_(1.0)
    with torch.no_grad():
        for p, q in zip(used, new, strict=True):
            p.copy_(q)
    run(optimizer, used, 2)
    run(build(new), new, 2)
    assert same(values(used), values(new))

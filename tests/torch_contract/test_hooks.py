"""Hooks of torch's optimizers: their order, their arguments, and what they may change."""

import torch
from inputs import FEW, fill_gradients, make_parameters, over, run, same, values
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@over(only=FEW)
def test_step_hooks_run_around_the_step_in_order(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    before, told = values(parameters), []

    def note(name):
        def hook(self, args, kwargs):
            assert self is optimizer
            assert isinstance(args, tuple)
            assert kwargs == {}
            told.append((name, torch.equal(parameters[0], before[0])))

        return hook

    handles = [
        register_optimizer_step_pre_hook(note("global before")),
        optimizer.register_step_pre_hook(note("before")),
        optimizer.register_step_post_hook(note("after")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    run(optimizer, parameters, 1)
    for handle in handles:
        handle.remove()
    run(optimizer, parameters, 1, start=1)
    assert told == [
        ("global before", True),
        ("before", True),
        ("after", False),
        ("global after", False),
    ]


@over(only=FEW)
def test_a_pre_hook_may_change_the_gradients(build):
    parameters, others = make_parameters(), make_parameters()
    optimizer, plain = build(parameters), build(others)

    def clip(self, args, kwargs):
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)
    run(optimizer, parameters, 1)
    fill_gradients(others, 0)
    torch.nn.utils.clip_grad_norm_(others, 0.1)
    plain.step()
    assert same(values(parameters), values(others))


@over(only=FEW)
def test_state_dict_hooks_see_and_replace_what_is_saved(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    run(optimizer, parameters, 1)
    order = []
    first = optimizer.register_state_dict_pre_hook(lambda self: order.append("before"))

    def stamp(self, saved):
        order.append("after")
        return {**saved, "stamp": 7}

    second = optimizer.register_state_dict_post_hook(stamp)
    third = optimizer.register_state_dict_pre_hook(lambda self: order.append("first"), prepend=True)
    assert optimizer.state_dict()["stamp"] == 7
    assert order == ["first", "before", "after"]
    for handle in (first, second, third):
        handle.remove()
    assert "stamp" not in optimizer.state_dict()


@over(only=FEW)
def test_load_hooks_see_and_replace_what_is_loaded(build):
    parameters, others = make_parameters(), make_parameters()
    optimizer, fresh = build(parameters), build(others)
    run(optimizer, parameters, 2)
    rates = []

    def faster(self, saved):
        groups = [{**group, "lr": 0.75} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    def loaded(self):
        rates.append(self.param_groups[0]["lr"])

    handles = [
        fresh.register_load_state_dict_pre_hook(faster),
        fresh.register_load_state_dict_post_hook(loaded),
    ]
    saved = optimizer.state_dict()
    fresh.load_state_dict(saved)
    assert rates == [0.75]
    assert saved["param_groups"][0]["lr"] != 0.75
    for handle in handles:
        handle.remove()
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]


def test_a_subclass_may_wrap_step():
    from rpt import ResidualPolarTransport

    class Counting(ResidualPolarTransport):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    parameters, others = make_parameters(), make_parameters()
    optimizer = Counting(parameters)
    run(optimizer, parameters, 2)
    run(ResidualPolarTransport(others), others, 2)
    assert optimizer.steps == 2
    assert same(values(parameters), values(others))

"""Every scheduler of torch, with rates that are numbers and rates that are tensors."""

import copy
import warnings

import pytest
import torch
from inputs import make_parameters, run, same, values
from torch.optim import AdamW, lr_scheduler
from torch.optim.swa_utils import SWALR

from rpt import ResidualPolarTransport

SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 0.5]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LinearLR(o, total_iters=3)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.StepLR(o, 2)], [2]
    ),
    "SWALR": lambda o: SWALR(o, 5e-3, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_here():
    kinds = [k for k in vars(lr_scheduler).values() if isinstance(k, type)]
    known = {k.__name__ for k in kinds if issubclass(k, lr_scheduler.LRScheduler)}
    assert known - {"LRScheduler", "_LRScheduler"} <= SCHEDULES.keys()


def scheduled(kind, schedule, tensor, **options):
    parameters = make_parameters()
    rate = (lambda r: torch.tensor(r, dtype=torch.float64)) if tensor else float
    groups = [{"params": parameters[:2], "lr": rate(2e-3)}, {"params": parameters[2:]}]
    optimizer = kind(groups, lr=rate(1e-3), **options)
    return parameters, optimizer, SCHEDULES[schedule](optimizer)


def follow(parameters, optimizer, scheduler, steps, start=0):
    """Train on; returns rates and betas of both groups in every step."""
    seen = []
    for step in range(start, start + steps):
        seen.append([(float(g["lr"]), tuple(g["betas"])) for g in optimizer.param_groups])
        run(optimizer, parameters, 1, step)
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if plateau else []))
    return seen


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_run_as_they_do_with_adamw(schedule, tensor):
    """Momentum cycles of `betas` included."""
    reference = follow(*scheduled(AdamW, schedule, False), 7)
    parameters, optimizer, scheduler = scheduled(ResidualPolarTransport, schedule, tensor)
    handed_over = [group["lr"] for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = follow(parameters, optimizer, scheduler, 7)
    for here, there in zip(seen, reference, strict=True):
        for (rate, betas), (expected, expected_betas) in zip(here, there, strict=True):
            assert rate == pytest.approx(expected, rel=1e-5)
            # The presets' own beta2 differs from AdamW's, and no schedule touches it.
            assert betas[0] == pytest.approx(expected_betas[0])
    assert all(p.isfinite().all() for p in parameters)
    if tensor:
        assert all(g["lr"] is r for g, r in zip(optimizer.param_groups, handed_over, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_rates_give_the_same_weights(schedule):
    numbers = scheduled(ResidualPolarTransport, schedule, False)
    tensors = scheduled(ResidualPolarTransport, schedule, True)
    follow(*numbers, 6)
    follow(*tensors, 6)
    for p, q in zip(numbers[0], tensors[0], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s != "SWALR"])
def test_a_schedule_resumes_with_its_optimizer(schedule):
    parameters, optimizer, scheduler = scheduled(ResidualPolarTransport, schedule, False)
    follow(parameters, optimizer, scheduler, 3)
    others, fresh, again = scheduled(ResidualPolarTransport, schedule, False)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    with torch.no_grad():
        for p, q in zip(others, parameters, strict=True):
            p.copy_(q)
    assert follow(others, fresh, again, 4, 3) == follow(parameters, optimizer, scheduler, 4, 3)
    assert same(values(others), values(parameters))


def test_a_schedule_that_steps_too_early_is_still_noticed():
    """torch tells by the wrapped `step` whether the optimizer has stepped."""
    parameters, optimizer, scheduler = scheduled(ResidualPolarTransport, "StepLR", False)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()
    parameters, optimizer, scheduler = scheduled(ResidualPolarTransport, "StepLR", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(parameters, optimizer, scheduler, 2)

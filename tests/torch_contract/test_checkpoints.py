"""Saving, loading and copying: a run that goes on is the run that never stopped."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from inputs import FEW, make_parameters, over, run, same, values


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ROADS = {
    "deepcopy": copy.deepcopy,
    "file": through_a_file,
    "pickle": lambda saved: pickle.loads(pickle.dumps(saved)),
}


def grouped(parameters):
    return [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.05}]


@over()
@pytest.mark.parametrize("road", ROADS)
def test_a_loaded_run_goes_on_bit_for_bit(build, road):
    parameters, others = make_parameters(), make_parameters(seed=1)
    optimizer, fresh = build(grouped(parameters)), build(grouped(others))
    run(optimizer, parameters, 3)
    run(fresh, others, 1)  # Whatever it did before is forgotten.
    fresh.load_state_dict(ROADS[road](optimizer.state_dict()))
    with torch.no_grad():
        for p, q in zip(others, parameters, strict=True):
            p.copy_(q)
    run(optimizer, parameters, 3, start=3)
    run(fresh, others, 3, start=3)
    assert same(values(others), values(parameters))
    assert same(fresh.state_dict(), optimizer.state_dict())


@over()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_optimizer_goes_on_bit_for_bit(build, copied):
    parameters = make_parameters()
    optimizer = build(grouped(parameters))
    run(optimizer, parameters, 2)
    others, twin = copied((parameters, optimizer))
    assert not any(p is q for p, q in zip(parameters, others, strict=True))
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public <= set(vars(twin))
    run(twin, others, 2, start=2)
    assert int(optimizer.state[parameters[0]]["step"]) == 2
    run(optimizer, parameters, 2, start=2)
    assert same(values(others), values(parameters))
    assert same(twin.state_dict(), optimizer.state_dict())


@over()
def test_a_state_dict_has_torchs_form(build):
    parameters = make_parameters()
    optimizer = build(grouped(parameters))
    run(optimizer, parameters, 1)
    saved = optimizer.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3, 4]]
    assert list(saved["state"]) == [0, 1, 2, 3, 4]
    assert saved["param_groups"][1]["weight_decay"] == 0.05
    assert same(optimizer.state_dict(), saved)
    plain = (int, float, bool, str, tuple, type(None), torch.Tensor)
    for record in saved["state"].values():
        assert all(isinstance(value, plain) for value in record.values())


@over(only=FEW)
def test_the_loaded_options_win_and_the_loaded_dict_stays(build):
    parameters, others = make_parameters(), make_parameters()
    optimizer, fresh = build(parameters, lr=0.125), build(others, lr=0.5)
    run(optimizer, parameters, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.125
    assert all(p is q for p, q in zip(fresh.param_groups[0]["params"], others, strict=True))
    fresh.param_groups[0]["lr"] = 0.25
    assert same(saved["param_groups"], kept["param_groups"])


@over(only=FEW)
def test_a_state_of_other_groups_is_refused(build):
    parameters = make_parameters()
    optimizer = build(grouped(parameters))
    run(optimizer, parameters, 1)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        build(make_parameters()).load_state_dict(saved)
    with pytest.raises(ValueError, match="size"):
        build(
            [{"params": p} for p in (make_parameters()[:1], make_parameters()[1:])]
        ).load_state_dict(saved)
    with pytest.raises((ValueError, KeyError, TypeError)):
        optimizer.load_state_dict({"state": saved["state"]})


@over()
def test_a_half_precision_state_loads_and_steps(build):
    parameters, others = make_parameters(), make_parameters(torch.bfloat16)
    optimizer, fresh = build(parameters), build(others)
    run(optimizer, parameters, 2)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(fresh, others, 2, start=2)
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in others)


@over()
def test_state_before_the_first_step_loads(build):
    parameters, others = make_parameters(), make_parameters()
    fresh = build(others)
    fresh.load_state_dict(build(parameters).state_dict())
    optimizer = build(parameters)
    run(optimizer, parameters, 2)
    run(fresh, others, 2)
    assert same(values(others), values(parameters))


@over(only=FEW)
def test_names_are_saved_and_optional(build):
    parameters = make_parameters()
    named = build([(f"p{i}", p) for i, p in enumerate(parameters)])
    run(named, parameters, 1)
    saved = named.state_dict()
    assert saved["param_groups"][0]["param_names"] == [f"p{i}" for i in range(5)]
    plain = build(make_parameters())
    plain.load_state_dict(copy.deepcopy(saved))
    assert int(plain.state_dict()["state"][0]["step"]) == 1
    for group in saved["param_groups"]:
        del group["param_names"]
    named.load_state_dict(saved)
    assert named.param_groups[0]["param_names"] == [f"p{i}" for i in range(5)]


@over()
def test_the_last_reference_frees_the_optimizer(build):
    parameters = make_parameters()
    optimizer = build(parameters)
    run(optimizer, parameters, 2)
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None

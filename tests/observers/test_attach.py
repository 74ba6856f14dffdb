"""Choosing sites, attaching, detaching, and saying so when a layer stays silent."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from rpt.observers.attach import attach
from rpt.observers.hook import HookObserver, Observer
from rpt.observers.staging import ObservationStage
from torch import nn


class Declared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def optimizer_observation_modules(self):
        return (self.second, self.head)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 1))


def names(attachment) -> list[str]:
    return [site.name for site in attachment.sites]


def backward(model: nn.Module) -> None:
    model(torch.randn(16, 4)).square().mean().backward()


def test_default_sites_are_the_owned_linears_wider_than_one():
    model = plain()
    assert names(attach(model, model.parameters(), ObservationStage())) == ["0", "2"]
    owned = [model[2].weight]
    assert names(attach(model, owned, ObservationStage())) == ["2"]


def test_the_declared_union_wins_over_the_default():
    model = nn.Sequential(nn.Linear(4, 4), Declared(), Declared())
    attachment = attach(model, model.parameters(), ObservationStage())
    # The scalar heads were declared too, but have rank 1 by definition.
    assert names(attachment) == ["1.second", "2.second"]
    frozen = [p for p in model.parameters() if p is not model[1].second.weight]
    assert names(attach(model, frozen, ObservationStage())) == ["2.second"]


def test_filter_and_sites_override_the_declaration():
    model = Declared()
    stage = ObservationStage()
    chosen = attach(model, model.parameters(), stage, module_filter=lambda m: m is model.first)
    assert names(chosen) == ["first"]
    everything = attach(model, model.parameters(), stage, module_filter=lambda m: True)
    assert names(everything) == ["first", "second"]
    for sites in ([model.first], ["first"]):
        assert names(attach(model, model.parameters(), stage, sites=sites)) == ["first"]


def test_unobservable_choices_are_named():
    model = nn.ModuleDict(
        {
            "table": nn.Embedding(5, 4),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "up": nn.ConvTranspose2d(4, 4, 3),
            "memory": nn.LSTM(4, 4),
            "norm": nn.LayerNorm(4),
            "attention": nn.MultiheadAttention(4, 2),
            "linear": nn.Linear(4, 4),
        }
    )
    owned = list(model.parameters())
    for name in ("table", "depthwise", "up", "memory", "norm", "attention"):
        with pytest.raises(ValueError, match=f"cannot observe '{name}'"):
            attach(model, owned, ObservationStage(), sites=[name])
    with pytest.raises(ValueError, match="embedding"):
        attach(
            model,
            owned,
            ObservationStage(),
            module_filter=lambda m: isinstance(m, (nn.Linear, nn.Embedding)),
        )
    with pytest.raises(ValueError, match=r"'linear'.*does not own"):
        attach(model, [], ObservationStage(), sites=["linear"])
    with pytest.raises(ValueError, match="no module named 'nothing'"):
        attach(model, owned, ObservationStage(), sites=["nothing"])
    with pytest.raises(ValueError, match="not a module of the model"):
        attach(model, owned, ObservationStage(), sites=[nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="selected no layer"):
        attach(model, owned, ObservationStage(), module_filter=lambda m: False)
    with pytest.raises(ValueError, match="strategy"):
        attach(model, owned, ObservationStage(), strategy="psychic")
    with pytest.raises(ValueError, match="not both"):
        attach(model, owned, ObservationStage(), sites=[], module_filter=bool)
    with pytest.raises(TypeError, match="list"):
        attach(model, owned, ObservationStage(), sites="linear")
    with pytest.raises(TypeError, match="int"):
        attach(model, owned, ObservationStage(), sites=[3])
    assert all(not module._forward_hooks for module in model.modules())


def test_a_scalar_head_chosen_by_name_is_left_out_with_a_warning():
    model = plain()
    with pytest.warns(UserWarning, match="'4' is not observed"):
        attachment = attach(model, model.parameters(), ObservationStage(), sites=["2", "4"])
    assert names(attachment) == ["2"]


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_detaching_leaves_nothing_in_the_model(strategy):
    model, stage = plain(), ObservationStage()
    attachment = attach(model, model.parameters(), stage, strategy=strategy)
    backward(model)
    assert len(stage) == 2
    attachment.clear()
    assert len(stage) == 0
    attachment.detach()
    attachment.detach()
    assert attachment.sites == []
    assert all(not m._forward_hooks and not m._forward_hooks_with_kwargs for m in model.modules())
    backward(model)
    assert len(stage) == 0
    attachment.after_step({})


def test_an_observer_of_ones_own():
    class Counting(HookObserver):
        attached = 0

        def attach(self, sites, stage):
            self.attached += len(sites)
            super().attach(sites, stage)

    model, observer = plain(), Counting()
    assert isinstance(observer, Observer)
    attach(model, model.parameters(), ObservationStage(), strategy=observer)
    assert observer.attached == 2


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_copies_of_the_model_are_untapped(strategy):
    model, stage = plain(), ObservationStage()
    attach(model, model.parameters(), stage, strategy=strategy)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    for twin in twins:
        backward(twin)
        assert len(stage) == 0
        own = ObservationStage()
        attach(twin, twin.parameters(), own, strategy=strategy)
        assert len(twin[0]._forward_hooks) == 1
        backward(twin)
        assert len(own) == 2
        assert len(stage) == 0
    backward(model)
    assert len(stage) == 2


@pytest.mark.parametrize("strategy", ["hook", "compiled"])
def test_an_attachment_copied_without_its_model_knows_it(strategy):
    model = plain()
    attachment = attach(
        model, model.parameters(), ObservationStage(), strategy=strategy, observe_every=3
    )
    twin = copy.deepcopy(attachment)
    assert twin.lost
    assert not attachment.lost
    twin.after_step({})
    twin.detach()
    assert not twin.lost
    assert pickle.loads(pickle.dumps(attachment)) is None


def test_cadence_switches_the_taps():
    model, stage = plain(), ObservationStage()
    attachment = attach(model, model.parameters(), stage, observe_every=3)
    seen = []
    for _ in range(7):
        backward(model)
        seen.append(sum(stage.commit().counts.values()))
        attachment.after_step({})
        model.zero_grad()
    assert seen == [2, 0, 0, 2, 0, 0, 2]
    attachment.after_step({model[0].weight: torch.tensor(-0.9)})
    backward(model)
    assert list(stage.commit().counts) == [model[0].weight]


def test_ages_of_a_checkpoint_keep_the_phase():
    model, stage = plain(), ObservationStage()
    attachment = attach(model, model.parameters(), stage, observe_every=3)
    backward(model)
    stage.commit()
    attachment.after_step({})
    ages = attachment.ages()
    assert set(ages.values()) == {1}
    attachment.detach()
    again = attach(model, model.parameters(), stage, observe_every=3)
    again.restore_ages(ages)
    backward(model)
    assert stage.commit().counts == {}


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normal = nn.Linear(4, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(torch.tanh(self.normal(x)), self.hidden.weight, self.hidden.bias)


def test_a_silent_layer_is_named_once():
    model, stage = Functional(), ObservationStage()
    attachment = attach(model, model.parameters(), stage)
    backward(model)
    assert list(stage.commit().counts) == [model.normal.weight]
    with pytest.warns(UserWarning, match=r"no statistics.*'hidden'") as caught:
        attachment.after_step({})
    assert len(caught) == 1
    assert "'normal'" not in str(caught[0].message)
    backward(model)
    stage.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachment.after_step({})


def test_a_layer_without_a_gradient_is_not_called_silent():
    model, stage = Functional(), ObservationStage()
    attachment = attach(model, model.parameters(), stage)
    torch.tanh(model.normal(torch.randn(8, 4))).sum().backward()
    stage.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attachment.after_step({})


def test_explicit_strategy_installs_nothing_and_takes_what_it_is_given():
    model, stage = Functional(), ObservationStage()
    attachment = attach(model, model.parameters(), stage, strategy="explicit")
    backward(model)
    assert len(stage) == 0
    x, delta = torch.randn(30, 4), torch.randn(30, 4)
    rank = attachment.observer.observe(x, delta, [model.normal.weight, model.hidden.weight])
    attachment.observer.observe(x, delta)
    committed = stage.commit()
    assert float(committed.ranks[model.hidden.weight]) == pytest.approx(float(rank))
    assert float(committed.global_rank) == pytest.approx(float(rank))
    attachment.observer.observe(x, delta, model.hidden.weight)
    attachment.clear()
    assert len(stage) == 0


def test_shared_weights_are_averaged_over_their_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    stage = ObservationStage()
    attach(model, model.parameters(), stage)
    backward(model)
    assert stage.commit().counts == {model[0].weight: 2}

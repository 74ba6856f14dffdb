"""What each suite runs, in stages: later ones use the rates that earlier ones found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .grids import beyond, grid
from .peers import PEERS
from .store import Config, Store
from .tasks import TASKS

__all__ = ["CORE", "SUITES", "TWO_FIFTHS", "Suite", "tuned_rate", "tuned_rest"]

TUNING_SEED = 100
# Beside a tuned rate, what multiplies that of the parameters which a peer leaves to AdamW.
RESTS = (0.3, 3.0)
CORE = ("adamw", "rpt", "muon", "soap")
OTHERS = tuple(
    n for n, p in PEERS.items() if p.family == "peer" and n not in (*CORE, "adamw_average_098")
)
ABLATIONS = tuple(n for n, p in PEERS.items() if p.family == "rpt" and n != "rpt")
LARGE = ("gpt_char_large", "gpt_bpe_large")
SUBSET = ("gpt_char", "vit_digits", "autoencoder_digits", "ripple", "chirps", "operator_1d")
# Equal to "rpt_all" in what they learn; what differs is how they observe.
SAME_NUMBERS = ("rpt_compiled", "rpt_explicit")
CONSTANT = ("rpt_average_098", "rpt_gain", "rpt_gain_down", "adamw_average_098", "schedule_free")
# The share of AdamW's steps in which language models are to reach its end.
TWO_FIFTHS = 0.4
QUICK = ("mlp_digits", "spirals_2d", "ripple", "ill_conditioned", "breast_cancer")

Stage = tuple[str, Callable[[Store], Iterable[Config]]]


@dataclass(frozen=True)
class Suite:
    """A named amount of work.

    Attributes:
        tasks: for the core optimizers.
        subset: for the other peers and the ablations.
        others, ablations: what runs on the subset.
        seeds: reported, never used for tuning.
        ablation_seeds: the ablations' reported seeds.
        constant: what runs on the tasks without a schedule, beside the core.
        candidates: variants run on every task, at the default rate and at RPT's tuned one.
        untuned: what also runs on every task at its documented default rate.
    """

    name: str
    tasks: tuple[str, ...]
    subset: tuple[str, ...]
    others: tuple[str, ...]
    ablations: tuple[str, ...]
    seeds: tuple[int, ...]
    ablation_seeds: tuple[int, ...]
    constant: tuple[str, ...] = CONSTANT
    candidates: tuple[str, ...] = ("rpt_gain_open",)
    untuned: tuple[str, ...] = ("adamw", "rpt")

    def stages(self) -> list[Stage]:
        """In order of the evidence's worth."""
        return [
            ("tune the core", lambda store: self._tuning(store, CORE, self.tasks)),
            ("report the core", lambda store: self._reporting(store, CORE, self.tasks, self.seeds)),
            ("at the default rate", lambda store: self._defaults()),
            ("ablate", self._ablation),
            ("tune the others", lambda store: self._tuning(store, self.others, self.subset)),
            (
                "report the others",
                lambda store: self._reporting(store, self.others, self.subset, self.seeds),
            ),
            ("tune without a schedule", lambda s: self._tuning(s, self.constant, self._flat())),
            (
                "report without a schedule",
                lambda s: self._reporting(s, self.constant, self._flat(), self.seeds),
            ),
            ("candidates for the default", self._candidates),
            ("in AdamW's time", self._in_equal_time),
            ("in two fifths of AdamW's steps", self._in_two_fifths),
        ]

    def _in_two_fifths(self, store: Store) -> Iterable[Config]:
        """RPT's whole schedule in two fifths of the steps, on the language models."""
        return [
            Config(task, "rpt", rate, seed, TWO_FIFTHS)
            for task in self.tasks
            if TASKS[task].group == "text"
            if (rate := tuned_rate(store, task, "rpt", self.name)) is not None
            for seed in self.seeds
        ]

    def _in_equal_time(self, store: Store) -> Iterable[Config]:
        """The steps that fit into AdamW's seconds, as its full runs and the others' have shown."""
        return [
            Config(task, name, rate, seed, share, tuned_rest(store, task, name, self.name))
            for task in self.tasks
            for name in (*CORE, *(self.others if task in self.subset else ()))
            if (rate := tuned_rate(store, task, name, self.name)) is not None
            if (share := time_share(store, task, name, self)) < 1.0
            for seed in self.seeds
        ]

    def _candidates(self, store: Store) -> Iterable[Config]:
        return [
            Config(task, name, rate, seed)
            for task in self.tasks
            for name in self.candidates
            for rate in (PEERS[name].rate, tuned_rate(store, task, "rpt", self.name))
            if rate is not None
            for seed in self.seeds
        ]

    def _tuning(
        self, store: Store, optimizers: Iterable[str], tasks: Iterable[str]
    ) -> Iterable[Config]:
        """Every grid, and one rate more where an end of it won: the same rule for all.

        Then, for a peer that shares the model with AdamW, the other rates of AdamW's part.
        """
        names = list(optimizers)
        return [
            Config(task, name, rate, TUNING_SEED, rest=rest)
            for task in tasks
            for name in names
            for rate, rest in tuning_points(store, task, name, self.name)
        ]

    def _reporting(
        self, store: Store, optimizers: Iterable[str], tasks: Iterable[str], seeds: Iterable[int]
    ) -> Iterable[Config]:
        names, chosen = list(optimizers), list(seeds)
        return [
            Config(task, name, rate, seed, rest=tuned_rest(store, task, name, self.name))
            for task in tasks
            for name in names
            if (rate := tuned_rate(store, task, name, self.name)) is not None
            for seed in chosen
        ]

    def _flat(self) -> list[str]:
        return [task for task in self.tasks if TASKS[task].schedule == "constant"]

    def _defaults(self) -> Iterable[Config]:
        return [
            Config(task, name, PEERS[name].rate, seed)
            for task in self.tasks
            for name in self.untuned
            for seed in self.seeds
        ]

    def _ablation(self, store: Store) -> Iterable[Config]:
        """One option changed at RPT's tuned rate; the paper preset gets the tuning it needs."""
        paper = [n for n in self.ablations if n.startswith("rpt_paper")]
        single = [n for n in self.ablations if n not in paper]
        configs = [
            Config(task, name, rate, seed)
            for name in single
            for task in self.subset
            if TASKS[task].group == "text" or not name.startswith("rpt_tables")
            if (rate := tuned_rate(store, task, "rpt", self.name)) is not None
            for seed in self.ablation_seeds
        ]
        return configs + [
            Config(task, name, rate, seed)
            for name in paper
            for task in self.subset
            for rate in (3e-3, 1e-2, 3e-2)[: 1 if self.name == "quick" else 3]
            for seed in self.ablation_seeds[:1]
        ]


def tuning_rates(store: Store, task: str, optimizer: str, suite: str) -> list[float]:
    """The grid, and what lies beyond the end of it that won once all of it has run."""
    rates = grid(optimizer, suite)
    found = _finals(store, task, optimizer, rates)
    if len(found) < len(rates):
        return rates
    return rates + beyond(optimizer, suite, min(found)[1])


def tuned_rate(store: Store, task: str, optimizer: str, suite: str) -> float | None:
    """The rate with the lowest final held-out loss on the tuning seed."""
    found = _finals(store, task, optimizer, tuning_rates(store, task, optimizer, suite))
    return min(found)[1] if found else None


def tuning_points(store: Store, task: str, optimizer: str, suite: str) -> list[tuple[float, float]]:
    """(rate, multiple of the rest's rate) to be run on the tuning seed, as far as it can be said."""
    rates = tuning_rates(store, task, optimizer, suite)
    points = [(rate, 1.0) for rate in rates]
    best = tuned_rate(store, task, optimizer, suite)
    if PEERS[optimizer].rest and len(_finals(store, task, optimizer, rates)) == len(rates):
        points += [(best or 0.0, rest) for rest in RESTS]
    return points


def tuned_rest(store: Store, task: str, optimizer: str, suite: str) -> float:
    """The best multiple of the rest's rate at the tuned rate, on the tuning seed; 1 where not tuned."""
    rate = tuned_rate(store, task, optimizer, suite) if PEERS[optimizer].rest else None
    if rate is None:
        return 1.0
    tried = {
        m: store.get(Config(task, optimizer, rate, TUNING_SEED, rest=m)) for m in (1.0, *RESTS)
    }
    found = {m: record["final"] for m, record in tried.items() if record is not None}
    return min(found, key=lambda m: found[m])


def time_share(store: Store, task: str, optimizer: str, suite: Suite) -> float:
    """The share of an optimizer's steps that takes the seconds of AdamW's whole run; 1 if not known."""
    cost = store.cost(Config(task, optimizer, 0.0, 0))
    if cost is not None:
        return min(1.0, round(1 / cost, 2))
    seconds: list[dict[int, float]] = []
    for name in ("adamw", optimizer):
        rate = tuned_rate(store, task, name, suite.name)
        runs = [] if rate is None else [store.get(Config(task, name, rate, s)) for s in suite.seeds]
        seconds.append({r["seed"]: r["curves"]["cpu"][-1] for r in runs if r and r["curves"]})
    both = seconds[0].keys() & seconds[1].keys()
    theirs, its = (sum(found[seed] for seed in both) for found in seconds)
    return min(1.0, round(theirs / its, 2)) if both else 1.0


def _finals(
    store: Store, task: str, optimizer: str, rates: Iterable[float]
) -> list[tuple[float, float]]:
    runs = ((rate, store.get(Config(task, optimizer, rate, TUNING_SEED))) for rate in rates)
    return [(record["final"], rate) for rate, record in runs if record is not None]


# What `other` and the ladder ask is asked by them alone.
BATTERY = tuple(name for name, task in TASKS.items() if task.group not in ("other", "ladder"))
DEV = tuple(name for name in BATTERY if name not in LARGE)
OTHER_FIELDS = tuple(name for name, task in TASKS.items() if task.group == "other")
SUITES = {
    "quick": Suite("quick", QUICK, QUICK[:2], (), ("rpt_sites", "rpt_alpha_0"), (0,), (0,)),
    "dev": Suite(
        "dev", DEV, SUBSET, OTHERS,
        tuple(n for n in ABLATIONS if n not in SAME_NUMBERS), (0, 1, 2, 3, 4), (0, 1, 2),
    ),
    "large": Suite(
        "large", LARGE, LARGE, ("heavyball_soap", "normuon"), (), (0,), (), (), ()
    ),
    "other": Suite("other", OTHER_FIELDS, (), (), (), (0, 1, 2), (), (), (), CORE),
    "full": Suite(
        "full", BATTERY, (*SUBSET, *LARGE), OTHERS, ABLATIONS, (0, 1, 2, 3, 4), (0, 1, 2)
    ),
}  # fmt: skip

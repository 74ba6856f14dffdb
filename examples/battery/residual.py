"""RPT and its ablations: presets, backends, observers, and one option changed at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

import rpt

from .bundle import Averaged, Bundle

__all__ = ["RPT_VARIANTS", "Variant"]


@dataclass(frozen=True)
class Variant:
    """One way to configure RPT.

    Attributes:
        says: one line for the report.
        preset: "drop_in" or "paper".
        options: keywords of the constructor.
        observe: "" (nothing), "sites" (what the model declares) or "all" (every linear layer).
        strategy: how, as in `attach_model`; "explicit" goes through `observe_residual`.
        every: measure in every k-th step.
        tables: options of embedding tables (and positions) alone.
        head: options of the output head alone.
        vectors: options of everything with fewer than two dimensions.
        average: decay of an average of the iterates, measured in the last one's place; 0 for none.
    """

    says: str = field(repr=False)  # results do not depend on it
    preset: str = "drop_in"
    options: dict[str, Any] = field(default_factory=dict)
    observe: str = ""
    strategy: str = "hook"
    every: int = 1
    tables: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=dict)
    average: float = 0.0

    def build(self, model: nn.Module, rate: float, decay: float) -> Bundle:
        optimizer = rpt.ResidualPolarTransport(
            self._groups(model), rate, preset=self.preset, weight_decay=decay, **self.options
        )
        if self.observe:
            observe(optimizer, model, self.observe, self.strategy, self.every)
        if not self.average:
            return Bundle([optimizer])
        average = Averaged(model, self.average)
        return Bundle([optimizer], evaluation=average.swapped_in, after_step=average.update)

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        heads = {id(linear[-1].weight)} if linear else set()
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        parts: dict[str, list[Tensor]] = {"hidden": [], "tables": [], "head": [], "vectors": []}
        for name, p in model.named_parameters():
            if p.ndim < 2:
                parts["vectors"].append(p)
            elif id(p) in tables or name.endswith("position"):
                parts["tables"].append(p)
            elif id(p) in heads:
                parts["head"].append(p)
            else:
                parts["hidden"].append(p)
        special = {"tables": self.tables, "head": self.head, "vectors": self.vectors}
        groups = [{"params": parts[k], **o} for k, o in special.items() if o and parts[k]]
        ordinary = [p for k, ps in parts.items() if not special.get(k) for p in ps]
        return ([{"params": ordinary}] if ordinary else []) + groups


def observe(
    optimizer: rpt.ResidualPolarTransport, model: nn.Module, which: str, strategy: str, every: int
) -> None:
    """Attach observers to a model's declared sites, or to every linear layer."""

    def is_linear(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    module_filter = is_linear if which == "all" else None
    if strategy != "explicit":
        optimizer.attach_model(model, module_filter, strategy=strategy, observe_every=every)
        return
    # What code without hooks of ours would do: hand over activations and output cotangents.
    names = optimizer.attach_model(model, module_filter)
    optimizer.remove_observers()

    def hand_over(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad:
            activations = inputs[0].detach()
            output.register_hook(
                lambda cotangents: (
                    optimizer.observe_residual(activations, cotangents, [module.weight]),  # type: ignore[list-item]
                    None,
                )[1]
            )

    for name in names:
        model.get_submodule(name).register_forward_hook(hand_over)


def _drop_in(says: str, **options: Any) -> Variant:
    return Variant(says, options=options)


RPT_VARIANTS: dict[str, Variant] = {
    # As users meet it.
    "rpt": Variant("RPT, default preset, nothing observed"),
    "rpt_sites": Variant("RPT, declared sites observed (every linear layer where none)", observe="sites"),
    "rpt_all": Variant("RPT, every linear layer observed", observe="all"),
    "rpt_paper": Variant("RPT, paper preset, nothing observed", preset="paper"),
    "rpt_paper_sites": Variant("RPT, paper preset, sites observed", preset="paper", observe="sites"),
    # Observers.
    "rpt_compiled": Variant("tap observer", observe="all", strategy="compiled"),
    "rpt_explicit": Variant("explicit observer", observe="all", strategy="explicit"),
    "rpt_every_4": Variant("observed in every 4th step", observe="all", every=4),
    "rpt_shuffle": Variant(
        "ranks calibrated by shuffling", options={"observer_null": "shuffle"}, observe="all"
    ),
    "rpt_analytic": Variant(
        "ranks calibrated analytically", options={"observer_null": "analytic"}, observe="all"
    ),
    # Parts of the method.
    "rpt_no_transport": _drop_in("no transport", transport=False),
    "rpt_no_closure": _drop_in("no closure", closure=False),
    "rpt_neither": _drop_in("neither transport nor closure", transport=False, closure=False),
    "rpt_no_metric": _drop_in("no metric", roots="none"),
    "rpt_alpha_0": _drop_in("polar weight 0", polar_prior=0.0),
    "rpt_alpha_04": _drop_in("polar weight 0.4", polar_prior=0.4),
    "rpt_alpha_07": _drop_in("polar weight 0.7", polar_prior=0.7),
    # Backends.
    "rpt_full": _drop_in("full roots", roots="full"),
    "rpt_blocked": _drop_in("blocked roots", roots="blocked"),
    "rpt_low_rank": _drop_in("low-rank roots", roots="low_rank"),
    "rpt_stale_10": _drop_in("roots at most 10 steps old", max_root_staleness=10),
    # Numbers.
    "rpt_fixed_length": _drop_in("one fixed length of step, 0.92", update_rms=0.92, signal_length=False),
    "rpt_no_bound": _drop_in("no bound on a step", max_relative_step=None),
    "rpt_thin_matrices": _drop_in("thin matrices by the matrix rule", thin_as_vector=False),
    "rpt_rms_05": _drop_in("update RMS 0.5", update_rms=0.5),
    "rpt_rms_023": _drop_in("update RMS 0.23", update_rms=0.23),
    "rpt_rms_none": _drop_in("no fixed RMS", update_rms=None),
    "rpt_beta1_08": _drop_in("β1 0.8", betas=(0.8, 0.95)),
    "rpt_beta1_095": _drop_in("β1 0.95", betas=(0.95, 0.95)),
    "rpt_beta2_09": _drop_in("β2 0.9", betas=(0.9, 0.9)),
    "rpt_beta2_099": _drop_in("β2 0.99", betas=(0.9, 0.99)),
    "rpt_gain": _drop_in("gain on, as published", gain_rate=0.02),
    "rpt_gain_target": _drop_in(
        "gain that only shrinks, target coherence 0.1",
        gain_rate=0.05, target_coherence=0.1, max_gain=1.0, min_gain=0.05,
    ),
    "rpt_gain_down": _drop_in(
        "gain that only shrinks, target coherence 0",
        gain_rate=0.05, target_coherence=0.0, max_gain=1.0, min_gain=0.02,
    ),
    "rpt_gain_open": _drop_in(
        "gain that only opens, up to 4, target coherence 0.1",
        gain_rate=0.05, target_coherence=0.1, max_gain=4.0, min_gain=1.0,
    ),
    "rpt_average_095": Variant("iterates averaged, decay 0.95", average=0.95),
    "rpt_average_098": Variant("iterates averaged, decay 0.98", average=0.98),
    # Vectors, tables, heads.
    "rpt_vectors_free": Variant("vectors keep their own RMS", vectors={"update_rms": None}),
    "rpt_tables_0": Variant("tables at polar weight 0", tables={"polar_prior": 0.0}),
    "rpt_head_0": Variant("head at polar weight 0", head={"polar_prior": 0.0}),
    "rpt_tables_head_0": Variant(
        "tables and head at polar weight 0", tables={"polar_prior": 0.0}, head={"polar_prior": 0.0}
    ),
    "rpt_tables_no_metric": Variant("tables without a metric", tables={"roots": "none"}),
    "rpt_tables_free": Variant("tables keep their own RMS", tables={"update_rms": None}),
    "rpt_head_free": Variant("head keeps its own RMS", head={"update_rms": None}),
}  # fmt: skip

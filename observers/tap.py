"""The tap: an identity on a layer's output whose backward sees activation and cotangent together.

One technique serves eager and compiled models. A forward hook passes the output through an identity
`torch.autograd.Function` that keeps what the layer read; its backward stages the statistics. What
is kept lives on the autograd graph and dies with it, so forwards without gradients, abandoned
graphs, and activation checkpointing (reentrant or not) need no bookkeeping: every backward through
the layer that gives its weight a gradient is one observation. Module backward hooks offer none of
that, and break full graphs.

Eagerly, the forward keeps a thin sketch, so neither the activation's memory nor later in-place
changes of it matter. Under `torch.compile` the backward calls one opaque operator instead, which
runs as ordinary Python between compiled kernels.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .patches import Convolution, sampled_cotangents, sampled_patches
from .rank import sketch, sketched_statistics
from .staging import ObservationStage

__all__ = ["TapSite", "install"]


class TapSite:
    """One tapped layer: where its observations go, and whether it observes at present.

    Holds the layer's parameter and geometry, never the layer: a copy of the optimizer copies its
    sites, and must not copy a model for it.

    Attributes:
        attached: False in the copy of a model that was copied without its optimizer.
        active: Whether the next backward is to be measured.
        installed: Whether a tap in a model leads here.
    """

    def __init__(
        self, name: str, module: nn.Module, parameter: Tensor, stage: ObservationStage
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.stage = stage
        self.attached = self.active = True
        self.installed = False
        self.handle: torch.utils.hooks.RemovableHandle | None = None
        self.convolution = Convolution.of(module) if hasattr(module, "kernel_size") else None
        own = module._parameters.items()
        self.attribute = next((name for name, p in own if p is parameter), "weight")
        # Under FSDP2 a layer computes with its unsharded stand-in.
        self.sharded = hasattr(parameter, "device_mesh")
        self._register()

    def _register(self) -> None:
        # Compiled graphs know a site by this tensor: as an input it needs no guard of its own.
        self.token = torch.tensor(next(_keys), dtype=torch.int64)
        _registry[int(self.token)] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> TapSite:
        twin: TapSite = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.parameter = copy.deepcopy(self.parameter, memo)
        twin.stage = copy.deepcopy(self.stage, memo)
        twin.attached = twin.active = twin.installed = False
        twin.handle = None
        twin._register()
        return twin

    def remove(self) -> None:
        """Untap the layer; a compiled graph may go on calling a tap that it was traced with."""
        self.attached = self.active = False
        if self.handle is not None:
            self.handle.remove()

    def sketch_activations(self, activations: Tensor, output_shape: torch.Size) -> Tensor:
        activations = _whole(activations)
        if self.convolution is not None:
            activations = sampled_patches(self.convolution, activations, output_shape)
        return sketch(activations, self.stage.settings.dim)

    def record(self, sketched: Tensor, cotangents: Tensor, weight: Tensor | None = None) -> None:
        """Stage one observation; called in the backward pass.

        Nothing is staged where that backward gives the weight no gradient: one for inputs alone,
        or with the weight frozen.

        Args:
            sketched: What `sketch_activations` made of the activations.
            cotangents: The output's.
            weight: What the layer computed with, where it is known: its parameter, or under FSDP2
                the stand-in, which a compiled graph does not tell.
        """
        if weight is None and not self.sharded:
            weight = self.parameter
        path = "grad" if weight is None else _gradient_path(weight)
        if path is None or _batched(cotangents):
            return
        cotangents = _whole(cotangents)
        if self.convolution is not None:
            cotangents = sampled_cotangents(cotangents, len(self.convolution.kernel_size))
        delta = sketch(cotangents, self.stage.settings.dim)
        if len(delta) != len(sketched):
            raise RuntimeError(
                f"observed layer {self.name!r} read {len(sketched)} rows but wrote {len(delta)}: "
                "it is no row-wise linear map; leave it out with sites= or module_filter="
            )
        statistics = sketched_statistics(sketched, delta, self.stage.settings)
        self.stage.add_from_backward(self.parameter, statistics, returned=path == "returned")


def _batched(cotangents: Tensor) -> bool:
    """Whether they stand for many backwards at once (is_grads_batched), none of them a step's."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(cotangents) or functorch.is_legacy_batchedtensor(cotangents)


def _gradient_path(weight: Tensor) -> str | None:
    """Where the running backward puts the weight's gradient.

    Returns:
        "grad", its attribute; "returned", by autograd.grad to its caller; None where it has none.
    """
    if torch._C._current_graph_task_id() == -1:
        return "grad"  # Not run by the engine, which could tell.
    if not weight.requires_grad:
        return None
    # A gradient edge needs the graph of a view, and backwards run without gradients.
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return "grad" if torch._C._will_engine_execute_node(node) else None  # type: ignore[arg-type]
    except RuntimeError:  # The engine's answer for a leaf that autograd.grad was asked for.
        return "returned"


def _keys_from_one() -> Any:
    key = 0
    while True:
        key += 1
        yield key


_keys = _keys_from_one()
_registry: weakref.WeakValueDictionary[int, TapSite] = weakref.WeakValueDictionary()


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor's full value; anything else as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


class _EagerTap(torch.autograd.Function):
    """Identity in both directions; carries the sketched activations on the graph."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, sketched: Tensor, weight: Tensor, site: TapSite
    ) -> Tensor:
        ctx.save_for_backward(sketched)
        # Not saved as a tensor, which would forbid changing it in place before the backward.
        ctx.weight = weight
        ctx.site = site
        # Not a view in autograd's eyes, so that an in-place activation may follow.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (sketched,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.site.record(sketched, cotangents, ctx.weight)
        return cotangents, None, None, None


# Defined without autograd or version-counting kernels of their own. The token of `observe` is
# "written" only so that no compiler drops or merges calls, and the same token is saved by every call
# of its layer. They run Python, which a replayed CUDA graph would skip.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAGS = () if _UNSAFE is None else (_UNSAFE,)
torch.library.define(
    "rpt::observe",
    "(Tensor activations, Tensor cotangents, Tensor own, Tensor(a!) token) -> ()",
    tags=_TAGS,
)
torch.library.define("rpt::reads_own_weight", "(Tensor weight, Tensor token) -> Tensor", tags=_TAGS)


@torch.library.impl("rpt::observe", "default")
def _observe(activations: Tensor, cotangents: Tensor, own: Tensor, token: Tensor) -> None:
    site = _registry.get(int(token))  # Both live on the CPU: no device wait.
    if site is None or not site.active or not bool(own):
        return
    with torch.no_grad():
        site.record(site.sketch_activations(activations, cotangents.shape), cotangents)


@torch.library.register_fake("rpt::observe")
def _observe_fake(activations: Tensor, cotangents: Tensor, own: Tensor, token: Tensor) -> None:
    return None


@torch.library.impl("rpt::reads_own_weight", "default")
def _reads_own_weight(weight: Tensor, token: Tensor) -> Tensor:
    # A compiled graph is not traced again for other weights of the same kind (functional_call).
    site = _registry.get(int(token))
    return torch.tensor(site is not None and weight.data_ptr() == site.parameter.data_ptr())


@torch.library.register_fake("rpt::reads_own_weight")
def _reads_own_weight_fake(weight: Tensor, token: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool)


class _OperatorTap(torch.autograd.Function):
    """The same identity, its backward one opaque call that compilers keep as it is."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, activations: Tensor, own: Tensor, token: Tensor
    ) -> Tensor:
        ctx.save_for_backward(activations, own)
        ctx.token = token
        return output.detach()

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        activations, own = ctx.saved_tensors
        if torch.compiler.is_compiling() or not _batched(cotangents):
            torch.ops.rpt.observe(activations, cotangents, own, ctx.token)
        return cotangents, None, None, None


class ForwardTap:
    """The forward hook of one site.

    A copy of the model observes where its optimizer was copied with it. Pickled, it is untapped:
    hooks are never serialised.
    """

    def __init__(self, site: TapSite, through_operator: bool) -> None:
        self.site = site
        self.token = site.token
        self.attribute = site.attribute
        self.through_operator = through_operator

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Tensor | None:
        if not torch.is_grad_enabled() or not self.site.attached:
            return None
        weight = getattr(module, self.attribute, None)
        if not (isinstance(weight, Tensor) and weight.requires_grad):
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.site.stage.settle()
            if not self.site.active or torch._C._are_functorch_transforms_active():
                return None
            if torch.autograd.forward_ad._current_level >= 0:  # Tangents have no backward.
                return None
            # torch.func.functional_call lends the layer other weights.
            if weight is not self.site.parameter and not self.site.sharded:
                return None
        activations = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(activations, Tensor) and isinstance(output, Tensor)):
            return None
        if not output.requires_grad:
            return None
        if compiling or self.through_operator:
            own = self.token > 0
            if not self.site.sharded:
                own = torch.ops.rpt.reads_own_weight(weight.detach(), self.token)
            return _OperatorTap.apply(output, activations.detach(), own, self.token)
        with torch.no_grad():
            sketched = self.site.sketch_activations(activations, output.shape)
        return _EagerTap.apply(output, sketched, weight, self.site)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardTap:
        twin = ForwardTap(copy.deepcopy(self.site, memo), self.through_operator)
        twin.site.installed = True
        # The handle of the copied dictionary of hooks, which is being copied just now.
        twin.site.handle = copy.deepcopy(self.site.handle, memo)
        return twin

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _untapped, ()


def untapped(*_: Any) -> None:
    """What stands in an unpickled model where its original had a tap."""


def _untapped() -> Callable[..., None]:
    return untapped


def install(site: TapSite, module: nn.Module, through_operator: bool) -> None:
    """Tap `module`'s output; `site.remove()` untaps it."""
    for key, hook in list(module._forward_hooks.items()):
        if hook is untapped or (isinstance(hook, ForwardTap) and not hook.site.attached):
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
    hook = ForwardTap(site, through_operator)
    site.handle = module.register_forward_hook(hook, with_kwargs=True)
    site.installed = True

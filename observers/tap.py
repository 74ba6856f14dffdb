"""The tap: an identity on a layer's output whose backward sees activation and cotangent together.

One technique serves eager and compiled models. A forward hook passes the output through an identity
`torch.autograd.Function` that keeps what the layer read; its backward stages the statistics. What
is kept lives on the autograd graph and dies with it, so forwards without gradients, abandoned
graphs, and activation checkpointing (reentrant or not) need no bookkeeping: every backward through
the layer is one observation. Module backward hooks offer none of that, and break full graphs.

Eagerly, the forward keeps a thin sketch, so neither the activation's memory nor later in-place
changes of it matter. Under `torch.compile` the backward calls one opaque operator instead, which
runs as ordinary Python between compiled kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .patches import sampled_cotangents, sampled_patches
from .rank import sketch, sketched_statistics
from .staging import ObservationStage

__all__ = ["TapSite", "install"]


class TapSite:
    """One tapped layer: where its observations go, and whether it observes at present."""

    def __init__(
        self, name: str, module: nn.Module, parameter: Tensor, stage: ObservationStage
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.stage = stage
        self.active = True
        # The convolution itself, for its geometry; never its weight, which may be sharded.
        self.convolution = module if hasattr(module, "kernel_size") else None
        # Compiled graphs know a site by this tensor: as an input it needs no guard of its own.
        self.token = torch.tensor(next(_keys), dtype=torch.int64)
        _registry[int(self.token)] = self

    def sketch_activations(self, activations: Tensor, output_shape: torch.Size) -> Tensor:
        activations = _whole(activations)
        if self.convolution is not None:
            activations = sampled_patches(self.convolution, activations, output_shape)
        return sketch(activations, self.stage.settings.dim)

    def record(self, sketched: Tensor, cotangents: Tensor) -> None:
        """Stage one observation; called in the backward pass."""
        cotangents = _whole(cotangents)
        if self.convolution is not None:
            axes = len(self.convolution.kernel_size)  # type: ignore[arg-type]
            cotangents = sampled_cotangents(cotangents, axes)
        delta = sketch(cotangents, self.stage.settings.dim)
        if len(delta) != len(sketched):
            raise RuntimeError(
                f"observed layer {self.name!r} read {len(sketched)} rows but wrote {len(delta)}: "
                "it is no row-wise linear map; leave it out with sites= or module_filter="
            )
        statistics = sketched_statistics(sketched, delta, self.stage.settings)
        self.stage.add_from_backward(self.parameter, statistics)


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
    def forward(ctx: Any, output: Tensor, sketched: Tensor, site: TapSite) -> Tensor:
        ctx.save_for_backward(sketched)
        ctx.site = site
        # Not a view in autograd's eyes, so that an in-place activation may follow.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (sketched,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.site.record(sketched, cotangents)
        return cotangents, None, None


# Defined without an autograd or version-counting kernel of its own: the token is "written" only so
# that no compiler drops or merges calls, and the same token is saved by every call of its layer.
# It runs Python, which a replayed CUDA graph would skip.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
torch.library.define(
    "rpt::observe",
    "(Tensor activations, Tensor cotangents, Tensor(a!) token) -> ()",
    tags=() if _UNSAFE is None else (_UNSAFE,),
)


@torch.library.impl("rpt::observe", "default")
def _observe(activations: Tensor, cotangents: Tensor, token: Tensor) -> None:
    site = _registry.get(int(token))  # The token lives on the CPU: no device wait.
    if site is None or not site.active:
        return
    with torch.no_grad():
        site.record(site.sketch_activations(activations, cotangents.shape), cotangents)


@torch.library.register_fake("rpt::observe")
def _observe_fake(activations: Tensor, cotangents: Tensor, token: Tensor) -> None:
    return None


class _OperatorTap(torch.autograd.Function):
    """The same identity, its backward one opaque call that compilers keep as it is."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, activations: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(activations)
        ctx.token = token
        return output.detach()

    @staticmethod
    def backward(ctx: Any, cotangents: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (activations,) = ctx.saved_tensors
        torch.ops.rpt.observe(activations, cotangents, ctx.token)
        return cotangents, None, None


class ForwardTap:
    """The forward hook of one site. Never serialised: a copied or unpickled model is untapped."""

    def __init__(self, site: TapSite, through_operator: bool) -> None:
        self.site = site
        self.token = site.token
        self.through_operator = through_operator

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self.site.stage.settle()
            if not self.site.active or torch._C._are_functorch_transforms_active():
                return None
        activations = args[0] if args else next(iter(kwargs.values()), None)
        if not (isinstance(activations, Tensor) and isinstance(output, Tensor)):
            return None
        if not output.requires_grad:
            return None
        if compiling or self.through_operator:
            return _OperatorTap.apply(output, activations.detach(), self.token)
        with torch.no_grad():
            sketched = self.site.sketch_activations(activations, output.shape)
        return _EagerTap.apply(output, sketched, self.site)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return untapped

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _untapped, ()


def untapped(*_: Any) -> None:
    """What stands in a copied model where its original had a tap."""


def _untapped() -> Callable[..., None]:
    return untapped


def install(
    site: TapSite, module: nn.Module, through_operator: bool
) -> torch.utils.hooks.RemovableHandle:
    """Tap `module`'s output; remove the returned handle to untap it."""
    for key, hook in list(module._forward_hooks.items()):
        if hook is untapped:
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
    return module.register_forward_hook(ForwardTap(site, through_operator), with_kwargs=True)

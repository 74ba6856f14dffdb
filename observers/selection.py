"""Which layers to observe: chosen by the caller, else declared by the model, else all linears."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from .caller import warn
from .patches import unsupported_convolution
from .protocol import declared_sites

__all__ = ["Site", "matrix_parameter", "select_sites", "unobservable"]


class Site(NamedTuple):
    """One observed layer.

    Attributes:
        name: Dotted path in the model.
        module: The layer.
        parameter: Its matrix, as it was when attached (under FSDP2 a DTensor).
    """

    name: str
    module: nn.Module
    parameter: Tensor


def matrix_parameter(module: nn.Module) -> Tensor | None:
    """The matrix a layer contracts its input with: `weight`, else its only one of ≥ 2 axes."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight if weight.ndim >= 2 else None
    matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
    # With layers inside, a matrix of its own is only part of what the module does.
    alone = len(matrices) == 1 and next(module.children(), None) is None
    return matrices[0] if alone else None


def unobservable(module: nn.Module) -> str | None:
    """Why a layer can never be a site, in words that say what to do; None where it can."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "an embedding looks rows up and contracts no activation: leave it out"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return (
            "a fused recurrent layer hides its matrices; "
            "build it from nn.Linear layers or call observe_residual"
        )
    if isinstance(module, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention uses its matrices in one fused call; "
            "build it from nn.Linear layers or call observe_residual"
        )
    if isinstance(module, nn.Bilinear):
        return "a bilinear form is no matrix map; call observe_residual"
    if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
        return "its weight has no shape yet: run the model once on a batch, then attach"
    parameter = matrix_parameter(module)
    if parameter is None:
        return "it has no weight matrix of its own; name the layer inside it that has"
    if isinstance(module, nn.modules.conv._ConvNd):
        return unsupported_convolution(module)
    if parameter.ndim != 2:
        return f"its weight has {parameter.ndim} axes; call observe_residual"
    return None


def smaller_side(parameter: Tensor) -> int:
    """The smaller dimension of a weight's matrix view (out, everything else)."""
    rows = parameter.shape[0]
    return min(rows, parameter.numel() // rows if rows else 0)


def select_sites(
    model: nn.Module,
    owned: Iterable[Tensor],
    module_filter: Callable[[nn.Module], bool] | None = None,
    sites: Iterable[Any] | None = None,
    by_hand: bool = False,
) -> list[Site]:
    """The layers of `model` to observe.

    `sites` (modules, dotted names, or what `derive_sites` returns) overrides `module_filter`, which
    overrides the model's own declaration, which overrides the default: every nn.Linear (and Conv1D
    of transformers) whose weight the optimizer owns, but for the `out_proj` that
    nn.MultiheadAttention uses without calling it. Layers whose smaller weight dimension is 1 have
    rank 1 by definition and are left out. Where nothing is left, a warning says what was found,
    unless the caller observes `by_hand`.

    Raises:
        ValueError: For a chosen layer that cannot be observed, is not in the model, or whose weight
            the optimizer does not own; for a filter that selects nothing.
        TypeError: For an entry of `sites` of another kind.
    """
    if sites is not None and module_filter is not None:
        raise ValueError("pass sites= or module_filter=, not both")
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    mine = {id(parameter) for parameter in owned}
    fused = {id(m.out_proj) for m in model.modules() if _is_fused_attention(m)}
    chosen: list[nn.Module]
    if sites is not None:
        sites = _as_list(sites)
        chosen = _resolve(model, sites)
    elif module_filter is not None:
        hits = [module for module in model.modules() if module_filter(module)]
        # A permissive filter also lets containers and norms through: they have nothing to observe.
        chosen = [m for m in hits if matrix_parameter(m) is not None or unobservable_matrix(m)]
        if not chosen:
            raise ValueError("module_filter selected no layer with a weight matrix")
        # A filter on nn.Linear does not mean those inside fused attention; where it selects nothing
        # else it does, and the step says that they stayed silent.
        chosen = [module for module in chosen if id(module) not in fused] or chosen
    else:
        declared = declared_sites(model)
        if declared == []:
            return []
        linear = [m for m in model.modules() if is_linear(m) and id(m) not in fused]
        chosen = linear if declared is None else declared
    found: dict[int, Site] = {}
    left_out: dict[str, list[str]] = {}
    for module in chosen:
        if id(module) not in names:
            raise ValueError(f"site {module} is not a module of the model that is attached")
        name = names[id(module)]
        by_name = module_filter is None
        reason = _FUSED if by_name and id(module) in fused else unobservable(module)
        if reason is not None:
            raise ValueError(f"cannot observe {name!r} ({type(module).__name__}): {reason}")
        parameter = matrix_parameter(module)
        assert parameter is not None
        if id(parameter) not in mine:
            if sites is not None or module_filter is not None:
                raise ValueError(
                    f"cannot observe {name!r}: the optimizer does not own its weight; "
                    "pass the weight to the optimizer or leave the layer out"
                )
            computed = not isinstance(parameter, nn.Parameter)
            left_out.setdefault(_COMPUTED if computed else _FOREIGN, []).append(name)
        elif smaller_side(parameter) < 2:
            left_out.setdefault(_THIN, []).append(name)
        else:
            found.setdefault(id(module), Site(name, module, parameter))
    if sites is not None and _THIN in left_out and found:
        warn(f"{_listed(left_out[_THIN])} is not observed, {_THIN}")
    if not found and sites != [] and not by_hand:
        looked = "what you named" if sites or module_filter else _DEFAULT
        warn(f"nothing is observed: looked for {looked}, found {_candidates(model, left_out)}")
    return list(found.values())


_FUSED = (
    "nn.MultiheadAttention uses its weight without calling it; build the attention from nn.Linear "
    "layers or call observe_residual"
)
_FOREIGN = (
    "whose weight this optimizer does not own: build it from the parameters of the very model that "
    "is attached (a deep copy has others)"
)
_COMPUTED = (
    "whose weight is computed from other parameters (weight_norm or another parametrization): "
    "call observe_residual"
)
_THIN = "whose weight has a side of 1, and with it an entropy rank of 1"


_DEFAULT = (
    "the layers that the model declares in optimizer_observation_modules(), or else its nn.Linear "
    "layers"
)


def _candidates(model: nn.Module, left_out: dict[str, list[str]]) -> str:
    """What a model has where no layer of it is observed, and what to do about it."""
    found = [f"{_listed(names)}, {reason}" for reason, names in left_out.items()]
    if not found:
        convolutions = []
        for name, module in model.named_modules():
            if _is_fused_attention(module):
                inner = f"{name}.out_proj" if name else "out_proj"
                found.append(f"{inner!r}, but {_FUSED}")
            elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                found.append(f"{name or type(module).__name__!r}, but {unobservable(module)}")
            elif isinstance(module, nn.modules.conv._ConvNd) and not unobservable(module):
                convolutions.append(name or type(module).__name__)
        if convolutions:
            found.append(f"convolutions {_listed(convolutions)}, observed where sites= names them")
    return "; ".join(found) or "none. Name other layers with sites=, or call observe_residual"


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")


def _is_fused_attention(module: nn.Module) -> bool:
    """Whether it is torch's attention, with torch's own forward."""
    fused = nn.MultiheadAttention
    return isinstance(module, fused) and type(module).forward is fused.forward


def is_linear(module: nn.Module) -> bool:
    """Whether it is an nn.Linear, or the transposed one, weight (in, out), that GPT-2 is made of."""
    if isinstance(module, nn.Linear):
        return True
    weight, width = getattr(module, "weight", None), getattr(module, "nf", None)
    conv1d = type(module).__name__ == "Conv1D" and isinstance(weight, Tensor)
    return conv1d and weight.ndim == 2 and weight.shape[1] == width  # type: ignore[union-attr]


def unobservable_matrix(module: nn.Module) -> bool:
    """Whether a layer without a single matrix still holds several (fused attention, recurrence)."""
    return any(p.ndim >= 2 for p in module.parameters(recurse=False))


def _as_list(sites: Iterable[Any]) -> list[Any]:
    if isinstance(sites, (str, nn.Module)):
        raise TypeError("sites= takes a list of modules, names or derived sites, not a single one")
    if isinstance(sites, Mapping):
        raise TypeError("sites= takes a list of modules, names or derived sites, not a mapping")
    return list(sites)


def _resolve(model: nn.Module, sites: list[Any]) -> list[nn.Module]:
    modules = []
    for item in sites:
        if isinstance(item, nn.Module):
            modules.append(item)
        elif isinstance(item, str) or isinstance(getattr(item, "path", None), str):
            if getattr(item, "observed", True) is False:
                continue
            path = item if isinstance(item, str) else item.path
            try:
                modules.append(model.get_submodule(path))
            except AttributeError as error:
                raise ValueError(f"the model has no module named {path!r}") from error
        else:
            raise TypeError(
                "sites= takes modules, dotted names or what derive_sites returns, "
                f"got {type(item).__name__}"
            )
    return modules

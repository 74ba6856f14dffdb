"""One run of a model, watched operation by operation: which matrices read which representation.

A dispatch mode sees every tensor operation of an eager run, below all modules and composites, so
nothing depends on how layers are named or written. Each storage carries a `Trail`: whether it
descends from the example, which new representation it holds that no trainable matrix has read yet,
and which parameters it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Read", "record_reads"]


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# What an operation does to a representation, by its ATen name without overload and trailing "_".
_CONTRACTIONS = _names(
    "mm addmm _grouped_mm bmm baddbmm mv addmv dot vdot linear matmul convolution _convolution "
    "mkldnn_convolution cudnn_convolution"
)
_LINEAR = _names(
    "add sub rsub neg mean sum cat stack clone copy _to_copy to contiguous fill zero index_select "
    "gather slice_scatter select_scatter index_put index_add scatter_add constant_pad_nd pad "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d avg_pool1d avg_pool2d "
    "_adaptive_avg_pool2d adaptive_avg_pool2d mean_dim cumsum roll flip repeat native_dropout "
    "upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d im2col "
    "col2im pixel_shuffle pixel_unshuffle tril triu masked_fill lerp addcmul detach lift_fresh "
    "resize set _fft_r2c _fft_c2r _fft_c2c real imag view_as_real view_as_complex complex conj "
    "_conj _neg_view positive unsafe_split split_with_sizes_copy"
)
_CREATIONS = _names(
    "new_zeros zeros_like ones_like new_ones empty_like new_empty new_empty_strided full_like "
    "new_full rand_like randn_like bernoulli"
)
_LOOKUPS = _names("embedding index index_select gather take_along_dim")
_ROWWISE_NORMS = _names("native_layer_norm _fused_rms_norm rms_norm fused_rms_norm")
_BATCH_NORMS = _names(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm "
    "_batch_norm_with_update native_group_norm"
)
_PRODUCTS = _names("mul div")
_POWERS = _names(
    "pow square sqrt rsqrt reciprocal linalg_vector_norm norm var var_mean std std_mean clamp_min "
    "clamp maximum abs"
)
_SELECTIONS = _names("topk argmax argmin argsort sort max min index multinomial")
_RECURRENCES = _names(
    "mkldnn_rnn_layer lstm gru rnn_tanh rnn_relu _thnn_fused_lstm_cell _thnn_fused_gru_cell "
    "_cudnn_rnn"
)


@dataclass(frozen=True)
class Trail:
    """What is known of one storage."""

    live: bool = False
    pending: tuple[str, ...] = ()
    parameters: frozenset[int] = frozenset()
    index: bool = False
    """Made of the example's integers: tokens, positions, masks."""
    statistic: bool = False
    """Made by powers and reductions alone, as the scale of a norm is."""
    reduced: int = 0
    """Summed or averaged over the last axis: 1 as it was, 2 after powers (an energy, a norm)."""


_NOTHING = Trail()
_SOFTMAX = "softmax mixing"


class Read(NamedTuple):
    """A trainable matrix met a live representation.

    Attributes:
        parameter: The matrix.
        boundary: The nonlinear operations whose result it reads first; empty where it reads none.
        path: The module that was running.
        called: Whether that module is the matrix's own layer.
        operation: The operation that contracted it, where that is a fused one.
        summary: Whether it reads norms and energies only, not the representation itself.
    """

    parameter: Tensor
    boundary: tuple[str, ...]
    path: str
    called: bool
    operation: str | None
    summary: bool = False


@dataclass
class _Watch(TorchDispatchMode):
    model: nn.Module
    reads: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.parameters = {id(p): p for p in self.model.parameters()}
        self.trails: dict[int, Trail] = {}
        self.kept: list[Any] = []
        self.running: list[tuple[str, nn.Module]] = [("", self.model)]
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                self.mark(parameter, Trail(parameters=frozenset([id(parameter)])))
        self.paths = {id(m): name for name, m in self.model.named_modules()}

    # -- trails -----------------------------------------------------------------------------------

    def mark(self, tensor: Tensor, trail: Trail) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.trails:
            # Kept alive, so that no later storage takes over this one's key.
            self.kept.append(storage)
        self.trails[key] = trail

    def trail(self, tensor: Tensor) -> Trail:
        return self.trails.get(tensor.untyped_storage()._cdata, _NOTHING)

    # -- the mode ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # What `out=` points to is overwritten, not read.
        given = {key: value for key, value in kwargs.items() if key != "out"}
        inputs = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        before = [self.trail(t) for t in inputs]
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if outputs:
            trail = self.follow(name, args, inputs, before)
            trails = [trail] * len(outputs)
            if name in ("var_mean", "std_mean"):
                trails[1] = before[0]  # A mean is linear.
            known = {t.untyped_storage()._cdata for t in inputs}
            for output, trail in zip(outputs, trails, strict=True):
                shared = output.untyped_storage()._cdata in known
                written = any(output is t for t in inputs)
                if shared and not written:
                    continue  # A view: the same storage, the same trail.
                self.write(output, trail, partial=written and output._is_view())
        return result

    def write(self, output: Tensor, trail: Trail, partial: bool) -> None:
        if partial:
            trail = _merge([self.trail(output), trail])
        self.mark(output, trail)

    def follow(
        self, name: str, args: Sequence[Any], inputs: list[Tensor], before: list[Trail]
    ) -> Trail:
        """The trail of an operation's result; notes the matrices that it reads."""
        if name in _CREATIONS or name == "isnan":
            return _NOTHING  # What marks damaged entries is no representation, either.
        merged = _merge(before)
        live = [t for t in before if t.live]
        if not live:
            # Rows of a trainable table picked by the example's integers begin a representation.
            picks = name in _LOOKUPS or name in _CONTRACTIONS
            return Trail(live=True) if picks and merged.index and merged.parameters else merged
        if name in _CONTRACTIONS:
            return self.contraction(name, inputs, before)
        if name in _ROWWISE_NORMS:
            # Each row is rescaled by one number: its direction, all a matrix reads, is the same.
            return before[0]
        if name in _BATCH_NORMS:
            training = "no_training" not in name and any(a is True for a in args)
            if training or name == "native_group_norm":
                return self.nonlinear("normalisation with live statistics")
            return before[0]
        if name in _PRODUCTS:
            return self.product(inputs, before) if len(live) > 1 else merged
        if name in _RECURRENCES:
            self.fused(name, inputs, before)
            return self.nonlinear("recurrence")
        if "scaled_dot_product" in name or "softmax" in name:
            return self.nonlinear(_SOFTMAX)
        if name in _LOOKUPS or name in ("where", "masked_fill"):
            chosen = any(
                t.live and not x.is_floating_point() for t, x in zip(before, inputs, strict=True)
            )
            return self.nonlinear("routing") if chosen else merged
        if name in ("sum", "mean") and _over_last_axis(args, inputs[0]):
            return replace(merged, reduced=2 if merged.statistic else 1)
        if name in _LINEAR or not any(x.is_floating_point() for x in inputs):
            return merged
        if name in _SELECTIONS:
            return self.nonlinear("routing")
        if any(t.parameters and not t.live for t in before):
            self.fused(name, inputs, before)
        new = self.nonlinear(_readable(name))
        whole = "norm" in name and _over_last_axis(args[1:], inputs[0])
        return replace(new, statistic=name in _POWERS, reduced=2 if whole else merged.reduced)

    def nonlinear(self, operation: str) -> Trail:
        """A new representation, named by the activation module that makes it, if one does."""
        path, module = self.running[-1]
        alone = path and next(module.parameters(), None) is None
        return Trail(True, (type(module).__name__ if alone else operation,))

    def product(self, inputs: list[Tensor], before: list[Trail]) -> Trail:
        """A product or quotient of two live tensors: a norm's rescaling, or a gate."""
        (a, x), (b, y) = zip(before, inputs, strict=True)
        if x is y:
            return replace(self.nonlinear("square"), statistic=True)
        for scale, size, other in ((b, y, a), (a, x, b)):
            per_row = size.ndim == 0 or size.shape[-1] == 1 or size.stride(-1) == 0
            if scale.statistic and per_row:
                return other
        if a.statistic and b.statistic:
            return _merge([a, b])
        mixing = any(_SOFTMAX in t.pending for t in (a, b))
        gated = self.nonlinear(_SOFTMAX if mixing else "multiplicative gate")
        return replace(gated, reduced=_merge([a, b]).reduced)

    def contraction(self, name: str, inputs: list[Tensor], before: list[Trail]) -> Trail:
        sides = list(zip(before, inputs, strict=True))
        added = [sides.pop(0)[0]] if name in ("addmm", "baddbmm", "addmv") else []
        (a, _), (b, _) = sides[:2]
        if a.live and b.live:
            mixing = any(_SOFTMAX in t.pending for t in (a, b))
            result = self.nonlinear(_SOFTMAX if mixing else "product of representations")
        elif not (a.live or b.live):
            result = _merge([a, b])
        else:
            representation, matrix = (a, b) if a.live else (b, a)
            if matrix.parameters:
                summary = representation.reduced == 2
                self.note(matrix.parameters, representation.pending, None, summary)
                result = Trail(live=True)
            else:
                # A fixed or frozen matrix: the branch goes on to the first trainable one.
                result = representation
        return _merge([*(t for t in added if t.live), result])

    def fused(self, name: str, inputs: list[Tensor], before: list[Trail]) -> None:
        pending = _merge([t for t in before if t.live]).pending
        for trail, tensor in zip(before, inputs, strict=True):
            if not trail.live and trail.parameters and tensor.ndim >= 2:
                self.note(trail.parameters, pending or ("recurrence",), _readable(name))

    def note(
        self,
        parameters: frozenset[int],
        boundary: tuple[str, ...],
        operation: str | None,
        summary: bool = False,
    ) -> None:
        path, module = self.running[-1]
        for key in parameters:
            parameter = self.parameters[key]
            if parameter.ndim < 2:
                continue
            own = any(p is parameter for p in module.parameters(recurse=False))
            called = own and operation is None
            self.reads.append(Read(parameter, boundary, path, called, operation, summary))

    # -- which module is running ------------------------------------------------------------------

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        handles = []

        def enter(module: nn.Module, args: Any) -> None:
            self.running.append((self.paths[id(module)], module))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _merge(trails: Sequence[Trail]) -> Trail:
    pending = dict.fromkeys(name for t in trails if t.live for name in t.pending)
    live = [t for t in trails if t.live]
    return Trail(
        live=bool(live),
        pending=tuple(pending),
        parameters=frozenset() if live else frozenset(p for t in trails for p in t.parameters),
        index=not live and any(t.index for t in trails),
        statistic=bool(live) and all(t.statistic for t in live),
        reduced=max(t.reduced for t in live) if live and all(t.reduced for t in live) else 0,
    )


def _over_last_axis(args: Sequence[Any], tensor: Tensor) -> bool:
    """Whether a reduction's arguments name the last axis and no other."""
    axes = next((a for a in args if isinstance(a, (list, tuple))), None)
    return axes is not None and [a % tensor.ndim for a in axes] == [tensor.ndim - 1]


def _readable(name: str) -> str:
    return name.removeprefix("native_").strip("_").replace("_", " ")


def record_reads(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> list[Read]:
    """Run `model(*args, **kwargs)` once and list every reading of a trainable matrix, in order.

    The model runs in the mode it is in; buffers and the random state are put back afterwards.
    """
    watch = _Watch(model)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for tensor in tree_leaves((args, kwargs or {})):
        if isinstance(tensor, Tensor):
            live = tensor.is_floating_point() or tensor.is_complex()
            watch.mark(tensor, Trail(live=live, index=not live))
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(watch.following_modules())
            stack.enter_context(watch)
            model(*args, **(kwargs or {}))
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])
    return watch.reads

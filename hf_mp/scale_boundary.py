"""Autograd functions and hooks that multiply gradients by the loss scale S or by 1/S.

In forward, each function returns its input unchanged, except for the dtype. In backward:

- :func:`cast_to_output` multiplies the gradient of a model output by S and casts it to the dtype of that output.
- :func:`unscaling_aliases` multiplies the gradients of weights and arguments by 1/S and casts them to FP32.

Between the two, gradients are S times their value, so that FP16 does not underflow (Micikevicius et al. 2017,
arXiv 1710.03740, section 3.2). S is read during backward.

Other modules with S or 1/S: ``casting/cpu/matmul.py``, ``weights/split_parameter.py``, ``ranks/fsdp_communication.py``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from hf_mp._warnings import warn_caller
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.native import native
from hf_mp.kernels.tensors import supports_foreach


class ScaleProvider(Protocol):
    """Provides S and 1/S, FP32 of shape (1,), to autograd nodes at the scale boundary, during backward."""

    def loss_scale_for(self, device: torch.device) -> Tensor | None:
        """Return S; None if gradients are not scaled."""

    def inverse_scale_for(self, device: torch.device, node: Any, indices: Sequence[int]) -> Tensor | None:
        """Return 1/S for the gradients of the inputs ``indices`` of ``node``; None if they are not scaled."""

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        """Called when ``gradient``, scaled, reaches a model output, before other nodes of the model run."""

    def take_scaled_gradients(self, node: Any, gradients: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        """Remove from ``gradients``, by input of ``node``, those that autograd must not accumulate; store them scaled.

        ``inverse`` unscales them.
        """


class _ScaleGradient(Function):
    """Multiplies a gradient by S or 1/S in FP32. The backward is the identity, :class:`_PassGradient`.

    With ``create_graph=True`` a penalty reads unscaled gradients, g = G/S of scaled ones G. Its own gradient is S times
    its value where it enters the scaled graph, as all gradients there. The chain rule would multiply by 1/S.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor, scale_provider: ScaleProvider) -> Tensor:
        ctx.dtype, ctx.factor, ctx.scale_provider = gradient.dtype, factor, scale_provider
        return gradient * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.scale_provider.on_output_gradient(ctx, gradient)
        return _PassGradient.apply(gradient, ctx.factor, ctx.scale_provider).to(ctx.dtype), None, None


class _PassGradient(Function):
    """Identity. Its backward is :class:`_ScaleGradient`, for third derivatives."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor, scale_provider: ScaleProvider) -> Tensor:
        ctx.factor, ctx.scale_provider = factor, scale_provider
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.scale_provider.on_output_gradient(ctx, gradient)
        return scale_gradient(gradient, ctx.factor, ctx.scale_provider), None, None


def scale_gradient(gradient: Tensor, factor: Tensor | None, scale_provider: ScaleProvider) -> Tensor:
    """Multiply ``gradient`` by ``factor`` in FP32 (None for 1), differentiably; scale a second derivative too."""
    if factor is None:
        return gradient
    if torch.is_grad_enabled():  # create_graph=True
        return _ScaleGradient.apply(gradient, factor, scale_provider).reshape(gradient.shape)
    # A DTensor can be multiplied by a plain tensor of shape () only.
    if gradient.is_sparse or hasattr(gradient, "device_mesh"):
        return gradient.to(torch.float32) * factor.squeeze()
    # FP16 times FP32 of shape (1,) is computed in FP32 and is FP32: one kernel.
    return (gradient * factor).reshape(gradient.shape)


def accumulating_edges(node: Any, indices: Iterable[int]) -> list[int]:
    """Return those of ``indices``, of inputs of ``node``, with gradients that the running backward adds to ``.grad``.

    None in ``torch.autograd.grad``, and none with ``create_graph=True``, so that autograd accumulates gradients with a
    graph.
    """
    if torch.is_grad_enabled():  # create_graph=True
        return []
    functions = node.next_functions  # a new tuple at each read
    try:  # torch has no public API to distinguish backward() from autograd.grad()
        return [index for index in indices if torch._C._will_engine_execute_node(functions[index][0])]
    except RuntimeError:  # raised in torch.autograd.grad
        return []


# Dtype of the unscaled gradient, by dtype of the tensor; other dtypes are kept.
_GRAD_DTYPE = dict.fromkeys(LOWER_PRECISION_DTYPES, torch.float32)


# Gradients with more elements are scaled by themselves on a GPU: joining moves 8 bytes an element more, which takes
# longer than a launch.
_JOINED_ELEMENTS = 2**20


class _UnscalingAliases(Function):
    @staticmethod
    def forward(
        ctx: Any, scale_provider: ScaleProvider, copies: Sequence[Tensor | None], with_aliases: bool, *originals: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.scale_provider, ctx.originals = scale_provider, originals
        ctx.alias_set_use_ref = None  # set by AliasSetUse
        ctx.first_copy = len(originals) if with_aliases else 0
        ctx.original_index = list(range(ctx.first_copy))  # of each result
        # Not views: the forward may write to an activation in place.
        with torch._C.DisableTorchFunctionSubclass():  # of a split parameter, the stored 16 bits
            results = [tensor.detach() for tensor in originals] if with_aliases else []
            for index, copy in enumerate(copies):
                if copy is not None:
                    ctx.original_index.append(index)
                    results.append(copy.detach())
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.alias_set_use_ref is not None and (use := ctx.alias_set_use_ref()) is not None:
            # torch has no public API for retain_graph.
            use.is_over = not torch._C._autograd._get_current_graph_task_keep_graph()
        with torch._C.DisableTorchFunctionSubclass():  # only dtypes and devices of split parameters are read
            return None, None, None, *_unscale_and_sum(ctx, gradients)


_UNSCALE_NODE: Any = _UnscalingAliases._backward_cls  # the class of its nodes


def _unscale_and_sum(ctx: Any, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Multiply the gradients of aliases and copies by 1/S in FP32, and sum those of the same original.

    Returns one gradient, or None, for each of ``ctx.originals``: FP32 for an FP16/BF16 tensor, otherwise in its dtype.
    """
    scale_provider, originals = ctx.scale_provider, ctx.originals
    by_original: dict[int, list[Tensor]] = {}
    for index, gradient in zip(ctx.original_index, gradients, strict=True):
        if gradient is not None:
            by_original.setdefault(index, []).append(gradient)
    inverse = None
    if by_original:
        inverse = scale_provider.inverse_scale_for(originals[0].device, ctx, list(by_original))
    scale_provider.take_scaled_gradients(ctx, by_original, inverse)  # removes those that it stores
    sums: list[Tensor | None] = [None] * len(originals)
    unscaled = _scale_gradients([each[0] for each in by_original.values()], inverse, scale_provider)
    for (index, scaled), total in zip(by_original.items(), unscaled, strict=True):
        # autograd rounds the FP32 gradient of an FP16/BF16 activation.
        dtype = _GRAD_DTYPE.get(originals[index].dtype, originals[index].dtype)
        total = total if total.dtype is dtype else total.to(dtype)
        sums[index] = _add_unscaled(total, scaled[1:], inverse, scale_provider) if len(scaled) > 1 else total
    return sums


def _add_unscaled(
    total: Tensor, others: Iterable[Tensor], inverse: Tensor | None, scale_provider: ScaleProvider
) -> Tensor:
    """Return the sum of ``total``, which is unscaled, and ``others`` times ``inverse`` (None for 1)."""
    for other in others:
        # A product with 1/S has no other reader, so one kernel multiplies and adds in place.
        if inverse is not None and not torch.is_grad_enabled() and _are_plain(total, other):
            total.addcmul_(other, inverse)
        else:
            total = total + scale_gradient(other, inverse, scale_provider)
    return total


def _scale_gradients(gradients: list[Tensor], factor: Tensor | None, scale_provider: ScaleProvider) -> list[Tensor]:
    """Call :func:`scale_gradient` for each, with few launches for plain gradients.

    On a GPU, several plain gradients are cast to FP32 also if ``factor`` is None.
    """
    has_foreach = len(gradients) > 1 and supports_foreach(gradients[0])
    if factor is None and not has_foreach:
        return gradients
    is_differentiable = torch.is_grad_enabled()  # create_graph=True
    if has_foreach and not is_differentiable and (module := native()) is not None:
        scaled_in_cpp = module.scale_gradients(gradients, factor, _JOINED_ELEMENTS)
        if scaled_in_cpp is not None:
            return scaled_in_cpp
    if len(gradients) < 2 or is_differentiable or not _are_plain(*gradients):  # not for multi-tensor calls
        return [scale_gradient(gradient, factor, scale_provider) for gradient in gradients]
    if factor is not None and not has_foreach:  # on a CPU
        return list(torch._foreach_mul(gradients, [factor] * len(gradients)))
    # On a GPU: large gradients by themselves, the others by dtype.
    scaled, by_dtype = dict[int, Tensor](), dict[torch.dtype, list[int]]()
    for index, gradient in enumerate(gradients):
        if factor is not None and gradient.numel() > _JOINED_ELEMENTS:
            scaled[index] = gradient * factor
        else:
            by_dtype.setdefault(gradient.dtype, []).append(index)
    for dtype, indices in by_dtype.items():
        group = _scale_jointly(dtype, [gradients[index] for index in indices], factor)
        scaled.update(zip(indices, group, strict=True))
    return [scaled[index] for index in range(len(gradients))]


def _scale_jointly(dtype: torch.dtype, gradients: list[Tensor], factor: Tensor | None) -> Sequence[Tensor]:
    """Multiply plain gradients of ``dtype`` by ``factor`` in FP32 (None for 1) on a GPU, in at most two launches."""
    if dtype not in LOWER_PRECISION_DTYPES:
        return gradients if factor is None else torch._foreach_mul(gradients, factor.squeeze())
    results = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    torch._foreach_copy_(results, gradients)
    if factor is not None:
        torch._foreach_mul_(results, factor.squeeze())  # shape (1,) would take a launch for each
    return results


def _are_plain(*gradients: Tensor) -> bool:
    """Return whether multi-tensor calls and sums in place support all ``gradients``."""
    # is_grads_batched=True passes batched tensors. A product of a 0-dimensional tensor with the factor has shape (1,).
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return all(
        [
            type(one) in (Tensor, FakeTensor) and one.layout is torch.strided and one.dim() and not is_batched(one)
            for one in gradients
        ]
    )


# Autograd runs ready nodes in descending order of their sequence number. Unscale nodes are created before the forward,
# so they would run last, and all 16-bit gradients would stay allocated until then. With the number of AccumulateGrad,
# the largest, they run as soon as they are ready.
_HIGHEST_PRIORITY = 2**64 - 1


@functools.cache
def _can_order_nodes() -> bool:
    # torch has no public API for the order of nodes.
    return hasattr(torch._C._FunctionBase, "_set_sequence_nr")


@functools.cache  # once
def _warn_without_order() -> None:
    warn_caller(
        "this torch cannot order autograd nodes (_set_sequence_nr is gone): gradients reach the parameters at the "
        "end of a backward, which takes up to 2 bytes a parameter more, and DDP's all-reduce does not overlap"
    )


def unscaling_aliases(
    originals: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    scale_provider: ScaleProvider,
    *,
    with_aliases: bool = True,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Make aliases of tensors and of their copies, outputs of one unscale node.

    Args:
        originals: tensors of one device.
        copies: the FP16/BF16 copy of each, or None; at least one if not ``with_aliases``.
        with_aliases: whether to make aliases of ``originals``.

    Returns:
        Two lists in the order of ``originals``: their aliases (the originals if not ``with_aliases``), and the aliases
        of ``copies`` (None for None).
    """
    made = _UnscalingAliases.apply(scale_provider, copies, with_aliases, *originals)
    if (node := made[0].grad_fn) is not None:  # None if no original requires a gradient
        node.number = node._sequence_nr()  # for reaches_forward()
        if _can_order_nodes():
            node._set_sequence_nr(_HIGHEST_PRIORITY)
        else:
            _warn_without_order()
    results = iter(made)
    aliases = [next(results) for _ in originals] if with_aliases else list(originals)
    return aliases, [None if copy is None else next(results) for copy in copies]


class AliasSetUse:
    """Use of an alias set (:class:`hf_mp.weights.slots.AliasSet`) by one forward; nodes of its graph reference it.

    The unscale nodes of the set have weak references. So the set is free for another forward if the graph is freed, or
    if ``is_over``: a backward without ``retain_graph`` has run through the nodes.
    """

    def __init__(self, nodes: Iterable[Any], scale_provider: ScaleProvider) -> None:
        self.is_over = False
        self.scale_provider = scale_provider
        for node in nodes:
            # An earlier forward may have created the node. For reaches_forward(), it is new.
            node.number = torch.autograd._get_sequence_nr()
            node.alias_set_use_ref = weakref.ref(self)
            # A proxy, because the garbage collector cannot free a cycle through a node.
            node.scale_provider = weakref.proxy(scale_provider)


class _UnscaleHook:
    """Hook of an autograd node that unscales the gradients of its inputs ``indices``, external tensors.

    The scale provider receives it as ``node``, and reads ``next_functions`` and ``originals``.
    """

    def __init__(self, node: Any, indices: Iterable[int], scale_provider: ScaleProvider) -> None:
        # Copy `next_functions` instead of storing `node`: a hook that references its node is never freed.
        self.scale_provider, self.next_functions = scale_provider, node.next_functions
        self.originals = {index: getattr(self.next_functions[index][0], "variable", None) for index in indices}

    def __call__(self, gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        results, provider = list(gradients), self.scale_provider
        for index in self.originals:
            gradient = gradients[index]
            if gradient is None:
                continue
            inverse = provider.inverse_scale_for(gradient.device, self, [index])
            to_accumulate = {index: [gradient]}
            provider.take_scaled_gradients(self, to_accumulate, inverse)  # may remove the gradient
            # autograd allows a hook no other dtype. For nearly all ops it is that of the external tensor.
            results[index] = scale_gradient(gradient, inverse, provider).to(gradient.dtype) if to_accumulate else None
        return tuple(results)


def reaches_forward(node: Any, first_node: int, known_external: set[Any]) -> bool:
    """Return whether the graph below ``node`` has a node that the current forward created.

    ``first_node`` is the sequence number of the first node of the forward. Nodes for which the result is False are
    added to ``known_external``.

    The number of ``node`` itself does not decide, because threads count separately: on a GPU, nodes that
    ``torch.autograd.grad(create_graph=True)`` creates during the forward have small numbers.
    """
    todo, seen = [node], {node}
    while todo:
        for child, _ in todo.pop().next_functions:
            if child is None or child in seen or child in known_external:
                continue
            number = child.number if type(child) is _UNSCALE_NODE else child._sequence_nr()
            if first_node <= number < _HIGHEST_PRIORITY:
                return True
            seen.add(child)
            todo.append(child)
    known_external |= seen
    return False


def add_unscale_hooks(
    results: Sequence[Tensor],
    scale_provider: ScaleProvider,
    first_node: int,
    was_made_by_forward: Callable[[Any], bool],
) -> bool:
    """Add an unscale hook at each edge of the graph of ``results`` to an external tensor; return whether there is one.

    That is an edge to a leaf, or to a node with a number below ``first_node``, unless ``was_made_by_forward`` or
    :func:`reaches_forward` is true of the node. Unscale nodes need no hook, nor do the inputs in
    ``node.unscaled_inputs``, with gradients that are unscaled through :class:`GradientTarget`.
    """
    module = native()
    # Python objects of nodes take most of the time.
    if module is not None and module.has_no_external_edge(results, first_node, _HIGHEST_PRIORITY, _UNSCALE_NODE):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # to not cast a deferred output
        todo: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
    has_added = False
    seen, known_external = {None, *todo}, set[Any]()
    for node in todo:  # the list grows
        indices = []
        for index, (child, _) in enumerate(node.next_functions):
            if child in seen or type(child) is _UNSCALE_NODE:
                continue
            is_of_forward = (
                first_node <= child._sequence_nr() < _HIGHEST_PRIORITY  # the number of AccumulateGrad
                or was_made_by_forward(child)
                or reaches_forward(child, first_node, known_external)
            )
            if is_of_forward:
                seen.add(child)
                todo.append(child)
            elif index not in getattr(node, "unscaled_inputs", ()):
                indices.append(index)
        if indices:
            has_added |= _add_unscale_hook(node, indices, scale_provider)
    return has_added


def _add_unscale_hook(node: Any, indices: Sequence[int], scale_provider: ScaleProvider) -> bool:
    """Add an unscale hook for inputs of ``node``; return False if an earlier forward has added it."""
    providers = node.metadata.setdefault(_UnscaleHook, [])
    if scale_provider in providers:
        return False
    providers.append(scale_provider)
    node.register_hook(_UnscaleHook(node, indices, scale_provider))
    return True


def is_of_model(node: Any, scale_provider: ScaleProvider) -> bool:
    """Return whether a forward of the model of ``scale_provider`` created an autograd node.

    If so, its graph contains an unscale node or unscale hook of the model that is not below a model output.
    """
    todo, seen = [node], {node, None}
    for each in todo:  # the list grows
        if type(each) is _UNSCALE_NODE:
            if each.scale_provider == scale_provider:  # not `is`: the node may have a weakref.proxy of it
                return True
        elif scale_provider in each.metadata.get(_UnscaleHook, ()):
            return True
        elif type(each) is not _OUTPUT_NODE:
            new = [child for child, _ in each.next_functions if child not in seen]
            seen.update(new)
            todo += new
    return False


def leaf_edges(results: Iterable[Tensor], first_node: int) -> Iterator[tuple[Any, int, Tensor]]:
    """Yield ``(node, input index, leaf)`` for each edge to a leaf in the graph of ``results``.

    Nodes with a number below ``first_node``, unscale nodes and the inputs in ``node.unscaled_inputs`` are skipped.
    """
    with torch._C.DisableTorchFunction():
        todo: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
    seen = {None, *todo}
    for node in todo:  # the list grows
        for index, (child, _) in enumerate(node.next_functions):
            if child in seen or type(child) is _UNSCALE_NODE or index in getattr(node, "unscaled_inputs", ()):
                continue
            if (leaf := getattr(child, "variable", None)) is not None:
                yield node, index, leaf
            elif child._sequence_nr() >= first_node:
                seen.add(child)
                todo.append(child)


def add_leaf_unscale_hooks(
    results: Iterable[Tensor], scale_provider: ScaleProvider, first_node: int, is_external: Callable[[Tensor], bool]
) -> None:
    """Add an unscale hook at each edge of :func:`leaf_edges` to a leaf that ``is_external``."""
    indices: dict[Any, list[int]] = {}
    for node, index, leaf in leaf_edges(results, first_node):
        if is_external(leaf):
            indices.setdefault(node, []).append(index)
    for node, of_node in indices.items():
        _add_unscale_hook(node, of_node, scale_provider)


def is_in_graph(node: Any, first_node: int) -> bool:
    """Return whether ``node``, not a leaf, is in the graph of the forward with nodes from number ``first_node`` on."""
    return type(node) is _UNSCALE_NODE or first_node <= node._sequence_nr() < _HIGHEST_PRIORITY


def original_of(tensor: Tensor) -> Tensor:
    """Return the original of an output of an unscale node; of any other tensor, the tensor."""
    node: Any = tensor.grad_fn
    return node.originals[node.original_index[tensor.output_nr]] if type(node) is _UNSCALE_NODE else tensor


class GradientTarget(NamedTuple):
    """A weight and the tensor that a forward reads in its place: the weight itself, or an alias of its copy."""

    alias: Tensor
    weight: Tensor  # receives the gradient, in its own dtype
    scale_provider: ScaleProvider | None = None  # None for the weight itself


def gradient_target(alias: Tensor) -> GradientTarget:
    """Return the weight of a working copy, for an op that writes the unscaled gradient of the weight."""
    node: Any = alias.grad_fn
    if type(node) is not _UNSCALE_NODE or alias.output_nr < node.first_copy:
        return GradientTarget(alias, alias)
    return GradientTarget(alias, original_of(alias), node.scale_provider)


class _CastToOutput(Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, scale_provider: ScaleProvider, wrap: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.scale_provider, ctx.dtype = scale_provider, output.dtype
        # GradientCheck distinguishes an inf in a loss from one in the gradients.
        ctx.value = output.detach() if output.numel() == 1 else None
        # Never a view: callers change a loss in place (the Trainer does).
        dtype = _GRAD_DTYPE.get(output.dtype, output.dtype)
        return output.to(dtype, copy=True) if wrap is None else wrap(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scale = ctx.scale_provider.loss_scale_for(gradient.device)
        scaled = scale_gradient(gradient, scale, ctx.scale_provider).to(ctx.dtype)
        ctx.scale_provider.on_output_gradient(ctx, scaled)
        return scaled, None, None


_OUTPUT_NODE: Any = _CastToOutput._backward_cls  # the class of its nodes


def cast_to_output(
    output: Tensor, scale_provider: ScaleProvider | None, wrap: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Cast a model output to FP32; in backward, multiply its gradient by S and cast it to the dtype of ``output``.

    Args:
        output: of any dtype. FP64 and complex outputs keep it, and their gradient is scaled. Integers are unchanged.
        scale_provider: None in a forward without gradients.
        wrap: makes the FP32 tensor from ``output``; default: a copy.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    if scale_provider is not None and output.requires_grad and torch.is_grad_enabled():
        return _CastToOutput.apply(output, scale_provider, wrap)
    return output.to(_GRAD_DTYPE.get(output.dtype, output.dtype))

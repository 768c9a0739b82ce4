"""The borders of a scaled forward, where a gradient is multiplied by the loss scale S, or by 1/S.

Forward is the identity (up to the dtype) everywhere. In backward, a gradient that enters the model's graph through one
of its outputs is multiplied by S, and one that leaves it, to a parameter or to any other tensor made outside, by 1/S.
Outside, every gradient is FP32 and true; inside, every FP16 gradient is S times larger and so clear of underflow
(Micikevicius et al. 2017, arXiv 1710.03740, section 3.2). S is that of the time of the backward.

Others multiply by S or 1/S where a gradient crosses by another way: products on a CPU (``casting/cpu/products.py``),
split parameters (``weights/split_parameter.py``), and what travels in 16 bits (``ranks/``).
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
from hf_mp.kernels.tensors import takes_lists


class ScaleProvider(Protocol):
    """Provides S and 1/S to the nodes at the scale boundary, and is notified of the gradients that enter a model."""

    def loss_scale_for(self, device: torch.device) -> Tensor | None:
        """S, FP32 of shape (1,); None where nothing is scaled."""

    def inverse_scale_for(self, device: torch.device, node: Any, places: Sequence[int]) -> Tensor | None:
        """1/S, FP32 of shape (1,), for gradients that ``node`` hands on by its inputs ``places``; None if unscaled."""

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        """A gradient goes in through the autograd node ``node``, before anything of the model's backward runs."""

    def take_scaled_gradients(self, node: Any, uses: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        """Remove from ``uses``, gradients that ``node`` hands on, by input, those that autograd must not accumulate.

        They are still scaled; ``inverse`` unscales them.
        """


class _ScaleGradient(Function):
    """Multiply a gradient by a factor in FP32; its own backward is the identity.

    What enters through the derivative of an unscaled gradient (a gradient penalty) then travels inside at S times its
    value, as everything inside does, and leaves through a border once.
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
    """The identity, whose backward is :class:`_ScaleGradient`: in a third derivative each is that of the other."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor, scale_provider: ScaleProvider) -> Tensor:
        ctx.factor, ctx.scale_provider = factor, scale_provider
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.scale_provider.on_output_gradient(ctx, gradient)
        return scale_gradient(gradient, ctx.factor, ctx.scale_provider), None, None


def scale_gradient(gradient: Tensor, factor: Tensor | None, scale_provider: ScaleProvider) -> Tensor:
    """Multiply ``gradient`` by ``factor`` in FP32 (None for 1), differentiably.

    A second derivative is scaled too, and ``scale_provider`` is notified of it.
    """
    if factor is None:
        return gradient
    if torch.is_grad_enabled():  # create_graph=True
        return _ScaleGradient.apply(gradient, factor, scale_provider).reshape(gradient.shape)
    if gradient.is_sparse or hasattr(gradient, "device_mesh"):  # a DTensor is multiplied with plain scalars alone
        return gradient.to(torch.float32) * factor.squeeze()
    # FP16 times FP32 of shape (1,) is computed in FP32 and is FP32: one kernel.
    return (gradient * factor).reshape(gradient.shape)


def accumulating_edges(node: Any, indices: Iterable[int]) -> list[int]:
    """The ``indices`` of edges by which the backward of ``node`` fills ``.grad``; none in ``autograd.grad``."""
    if torch.is_grad_enabled():  # create_graph=True
        return []
    functions = node.next_functions  # made anew at each look
    try:
        # The engine alone knows whether this is backward(), which fills .grad, or autograd.grad(), which does not.
        return [index for index in indices if torch._C._will_engine_execute_node(functions[index][0])]
    except RuntimeError:  # how torch says that this is torch.autograd.grad
        return []


_GRAD_DTYPE = dict.fromkeys(LOWER_PRECISION_DTYPES, torch.float32)  # of the dtypes that change at a border


# The largest gradient that is cast on a GPU together with others. Two calls for all move 8 bytes an element more than
# one call for each, and for a larger gradient these bytes take longer than a launch.
_JOINED_ELEMENTS = 2**20


class _UnscalingAliases(Function):
    @staticmethod
    def forward(
        ctx: Any, scale_provider: ScaleProvider, copies: Sequence[Tensor | None], with_aliases: bool, *outside: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.scale_provider, ctx.outside, ctx.use = scale_provider, outside, None
        ctx.first_copy = len(outside) if with_aliases else 0
        ctx.leads_to = list(range(ctx.first_copy))  # for each result, its place in `outside`
        # Views cannot be written to in place: copies must not be, activations that come in may.
        with torch._C.DisableTorchFunctionSubclass():  # plain tensors, whatever reads of a weight outside give
            inside = [tensor.detach() for tensor in outside] if with_aliases else []
            for place, copy in enumerate(copies):
                if copy is not None:
                    ctx.leads_to.append(place)
                    inside.append(copy.detach())
        return tuple(inside)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.use is not None and (use := ctx.use()) is not None:
            # Nothing public tells whether a backward retains its graph.
            use.is_over = not torch._C._autograd._get_current_graph_task_keep_graph()
        with torch._C.DisableTorchFunctionSubclass():  # weights are only looked at
            return None, None, None, *_unscale_uses(ctx, gradients)


_UNSCALE_NODE: Any = _UnscalingAliases._backward_cls  # the class of its nodes


def _unscale_uses(ctx: Any, gradients: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The gradients of tensors outside from those of their uses inside: each times 1/S in FP32, then summed."""
    scale_provider, outside = ctx.scale_provider, ctx.outside
    uses: dict[int, list[Tensor]] = {}  # for the place of a tensor outside, the gradients of what it is inside
    for place, gradient in zip(ctx.leads_to, gradients, strict=True):
        if gradient is not None:
            uses.setdefault(place, []).append(gradient)
    factor = scale_provider.inverse_scale_for(outside[0].device, ctx, list(uses)) if uses else None
    scale_provider.take_scaled_gradients(ctx, uses, factor)
    found: list[Tensor | None] = [None] * len(outside)
    products = _scale_gradients([each[0] for each in uses.values()], factor, scale_provider)
    for (place, (_, *others)), product in zip(uses.items(), products, strict=True):
        # Of an activation outside that is FP16, autograd rounds the gradient.
        dtype = _GRAD_DTYPE.get(outside[place].dtype, outside[place].dtype)
        total = product if product.dtype is dtype else product.to(dtype)
        for other in others:
            # A product is nobody else's: one kernel adds to it, and makes no second FP32 tensor.
            if factor is not None and not torch.is_grad_enabled() and _are_plain(total, other):
                total.addcmul_(other, factor)
            else:
                total = total + scale_gradient(other, factor, scale_provider)
        found[place] = total
    return found


def _scale_gradients(gradients: list[Tensor], factor: Tensor | None, scale_provider: ScaleProvider) -> list[Tensor]:
    """:func:`scale_gradient` of each, plain ones in few calls; on a GPU these are FP32 also without a factor."""
    is_listed = len(gradients) > 1 and takes_lists(gradients[0])
    if factor is None and not is_listed:
        return gradients
    if len(gradients) < 2 or torch.is_grad_enabled() or not _are_plain(*gradients):
        return [scale_gradient(gradient, factor, scale_provider) for gradient in gradients]
    if factor is not None and not is_listed:
        return list(torch._foreach_mul(gradients, [factor] * len(gradients)))  # in FP32, as :func:`scale_gradient`
    found, kinds = dict[int, Tensor](), dict[torch.dtype | None, list[int]]()
    for place, gradient in enumerate(gradients):
        is_large = factor is not None and gradient.numel() > _JOINED_ELEMENTS
        kinds.setdefault(None if is_large else gradient.dtype, []).append(place)
    for dtype, places in kinds.items():
        found.update(zip(places, _products(dtype, [gradients[place] for place in places], factor), strict=True))
    return [found[place] for place in range(len(gradients))]


def _products(dtype: torch.dtype | None, gradients: list[Tensor], factor: Tensor | None) -> Sequence[Tensor]:
    """Plain gradients of ``dtype`` (None: one by one) times ``factor`` in FP32, on a GPU; as :func:`scale_gradient`."""
    if dtype is None and factor is not None:
        return [gradient * factor for gradient in gradients]
    if dtype not in LOWER_PRECISION_DTYPES:
        return gradients if factor is None else torch._foreach_mul(gradients, factor.squeeze())
    products = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    torch._foreach_copy_(products, gradients)
    if factor is not None:
        torch._foreach_mul_(products, factor.squeeze())  # of shape (1,) it would take a launch for each
    return products


def _are_plain(*gradients: Tensor) -> bool:
    """Whether multi-tensor calls, and sums in place, take all ``gradients``."""
    # is_grads_batched=True gives batched tensors; a product with the factor, of shape (1,), has a dimension.
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return all(
        [
            type(one) in (Tensor, FakeTensor) and one.layout is torch.strided and one.dim() and not is_batched(one)
            for one in gradients
        ]
    )


# Autograd runs what is ready in the order of these numbers, largest first. A border is made before the forward and
# would come last: all 16-bit gradients would wait for the end of the backward. With AccumulateGrad's, none waits.
_HIGHEST_PRIORITY = 2**64 - 1


@functools.cache
def _can_order_nodes() -> bool:
    """Whether torch can order autograd nodes."""
    # torch has no public API for the order of nodes.
    return hasattr(torch._C._FunctionBase, "_set_sequence_nr")


@functools.cache  # once
def _warn_without_order() -> None:
    warn_caller(
        "this torch cannot order autograd nodes (_set_sequence_nr is gone): gradients reach the parameters at the "
        "end of a backward, which takes up to 2 bytes a parameter more, and DDP's all-reduce does not overlap"
    )


def unscaling_aliases(
    outside: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    scale_provider: ScaleProvider,
    *,
    with_aliases: bool = True,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Bring tensors of one device inside, in one autograd node for all of them; their gradients leave unscaled.

    Returns two lists in the order of ``outside``: aliases in the tensors' own dtypes (the tensors themselves, without
    ``with_aliases``), and aliases of their FP16/BF16 copies, None where there is none. Without aliases there must be a
    copy.
    """
    made = _UnscalingAliases.apply(scale_provider, copies, with_aliases, *outside)
    # None where nothing wants a gradient.
    if (node := made[0].grad_fn) is not None:
        # It runs as soon as it is ready; reaches_forward() still needs its own number.
        node.number = node._sequence_nr()
        if _can_order_nodes():
            node._set_sequence_nr(_HIGHEST_PRIORITY)
        else:
            _warn_without_order()
    inside = iter(made)
    aliases = [next(inside) for _ in outside] if with_aliases else list(outside)
    return aliases, [None if copy is None else next(inside) for copy in copies]


class AliasSetUse:
    """One forward's use of inward borders, which other forwards use as well. The forward's graph holds it."""

    def __init__(self, nodes: Iterable[Any], scale_provider: ScaleProvider) -> None:
        self.is_over = False  # whether a backward has gone through the borders, and retained no graph
        self.scale_provider = scale_provider
        for node in nodes:
            node.number, node.use = torch.autograd._get_sequence_nr(), weakref.ref(self)
            # Whoever keeps the borders belongs to `scale_provider`, and no garbage collector sees what a node holds.
            node.scale_provider = weakref.proxy(scale_provider)


class _UnscaleHook:
    """Hook of an autograd node: a border on each of its edges ``places``, which lead outside."""

    def __init__(self, node: Any, places: Iterable[int], scale_provider: ScaleProvider) -> None:
        # What a ScaleProvider asks of a node: a hook that held its node would keep the graph for good.
        self.scale_provider, self.next_functions = scale_provider, node.next_functions
        self.outside = {place: getattr(self.next_functions[place][0], "variable", None) for place in places}

    def __call__(self, gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        found = list(gradients)
        for place in self.outside:
            if (gradient := gradients[place]) is not None:
                inverse, uses = (
                    self.scale_provider.inverse_scale_for(gradient.device, self, [place]),
                    {place: [gradient]},
                )
                self.scale_provider.take_scaled_gradients(self, uses, inverse)
                # autograd lets no hook change a dtype; of nearly all ops it is that of the tensor outside.
                found[place] = (
                    scale_gradient(gradient, inverse, self.scale_provider).to(gradient.dtype) if uses else None
                )
        return tuple(found)


def reaches_forward(node: Any, first: int, known_external: set[Any]) -> bool:
    """Whether the graph behind ``node`` reaches a node numbered ``first`` or higher; fills ``known_external`` if not.

    autograd numbers the nodes of each thread by themselves, and a backward on a GPU has its own thread: what
    ``torch.autograd.grad(create_graph=True)`` makes there during a forward has small numbers. What was made before a
    forward leads to nothing that the forward made.
    """
    todo, seen = [node], {node}
    while todo:
        for to, _ in todo.pop().next_functions:
            if to is None or to in seen or to in known_external:
                continue
            if first <= (to.number if type(to) is _UNSCALE_NODE else to._sequence_nr()) < _HIGHEST_PRIORITY:
                return True
            seen.add(to)
            todo.append(to)
    known_external |= seen
    return False


def add_unscale_hooks(
    results: Sequence[Tensor], scale_provider: ScaleProvider, first: int, was_made_by_forward: Callable[[Any], bool]
) -> bool:
    """Add an unscale hook at each edge of the graph of ``results`` to an external tensor.

    That is an edge to a leaf, or to a node with a number below ``first``, unless ``was_made_by_forward`` or
    :func:`reaches_forward` is true of the node. Unscale nodes need no hook, nor do the inputs that a node names in
    ``unscaled_inputs``: their gradients are unscaled through :class:`GradientTarget`. Most of the time of this function
    goes into the Python object that torch makes for each node; where C++ was compiled, it looks first, and nearly
    always nothing is left to do.

    Returns:
        Whether there was such an edge.
    """
    if (module := native()) is not None and module.leaves_by_unscale_nodes(
        results, first, _HIGHEST_PRIORITY, _UNSCALE_NODE
    ):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a loss that may stay unread
        todo: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
    found = False
    seen, outside = {None, *todo}, set[Any]()
    for node in todo:  # which grows
        places = []
        for place, (to, _) in enumerate(node.next_functions):
            if to in seen or type(to) is _UNSCALE_NODE:
                continue
            # AccumulateGrad has the largest number.
            if (
                first <= to._sequence_nr() < _HIGHEST_PRIORITY
                or was_made_by_forward(to)
                or reaches_forward(to, first, outside)
            ):
                seen.add(to)
                todo.append(to)
            elif place not in getattr(node, "unscaled_inputs", ()):
                places.append(place)
        found |= bool(places) and _add_unscale_hook(node, places, scale_provider)
    return found


def _add_unscale_hook(node: Any, places: Sequence[int], scale_provider: ScaleProvider) -> bool:
    """Put a border on the edges ``places`` of ``node``; False if it has them already, as of an earlier forward."""
    if scale_provider in (bordered := node.metadata.setdefault(_UnscaleHook, [])):
        return False
    bordered.append(scale_provider)
    node.register_hook(_UnscaleHook(node, places, scale_provider))
    return True


def is_of_model(node: Any, scale_provider: ScaleProvider) -> bool:
    """Whether an autograd node was made inside a forward of the model of ``scale_provider``.

    Its graph leads to an inward border or a late border of the model, and not only through the outputs of a model.
    Sequence numbers do not suffice: each thread counts its own.
    """
    todo, seen = [node], {None, node}
    for each in todo:  # which grows
        if type(each) is _UNSCALE_NODE:
            if each.scale_provider == scale_provider:
                return True
        elif scale_provider in each.metadata.get(_UnscaleHook, ()):
            return True
        elif type(each) is not _OUTPUT:
            new = [to for to, _ in each.next_functions if to not in seen]
            seen.update(new)
            todo += new
    return False


def leaf_edges(results: Iterable[Tensor], first: int) -> Iterator[tuple[Any, int, Tensor]]:
    """The edges to leaves in the graph of ``results``, each as its node, the place in it, and the leaf.

    Nodes with a number below ``first`` are not followed, nor inward borders, nor the edges that a node names in
    ``unscaled_inputs``.
    """
    with torch._C.DisableTorchFunction():
        todo: list[Any] = [node for result in results if (node := result.grad_fn) is not None]
    seen = {None, *todo}
    for node in todo:  # which grows
        for place, (to, _) in enumerate(node.next_functions):
            if to in seen or type(to) is _UNSCALE_NODE or place in getattr(node, "unscaled_inputs", ()):
                continue
            if (leaf := getattr(to, "variable", None)) is not None:
                yield node, place, leaf
            elif to._sequence_nr() >= first:
                seen.add(to)
                todo.append(to)


def add_leaf_borders(
    results: Iterable[Tensor], scale_provider: ScaleProvider, first: int, is_external: Callable[[Tensor], bool]
) -> None:
    """Put a border on each edge to a leaf that :func:`leaf_edges` finds, if it ``is_external``."""
    places: dict[Any, list[int]] = {}
    for node, place, leaf in leaf_edges(results, first):
        if is_external(leaf):
            places.setdefault(node, []).append(place)
    for node, its in places.items():
        _add_unscale_hook(node, its, scale_provider)


def is_in_graph(node: Any, first: int) -> bool:
    """Whether an autograd node belongs to the graph of a forward, whose nodes have numbers from ``first`` on.

    An inward border does; a leaf does not.
    """
    return type(node) is _UNSCALE_NODE or first <= node._sequence_nr() < _HIGHEST_PRIORITY


def original_of(inside: Tensor) -> Tensor:
    """The tensor of which ``inside`` is an alias or a copy, if an inward border made it; else ``inside``."""
    node: Any = inside.grad_fn
    return node.outside[node.leads_to[inside.output_nr]] if type(node) is _UNSCALE_NODE else inside


class GradientTarget(NamedTuple):
    """A tensor inside, and the tensor that it is a working copy of: itself, if no inward border made it."""

    inside: Tensor
    outside: Tensor  # receives the gradient, in its own dtype
    scale_provider: ScaleProvider | None = None


def gradient_target(inside: Tensor) -> GradientTarget:
    """What lies behind the inward border that made ``inside``, if one did.

    An op that writes the gradient of ``outside`` itself, times the inverse of S, needs no 16-bit gradient.
    """
    node: Any = inside.grad_fn
    if type(node) is not _UNSCALE_NODE or inside.output_nr < node.first_copy:
        return GradientTarget(inside, inside)
    return GradientTarget(inside, original_of(inside), node.scale_provider)


class _CastToOutput(Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, scale_provider: ScaleProvider, wrap: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.scale_provider, ctx.dtype = scale_provider, output.dtype
        ctx.value = output.detach() if output.numel() == 1 else None
        # Never a view: callers change a loss in place (the Trainer does).
        dtype = _GRAD_DTYPE.get(output.dtype, output.dtype)
        return output.to(dtype, copy=True) if wrap is None else wrap(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        entering = scale_gradient(gradient, ctx.scale_provider.loss_scale_for(gradient.device), ctx.scale_provider).to(
            ctx.dtype
        )
        ctx.scale_provider.on_output_gradient(ctx, entering)
        return entering, None, None


_OUTPUT: Any = _CastToOutput._backward_cls  # the class of its nodes


def cast_to_output(
    output: Tensor, scale_provider: ScaleProvider | None, wrap: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """``output`` in FP32; its gradient is multiplied by the loss scale before it is cast to ``output``'s dtype.

    FP64 and complex outputs keep their dtype, with their gradient scaled all the same; integers pass unchanged.
    ``wrap`` makes the FP32 tensor of ``output``; default: a copy. Without ``scale_provider`` there are no gradients.
    """
    if not (output.is_floating_point() or output.is_complex()):
        return output
    if scale_provider is not None and output.requires_grad and torch.is_grad_enabled():
        return _CastToOutput.apply(output, scale_provider, wrap)
    return output.to(_GRAD_DTYPE.get(output.dtype, output.dtype))

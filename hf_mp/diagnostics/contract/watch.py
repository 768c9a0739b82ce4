"""Takes the precision contract from the tensors of a training, and from what one of its steps does."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.diagnostics.contract.table import NONE, NOT_SEEN, ContractRow, PrecisionContract
from hf_mp.dtypes import LOWER_PRECISION_DTYPES, spell
from hf_mp.integrations.accelerated import as_accelerated
from hf_mp.kernels.nested import tensors_in
from hf_mp.memory.footprint import gradients_of
from hf_mp.ranks.parallelism import is_distributed, local_part
from hf_mp.step.observers import StepObserver
from hf_mp.weights.attach_checks import runtimes_of
from hf_mp.weights.fp32_reads import on_stored_values
from hf_mp.weights.split_parameter import SplitParameter

# By which gradients travel: DDP's hooks and FSDP2 call these. DDP's own reduction, in C++, sends gradients as they are.
_COLLECTIVES = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single")
_WORDS = {
    "adapters": ("lora", "peft"),
    "experts": ("expert",),
    "norms": ("norm",),
    "embeddings": ("embed",),
    "linear": ("linear", "conv", "head"),
}


class ContractWatch(ExitStack, StepObserver):
    """Looks on while ``model`` takes a step, from :meth:`start` to ``close``, with one forward hook for each module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._computed: dict[nn.Module, set[str]] = {}  # in each one's first forward
        self._gradients: dict[int, set[str]] = defaultdict(set)
        self._sent: set[str] = set()

    def start(self) -> None:
        """Put the hooks on, those of modules only where none is compiled."""
        # torch.compile traces forward hooks into the graph, and compiles anew when they go.
        if all(module._compiled_call_impl is None for module in self.model.modules()):
            for module in self.model.modules():
                if module._parameters:
                    # A hook on a container would tell the dtype of what its children gave.
                    self.callback(module.register_forward_hook(self._ran).remove)
        for runtime in runtimes_of(self.model):
            runtime.observers.append(self)
            self.callback(runtime.observers.remove, self)
        # Gradients travel by calls on this module; a hook of the process group (c10d's logger) has no dtypes.
        for name in _COLLECTIVES if is_distributed() else ():
            if (own := getattr(torch.distributed, name, None)) is not None:
                # Undone in reverse order, so that another's patch on top is not lost.
                self.callback(setattr, torch.distributed, name, own)
                setattr(torch.distributed, name, functools.partial(self._send, own))

    def _ran(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the dtypes that ``module`` computed in: a hook after its forward."""
        # The output has the dtype that was computed in, but for stacked experts (weights of 3 dimensions), whose output
        # a router's scores make FP32: their weights tell it. While a forward runs, an attached module holds the copies.
        held = [vars(module).get(name, weight) for name, weight in module._parameters.items()]
        stacked = [
            one for one in held if isinstance(one, Tensor) and one.ndim > 2 and one.dtype in LOWER_PRECISION_DTYPES
        ]
        given = stacked or [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        # The first forward is the training's: later ones may be a replay of diagnostics, in other dtypes.
        self._computed.setdefault(module, dtypes_of(given))

    def _send(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        if given and given[-1].numel() > 1:  # not the agreement on a step; the input comes last
            self._sent |= dtypes_of(given[-1:])
        return own(*args, **kwargs)

    def on_backward_end(self, largest: Tensor | None = None) -> None:
        """Note the gradients that are there: an attached model's, before its update frees them."""
        for parameter in self.model.parameters():
            if isinstance(parameter, SplitParameter):
                self._gradients[id(parameter)] |= set(map(spell, parameter.gradient_dtypes))
            else:
                self._gradients[id(parameter)] |= dtypes_of(gradients_of(parameter))

    @on_stored_values
    def contract(self, optimizer: Any = None, saved: Mapping[str, torch.dtype] | None = None) -> PrecisionContract:
        """What was seen so far; ``saved``: to what weights are cast when they are saved, if they are, by name."""
        self.on_backward_end()
        # accelerate's wrapper and MasterWeightOptimizer both have .optimizer; the state is the innermost one's.
        optimizer = getattr(as_accelerated(optimizer), "optimizer", optimizer)
        computed: dict[int, set[str]] = defaultdict(set)  # by parameter, which several modules may share
        for module, dtypes in self._computed.items():
            for parameter in module._parameters.values():
                computed[id(parameter)] |= dtypes
        # Tied weights: one row, under the first name.
        return PrecisionContract.of(
            self._row(name, parameter, computed[id(parameter)], optimizer, (saved or {}).get(name))
            for name, parameter in self.model.named_parameters()
        )

    def _row(
        self, name: str, parameter: nn.Parameter, computed: set[str], optimizer: Any, save_dtype: torch.dtype | None
    ) -> ContractRow:
        kind = kind_of(name, self.model.get_submodule(name.rpartition(".")[0]), parameter)
        elements, dtype = local_part(parameter).numel(), parameter.dtype
        stored = saved = spell(dtype)
        if isinstance(parameter, SplitParameter):
            stored, saved = f"{stored}+16", "fp32"
        elif dtype in LOWER_PRECISION_DTYPES and getattr(optimizer, "keeps_masters", False):
            stored += "+fp32"
        if save_dtype is not None:
            saved = spell(save_dtype)
        gradient = reduced = moments = NONE
        if parameter.requires_grad:
            gradients = self._gradients[id(parameter)]
            gradient = _said(gradients)
            # Where nothing was sent by a call, DDP's C++ reduced: in the dtype of the gradient.
            reduced = _said(self._sent or gradients) if is_distributed() else NONE
            moments = NOT_SEEN if optimizer is None else _said(moments_of(optimizer, parameter), NONE)
        elif hasattr(self.model, "peft_config"):  # PEFT saves adapters alone
            saved = NONE
        return ContractRow(kind, elements, stored, _said(computed), gradient, reduced, moments, saved, (name,))


def precision_contract(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    run: Callable[[], Any] | None = None,
) -> PrecisionContract:
    """Show the dtypes in which a training stores, computes, sums and saves: any training, attached or not.

    It is read from the tensors that exist. What only a step shows (the dtypes of computation, and of what travels
    between processes) is read while ``run`` runs, and is ``"?"`` without it. Gradients are ``"?"`` before the first
    backward, moments ``"-"`` before the first step.

    Args:
        model: any module, under DDP or FSDP2 too.
        optimizer: over its parameters; torch's, accelerate's around it, or a :class:`hf_mp.MasterWeightOptimizer`.
        run: takes a step, or a part of one, as ``lambda: model(**batch).loss.backward()``.

    Returns:
        A :class:`PrecisionContract`; ``print`` shows a table.

    Raises:
        TypeError: for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"precision_contract takes a model (nn.Module), not {type(model).__name__}: trainer.model")
    with ContractWatch(model) as watch:
        if run is not None:
            watch.start()
            run()
        return watch.contract(optimizer)


def kind_of(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    """What a contract calls a parameter: frozen, of an adapter, or by the names of its module and of what holds it."""
    if not parameter.requires_grad:
        return "frozen"
    # By names, since there is no base class of embeddings or experts over the models of Transformers.
    package = type(module).__module__.partition(".")[0]
    words = f"{package} {name} {type(module).__name__}".lower()
    found = (kind for kind, parts in _WORDS.items() if any(part in words for part in parts))
    return next(found, "linear" if parameter.ndim > 1 else "other")


def moments_of(optimizer: Any, parameter: nn.Parameter) -> set[str]:
    """The dtypes of an optimizer's state that has an element for each of the parameter's, or of all that it has."""
    inner = getattr(optimizer, "optimizer", optimizer)
    state = [value for value in inner.state.get(parameter, {}).values() if isinstance(value, Tensor) and value.ndim]
    # Adafactor and GaLore keep factors of another size: then all of the state is what there is to tell.
    return dtypes_of([one for one in state if one.numel() == parameter.numel()] or state)


def dtypes_of(tensors: Iterable[Tensor]) -> set[str]:
    """Their dtypes in our words."""
    return {spell(tensor.dtype) for tensor in tensors}


def _said(dtypes: set[str], none: str = NOT_SEEN) -> str:
    return "/".join(sorted(dtypes)) or none

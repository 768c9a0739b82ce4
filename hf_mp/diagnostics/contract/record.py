"""Records the precision contract from the tensors of a training and from one of its steps."""

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
from hf_mp.weights.attachable import runtimes_of
from hf_mp.weights.outside_reads import on_stored_values
from hf_mp.weights.split_parameter import SplitParameter

# DDP's hooks and FSDP2 reduce gradients by these. DDP's reducer, in C++, sends gradients in their own dtype.
_COLLECTIVES = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single")
# Parts of the names of modules and parameters, by kind.
_NAME_PARTS = {
    "adapters": ("lora", "peft"),
    "experts": ("expert",),
    "norms": ("norm",),
    "embeddings": ("embed",),
    "linear": ("linear", "conv", "head"),
}


class ContractRecorder(ExitStack, StepObserver):
    """Records dtypes of a step of ``model`` between :meth:`start` and ``close``, by hooks and as a step observer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._computed: dict[nn.Module, set[str]] = {}  # in the first forward of each module
        self._gradients: dict[int, set[str]] = defaultdict(set)
        self._sent: set[str] = set()

    def start(self) -> None:
        """Register the hooks; no forward hooks if a module is compiled."""
        # torch.compile traces forward hooks, and compiles again when they are removed.
        if all(module._compiled_call_impl is None for module in self.model.modules()):
            for module in self.model.modules():
                if module._parameters:
                    self.callback(module.register_forward_hook(self._record_forward).remove)
        for runtime in runtimes_of(self.model):
            runtime.observers.append(self)
            self.callback(runtime.observers.remove, self)
        # c10d's logger has no dtypes, so the functions of torch.distributed are patched.
        for name in _COLLECTIVES if is_distributed() else ():
            if (original := getattr(torch.distributed, name, None)) is not None:
                # Undone in reverse order, so that later patches of other code are preserved.
                self.callback(setattr, torch.distributed, name, original)
                setattr(torch.distributed, name, functools.partial(self._record_and_send, original))

    def _record_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: record the dtypes in which ``module`` computed, in its first forward.

        Later forwards may be replays of the diagnostics in other dtypes.
        """
        # Stacked experts (weights of 3 dimensions) compute in the dtype of their weights. Their output is FP32, because
        # it is multiplied by router scores. During a forward, parameter slots hold working copies.
        weights = [vars(module).get(name, weight) for name, weight in module._parameters.items()]
        stacked = [
            one for one in weights if isinstance(one, Tensor) and one.ndim > 2 and one.dtype in LOWER_PRECISION_DTYPES
        ]
        recorded = stacked or [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        self._computed.setdefault(module, dtypes_of(recorded))

    def _record_and_send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the dtype of the last tensor argument, the input of a collective, and call ``original``."""
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        if tensors and tensors[-1].numel() > 1:  # one element: the report of a step
            self._sent |= dtypes_of(tensors[-1:])
        return original(*args, **kwargs)

    def on_backward_end(self, largest: Tensor | None = None) -> None:
        """Record the dtypes of the gradients, which the update of an attached model frees."""
        for parameter in self.model.parameters():
            if isinstance(parameter, SplitParameter):
                self._gradients[id(parameter)] |= set(map(spell, parameter.gradient_dtypes))
            else:
                self._gradients[id(parameter)] |= dtypes_of(gradients_of(parameter))

    @on_stored_values
    def contract(self, optimizer: Any = None, saved: Mapping[str, torch.dtype] | None = None) -> PrecisionContract:
        """Return the contract from all records and the tensors that exist.

        ``saved`` maps names of weights to the dtypes that they are cast to when they are saved.
        """
        self.on_backward_end()
        # accelerate's wrapper and MasterWeightOptimizer both have `.optimizer`; the innermost one has the state.
        optimizer = getattr(as_accelerated(optimizer), "optimizer", optimizer)
        computed: dict[int, set[str]] = defaultdict(set)  # by parameter, for shared ones
        for module, dtypes in self._computed.items():
            for parameter in module._parameters.values():
                computed[id(parameter)] |= dtypes
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
            gradient = _joined(gradients)
            # If no collective was recorded, DDP's reducer has sent the gradients in their dtype.
            reduced = _joined(self._sent or gradients) if is_distributed() else NONE
            moments = NOT_SEEN if optimizer is None else _joined(moments_of(optimizer, parameter), NONE)
        elif hasattr(self.model, "peft_config"):  # PEFT saves only adapters
            saved = NONE
        return ContractRow(kind, elements, stored, _joined(computed), gradient, reduced, moments, saved, (name,))


def precision_contract(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    run: Callable[[], Any] | None = None,
) -> PrecisionContract:
    """Return the dtypes in which any training, attached or not, stores, computes, reduces and saves.

    Dtypes of computation and communication are recorded while ``run`` is called, and are ``"?"`` without it. Others are
    read from existing tensors: gradients are ``"?"`` before the first backward, moments ``"-"`` before the first step.

    Args:
        model: any module, also under DDP or FSDP2.
        optimizer: of its parameters; torch's, accelerate's wrapper, or a :class:`hf_mp.MasterWeightOptimizer`.
        run: runs a step or a part of one, for example ``lambda: model(**batch).loss.backward()``.

    Returns:
        A :class:`PrecisionContract`; ``print`` shows a table.

    Raises:
        TypeError: for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"precision_contract takes a model (nn.Module), not {type(model).__name__}: trainer.model")
    with ContractRecorder(model) as recorder:
        if run is not None:
            recorder.start()
            run()
        return recorder.contract(optimizer)


def kind_of(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    """Return the kind of a parameter in a contract, as in :class:`ContractRow`."""
    if not parameter.requires_grad:
        return "frozen"
    # Transformers has no base classes for embeddings or experts, so the kind is derived from names.
    package = type(module).__module__.partition(".")[0]
    text = f"{package} {name} {type(module).__name__}".lower()
    matching = (kind for kind, parts in _NAME_PARTS.items() if any(part in text for part in parts))
    return next(matching, "linear" if parameter.ndim > 1 else "other")


def moments_of(optimizer: Any, parameter: nn.Parameter) -> set[str]:
    """Return the dtypes of optimizer state with the parameter's number of elements; if there is none, of all state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    state = [value for value in inner.state.get(parameter, {}).values() if isinstance(value, Tensor) and value.ndim]
    # State of Adafactor and GaLore has other sizes.
    return dtypes_of([one for one in state if one.numel() == parameter.numel()] or state)


def dtypes_of(tensors: Iterable[Tensor]) -> set[str]:
    """Return the dtypes as ``"fp32"``, ``"bf16"``, ``"fp16"`` or torch's name."""
    return {spell(tensor.dtype) for tensor in tensors}


def _joined(dtypes: set[str], none: str = NOT_SEEN) -> str:
    return "/".join(sorted(dtypes)) or none

"""``precision_contract``: from a training's tensors and one of its steps."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
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

# Of DDP's hooks and FSDP2. DDP's reducer, in C++, sends gradients in their own dtype.
_COLLECTIVES = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single")
# Parts of names, by kind.
_NAME_PARTS = {
    "adapters": ("lora", "peft"),
    "experts": ("expert",),
    "norms": ("norm",),
    "embeddings": ("embed",),
    "linear": ("linear", "conv", "head"),
}


class ContractRecorder(ExitStack, StepObserver):
    """Records dtypes of a step of ``model`` between :meth:`start` and ``close``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._computed: dict[nn.Module, set[str]] = {}  # in the first forward of each module
        self._gradients: dict[int, set[str]] = defaultdict(set)
        self._sent: set[str] = set()

    def start(self) -> None:
        # Compiled code would be compiled again when they are removed.
        if all(module._compiled_call_impl is None for module in self.model.modules()):
            for module in self.model.modules():
                if module._parameters:
                    self.callback(module.register_forward_hook(self._record_forward).remove)
        for runtime in runtimes_of(self.model):
            runtime.observers.append(self)
            self.callback(runtime.observers.remove, self)
        # c10d's logger has no dtypes.
        for name in _COLLECTIVES if is_distributed() else ():
            if (original := getattr(torch.distributed, name, None)) is not None:
                self.callback(setattr, torch.distributed, name, original)
                setattr(torch.distributed, name, functools.partial(self._record_and_send, original))

    def _record_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: record the dtypes of the first forward; later ones may be replays."""
        # Parameter slots hold working copies meanwhile.
        weights = [vars(module).get(name, weight) for name, weight in module._parameters.items()]
        # Stacked experts compute in the dtype of their weights, not of their output.
        stacked = [
            one for one in weights if isinstance(one, Tensor) and one.ndim > 2 and one.dtype in LOWER_PRECISION_DTYPES
        ]
        recorded = stacked or [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        self._computed.setdefault(module, dtypes_of(recorded))

    def _record_and_send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the dtype of the last tensor argument, the input, of a collective."""
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        if tensors and tensors[-1].numel() > 1:  # one element: the report of a step
            self._sent |= dtypes_of(tensors[-1:])
        return original(*args, **kwargs)

    def on_backward_end(self, largest: Tensor | None = None) -> None:
        """Record the dtypes of the gradients, which an update frees."""
        for parameter in self.model.parameters():
            if isinstance(parameter, SplitParameter):
                self._gradients[id(parameter)] |= set(map(spell, parameter.gradient_dtypes))
            else:
                self._gradients[id(parameter)] |= dtypes_of(gradients_of(parameter))

    @on_stored_values
    def contract(self, optimizer: Any = None, saved: Mapping[str, torch.dtype] | None = None) -> PrecisionContract:
        """Return the contract; ``saved`` maps names of weights to the dtypes in which they are saved."""
        self.on_backward_end()
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
        stored = saved = spell(parameter.dtype)
        if isinstance(parameter, SplitParameter):
            stored, saved = f"{stored}+16", "fp32"
        elif parameter.dtype in LOWER_PRECISION_DTYPES and getattr(optimizer, "keeps_masters", False):
            stored += "+fp32"
        row = ContractRow(
            kind=kind_of(name, self.model.get_submodule(name.rpartition(".")[0]), parameter),
            elements=local_part(parameter).numel(),
            stored=stored,
            computed=_joined(computed),
            gradient=NONE,
            reduced=NONE,
            moments=NONE,
            saved=saved if save_dtype is None else spell(save_dtype),
            names=(name,),
        )
        if not parameter.requires_grad:
            has_adapters = hasattr(self.model, "peft_config")  # PEFT saves only these
            return replace(row, saved=NONE) if has_adapters else row
        gradients = self._gradients[id(parameter)]
        return replace(
            row,
            gradient=_joined(gradients),
            # Without a collective, DDP's reducer has sent them.
            reduced=_joined(self._sent or gradients) if is_distributed() else NONE,
            moments=NOT_SEEN if optimizer is None else _joined(moments_of(optimizer, parameter), NONE),
        )


def precision_contract(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    run: Callable[[], Any] | None = None,
) -> PrecisionContract:
    """Return the dtypes in which any training, attached or not, stores, computes, reduces and saves.

    Dtypes of computation and communication are recorded during ``run``, and are ``"?"`` without it. Others are read
    from existing tensors: gradients are ``"?"`` before the first backward, moments ``"-"`` before the first step.

    Args:
        model: any module, also under DDP or FSDP2.
        optimizer: torch's, accelerate's wrapper, or a :class:`hf_mp.MasterWeightOptimizer`.
        run: runs a step or a part, for example ``lambda: model(**batch).loss.backward()``.

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
    """Return the kind, as in :class:`ContractRow`."""
    if not parameter.requires_grad:
        return "frozen"
    # Transformers has no base classes for embeddings or experts.
    text = f"{type(module).__module__.partition('.')[0]} {name} {type(module).__name__}".lower()
    matching = (kind for kind, parts in _NAME_PARTS.items() if any(part in text for part in parts))
    return next(matching, "linear" if parameter.ndim > 1 else "other")


def moments_of(optimizer: Any, parameter: nn.Parameter) -> set[str]:
    """Return the dtypes of optimizer state of the parameter's size; if there is none (Adafactor), of all state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    state = [value for value in inner.state.get(parameter, {}).values() if isinstance(value, Tensor) and value.ndim]
    return dtypes_of([one for one in state if one.numel() == parameter.numel()] or state)


def dtypes_of(tensors: Iterable[Tensor]) -> set[str]:
    """Return the names of the dtypes."""
    return {spell(tensor.dtype) for tensor in tensors}


def _joined(dtypes: set[str], none: str = NOT_SEEN) -> str:
    return "/".join(sorted(dtypes)) or none

"""The working copies of an attached model, for an engine that serves it: one by one, or as a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.save_dtype import write_dtype
from hf_mp.weights.lean.outside_reads import stores_16_bits
from hf_mp.weights.ranks.placement import get_rank, is_dtensor, is_sharded

_OF_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpointing and torch.compile


def working_copies(model: nn.Module | MixedPrecision) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of an attached model in FP16 or BF16, as its forward reads it, to synchronise an engine with.

    With TRL's client of a vLLM server::

        metadata = [(name, str(copy.dtype).removeprefix("torch."), list(copy.shape))
                    for name, copy in hf_mp.working_copies(model)]
        client.update_named_params(metadata, hf_mp.working_copies(model))

    A copy that the forward keeps, or the parameter of a lean layout, comes as it is: read it before the next step, and
    do not write to it. What the forward reads in FP32 (norms, embeddings, modules of an ``"fp32"`` rule) is rounded for
    the moment, to nearest. No FP32 copy is made. Under FSDP2 every process must iterate, and gets whole parameters,
    gathered in 16 bits. An adapter is not merged: call its ``merge_adapter()`` before.

    Args:
        model: attached, or its :class:`hf_mp.MixedPrecision`.

    Yields:
        Names as in ``named_parameters()``, without those of wrappers, tied weights once; detached tensors of the
        parameter's shape, on its device. Quantized weights come as they are.

    Raises:
        TypeError: if ``model`` is neither.
        ValueError: for a model that is not attached.
    """
    runtime = _runtime_of(model, "working_copies")
    assert runtime.model is not None
    return ((plain_name(name), _copy_of(runtime, one)) for name, one in runtime.model.named_parameters())


def save_working_copies(model: nn.Module | MixedPrecision, directory: str | os.PathLike[str]) -> None:
    """Save an attached model in FP16 or BF16, as its forward reads it, for ``from_pretrained`` or an engine.

    Writes what ``save_pretrained`` does, in its place, with the ``dtype`` of the working copies in the config: have the
    engine read when this has returned. The weights are those of :func:`working_copies`; buffers are saved as they are.
    Of a model with adapters, these are saved.

    Under FSDP2 every process must call it, and the first writes; under DDP the first writes.

    Args:
        model: attached, or its :class:`hf_mp.MixedPrecision`.
        directory: to write.

    Raises:
        TypeError: for a model without ``save_pretrained``.
        ValueError: for a model that is not attached, weights that the dtype does not hold, and a model sharded by
            Transformers' own ``distributed_config``.
    """
    runtime = _runtime_of(model, "save_working_copies")
    attached: Any = runtime.model
    if not hasattr(type(attached), "save_pretrained"):
        raise TypeError(
            f"save_working_copies writes Transformers' format, and {type(attached).__name__} has no save_pretrained: "
            "save what hf_mp.working_copies(model) gives"
        )
    # Transformers gathers the model itself there, and reads no state_dict that it is given.
    if getattr(getattr(attached, "config", None), "distributed_config", None) is not None:
        raise ValueError(
            "save_pretrained gathers a model with a distributed_config by itself, in FP32: shard it with fully_shard "
            "or accelerate's FSDP2 instead, or use hf_mp.working_copies(model)"
        )
    is_first = get_rank() == 0
    state = _state(runtime, attached, keep=is_first)
    if is_first:
        # Of the class: PEFT and accelerate put functions on instances that would ask the model for its FP32 state.
        type(attached).save_pretrained(attached, directory, state_dict=state)
        # save_pretrained writes the dtype that the model is in, which is that of its masters.
        write_dtype(Path(directory), runtime.policy.compute)
    if is_sharded(attached):
        torch.distributed.barrier()


def _runtime_of(model: Any, caller: str) -> MixedPrecision:
    runtime = runtime_of(model)
    if runtime.model is None:
        raise ValueError(
            f"{caller}: the mixed precision of this model was detached, as it is when a training ends: call it before, "
            "or have MixedPrecisionCallback(keep_attached=True)"
        )
    return runtime


def plain_name(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    for wrapper in _OF_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@stores_16_bits
def _copy_of(runtime: MixedPrecision, parameter: nn.Parameter) -> Tensor:
    layout = runtime.layout
    if layout.keeps_copies and parameter in layout.copies:
        return layout.copies.get(parameter)
    copy = parameter.detach()
    if copy.is_floating_point():
        # One at a time: a generator holds no second copy of the model.
        copy = copy.to(runtime.policy.compute)
    return copy.full_tensor() if is_dtensor(copy) else copy  # type: ignore[attr-defined]


def _state(runtime: MixedPrecision, model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """What ``state_dict()`` has, with working copies; empty on a process that only helps to gather."""
    copies: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        copy = _copy_of(runtime, parameter)
        if keep:
            _check_finite(name, copy)
            copies[id(parameter)] = copy
    if not keep:
        return {}
    state = {plain_name(name): copies[id(one)] for name, one in model.named_parameters(remove_duplicate=False)}
    return {**state, **{plain_name(name): buffer for name, buffer in _saved_buffers(model)}}


def _check_finite(name: str, copy: Tensor) -> None:
    if copy.is_floating_point() and not copy.isfinite().all():
        raise ValueError(
            f"{name} has values that are not finite in {copy.dtype}: save the model in FP32 with save_pretrained, or "
            "train it in bf16"
        )


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer

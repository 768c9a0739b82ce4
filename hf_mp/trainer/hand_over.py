"""The working copies of an attached model, for an engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.ranks.parallelism import is_dtensor
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.lean.outside_reads import on_stored_values

_OF_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of activation checkpointing and torch.compile


def working_copies(model: nn.Module | MixedPrecision) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of an attached model in FP16 or BF16, as its forward reads it, to synchronise an engine with.

    With TRL's client of a vLLM server::

        metadata = [(name, str(copy.dtype).removeprefix("torch."), list(copy.shape))
                    for name, copy in hf_mp.working_copies(model)]
        client.update_named_params(metadata, hf_mp.working_copies(model))

    As a directory: ``model.save_pretrained(folder, state_dict=dict(hf_mp.working_copies(model)))``. Buffers that a
    model saves (of BatchNorm, the router's bias of DeepSeek-V3) are not among them: add those of
    ``model.state_dict()``. Transformers ignores ``state_dict`` where it has distributed the model itself.

    A copy that the forward keeps, or the parameter of a lean layout, comes as it is: read it before the next step, and
    do not write to it. What the forward reads in FP32 (norms, embeddings, modules of an ``"fp32"`` rule) is rounded for
    the moment, to nearest. No FP32 copy is made. Under FSDP2 every process must iterate, and gets whole parameters,
    gathered in 16 bits. An adapter is not merged: call its ``merge_adapter()`` before.

    Args:
        model: attached, or its :class:`hf_mp.MixedPrecision`.

    Yields:
        Names as in ``named_parameters()``, without those of wrappers, tied weights once; detached tensors of the
        parameter's shape, on its device. Quantized weights come as they are, and what is beyond FP16's range as inf.

    Raises:
        TypeError: if ``model`` is neither.
        ValueError: for a model that is not attached.
    """
    runtime = runtime_of(model)
    if runtime.model is None:
        raise ValueError(
            "working_copies: the mixed precision of this model was detached, as it is when a training ends: call it "
            "before, or have MixedPrecisionCallback(keep_attached=True)"
        )
    return ((plain_name(name), _copy_of(runtime, one)) for name, one in runtime.model.named_parameters())


def plain_name(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    for wrapper in _OF_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@on_stored_values
def _copy_of(runtime: MixedPrecision, parameter: nn.Parameter) -> Tensor:
    layout = runtime.weights.layout
    if layout.keeps_copies and parameter in layout.copies:
        return layout.copies.get(parameter)
    copy = parameter.detach()
    if copy.is_floating_point():
        # One at a time: a generator holds no second copy of the model.
        copy = copy.to(runtime.policy.compute)
    return copy.full_tensor() if is_dtensor(copy) else copy  # type: ignore[attr-defined]

"""The working copies of an attached model, for an engine that serves it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.model_index import plain_name
from hf_mp.ranks.parallelism import is_dtensor
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.fp32_reads import on_stored_values


def working_copies(model: nn.Module | MixedPrecision) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in FP16 or BF16, as the forward reads them, to send them to an inference engine.

    With TRL's client of a vLLM server::

        metadata = [(name, str(copy.dtype).removeprefix("torch."), list(copy.shape))
                    for name, copy in hf_mp.working_copies(model)]
        client.update_named_params(metadata, hf_mp.working_copies(model))

    As a directory: ``model.save_pretrained(folder, state_dict=dict(hf_mp.working_copies(model)))``. Saved buffers
    (BatchNorm's, the router's bias of DeepSeek-V3) are not included: add them from ``model.state_dict()``. Transformers
    ignores ``state_dict`` if it has distributed the model itself.

    A tensor may be the very copy that the forward uses: read it before the next step, and do not write to it. What the
    forward reads in FP32 (norms, embeddings, modules of an ``"fp32"`` rule) is rounded to nearest. No FP32 copy is
    made. Under FSDP2 every process must iterate; each gets whole parameters, gathered in 16 bits. Adapters are not
    merged: call ``merge_adapter()`` first.

    Args:
        model: attached, or its :class:`hf_mp.MixedPrecision`.

    Yields:
        Pairs of a name, as in ``named_parameters()`` of the model without wrappers, and a detached tensor of the
        parameter's shape, on its device; tied weights once. Quantized weights are unchanged; values beyond FP16's range
        become inf.

    Raises:
        TypeError: if ``model`` is neither.
        ValueError: for a model that is not attached.
    """
    runtime = runtime_of(model)
    if runtime.model is None:
        raise ValueError(
            "working_copies: mixed precision was detached from this model, as it is when a training ends: call it "
            "before, or pass MixedPrecisionCallback(keep_attached=True)"
        )
    return ((plain_name(name), _copy_of(runtime, one)) for name, one in runtime.model.named_parameters())


@on_stored_values
def _copy_of(runtime: MixedPrecision, parameter: nn.Parameter) -> Tensor:
    copy = runtime.weights.copy_of(parameter)  # one at a time: a generator holds no second copy of the model
    return copy.full_tensor() if is_dtensor(copy) else copy  # type: ignore[attr-defined]

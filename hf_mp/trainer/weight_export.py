"""Working copies for an inference engine."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.model_index import plain_name
from hf_mp.ranks.parallelism import is_dtensor
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.fp32_reads import on_stored_values


def working_copies(model: nn.Module | MixedPrecision) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in FP16 or BF16, to send them to an inference engine.

    With TRL's client of a vLLM server::

        metadata = [(name, str(copy.dtype).removeprefix("torch."), list(copy.shape))
                    for name, copy in hf_mp.working_copies(model)]
        client.update_named_params(metadata, hf_mp.working_copies(model))

    To save them: ``model.save_pretrained(folder, state_dict=dict(hf_mp.working_copies(model)))``; Transformers ignores
    ``state_dict`` for a model that it has distributed. Buffers (BatchNorm, the router bias of DeepSeek-V3) are not
    included: add them from ``model.state_dict()``. Call ``merge_adapter()`` first if adapters are to be merged.

    A tensor may be the working copy itself: read it before the next step, and do not write to it. Other weights (norms,
    embeddings) are rounded to nearest, one at a time. Under FSDP2 all processes must iterate; each gets full
    parameters, gathered in 16 bits.

    Args:
        model: an attached model, or its :class:`hf_mp.MixedPrecision`.

    Yields:
        Names of the model without wrappers, and detached tensors of the parameters' shapes on their devices; tied
        weights once. Quantized weights are unchanged; values beyond FP16's range become inf.

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
    return ((plain_name(name), _copy_of(runtime, parameter)) for name, parameter in runtime.model.named_parameters())


@on_stored_values
def _copy_of(runtime: MixedPrecision, parameter: nn.Parameter) -> Tensor:
    copy = runtime.weights.copy_of(parameter)
    return copy.full_tensor() if is_dtensor(copy) else copy  # type: ignore[attr-defined]

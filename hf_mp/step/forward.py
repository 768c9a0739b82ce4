"""``AttachedForward``: what stands in the place of an attached model's ``forward``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_mp.casting.nested import apply_to_tensors
from hf_mp.casting.replacements.activations import class_forward

if TYPE_CHECKING:
    from hf_mp.step.mixed_precision import MixedPrecision


class AttachedForward:
    """Takes the place of ``model.forward`` while attached: borders around the model's own forward, in its region."""

    def __init__(self, runtime: MixedPrecision, module: nn.Module, original: Callable[..., Any]) -> None:
        self.runtime = runtime
        self.module = weakref.ref(module)
        self.original = original
        functools.update_wrapper(self, original)

    # torch.compile leaves this frame alone and compiles the model's own forward, in the region, as one graph.
    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self.runtime
        # Detached: a library that put its own forward over this one still calls it.
        if runtime.region.entered or runtime.detached:
            return self.original(*args, **kwargs)
        runtime.before_forward()
        observed = runtime.observe_forward(self, args, kwargs)
        if torch.is_grad_enabled():
            args = apply_to_tensors(runtime.input_border, args)
            kwargs = apply_to_tensors(runtime.input_border, kwargs)
        with runtime.working_copies.saving(), runtime.region:
            outputs = self.original(*args, **kwargs)
        # Beside a loss, large outputs may stay unread.
        border = functools.partial(runtime.output_border, may_defer=_has_loss(outputs))
        outputs = apply_to_tensors(border, outputs)
        runtime.forward_ended(observed, outputs)
        return outputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Deep-copying a model copies its attributes, this one too: the copy must run the copied weights.
        module = self.module()
        copied = memo.get(id(module))
        if copied is None:
            raise TypeError("an attached forward is copied only together with its model: copy.deepcopy(model)")
        return self.runtime.copy_for(memo).attached_forward(copied)

    def __reduce__(self) -> Any:
        # A pickled model is an ordinary FP32 model.
        module: Any = self.module()
        return class_forward, (module,)


def _has_loss(outputs: Any) -> bool:
    if isinstance(outputs, Mapping):
        first = outputs.get("loss")
    else:
        first = outputs[0] if isinstance(outputs, tuple) and outputs else None
    return isinstance(first, Tensor) and first.dim() == 0 and first.requires_grad

"""The lean layout of a model, on one process and under DDP: its trainable parameters split, its checkpoints in FP32.

What FSDP2 shards has FP32 masters in its shards. An optimizer that knows nothing of the masters may not step.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_mp.casting.watched import DataTrackedParameter
from hf_mp.kernels.tensors import takes_lists
from hf_mp.model_walk import model_parameters, modules_of, widen_buffers
from hf_mp.ranks.parallelism import Parallelism
from hf_mp.ranks.wire import ScaleSource
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.master_weight_optimizer import MasterWeightOptimizer, clip_grad_norm_
from hf_mp.weights.outside_reads import on_stored_values
from hf_mp.weights.split_parameter import (
    SplitParameter,
    check_splittable,
    copy_scale_factors,
    gradient_and_factor,
    make_split,
    put_masters_into_state_dict,
    unsplit,
)

_ORDINARY = (Tensor, nn.Parameter, DataTrackedParameter)


class SplitLayout(WeightLayout):
    """The model's parameters are the working copies; with 16 more bits for each, they are the FP32 masters.

    Gradients stay in FP16/BF16, scaled, until the update reads them. Frozen FP32 parameters have working copies.
    """

    keeps_scaled_gradients = True

    def prepare_weights(self, model: nn.Module) -> None:
        """Split the trainable parameters of ``model`` that are not split yet."""
        if split_trainable_parameters(model, self.policy.params, self.split):
            self.copies.clear()  # of what was frozen before
            refuse_unwrapped_steps()

    def split(self, parameters: Sequence[nn.Parameter]) -> None:
        """Split ``parameters``, which are splittable, in place."""
        for parameter in parameters:
            make_split(parameter, self.policy.params)

    def register_communication(
        self, model: nn.Module, parallelism: Parallelism, scale_source: ScaleSource, in_fp32: Sequence[nn.Module]
    ) -> None:
        """As the base class. FSDP's shards need another layout, which is chosen before: here it is too late."""
        if parallelism.fsdp:
            raise ValueError(
                f"precision={str(self.policy)!r} must know before the first forward that FSDP shards this "
                f"{type(model).__name__}: call attach_optimizer earlier"
            )
        super().register_communication(model, parallelism, scale_source, in_fp32)

    @on_stored_values
    def store_scaled_gradients(
        self, weights: Mapping[int, Tensor], uses: dict[int, list[Tensor]], inverse: Tensor | None
    ) -> None:
        """Keep gradients of split ``weights`` there, and remove them from ``uses``; autograd accumulates others."""
        # DDP's hook reduces its buckets, and copies a gradient into its bucket when autograd reports that it is ready.
        beside_grad = bool(self._comm_hook_by_ddp)
        looks_for_unused = [buckets for buckets in self._comm_hook_by_ddp.values() if buckets.looks_for_unused]
        for buckets in looks_for_unused:
            buckets.mark_accumulated()
        split = [weight for weight in weights.values() if isinstance(weight, SplitParameter)]
        beside = [weakref.ref(weight) for weight in split] if split and takes_lists(split[0]) else []
        for place, weight in weights.items():
            if isinstance(weight, SplitParameter):
                weight._same_node_parameters = beside
                # What is left, autograd accumulates, so that a hook sees it.
                left = [
                    gradient
                    for gradient in uses.pop(place)
                    if not weight.store_scaled_gradient(gradient, inverse, beside_grad=beside_grad)
                ]
                if left:
                    uses[place] = left
                if looks_for_unused:
                    weight.mark_used()

    @on_stored_values
    def gradients_and_factors(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        """As the base class; what DDP's buckets left in ``.grad`` is taken over first, still scaled."""
        parameters = list(parameters)
        for buckets in self._comm_hook_by_ddp.values():
            buckets.collect_reduced_gradients(parameters)
        found = [gradient_and_factor(parameter) for parameter in parameters]
        return [(gradient, factor) for gradient, factor in found if gradient is not None]

    def clip_grad_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor | None:
        return clip_grad_norm_(parameters, max_norm)

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer if isinstance(optimizer, MasterWeightOptimizer) else MasterWeightOptimizer(optimizer)

    def refresh_working_copies(self, optimizer: Optimizer) -> None:
        pass  # the update has written both halves

    @on_stored_values
    def freeze_scale_factors(self, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        copy_scale_factors(parameters())

    def restore(self, model: nn.Module | None) -> None:
        super().restore(model)
        if model is not None:
            restore_parameters(model)


def split_trainable_parameters(
    model: nn.Module, dtype: torch.dtype, split: Callable[[Sequence[nn.Parameter]], None] | None = None
) -> bool:
    """Split the trainable parameters that are not split yet, in ``dtype``; returns whether there was anything to split.

    Normalizations with running statistics become FP32: torch takes no 16-bit weights with FP32 statistics. What the
    model and its parts save is FP32 then, and so is what code outside of a forward reads of the parameters.
    ``split`` splits those of a layout in place; default: :func:`make_split` of each.
    """
    is_known = put_masters_into_state_dict in model._state_dict_hooks.values()
    trained = [p for p in model_parameters(model) if p.requires_grad]
    # torch.func.functional_call puts tensors in the places of parameters.
    others = [p for p in trained if isinstance(p, nn.Parameter) and not isinstance(p, SplitParameter)]
    if is_known and not others:
        return False
    with_statistics = trained_with_statistics(model)
    new = [p for p in others if p.is_floating_point() and p not in with_statistics]
    if is_known and not new:
        return False
    # All or nothing: a model of which half is split could neither train nor be restored.
    check_splittable(new)  # before anything is changed
    if split is not None:
        split(new)
    else:
        for parameter in new:
            make_split(parameter, dtype)
    for parameter in with_statistics:
        parameter.data = parameter.data.float()
    widen_buffers(model)
    _save_in_fp32(model)
    return True


def _save_in_fp32(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.jit.RecursiveScriptModule):
            continue  # frozen, or it would have been refused: it takes no hook
        if put_masters_into_state_dict not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(put_masters_into_state_dict)
        if hasattr(type(module), "save_pretrained"):  # also of a part, which may be saved by itself
            module.save_pretrained = types.MethodType(save_pretrained, module)  # type: ignore[assignment]


def trained_with_statistics(model: nn.Module) -> dict[nn.Parameter, None]:
    """The trained weights of normalizations with running statistics, in the order of the model."""
    return {
        parameter: None
        for module in modules_of(model)
        if getattr(module, "track_running_stats", False)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }


def restore_parameters(model: nn.Module) -> None:
    """Make the split parameters of ``model`` ordinary FP32 ones again, and take back what came with them."""
    for parameter in model.parameters():
        if isinstance(parameter, SplitParameter):
            unsplit(parameter)
    for module in model.modules():
        for key in [key for key, hook in module._state_dict_hooks.items() if hook is put_masters_into_state_dict]:
            del module._state_dict_hooks[key]
        if getattr(module.__dict__.get("save_pretrained"), "__func__", None) is save_pretrained:
            del module.save_pretrained


def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of a split model's own: weights are saved in FP32, and so Transformers' config must name FP32.

    Raises:
        ValueError: with ``push_to_hub=True``, which would upload the configuration before it is corrected.
    """
    if kwargs.get("push_to_hub"):
        raise ValueError(
            "save_pretrained(push_to_hub=True) of a lean model would upload a configuration of 16 bits with "
            "FP32 weights: call model.push_to_hub(repo_id)"
        )
    result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    config: Any = getattr(model, "config", None)
    # A config of diffusers or of a PyTorchModelHubMixin is a dictionary, which names no dtype.
    names_dtype = hasattr(config, "save_pretrained")
    # An adapter is saved without one.
    if names_dtype and kwargs.get("is_main_process", True) and Path(save_directory, "config.json").is_file():
        config.dtype = torch.float32
        config.save_pretrained(save_directory)
    return result


@functools.cache
def refuse_unwrapped_steps() -> None:
    """Have a step on weights of a lean model raise a RuntimeError where no ``MasterWeightOptimizer`` has their masters.

    Once and for good: torch iterates over these hooks, and must not meet a garbage collection that removes one.
    """
    register_optimizer_step_pre_hook(_refuse_unwrapped_step)


def _refuse_unwrapped_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Hook before any optimizer's step: a RuntimeError for one with split parameters that has not their masters."""
    if getattr(optimizer, "keeps_masters", False):
        return
    for group in optimizer.param_groups:
        # Every step of any optimizer comes here: no call for ordinary parameters.
        if any([type(p) not in _ORDINARY and not getattr(p, "has_optimizer", True) for p in group["params"]]):
            raise RuntimeError(
                f"this {type(optimizer).__name__} was not attached, and would round its updates to the 16 bits in "
                "which a lean layout stores weights: step what attach_optimizer(optimizer) or prepare(model, "
                "optimizer, ...) returns, or call hf_mp.detach(model)"
            )


_refuse_unwrapped_step.is_internal = True  # type: ignore[attr-defined]

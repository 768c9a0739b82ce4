"""``SplitLayout``, the lean layout without sharding."""

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

from hf_mp.casting.data_tracking import DataTrackedParameter
from hf_mp.kernels.tensors import supports_foreach
from hf_mp.model_index import model_parameters, modules_of, widen_buffers
from hf_mp.ranks.fsdp_communication import ScaleSource
from hf_mp.ranks.parallelism import Parallelism
from hf_mp.weights.fp32_methods import install_fp32_methods, remove_fp32_methods
from hf_mp.weights.fp32_reads import on_stored_values
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.master_weight_optimizer import MasterWeightOptimizer, clip_grad_norm_
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
    """The trained parameters are split, and saved in FP32.

    Gradients stay in FP16/BF16, scaled, until the update reads them. Frozen FP32 parameters have working copies.
    """

    keeps_scaled_gradients = True

    def prepare_weights(self, model: nn.Module) -> None:
        if split_trainable_parameters(model, self.split):
            self.copies.clear()  # copies of parameters that were frozen before
            check_all_steps()

    def split(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            make_split(parameter, self.policy.params)

    def register_communication(
        self, model: nn.Module, parallelism: Parallelism, scale_source: ScaleSource, in_fp32: Sequence[nn.Module]
    ) -> None:
        """As the base class; a ValueError under FSDP2, which needs another layout."""
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
        """Move the gradients of split ``weights`` from ``uses`` to the parameters; autograd accumulates the others.

        ``uses`` has one gradient for each alias of a weight (in its slot, and of its working copy). On a GPU each
        parameter also gets the list of those of its node, so that a read of ``.grad`` unscales all in two launches.
        """
        # DDP takes a parameter without .grad as unused, and these gradients are stored outside of .grad.
        hooks_finding_unused = [hook for hook in self._comm_hook_by_ddp.values() if hook.finds_unused]
        for hook in hooks_finding_unused:  # before a gradient of this backward is stored
            hook.mark_accumulated()
        split = {index: weight for index, weight in weights.items() if isinstance(weight, SplitParameter)}
        has_foreach = split and supports_foreach(next(iter(split.values())))
        of_node = [weakref.ref(weight) for weight in split.values()] if has_foreach else []
        is_ddp = bool(self._comm_hook_by_ddp)
        for index, weight in split.items():
            weight._same_node_parameters = of_node
            gradients = uses.pop(index)
            for_autograd = [one for one in gradients if not weight.store_scaled_gradient(one, inverse, separate=is_ddp)]
            if for_autograd:
                uses[index] = for_autograd
            if hooks_finding_unused:
                weight.mark_used()

    @on_stored_values
    def gradients_and_factors(self, parameters: Iterable[nn.Parameter]) -> list[tuple[Tensor, Tensor | None]]:
        parameters = list(parameters)
        for hook in self._comm_hook_by_ddp.values():
            hook.collect_reduced_gradients(parameters)
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


def split_trainable_parameters(model: nn.Module, split: Callable[[Sequence[nn.Parameter]], None]) -> bool:
    """Pass the trainable parameters that are not split yet to ``split``, and return whether there were any.

    Normalizations with running statistics become FP32, because torch does not accept 16-bit weights with FP32
    statistics. The model and its parts then save FP32 weights.
    """
    was_split = put_masters_into_state_dict in model._state_dict_hooks.values()
    trained = [p for p in model_parameters(model) if p.requires_grad]
    # torch.func.functional_call replaces parameters by tensors.
    new = [p for p in trained if isinstance(p, nn.Parameter) and not isinstance(p, SplitParameter)]
    with_statistics = trained_with_statistics(model) if new or not was_split else {}
    new = [p for p in new if p.is_floating_point() and p not in with_statistics]
    if was_split and not new:
        return False
    check_splittable(new)  # before anything is changed
    split(new)
    for parameter in with_statistics:
        parameter.data = parameter.data.float()
    widen_buffers(model)
    _save_in_fp32(model)
    install_fp32_methods(model)
    return True


def _save_in_fp32(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.jit.RecursiveScriptModule):
            continue  # frozen, and supports no hook
        if put_masters_into_state_dict not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(put_masters_into_state_dict)
        if hasattr(type(module), "save_pretrained"):  # a part may be saved separately
            module.save_pretrained = types.MethodType(save_pretrained, module)  # type: ignore[assignment]


def trained_with_statistics(model: nn.Module) -> dict[nn.Parameter, None]:
    """Return the trained weights of normalizations with running statistics."""
    return {
        parameter: None
        for module in modules_of(model)
        if getattr(module, "track_running_stats", False)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }


def restore_parameters(model: nn.Module) -> None:
    """Make the split parameters of ``model`` ordinary ones, saved as usual."""
    for parameter in model.parameters():
        if isinstance(parameter, SplitParameter):
            unsplit(parameter)
    remove_fp32_methods(model)
    for module in model.modules():
        for key in [key for key, hook in module._state_dict_hooks.items() if hook is put_masters_into_state_dict]:
            del module._state_dict_hooks[key]
        if getattr(module.__dict__.get("save_pretrained"), "__func__", None) is save_pretrained:
            del module.save_pretrained


def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement of ``model.save_pretrained``: the config names FP32, as the weights are saved.

    Raises a ValueError for ``push_to_hub=True``, which would upload the config before it is corrected.
    """
    if kwargs.get("push_to_hub"):
        raise ValueError(
            "save_pretrained(push_to_hub=True) of a lean model would upload a configuration of 16 bits with "
            "FP32 weights: call model.push_to_hub(repo_id)"
        )
    result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    config: Any = getattr(model, "config", None)
    # A config of diffusers or of a PyTorchModelHubMixin is a dictionary without a dtype; an adapter has no config.json.
    names_dtype = hasattr(config, "save_pretrained")
    if names_dtype and kwargs.get("is_main_process", True) and Path(save_directory, "config.json").is_file():
        config.dtype = torch.float32
        config.save_pretrained(save_directory)
    return result


@functools.cache
def check_all_steps() -> None:
    """Register a hook that raises if an optimizer without master weights steps a lean model."""
    # It stays: torch iterates over these hooks, and a removal by the garbage collector would fail.
    register_optimizer_step_pre_hook(_check_masters_of)


def _check_masters_of(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Pre-step hook: raise a RuntimeError for split parameters without a :class:`MasterWeightOptimizer`."""
    if getattr(optimizer, "keeps_masters", False):
        return
    for group in optimizer.param_groups:
        if any([type(p) not in _ORDINARY and not getattr(p, "has_optimizer", True) for p in group["params"]]):
            raise RuntimeError(
                f"this {type(optimizer).__name__} was not attached, and would round its updates to the 16 bits in "
                "which a lean layout stores weights: step what attach_optimizer(optimizer) or prepare(model, "
                "optimizer, ...) returns, or call hf_mp.detach(model)"
            )


_check_masters_of.is_internal = True  # type: ignore[attr-defined]

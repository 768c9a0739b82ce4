"""The lean layouts of a whole model: its trainable parameters split, its checkpoints in FP32 all the same."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hf_mp.weights.lean.split_parameter import (
    SplitParameter,
    check_splittable,
    make_split,
    put_masters_into_state_dict,
    unsplit,
)
from hf_mp.weights.model_walk import model_parameters, modules_of, widen_buffers


def split_trainable_parameters(model: nn.Module, dtype: torch.dtype) -> bool:
    """Split what is trainable and not split yet, in ``dtype``; tells whether there was anything to split.

    Normalizations with running statistics become FP32: torch takes no 16-bit weights with FP32 statistics. What the
    model and its parts save is FP32 then, and so is what code outside of a forward reads of the parameters.
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
    for parameter in new:
        make_split(parameter, dtype)
    for parameter in with_statistics:
        parameter.data = parameter.data.float()
    widen_buffers(model)
    _save_in_fp32(model)
    return True


def _save_in_fp32(model: nn.Module) -> None:
    for module in model.modules():
        if put_masters_into_state_dict not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(put_masters_into_state_dict)
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = types.MethodType(save_pretrained, model)  # type: ignore[assignment]


def trained_with_statistics(model: nn.Module) -> dict[nn.Parameter, None]:
    """The trained weights of normalizations with running statistics, in the order of the model."""
    return {
        parameter: None
        for module in modules_of(model)
        if isinstance(module, _NormBase) and module.track_running_stats
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
    if getattr(model.__dict__.get("save_pretrained"), "__func__", None) is save_pretrained:
        del model.save_pretrained


def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of a split model's own: Transformers writes the parameters' dtype, and weights are saved in FP32."""
    result = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    config = getattr(model, "config", None)
    # An adapter is saved without one.
    if config is not None and kwargs.get("is_main_process", True) and Path(save_directory, "config.json").is_file():
        config.dtype = torch.float32
        config.save_pretrained(save_directory)
    return result

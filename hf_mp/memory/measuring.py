"""Measures the memory of fine-tuning by real training steps on this machine."""

from __future__ import annotations

import gc
import tempfile
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_mp.memory.batches import Inputs, make_batch
from hf_mp.memory.models import (
    ModelLike,
    cast_weights,
    check_quantizable,
    copy_model,
    find_model,
    load,
    model_class,
)
from hf_mp.memory.precisions import parse_precision, parse_preset
from hf_mp.memory.recorder import MemoryRecorder
from hf_mp.memory.settings import check_device, make_settings
from hf_mp.memory.training import TrainingMemory, host_bytes_of, make_training_setup, prepare_model, recording


def measure_training_memory(
    model: ModelLike,
    precision: str | torch.dtype = "fp16",
    *,
    device: str | None = None,
    **settings: Any,
) -> TrainingMemory:
    """Measure the memory of fine-tuning by real training steps, as :func:`hf_mp.estimate_training_memory` predicts it.

    A given model is copied. Otherwise only its configuration is downloaded, and weights are random.

    Args:
        model: as there.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        device: ``"cuda"`` or ``"cpu"``; default: the GPU if there is one.
        settings: ``batch_size``, ``seq_len``, ``accumulation_steps``, ``gradient_checkpointing``, ``optimizer``,
            ``free_gradients`` and ``offload``, as there.

    Returns:
        As there; on a GPU with the peak of CUDA's allocator.

    Raises:
        ValueError: as there, for several ranks, and for a meta model.
    """
    if settings.get("ranks", 1) > 1:
        raise ValueError(f"ranks={settings['ranks']} cannot be measured: a step is taken in this process alone")
    source = find_model(model)
    chosen = make_settings(source, precision, **settings)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = target.type == "cuda"
    check_device(chosen, target.type)
    gc.collect()  # earlier models may be in reference cycles
    before = torch.cuda.memory_allocated() if on_gpu else 0
    real = _real_model(source, parse_preset(precision).loaded, target)
    name, parameters = type(real).__name__, real.num_parameters()
    batch = make_batch(Inputs.of(real, chosen.precision), chosen, target)
    setup = make_training_setup(prepare_model(real, chosen).to(target), chosen, target)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with recording(setup, MemoryRecorder(target)) as profile_of:
        profile = profile_of(batch)
    return TrainingMemory(
        **vars(profile),
        model=name,
        parameters=parameters,
        settings=chosen,
        device=target.type,
        measured=True,
        host_bytes=host_bytes_of(setup),
        allocator_peak_bytes=torch.cuda.max_memory_allocated() - before if on_gpu else None,
    )


def _real_model(source: PreTrainedConfig | nn.Module, precision: str, device: torch.device) -> PreTrainedModel:
    """Copy a model, or create one with random weights."""
    chosen = parse_precision(precision)
    if isinstance(source, nn.Module):
        check_quantizable(source, precision)
        if any(tensor.is_meta for tensor in source.parameters()):
            raise ValueError(
                f"this {type(source).__name__} has weights on the meta device, with which no step can be measured: "
                "give its configuration (model.config), or use estimate_training_memory"
            )
        model = cast(PreTrainedModel, copy_model(source, {}))
        cast_weights(model, chosen.dtype)
    else:
        with torch.device(device if chosen.quantization is None else "cpu"):
            model = model_class(source)._from_config(source, dtype=chosen.dtype)
    if chosen.quantization is None:
        return model
    # bitsandbytes quantizes weights only while they are loaded from a file.
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        del model
        return load(directory, precision, device_map={"": str(device)})

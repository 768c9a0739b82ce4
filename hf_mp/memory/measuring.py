"""Measures fine-tuning: real training steps on this machine, counted as the estimate counts them."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_mp.memory.models import ModelLike, find_config, load, model_class
from hf_mp.memory.precisions import parse_precision, parse_preset
from hf_mp.memory.recorder import MemoryRecorder
from hf_mp.memory.training import (
    MOST_STEPS,
    Trainee,
    TrainingMemory,
    make_settings,
    make_trainee,
    prepare_model,
    record_steps,
    train_one_step,
)


def measure_training_memory(
    model: ModelLike,
    precision: str | torch.dtype = "fp16",
    *,
    device: str | None = None,
    ask_allocator: bool | None = None,
    **settings: Any,
) -> TrainingMemory:
    """Measure the memory of fine-tuning with real steps on this machine.

    The model is created from its configuration with random weights: a given model is left untouched, and only a
    configuration is downloaded.

    Args:
        model: as for :func:`hf_mp.estimate_training_memory`.
        precision: one of :data:`hf_mp.memory.precisions.TRAINING_PRESETS`; default ``"fp16"``.
        device: ``"cuda"`` or ``"cpu"``; default: the GPU if there is one.
        ask_allocator: also train unobserved steps and take the peak from the allocator: CUDA's statistics, or torch's
            profiler on a CPU. Default: on a GPU.
        settings: ``batch_size``, ``seq_len``, ``accumulation_steps``, ``gradient_checkpointing``, ``optimizer`` and
            ``free_gradients``, as for :func:`hf_mp.estimate_training_memory`.

    Returns:
        As :func:`hf_mp.estimate_training_memory`, for real tensors.

    Raises:
        ValueError: as for :func:`hf_mp.estimate_training_memory`, and for several ranks.
    """
    if settings.get("ranks", 1) > 1:
        raise ValueError(f"ranks={settings['ranks']} cannot be measured: a step is taken in this process alone")
    config = find_config(model)
    asked = make_settings(config, precision, **settings)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    before = torch.cuda.memory_allocated() if place.type == "cuda" else 0
    real = _real_model(config, parse_preset(precision).loaded, place)
    kind, parameters = type(real), real.num_parameters()
    trainee = make_trainee(prepare_model(real, asked).to(place), kind, asked, place)
    recorder = MemoryRecorder(place)
    profile = record_steps(trainee, recorder)
    allocator_peak = None
    if ask_allocator or (ask_allocator is None and place.type == "cuda"):
        allocator_peak = _cuda_peak(trainee) - before if place.type == "cuda" else _cpu_peak(trainee, recorder)
    return TrainingMemory(
        **vars(profile),
        model=kind.__name__,
        parameters=parameters,
        settings=asked,
        device=place.type,
        measured=True,
        allocator_peak_bytes=allocator_peak,
    )


def _real_model(config: PreTrainedConfig, precision: str, device: torch.device) -> PreTrainedModel:
    """A model with random weights; a quantized one is loaded as :func:`hf_mp.load` does."""
    chosen = parse_precision(precision)
    with torch.device(device if chosen.quantization is None else "cpu"):
        model: PreTrainedModel = model_class(config)._from_config(config, dtype=chosen.dtype)
    if chosen.quantization is None:
        return model
    # bitsandbytes quantizes weights while they are loaded, so that they go through a file.
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        del model
        return load(directory, precision, device_map={"": str(device)})


def _cuda_peak(trainee: Trainee) -> int:
    torch.cuda.reset_peak_memory_stats()
    _train_until_updated(trainee)
    _train_until_updated(trainee)
    return torch.cuda.max_memory_allocated()


def _cpu_peak(trainee: Trainee, recorder: MemoryRecorder) -> int:
    """The peak of one more update as torch's CPU allocator reports it to the profiler, plus what was live before."""
    from torch.profiler import ProfilerActivity, profile

    # What cycles hold would be freed under the profiler, which never saw it made.
    gc.collect()
    in_use = peak = sum(allocation.size_bytes for allocation in recorder.ledger.live.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train_until_updated(trainee)
    # The public tables of the profiler add bytes up by op, and have no order.
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return int(peak)


def _train_until_updated(trainee: Trainee) -> None:
    for _ in range(MOST_STEPS):
        updated = train_one_step(trainee)
        trainee.optimizer.zero_grad()
        if updated:
            return

"""Batches of zeros for a training step: no shape depends on values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_mp.memory.models import class_of, config_of
from hf_mp.memory.precisions import parse_preset
from hf_mp.memory.settings import TrainingSettings

_IMAGE_SIZE = 224
_SAMPLES = 160_000  # ten seconds of sound at 16 kHz
_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
# With one label per sequence and no config.num_labels.
_ONE_LABEL = ("ForMultipleChoice", "ForNextSentencePrediction")


@dataclass(frozen=True)
class Inputs:
    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype  # of images and sound: FP32, or that of the weights without autocast

    @classmethod
    def of(cls, model: PreTrainedModel, precision: str) -> Inputs:
        preset = parse_preset(precision)
        without_autocast = preset.policy is None and preset.autocast is None
        return cls(class_of(model), config_of(model), model.dtype if without_autocast else torch.float32)


def make_batch(inputs: Inputs, settings: TrainingSettings, device: torch.device) -> dict[str, Any]:
    """Create inputs and labels by the argument names of the model's forward.

    Raises:
        ValueError: for a model with inputs other than token ids, images, videos or sound.
    """
    arguments = inspect.signature(inputs.kind.forward).parameters
    tokens = () if settings.seq_len is None else (settings.seq_len,)
    specs = (*_input_specs(inputs, tokens, arguments), *_label_specs(inputs, tokens, arguments))
    batch: dict[str, Any] = {
        name: torch.zeros(settings.batch_size, *shape, dtype=dtype, device=device) for name, (shape, dtype) in specs
    }
    if "return_loss" in arguments:  # CLIP and the like
        batch["return_loss"] = True
    return batch


_Spec = tuple[tuple[int, ...], torch.dtype]  # shape without the batch dimension, and dtype


def _input_specs(inputs: Inputs, tokens: tuple[int, ...], arguments: Any) -> Iterator[tuple[str, _Spec]]:
    """Yield name, shape and dtype of each input; ``arguments`` are those of the forward."""
    kind, config, main = inputs.kind, inputs.config, inputs.kind.main_input_name
    if main == "input_ids" or (main == "pixel_values" and "input_ids" in arguments):
        one_choice = (1, *tokens) if kind.__name__.endswith("ForMultipleChoice") else tokens
        yield "input_ids", (one_choice, torch.long)
    if main == "pixel_values" or "return_loss" in arguments:
        yield "pixel_values", (_image(config), inputs.dtype)
    elif main == "pixel_values_videos":
        yield main, (_image(config), inputs.dtype)
    elif main in ("input_features", "input_values"):
        yield main, (_sound(config), inputs.dtype)
    elif main != "input_ids":
        raise ValueError(
            f"{kind.__name__} reads {main}, and batches are made of token ids, images, videos and sound alone: no step "
            "of it can be taken here"
        )
    if "bool_masked_pos" in arguments:
        *_, height, width = _image(config)
        patch = _config_value(config, "patch_size", default=16)
        yield "bool_masked_pos", ((height // patch * (width // patch),), torch.bool)


def _label_specs(inputs: Inputs, tokens: tuple[int, ...], arguments: Any) -> Iterator[tuple[str, _Spec]]:
    label: _Spec = (), torch.long
    if "start_positions" in arguments:
        yield "start_positions", label
        yield "end_positions", label
    elif "labels" in arguments:
        yield "labels", _label(inputs.kind, inputs.config, tokens)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in arguments:
            yield name, label


def _label(kind: type[PreTrainedModel], config: PreTrainedConfig, tokens: tuple[int, ...]) -> _Spec:
    if kind.__name__.endswith(_CLASSIFIERS):
        labels = int(config.num_labels or 0)
        if config.problem_type == "multi_label_classification":
            return (labels,), torch.float32
        if config.problem_type == "regression" or (config.problem_type is None and labels == 1):
            return () if labels == 1 else (labels,), torch.float32
        return (), torch.long
    if kind.__name__.endswith("ForSemanticSegmentation"):
        return _image(config)[1:], torch.long
    return () if kind.__name__.endswith(_ONE_LABEL) else tokens, torch.long


def _image(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the shape of an image, (channels, height, width), or of a video, (frames, channels, height, width)."""
    size = _config_value(config, "image_size", "crop_size", default=_IMAGE_SIZE)
    height, width = (size, size) if isinstance(size, int) else size
    frames = _config_value(config, "num_frames", "frames_per_clip", default=0)
    image = _config_value(config, "num_channels", default=3), height, width
    return (frames, *image) if frames else image


def _config_value(config: PreTrainedConfig, *names: str, default: Any) -> Any:
    """Return the first of ``names`` in a configuration or one of its parts."""
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    found = (getattr(part, name, None) for name in names for part in parts)
    return next(filter(None, found), default)


def _sound(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the shape of the longest sound that a model accepts, or of ten seconds."""
    if hasattr(config, "input_feat_per_channel"):  # Speech2Text
        return config.max_source_positions, config.input_feat_per_channel * config.input_channels
    has_mel_bins = hasattr(config, "num_mel_bins")
    if has_mel_bins and hasattr(config, "max_source_positions"):  # Whisper, with a convolution of stride 2
        return config.num_mel_bins, 2 * config.max_source_positions
    if has_mel_bins and hasattr(config, "max_length"):  # AST
        return config.max_length, config.num_mel_bins
    return (_SAMPLES,)

"""Creates batches of zeros for a training step; no shape depends on their values."""

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

_IMAGE_SIZE = 224  # default of most image processors, for models that accept any size
_SAMPLES = 160_000  # ten seconds of sound at 16 kHz
_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
# Classes with one label per sequence and no config.num_labels.
_ONE_LABEL = ("ForMultipleChoice", "ForNextSentencePrediction")


@dataclass(frozen=True)
class Inputs:
    """Facts of a model that determine the inputs of its forward.

    Attributes:
        kind: class of the model.
        config: its configuration.
        dtype: of images and sound: FP32, or the dtype of the weights without autocast.
    """

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, precision: str) -> Inputs:
        """Return the inputs of a loaded model for a training preset."""
        preset = parse_preset(precision)
        casts = preset.policy is not None or preset.autocast is not None
        return cls(class_of(model), config_of(model), torch.float32 if casts else model.dtype)


def make_batch(inputs: Inputs, settings: TrainingSettings, device: torch.device) -> dict[str, Any]:
    """Create inputs and labels of zeros, by the argument names of the model's forward.

    Raises:
        ValueError: for a model with inputs other than token ids, images, videos or sound.
    """
    arguments = inspect.signature(inputs.kind.forward).parameters
    batch: dict[str, Any] = {
        name: torch.zeros(settings.batch_size, *shape, dtype=dtype, device=device)
        for name, (shape, dtype) in _specs(inputs, settings, arguments)
    }
    if "return_loss" in arguments:  # CLIP and the like
        batch["return_loss"] = True
    return batch


_Spec = tuple[tuple[int, ...], torch.dtype]  # shape without the batch dimension, and dtype


def _specs(inputs: Inputs, settings: TrainingSettings, arguments: Any) -> Iterator[tuple[str, _Spec]]:
    """Yield name, shape and dtype of each tensor of a batch; ``arguments`` are those of the forward."""
    kind, config = inputs.kind, inputs.config
    tokens = () if settings.seq_len is None else (settings.seq_len,)
    one_choice = (1, *tokens) if kind.__name__.endswith("ForMultipleChoice") else tokens
    ids, label = (one_choice, torch.long), ((), torch.long)
    main = kind.main_input_name
    if main == "input_ids" or (main == "pixel_values" and "input_ids" in arguments):
        yield "input_ids", ids
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
        patch = _config_value(config, "patch_size", 16)
        yield "bool_masked_pos", ((height // patch * (width // patch),), torch.bool)
    if "start_positions" in arguments:
        yield "start_positions", label
        yield "end_positions", label
    elif "labels" in arguments:
        yield "labels", _label(kind, config, tokens)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in arguments:
            yield name, label


def _label(kind: type[PreTrainedModel], config: PreTrainedConfig, tokens: tuple[int, ...]) -> _Spec:
    """Return shape and dtype of the labels."""
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
    size = _config_value(config, "image_size", _config_value(config, "crop_size", _IMAGE_SIZE))
    height, width = (size, size) if isinstance(size, int) else size
    frames = _config_value(config, "num_frames", _config_value(config, "frames_per_clip", 0))
    image = _config_value(config, "num_channels", 3), height, width
    return (frames, *image) if frames else image


def _config_value(config: PreTrainedConfig, name: str, default: Any) -> Any:
    """Return a value of a configuration or of one of its parts, for example a vision encoder's."""
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    return next((found for part in parts if (found := getattr(part, name, None))), default)


def _sound(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the shape of the longest sound that a model accepts, or of ten seconds if there is no limit."""
    if hasattr(config, "input_feat_per_channel"):  # Speech2Text
        return config.max_source_positions, config.input_feat_per_channel * config.input_channels
    has_mel_bins = hasattr(config, "num_mel_bins")
    if has_mel_bins and hasattr(config, "max_source_positions"):  # Whisper, with a convolution of stride 2
        return config.num_mel_bins, 2 * config.max_source_positions
    if has_mel_bins and hasattr(config, "max_length"):  # AST
        return config.max_length, config.num_mel_bins
    return (_SAMPLES,)

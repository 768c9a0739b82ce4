"""Batches of zeros with which a model takes a training step: no shape depends on their values."""

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

_IMAGE_SIZE = 224  # of most image processors, for convolutional models, which take any
_SAMPLES = 160_000  # ten seconds of sound at 16 kHz
_OF_A_SEQUENCE = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
# A label for each sequence, without a config.num_labels.
_ONE_LABEL = ("ForMultipleChoice", "ForNextSentencePrediction")


@dataclass(frozen=True)
class Inputs:
    """What the forward of a model takes.

    Attributes:
        kind: class of the model.
        config: its configuration.
        dtype: of images and sound: FP32, or that of the weights if nothing casts to it.
    """

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, precision: str) -> Inputs:
        """Those of a loaded model that is trained in a preset."""
        preset = parse_preset(precision)
        casts = preset.policy is not None or preset.autocast is not None
        return cls(class_of(model), config_of(model), torch.float32 if casts else model.dtype)


def make_batch(inputs: Inputs, settings: TrainingSettings, device: torch.device) -> dict[str, Any]:
    """Inputs and labels, all zeros, by the names of the model's forward.

    Raises:
        ValueError: for a model that reads neither token ids nor images, videos or sound.
    """
    arguments = inspect.signature(inputs.kind.forward).parameters
    batch: dict[str, Any] = {
        name: torch.zeros(settings.batch_size, *shape, dtype=dtype, device=device)
        for name, (shape, dtype) in _inputs(inputs, settings, arguments)
    }
    if "return_loss" in arguments:  # CLIP and the like
        batch["return_loss"] = True
    return batch


_Shape = tuple[tuple[int, ...], torch.dtype]  # of each sample of a batch


def _inputs(inputs: Inputs, settings: TrainingSettings, arguments: Any) -> Iterator[tuple[str, _Shape]]:
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
        patch = _of_parts(config, "patch_size", 16)
        yield "bool_masked_pos", ((height // patch * (width // patch),), torch.bool)
    if "start_positions" in arguments:
        yield "start_positions", label
        yield "end_positions", label
    elif "labels" in arguments:
        yield "labels", _label(kind, config, tokens)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in arguments:
            yield name, label


def _label(kind: type[PreTrainedModel], config: PreTrainedConfig, tokens: tuple[int, ...]) -> _Shape:
    if kind.__name__.endswith(_OF_A_SEQUENCE):
        if config.problem_type == "multi_label_classification":
            return (int(config.num_labels or 0),), torch.float32
        labels = int(config.num_labels or 0)
        if config.problem_type == "regression" or (config.problem_type is None and labels == 1):
            return () if labels == 1 else (labels,), torch.float32
        return (), torch.long
    if kind.__name__.endswith("ForSemanticSegmentation"):
        return _image(config)[1:], torch.long
    return () if kind.__name__.endswith(_ONE_LABEL) else tokens, torch.long


def _image(config: PreTrainedConfig) -> tuple[int, ...]:
    """Channels, height and width of the images that a model is made for; with frames before them, of its videos."""
    size = _of_parts(config, "image_size", _of_parts(config, "crop_size", _IMAGE_SIZE))
    height, width = (size, size) if isinstance(size, int) else size
    frames = _of_parts(config, "num_frames", _of_parts(config, "frames_per_clip", 0))
    return (*((frames,) if frames else ()), _of_parts(config, "num_channels", 3), height, width)


def _of_parts(config: PreTrainedConfig, name: str, usual: Any) -> Any:
    """A setting of a configuration, or of a part of it, such as that of a vision encoder."""
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    return next((found for part in parts if (found := getattr(part, name, None))), usual)


def _sound(config: PreTrainedConfig) -> tuple[int, ...]:
    """The shape of the longest sound that a model takes, or of ten seconds where it takes any."""
    if hasattr(config, "input_feat_per_channel"):  # Speech2Text
        return config.max_source_positions, config.input_feat_per_channel * config.input_channels
    if hasattr(config, "num_mel_bins") and hasattr(
        config, "max_source_positions"
    ):  # Whisper: a convolution halves them
        return config.num_mel_bins, 2 * config.max_source_positions
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # AST
        return config.max_length, config.num_mel_bins
    return (_SAMPLES,)

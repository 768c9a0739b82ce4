"""Finds, loads and copies models."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.environment.libraries import first_line
from hf_mp.environment.paths import is_inside
from hf_mp.memory.footprint import is_bitsandbytes, tensors_of
from hf_mp.memory.precisions import bitsandbytes_config, parse_precision
from hf_mp.ranks.parallelism import is_dtensor

ModelLike = str | Path | PreTrainedConfig | nn.Module

# Classes with a loss by model_type, in order of priority.
_ENCODER_DECODERS = (
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
_WITH_A_LOSS = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *_ENCODER_DECODERS,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
)

_POSITIONS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
_WRITE_TEXT = ("ForConditionalGeneration", "EncoderDecoderModel", "ForCausalLM")

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024}

BUILT_IN: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_embd": 1600, "n_head": 25},
}


def find_model(model: ModelLike) -> PreTrainedConfig | nn.Module:
    """Return a model unchanged, or else its configuration.

    Raises:
        TypeError: for a module of neither Transformers nor PEFT.
        ValueError: for a replaced forward or sharded weights.
    """
    if not isinstance(model, nn.Module):
        return find_config(model)
    inner, name = transformers_model(model), type(model).__name__
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"no training step of a {name} can be taken here: give a model of Transformers, or PEFT's around one, "
            "without the wrapper of DDP or torch.compile"
        )
    replaced = any("forward" in vars(one) and not hasattr(one, "_hf_hook") for one in model.modules())
    if replaced or any(map(is_dtensor, model.parameters())):
        raise ValueError(
            f"this {name} is prepared for training already ({'its forward is replaced' if replaced else 'sharded'}): "
            "estimate before MixedPrecision.attach, prepare or a Trainer, or give its configuration (model.config)"
        )
    return model


def transformers_model(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside a PEFT model, or ``model`` itself."""
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return cast(Any, model).get_base_model() if is_peft else model


def config_of(source: PreTrainedConfig | nn.Module) -> PreTrainedConfig:
    return cast(Any, transformers_model(source)).config if isinstance(source, nn.Module) else source


def find_config(model: str | Path | PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration, a built-in one, or that of a directory, a file or the Hub."""
    if isinstance(model, PreTrainedConfig):
        return copy.deepcopy(model)
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"a model is given by its name, path or configuration, or as it is, not as {type(model).__name__}"
        )
    short_name = str(model).removeprefix("openai-community/")
    if short_name in BUILT_IN and not Path(model).exists():
        return AutoConfig.for_model(**BUILT_IN[short_name])
    return _fetch(model, AutoConfig.from_pretrained)


def _fetch(model: str | Path, from_pretrained: Callable[..., Any], **settings: Any) -> Any:
    """Call ``from_pretrained``, with the cache only if a request to the Hub fails."""
    hub_error = None if Path(model).exists() else ask_hub(str(model))
    defaults = {"local_files_only": hub_error is not None, "trust_remote_code": False}
    try:
        return from_pretrained(str(model), **{**defaults, **settings})
    # Raised for other contents.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if hub_error is not None and isinstance(error, OSError):  # neither on the Hub nor in the cache
            why = (
                f"{str(model)!r} is neither a directory here nor a model in the Hub's cache, and the Hub gave none of "
                f"that name ({first_line(hub_error).rstrip('.')})"
            )
        else:
            why = f"{model} cannot be loaded: {' '.join(str(error).split()).rstrip('.')}"
        raise ValueError(
            f"{why}. Give a directory that save_pretrained wrote, or the name of a model on the Hub or in its cache. "
            f"`hf-mp memory`, which needs no weights, also takes a config.json, or one of {', '.join(BUILT_IN)}. hf_mp "
            "does not run a model's own code: load such a model's config with from_pretrained, and give that"
        ) from error


def ask_hub(name: str) -> Exception | None:
    """Return the error of one request, or None; ``from_pretrained`` retries for half a minute."""
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:
        return error
    return None


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a configuration, or that of its ``model_type`` with a loss."""
    # Without a head there is no loss, except CLIP's.
    bare = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    for name in getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
        if name != bare and isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for mapping in (*(_ENCODER_DECODERS if config.is_encoder_decoder else ()), *_WITH_A_LOSS):
        names = mapping.get(config.model_type)
        if names:
            return getattr(transformers, names if isinstance(names, str) else names[0])
    raise ValueError(
        f"no model with a loss is known for model_type {config.model_type!r}: name a class of Transformers in the "
        'configuration, as "architectures": ["BertForMaskedLM"], or give the model'
    )


def class_of(source: PreTrainedConfig | nn.Module) -> type[PreTrainedModel]:
    if isinstance(source, nn.Module):
        return cast(type[PreTrainedModel], type(transformers_model(source)))
    return model_class(source)


def longest_sequence(source: PreTrainedConfig | nn.Module) -> float | None:
    """Return the maximum sequence length in tokens, may be infinite; None for a model without tokens."""
    kind, config = class_of(source), config_of(source).get_text_config()
    if kind.main_input_name != "input_ids" and not kind.__name__.endswith(_WRITE_TEXT):
        return None
    longest = min((found for name in _POSITIONS if (found := getattr(config, name, None))), default=float("inf"))
    # RoBERTa and its relatives number positions from 2.
    counts_from_2 = getattr(config, "pad_token_id", None) == 1 and longest - 2 in (512, 1024, 4096)
    return longest - 2 if counts_from_2 else longest


def meta_model(source: PreTrainedConfig | nn.Module, precision: str) -> PreTrainedModel:
    """Create on the meta device the model that :func:`hf_mp.load` would load, or a copy of a given one."""
    dtype = parse_precision(precision).dtype
    if isinstance(source, nn.Module):
        check_quantizable(source, precision)
        model = cast(PreTrainedModel, copy_on_meta(source))
        cast_weights(model, dtype)
    else:
        with torch.device("meta"):
            model = model_class(source)._from_config(copy.deepcopy(source), dtype=dtype)
        model.tie_weights()
    quantization = bitsandbytes_config(precision)
    return model if quantization is None else _quantize(model, quantization, dtype)


def _quantize(model: PreTrainedModel, quantization: BitsAndBytesConfig, dtype: torch.dtype) -> PreTrainedModel:
    quantizer: Any = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"}, dtype=dtype)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        if quantizer.param_needs_quantization(model, name):
            cast(Any, parameter)._quantize(torch.device("meta"))
    return cast(PreTrainedModel, quantizer.postprocess_model(model) or model)


def check_quantizable(model: nn.Module, precision: str) -> None:
    """Raise a ValueError if ``precision`` quantizes a model that is quantized already or has adapters."""
    inner: Any = transformers_model(model)
    has_adapters = inner is not model or getattr(inner, "_hf_peft_config_loaded", False)
    if (has_adapters or getattr(inner, "is_quantized", False)) and parse_precision(precision).quantization is not None:
        raise ValueError(
            f"precision={precision!r} quantizes a model without adapters, and this {type(model).__name__} is quantized "
            "or has some: give the model before that, or choose another precision"
        )


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a model with its quantized weights."""
    copied = copy.deepcopy(model, memo)
    # bitsandbytes ignores the memo: weight and module would have different quantization state.
    for parameter, copied_parameter in zip(model.parameters(), copied.parameters(), strict=True):
        vars(copied_parameter).update(copy.deepcopy(vars(parameter), memo))
    return copied


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Copy the modules and hooks of ``model``, with tensors on the meta device."""
    memo: dict[int, Any] = {}
    for _, _, tensor in tensors_of(model):
        _on_device(tensor, torch.device("meta"), memo)
    for module in model.modules():
        if (hook := vars(module).get("_hf_hook")) is not None:  # accelerate's, may contain offloaded weights
            memo[id(hook)] = hook
    try:
        copied = copy_model(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"this {type(model).__name__} cannot be copied ({first_line(error)}): give its configuration (model.config)"
        ) from error
    for module in copied.modules():
        if vars(module).pop("_hf_hook", None) is not None:  # moves inputs to the device of the weights
            for name in ("forward", "_old_forward"):
                vars(module).pop(name, None)
    return copied


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of a model for training in ``dtype``, except frozen ones if it is FP32."""
    is_lower = dtype in LOWER_PRECISION_DTYPES
    for parameter in model.parameters():
        if parameter.is_floating_point() and (parameter.requires_grad or is_lower):
            parameter.data = parameter.data.to(dtype)


def load(
    model_name_or_path: str | Path,
    precision: str | torch.dtype = "fp32",
    *,
    double_quant: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Load a model through Transformers' ``from_pretrained`` in one of six precisions.

    ``int8`` is LLM.int8() (Dettmers et al. 2022), ``nf4`` and ``fp4`` are QLoRA's 4-bit types (Dettmers et al. 2023),
    all from bitsandbytes, also on a CPU: weights of linear layers are quantized, all others are FP16. Does not run a
    model's own code, and reads no weights outside of its directory.

    Args:
        model_name_or_path: a directory that ``save_pretrained`` wrote, or a model on the Hub or in the cache.
        precision: ``"fp32"`` (default), ``"fp16"``, ``"bf16"``, ``"int8"``, ``"nf4"`` or ``"fp4"``.
        double_quant: also quantize the quantization state of ``nf4`` and ``fp4`` (QLoRA, section 3); default False.
        settings: for ``from_pretrained``: ``device_map``, ``revision``, ``attn_implementation`` and so on.

    Raises:
        ValueError: for an unknown precision, or a model that cannot be loaded.
        TypeError: for a ``dtype`` or ``quantization_config`` in addition to ``precision``.
        ImportError: if bitsandbytes is needed and missing.
    """
    dtype = parse_precision(precision).dtype
    config = find_config(model_name_or_path)
    kind = model_class(config)
    # Both, so that Python raises a TypeError if `settings` has one.
    given = {"dtype": dtype, "quantization_config": bitsandbytes_config(precision, double_quant)}

    def from_pretrained(name: str, **all_settings: Any) -> PreTrainedModel:
        _check_shards(name, config, all_settings)
        return kind.from_pretrained(name, **all_settings)

    return cast(PreTrainedModel, _fetch(model_name_or_path, from_pretrained, **given, **settings))


_FILE_SETTINGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def _check_shards(name: str, config: PreTrainedConfig, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if an index names a file outside of the model's directory."""
    file_settings = {key: settings[key] for key in _FILE_SETTINGS if key in settings}
    for index_name in _index_names(config, settings.get("variant")):
        try:
            index = cached_file(name, index_name, **file_settings)
        except OSError:
            continue
        shards = set(json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values())
        if outside := [shard for shard in shards if not (isinstance(shard, str) and is_inside(shard))]:
            raise ValueError(f"{index_name} names a shard outside of its directory: {outside[0]!r:.200}")


def _index_names(config: PreTrainedConfig, variant: str | None) -> list[str]:
    ending = ".json" if variant is None else f".{variant}.json"
    names = [name.replace(".json", ending) for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)]
    # Transformers restricts this name to the directory, but not the shards in it.
    own = getattr(config, "transformers_weights", None)
    return [*names, own] if isinstance(own, str) and own.endswith(".index.json") else names


def replace_tensors(model: nn.Module, device: torch.device) -> None:
    """Replace tensors by uninitialized ones on ``device``, fake in a FakeTensorMode; ties are preserved."""
    memo: dict[int, Any] = {}
    # Module._apply would untie weights.
    for module in model.modules():
        for registry in (module._parameters, module._buffers, vars(module)):
            for name, value in list(registry.items()):
                registry[name] = _on_device(value, device, memo)


def _on_device(value: Any, device: torch.device, memo: dict[int, Any]) -> Any:
    """Return a replacement of ``value``, unchanged if it has no tensor; ``memo`` maps ids to replacements."""
    if id(value) in memo:  # tied
        return memo[id(value)]
    if isinstance(value, Tensor):
        new: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            new = nn.Parameter(new, requires_grad=value.requires_grad)
            # bitsandbytes stores codes, scales, and the weight itself in attributes.
            for name, item in vars(value).items():
                setattr(new, name, new.detach() if _is_alias(item, value) else _on_device(item, device, memo))
    elif is_bitsandbytes(value):
        new = copy.copy(value)
        for name, item in vars(value).items():
            setattr(new, name, _on_device(item, device, memo))
    else:
        return value
    memo[id(value)] = new
    return new


def _is_alias(value: Any, weight: Tensor) -> bool:
    is_alike = isinstance(value, Tensor) and value.shape == weight.shape
    return is_alike and value.untyped_storage()._cdata == weight.untyped_storage()._cdata

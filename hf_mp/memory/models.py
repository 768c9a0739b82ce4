"""From a name, directory or configuration to a model class, a loaded model, and a model of fake tensors."""

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
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file

from hf_mp.environment.libraries import first_line
from hf_mp.environment.paths import is_inside
from hf_mp.memory.precisions import bitsandbytes_config, parse_precision

ModelLike = str | Path | PreTrainedConfig | PreTrainedModel

# The classes that train a configuration without "architectures" (or with a bare encoder); of two, the last one is used.
_LANGUAGE_MODELS = {
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, and the released checkpoints.
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024}

BUILT_IN: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_embd": 1600, "n_head": 25},
}


def find_config(model: ModelLike) -> PreTrainedConfig:
    """The configuration of a model: its own, or from a directory, a ``config.json``, the built-in ones, or the Hub.

    Never runs code that comes with a model.
    """
    if isinstance(model, PreTrainedModel):
        model = model.config
    if isinstance(model, PreTrainedConfig):
        return copy.deepcopy(model)
    short_name = str(model).removeprefix("openai-community/")
    if short_name in BUILT_IN and not Path(model).exists():
        return AutoConfig.for_model(**BUILT_IN[short_name])
    return _fetch(model, AutoConfig.from_pretrained)


def _fetch(model: str | Path, from_pretrained: Callable[..., Any], **settings: Any) -> Any:
    """What ``from_pretrained`` makes of a path, of a model on the Hub, or, where nobody reaches the Hub, in the cache.

    Raises:
        ValueError: where it fails, with the reason.
    """
    # from_pretrained itself would ask again and again for half a minute.
    reason = None if Path(model).exists() else ask_hub(str(model))
    try:
        return from_pretrained(
            str(model), **{"local_files_only": reason is not None, "trust_remote_code": False, **settings}
        )
    # All but the first: what Transformers raises for a file that holds something else.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if reason is None or not isinstance(error, OSError):  # the last says that the cache has no such model
            why = f"{model} cannot be loaded: {' '.join(str(error).split()).rstrip('.')}"
        else:
            why = (
                f"{str(model)!r} is neither a directory here nor a model in the Hub's cache, and the Hub gave none of "
                f"that name ({first_line(reason).rstrip('.')})"
            )
        raise ValueError(
            f"{why}. Give a directory that save_pretrained wrote, or the name of a model on the Hub or in its cache. "
            f"`hf-mp memory`, which needs no weights, also takes a config.json, or one of {', '.join(BUILT_IN)}. hf_mp "
            "does not run a model's own code: load such a model's config with from_pretrained, and give that"
        ) from error


def ask_hub(name: str) -> Exception | None:
    """Why the Hub has no such model; asked once, because ``from_pretrained`` retries for half a minute."""
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # no network, no such model, no access, no valid name: each has a type of its own
        return error
    return None


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a configuration: its architecture, or the language model of its type."""
    # An encoder without a head has no loss.
    bare = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    for name in getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
        if name != bare and isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    if config.model_type in _LANGUAGE_MODELS:
        return getattr(transformers, _LANGUAGE_MODELS[config.model_type])
    raise ValueError(
        f"no language model for model_type {config.model_type!r}: name a class of Transformers in the "
        'configuration, as "architectures": ["BertForMaskedLM"]'
    )


def skeleton(config: PreTrainedConfig, precision: str) -> PreTrainedModel:
    """The model that :func:`hf_mp.load` would load, on the meta device.

    bitsandbytes' own functions quantize the weights there, too.
    """
    dtype = parse_precision(precision).dtype
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)._from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    if (quantization := bitsandbytes_config(precision)) is None:
        return model
    quantizer: Any = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"}, dtype=dtype)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        if quantizer.param_needs_quantization(model, name):
            cast(Any, parameter)._quantize(torch.device("meta"))
    return cast(PreTrainedModel, quantizer.postprocess_model(model) or model)


def load(
    model_name_or_path: str | Path,
    precision: str | torch.dtype = "fp32",
    *,
    double_quant: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Load a model through Transformers' ``from_pretrained`` in one of six precisions.

    ``int8`` is LLM.int8() (Dettmers et al. 2022), ``nf4`` and ``fp4`` are QLoRA's 4-bit types (Dettmers et al. 2023),
    both from bitsandbytes: weights of linear layers are quantized, everything else is FP16. They work on a CPU too.

    Never runs code that comes with a model, and reads no weights outside of its directory.

    Args:
        model_name_or_path: a directory that ``save_pretrained`` wrote, or a model on the Hub or in the cache.
        precision: ``"fp32"`` (default), ``"fp16"``, ``"bf16"``, ``"int8"``, ``"nf4"`` or ``"fp4"``.
        double_quant: for ``nf4`` and ``fp4``: also quantize the quantization state (QLoRA, section 3); default False.
        settings: for ``from_pretrained``: ``device_map``, ``revision``, ``attn_implementation`` and so on.

    Returns:
        The model, as ``from_pretrained`` gives it.

    Raises:
        ValueError: for an unknown precision, or a model that cannot be loaded.
        TypeError: for a ``dtype`` or ``quantization_config`` in addition to ``precision``.
        ImportError: if bitsandbytes is needed and missing.
    """
    dtype = parse_precision(precision).dtype
    config = find_config(model_name_or_path)
    kind = model_class(config)
    # Given always, so that Python refuses a second one in the settings.
    given = {"dtype": dtype, "quantization_config": bitsandbytes_config(precision, double_quant)}

    def from_pretrained(name: str, **all_settings: Any) -> PreTrainedModel:
        _check_shards(name, config, all_settings)
        return kind.from_pretrained(name, **all_settings)

    return cast(PreTrainedModel, _fetch(model_name_or_path, from_pretrained, **given, **settings))


_OF_FILES = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def _check_shards(name: str, config: PreTrainedConfig, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if an index of shards names a file outside of the model's directory, which would be read."""
    of_files = {key: settings[key] for key in _OF_FILES if key in settings}
    variant = settings.get("variant")
    ending = ".json" if variant is None else f".{variant}.json"
    names = [name.replace(".json", ending) for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)]
    # A configuration may name its weights, which Transformers keeps inside of the directory, and their shards not.
    own = getattr(config, "transformers_weights", None)
    if isinstance(own, str) and own.endswith(".index.json"):
        names.append(own)
    for index_name in names:
        try:
            index = cached_file(name, index_name, **of_files)
        except OSError:  # most models have no such file
            continue
        shards = set(json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values())
        if outside := [shard for shard in shards if not (isinstance(shard, str) and is_inside(shard))]:
            raise ValueError(f"{index_name} names a shard outside of its directory: {outside[0]!r:.200}")


def replace_tensors(model: nn.Module, device: torch.device) -> None:
    """Give a model new tensors of the same shapes on ``device``, with the same ties; fake in a FakeTensorMode.

    A skeleton cannot be built in that mode: bitsandbytes' classes of parameters cannot be made of fake tensors.
    """
    renewed: dict[int, Tensor] = {}

    def renew(tensor: Tensor) -> Tensor:
        if id(tensor) in renewed:  # tied
            return renewed[id(tensor)]
        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            for name, value in vars(tensor).items():
                # bitsandbytes keeps codes and scales there, and the weight itself by a second name.
                if isinstance(value, Tensor):
                    place = tensor.untyped_storage()._cdata, tensor.shape
                    is_weight = (value.untyped_storage()._cdata, value.shape) == place
                    value = new.detach() if is_weight else renew(value)
                setattr(new, name, value)
        renewed[id(tensor)] = new
        return new

    # Not by Module._apply, which makes two of tied weights and drops what bitsandbytes hangs on its own.
    for module in model.modules():
        for registry in (module._parameters, module._buffers, vars(module)):
            for name, value in list(registry.items()):
                if isinstance(value, Tensor):
                    registry[name] = renew(value)  # type: ignore[assignment]

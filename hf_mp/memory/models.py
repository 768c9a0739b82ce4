"""From a name, directory or configuration to a model class, a loaded model, and a model of fake tensors."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import transformers
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.quantizers import AutoHfQuantizer

from hf_mp.environment.libraries import first_line
from hf_mp.memory.folding import kept_sentences
from hf_mp.memory.footprint import memory_footprint
from hf_mp.memory.precisions import bitsandbytes_config, parse_precision
from hf_mp.policy import spell
from hf_mp.weights.ranks.placement import is_dtensor, local_part

ModelLike = str | Path | PreTrainedConfig | PreTrainedModel

# The classes that train a configuration without "architectures" (or with a bare encoder); encoders before decoders.
_TASKS = (
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

# DeepNet, the deepest model, has 1,000. A configuration lists its layers as soon as it is made, before a model is.
MOST_LAYERS = 10_000
_COUNTS = re.compile(r"(n|num)_.*(layers?|blocks?|experts?)|.*_layers|depth")

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, and the released checkpoints.
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024}

BUILT_IN: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, "n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_embd": 1280, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_embd": 1600, "n_head": 25},
}


class UnknownModelError(ValueError):
    """A model that is neither built in, nor a directory or file, nor in the cache or on the Hub."""


def find_config(model: ModelLike) -> PreTrainedConfig:
    """The configuration of a model: its own, or from a directory, a ``config.json``, the built-in ones, or the Hub.

    Never runs code that comes with a model.
    """
    if isinstance(model, PreTrainedModel):
        model = model.config
    if isinstance(model, PreTrainedConfig):
        _check_counts(model.to_dict())
        return copy.deepcopy(model)
    if not isinstance(model, (str, Path)):
        raise TypeError(
            f"a model is given by name, directory, config.json, configuration or as a PreTrainedModel, not as "
            f"{type(model).__name__}"
        )
    path = Path(model)
    if path.exists():
        return _read_config(path)
    if (short_name := str(model).removeprefix("openai-community/")) in BUILT_IN:
        return AutoConfig.for_model(**BUILT_IN[short_name])
    # from_pretrained itself would ask again and again for half a minute.
    if (reason := ask_hub(str(model))) is None:
        return _load_config(str(model))
    try:
        return _load_config(str(model), local_files_only=True)
    except OSError as error:
        raise UnknownModelError(unknown_model(str(model), reason)) from error


def _load_config(name: str, **settings: Any) -> PreTrainedConfig:
    """The configuration in a directory, a file, the cache or on the Hub, validated before it is instantiated."""
    values, _ = PreTrainedConfig.get_config_dict(name, **settings)
    code = (values.get("auto_map") or {}).get("AutoConfig")
    # Transformers builds a type that it knows by its own class, whatever code the file names.
    if code is not None and values.get("model_type") not in CONFIG_MAPPING:
        raise UnknownModelError(
            f"{name} is a model of type {values.get('model_type')!r}, which needs its own code ({code}), and that does "
            "not run here: if you trust it, pass the model or its PreTrainedConfig, loaded by from_pretrained with "
            "trust_remote_code=True"
        )
    _check_counts(values)
    return AutoConfig.from_pretrained(name, trust_remote_code=False, **settings)


def _check_counts(values: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the setting, for more layers or experts than any model has."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif isinstance(value, int) and value > MOST_LAYERS and _COUNTS.fullmatch(name):
            raise ValueError(f"{name}={value:,} is more than any model has: at most {MOST_LAYERS:,} are counted")


def unknown_model(name: str, reason: Exception) -> str:
    return (
        f"{name!r} is not a directory, not a file, not in the cache, and the Hub does not give it "
        f"({first_line(reason)}). Ways out: a directory with a config.json (as save_pretrained writes), the path of a "
        f"config.json, or a configuration that is built in: {', '.join(BUILT_IN)}"
    )


def ask_hub(name: str) -> Exception | None:
    """Why the Hub has no such model; asked once, because ``from_pretrained`` retries for half a minute."""
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # no network, no such model, no access, no valid name: each has a type of its own
        return error
    return None


def _read_config(path: Path) -> PreTrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} holds no config.json: give a directory that save_pretrained wrote, or a config.json")
    try:
        return _load_config(str(path))
    except UnknownModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not the configuration of a model: {first_line(error)}") from error


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a configuration: its architecture, or the language model of its type."""
    # An encoder without a head has no loss.
    bare = {str(getattr(modeling_auto, "MODEL_MAPPING_NAMES", {}).get(config.model_type))}
    for name in getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
        if name not in bare and isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for task in _TASKS:
        if config.model_type in task:
            return getattr(transformers, task[config.model_type])
    raise ValueError(
        f"no language model for model_type {config.model_type!r}: name a class of Transformers in the "
        'configuration, as "architectures": ["BertForMaskedLM"]'
    )


def skeleton(config: PreTrainedConfig, precision: str, *, double_quant: bool = False) -> PreTrainedModel:
    """The model that :func:`hf_mp.load` would load, on the meta device.

    bitsandbytes' own functions quantize the weights there, too.
    """
    dtype = parse_precision(precision).dtype
    kind = model_class(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind._from_config(copy.deepcopy(config), dtype=dtype)
    except RuntimeError as error:  # a tensor with more bytes than torch can count
        raise ValueError(f"no {kind.__name__} of this configuration: {first_line(error)}") from error
    model.tie_weights()
    if (quantization := bitsandbytes_config(precision, double_quant)) is None:
        return model
    quantizer: Any = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    quantizer.preprocess_model(model=model, device_map={"": "cpu"}, dtype=dtype)
    from bitsandbytes.functional import name2qmap

    with mock.patch.dict(name2qmap, clear=True):  # a cache for real models, too, and these tables are on meta
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

    Never runs code that comes with a model.

    Args:
        model_name_or_path: a directory that ``save_pretrained`` wrote, or a model on the Hub or in the cache.
        precision: ``"fp32"`` (default), ``"fp16"``, ``"bf16"``, ``"int8"``, ``"nf4"`` or ``"fp4"``.
        double_quant: for ``nf4`` and ``fp4``: also quantize the quantization state (QLoRA, section 3); default False.
        settings: for ``from_pretrained``: ``device_map``, ``revision``, ``attn_implementation`` and so on.

    Returns:
        The model, as ``from_pretrained`` gives it.

    Raises:
        ValueError: for an unknown precision, a device that bitsandbytes does not support, a ``dtype`` or
            ``quantization_config`` in addition to ``precision``, or a model that is not found.
        ImportError: if bitsandbytes is needed and missing.
    """
    chosen = parse_precision(precision)
    for name in ("dtype", "torch_dtype", "quantization_config"):
        if name in settings:
            raise ValueError(f"{name} is decided by precision={precision!r}: leave {name} out, or use from_pretrained")
    quantization_config = bitsandbytes_config(precision, double_quant, settings.get("device_map"))
    if quantization_config is not None:
        settings["quantization_config"] = quantization_config
    config = find_config(model_name_or_path)
    offline = None if Path(model_name_or_path).exists() else ask_hub(str(model_name_or_path))
    try:
        model: PreTrainedModel = model_class(config).from_pretrained(
            str(model_name_or_path),
            dtype=chosen.dtype,
            **{"local_files_only": offline is not None, "trust_remote_code": False, **settings},
        )
    except OSError as error:
        if offline is None:
            raise ValueError(
                f"{model_name_or_path} cannot be loaded: {first_line(error)} `hf-mp memory {model_name_or_path} "
                "--config-only` counts it without its weights"
            ) from error
        message = unknown_model(str(model_name_or_path), offline)
        raise ValueError(f"{message}; these have no weights: --config-only counts them all the same") from error
    if chosen.quantization:
        for sentence in kept_sentences({spell(precision): memory_footprint(model)}):
            warnings.warn(sentence, stacklevel=2)
    return model


def replace_tensors(model: nn.Module, device: torch.device) -> nn.Module:
    """Give a model new tensors of the same shapes on ``device``, with the same ties; fake in a FakeTensorMode."""
    renewed: dict[int, Tensor] = {}

    def renew(tensor: Tensor) -> Tensor:
        if id(tensor) not in renewed:
            renewed[id(tensor)] = _renewed(tensor, device, renew)
        return renewed[id(tensor)]

    for module in model.modules():
        for registry in (module._parameters, module._buffers, vars(module)):
            for name, value in list(registry.items()):
                if isinstance(value, Tensor):
                    registry[name] = renew(value)  # type: ignore[assignment]
    return model


def _renewed(tensor: Tensor, device: torch.device, renew: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor like this one, or a parameter with its attributes, of which ``renew`` makes new tensors."""
    new = _empty_like(tensor, device)
    if not isinstance(tensor, nn.Parameter):
        return new
    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    storage = tensor.untyped_storage()._cdata
    for name, value in vars(tensor).items():
        if isinstance(value, Tensor):
            # bitsandbytes keeps codes and scales there, and the weight itself by a second name.
            is_weight = value.shape == tensor.shape and value.untyped_storage()._cdata == storage
            value = new.detach() if is_weight else renew(value)
        setattr(new, name, value)
    return new


def _empty_like(tensor: Any, device: torch.device) -> Tensor:
    """Memory on ``device`` that is laid out as ``tensor``, also as the part of a DTensor."""
    whole = tensor.detach() if is_dtensor(tensor) else tensor  # FakeTensorMode of torch 2.11 detaches no 4-bit weights
    local = local_part(whole)
    new = torch.empty_strided(local.shape, local.stride(), dtype=tensor.dtype, device=device)
    if not is_dtensor(whole):
        return new
    layout = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return cast(Tensor, type(whole).from_local(new, whole.device_mesh, whole.placements, **layout))

"""``load``: a model in one of six precisions, through Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_mp.environment.libraries import first_line
from hf_mp.memory.models import ask_hub, find_config, model_class, unknown_model
from hf_mp.memory.precisions import bitsandbytes_config, parse_precision


def load(
    model_name_or_path: str | Path, precision: str = "fp32", *, double_quant: bool = False, **settings: Any
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
        return model_class(config).from_pretrained(
            str(model_name_or_path),
            dtype=chosen.dtype,
            **{"local_files_only": offline is not None, "trust_remote_code": False, **settings},
        )
    except OSError as error:
        if offline is None:
            raise ValueError(f"{model_name_or_path} cannot be loaded: {first_line(error)}") from error
        message = unknown_model(str(model_name_or_path), offline)
        raise ValueError(f"{message}; these have no weights: --config-only counts them all the same") from error

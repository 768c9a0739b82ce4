"""``save_dtype``: the dtype in which a trained model is saved. Checkpoints to resume from contain FP32 weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.utils import CONFIG_NAME

from hf_mp.trainer.checkpoints.inspection import step_of
from hf_mp.trainer.find_trainer import extend_method
from hf_mp.trainer.session import TrainerSession


def extend_save(trainer: Trainer, session: Callable[[], TrainerSession | None]) -> None:
    """Save models, and push them to the Hub, in the dtypes of ``session()``."""

    def _save(
        own: Callable[..., None], output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir or str(trainer.args.output_dir))
        current = session()
        dtypes = {} if current is None else current.saved_dtypes
        is_checkpoint = step_of(folder) is not None
        if not dtypes or is_checkpoint or not trainer.args.should_save:
            own(output_dir, state_dict)
            return
        own(output_dir, _cast(state_dict or trainer.model.state_dict(), dtypes))  # type: ignore[union-attr]
        write_dtype(folder, Counter(dtypes.values()).most_common(1)[0][0])

    extend_method(trainer, "_save", _save)


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Set ``dtype`` in the config of a saved model, which ``from_pretrained`` reads."""
    config = folder / CONFIG_NAME
    if config.is_file():  # adapters have no config of the model
        values = {**json.loads(config.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast(state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Round weights to nearest; tied weights stay tied. Raises a ValueError if a finite value becomes inf."""
    cast_by_memory: dict[tuple[int, torch.Size], Tensor] = {}
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.shape)
        if key not in cast_by_memory:
            cast = value.to(dtypes.get(name, value.dtype))
            if bool(cast.isinf().any()) and not bool(value.isinf().any()):
                raise ValueError(
                    f"{name} has values up to {float(value.abs().max()):.3g}, which save_dtype rounds to infinity in "
                    f"{cast.dtype}: save in 'bf16' or 'fp32'"
                )
            cast_by_memory[key] = cast
        result[name] = cast_by_memory[key]
    return result

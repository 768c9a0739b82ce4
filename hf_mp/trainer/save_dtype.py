"""``save_dtype``: in which dtype a trained model is saved; checkpoints to resume from keep their FP32 weights."""

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
    """Have ``trainer`` save models, and push them to the hub, in what its ``session`` says, if it has one then."""

    # Trainer._save is what save_model, a push to the hub and a checkpoint have in common.
    def _save(
        own: Callable[..., None], output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir or str(trainer.args.output_dir))
        dtypes = {} if (found := session()) is None else found.saved_dtypes
        if not dtypes or step_of(folder) is not None or not trainer.args.should_save:
            own(output_dir, state_dict)
            return
        cast = _cast(state_dict or trainer.model.state_dict(), dtypes)  # type: ignore[union-attr]
        own(output_dir, cast)
        write_dtype(folder, Counter(dtypes.values()).most_common(1)[0][0])

    extend_method(trainer, "_save", _save)


def write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Have the config of a saved model say that it is in ``dtype``, for ``from_pretrained``."""
    config = folder / CONFIG_NAME
    if config.is_file():  # an adapter is saved without one
        said = {**json.loads(config.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast(state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Weights rounded to nearest; what shares memory before does so after.

    Raises:
        ValueError: for values that are not finite any more.
    """
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        # Tied weights stay one tensor: safetensors refuses two names of one memory, and two copies take twice the room.
        key = (value.data_ptr(), value.shape)
        if key not in cast:
            cast[key] = value.to(dtypes.get(name, value.dtype))
            if bool(cast[key].isinf().any()) and not bool(value.isinf().any()):
                raise ValueError(
                    f"{name} has values up to {float(value.abs().max()):.3g}, which save_dtype rounds to infinity in "
                    f"{cast[key].dtype}: save in 'bf16' or 'fp32'"
                )
        found[name] = cast[key]
    return found

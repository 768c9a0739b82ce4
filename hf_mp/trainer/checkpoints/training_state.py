"""Model and optimizer together in a folder of shards, for loops of one's own and for the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.trainer.checkpoints import loaded_state
from hf_mp.trainer.checkpoints.model_shards import compare, model_tensors, named_parameters, put_tensors
from hf_mp.trainer.checkpoints.optimizer_shards import make_room, put_state, take_state
from hf_mp.trainer.checkpoints.shards import read_layout, read_shards, refused_together


def take(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a model and its optimizer, for shards, and what else the optimizer holds, for JSON."""
    tensors, _ = model_tensors(model)
    state, plain = take_state(optimizer, named_parameters(model))
    return {**tensors, **state}, plain


def put(folder: Path, model: nn.Module, optimizer: Any = None, plain: Mapping[str, Any] | None = None) -> None:
    """Load what :func:`take` gave and ``folder`` holds into a model and its optimizer: a collective call.

    Args:
        folder: of the shards.
        model: whose weights they are.
        optimizer: default None: the weights alone.
        plain: what the optimizer holds besides tensors.

    Raises:
        CheckpointError: on all ranks, for weights of another model, another optimizer, and values that are not finite.
    """
    plain = plain or {}
    with refused_together(), loaded_state.naming(folder, "the state"):
        # First the state dict: FSDP2 then shards again what a forward left whole, and parameters by name are others.
        tensors, first = model_tensors(model)
        names, layout = named_parameters(model), read_layout(folder)
        compare(tensors, layout)
        state = {} if optimizer is None else make_room(optimizer, names, layout, plain)
    read_shards(folder, {**tensors, **state})
    with refused_together(), loaded_state.naming(folder, "the state"), torch.no_grad():
        put_tensors(model, tensors, first)
        loaded_state.check_parameters(folder, model)
        if optimizer is not None:
            put_state(optimizer, names, state, plain)
            loaded_state.check_optimizer(folder, optimizer)

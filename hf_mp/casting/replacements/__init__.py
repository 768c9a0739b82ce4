"""Pieces of a model that are replaced while mixed precision is attached; :data:`REPLACEMENTS` lists them."""

from __future__ import annotations

from torch import nn

from hf_mp.casting.replacements.activations import OneKernelActivations
from hf_mp.casting.replacements.base import ModelReplacement
from hf_mp.casting.replacements.fp32_norms import FP32Norms
from hf_mp.casting.replacements.lm_losses import LMLossReplacement
from hf_mp.casting.replacements.routers import FP32Routers
from hf_mp.casting.tables import TableName

REPLACEMENTS: tuple[ModelReplacement, ...] = (LMLossReplacement(), OneKernelActivations(), FP32Norms(), FP32Routers())


def install_replacements(model: nn.Module, tables: TableName) -> None:
    """Install in ``model`` what belongs to ``tables``."""
    for replacement in REPLACEMENTS:
        if replacement.tables is None or tables in replacement.tables:
            replacement.install(model)


def remove_replacements(model: nn.Module) -> None:
    """Take all of it out of ``model`` again."""
    for replacement in REPLACEMENTS:
        replacement.remove(model)

"""Parts of models that are replaced while mixed precision is attached, in :data:`REPLACEMENTS`."""

from __future__ import annotations

from torch import nn

from hf_mp.casting.tables import TableName
from hf_mp.models.activations import TANH_GELUS
from hf_mp.models.adapters import AdapterInputs
from hf_mp.models.base import ModelReplacement
from hf_mp.models.lm_losses import LMLossReplacement
from hf_mp.models.routers import FP32_ROUTERS

REPLACEMENTS: tuple[ModelReplacement, ...] = (LMLossReplacement(), TANH_GELUS, FP32_ROUTERS, AdapterInputs())


def install_replacements(model: nn.Module, tables: TableName) -> None:
    for replacement in REPLACEMENTS:
        if replacement.tables is None or tables in replacement.tables:
            replacement.install(model)


def remove_replacements(model: nn.Module) -> None:
    for replacement in REPLACEMENTS:
        replacement.remove(model)

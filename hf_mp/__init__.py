"""Mixed precision training in readable code: own autocast, own loss scaling, own FP32 master weights.

The public names below are all that a program needs. They are imported when first used, so that ``import hf_mp`` and
``hf-mp --help`` do not wait for torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_mp._version import __version__

if sys.version_info < (3, 11):  # noqa: UP036  from a checkout, no installer says it
    raise ImportError(f"hf_mp needs Python 3.11 or newer, and this is {sys.version.split()[0]}: use a newer one")

if TYPE_CHECKING:
    from hf_mp.casting.custom_functions import custom_bwd, custom_fwd
    from hf_mp.casting.mode import autocast
    from hf_mp.diagnostics.calibration import calibrate
    from hf_mp.diagnostics.comparison import compare_precisions
    from hf_mp.diagnostics.comparison_report import PrecisionComparison
    from hf_mp.diagnostics.contract.record import precision_contract
    from hf_mp.diagnostics.contract.table import PrecisionContract
    from hf_mp.diagnostics.healing import heal_overflows
    from hf_mp.diagnostics.lost_updates import TrainingCheck, check_training
    from hf_mp.diagnostics.overflow import explain_overflows
    from hf_mp.diagnostics.overflow_report import OverflowReport
    from hf_mp.diagnostics.precision_recorder import record_precision
    from hf_mp.diagnostics.range_report import RangeReport
    from hf_mp.diagnostics.remedies import CannotHealError
    from hf_mp.diagnostics.scale_leaks import ScaleLeakError, check_gradients
    from hf_mp.memory.footprint import MemoryFootprint, memory_footprint
    from hf_mp.memory.largest_batch import LargestBatch, largest_batch_size
    from hf_mp.memory.measuring import measure_training_memory
    from hf_mp.memory.models import load
    from hf_mp.memory.training import TrainingMemory, estimate_training_memory
    from hf_mp.policy import PrecisionPolicy
    from hf_mp.scaling.scalers import (
        DynamicLossScaler,
        HeadroomLossScaler,
        LossScaleError,
        StaticLossScaler,
    )
    from hf_mp.step.mixed_precision import MixedPrecision, PrecisionStats
    from hf_mp.step.prepare import prepare
    from hf_mp.step.unscaled_gradients import unscaled_gradients
    from hf_mp.trainer.arguments import MixedPrecisionArguments
    from hf_mp.trainer.callback import MixedPrecisionCallback
    from hf_mp.trainer.checkpoints.manifest import CheckpointError, NoCheckpointError
    from hf_mp.trainer.checkpoints.preemption import Preempted
    from hf_mp.trainer.checkpoints.sharded_checkpoint import load_checkpoint, save_checkpoint
    from hf_mp.trainer.log_probabilities import LogProbabilityGap, log_probability_gap
    from hf_mp.trainer.trainer import MixedPrecisionTrainer
    from hf_mp.trainer.weight_export import working_copies
    from hf_mp.weights.attachable import detach
    from hf_mp.weights.master_weight_optimizer import MasterWeightOptimizer

_HOME = {
    "autocast": "hf_mp.casting.mode",
    "custom_bwd": "hf_mp.casting.custom_functions",
    "custom_fwd": "hf_mp.casting.custom_functions",
    "LogProbabilityGap": "hf_mp.trainer.log_probabilities",
    "log_probability_gap": "hf_mp.trainer.log_probabilities",
    "PrecisionContract": "hf_mp.diagnostics.contract.table",
    "precision_contract": "hf_mp.diagnostics.contract.record",
    "TrainingCheck": "hf_mp.diagnostics.lost_updates",
    "check_training": "hf_mp.diagnostics.lost_updates",
    "calibrate": "hf_mp.diagnostics.calibration",
    "compare_precisions": "hf_mp.diagnostics.comparison",
    "PrecisionComparison": "hf_mp.diagnostics.comparison_report",
    "heal_overflows": "hf_mp.diagnostics.healing",
    "RangeReport": "hf_mp.diagnostics.range_report",
    "CannotHealError": "hf_mp.diagnostics.remedies",
    "explain_overflows": "hf_mp.diagnostics.overflow",
    "OverflowReport": "hf_mp.diagnostics.overflow_report",
    "record_precision": "hf_mp.diagnostics.precision_recorder",
    "check_gradients": "hf_mp.diagnostics.scale_leaks",
    "ScaleLeakError": "hf_mp.diagnostics.scale_leaks",
    "DynamicLossScaler": "hf_mp.scaling.scalers",
    "HeadroomLossScaler": "hf_mp.scaling.scalers",
    "LossScaleError": "hf_mp.scaling.scalers",
    "StaticLossScaler": "hf_mp.scaling.scalers",
    "MasterWeightOptimizer": "hf_mp.weights.master_weight_optimizer",
    "LargestBatch": "hf_mp.memory.largest_batch",
    "largest_batch_size": "hf_mp.memory.largest_batch",
    "MemoryFootprint": "hf_mp.memory.footprint",
    "memory_footprint": "hf_mp.memory.footprint",
    "measure_training_memory": "hf_mp.memory.measuring",
    "load": "hf_mp.memory.models",
    "TrainingMemory": "hf_mp.memory.training",
    "estimate_training_memory": "hf_mp.memory.training",
    "PrecisionPolicy": "hf_mp.policy",
    "MixedPrecision": "hf_mp.step.mixed_precision",
    "PrecisionStats": "hf_mp.step.mixed_precision",
    "prepare": "hf_mp.step.prepare",
    "unscaled_gradients": "hf_mp.step.unscaled_gradients",
    "detach": "hf_mp.weights.attachable",
    "load_checkpoint": "hf_mp.trainer.checkpoints.sharded_checkpoint",
    "save_checkpoint": "hf_mp.trainer.checkpoints.sharded_checkpoint",
    "CheckpointError": "hf_mp.trainer.checkpoints.manifest",
    "NoCheckpointError": "hf_mp.trainer.checkpoints.manifest",
    "Preempted": "hf_mp.trainer.checkpoints.preemption",
    "MixedPrecisionCallback": "hf_mp.trainer.callback",
    "MixedPrecisionArguments": "hf_mp.trainer.arguments",
    "MixedPrecisionTrainer": "hf_mp.trainer.trainer",
    "working_copies": "hf_mp.trainer.weight_export",
}

__all__ = [
    "CannotHealError",
    "CheckpointError",
    "DynamicLossScaler",
    "HeadroomLossScaler",
    "LargestBatch",
    "LogProbabilityGap",
    "LossScaleError",
    "MasterWeightOptimizer",
    "MemoryFootprint",
    "MixedPrecision",
    "MixedPrecisionArguments",
    "MixedPrecisionCallback",
    "MixedPrecisionTrainer",
    "NoCheckpointError",
    "OverflowReport",
    "PrecisionComparison",
    "PrecisionContract",
    "PrecisionPolicy",
    "PrecisionStats",
    "Preempted",
    "RangeReport",
    "ScaleLeakError",
    "StaticLossScaler",
    "TrainingCheck",
    "TrainingMemory",
    "__version__",
    "autocast",
    "calibrate",
    "check_gradients",
    "check_training",
    "compare_precisions",
    "custom_bwd",
    "custom_fwd",
    "detach",
    "estimate_training_memory",
    "explain_overflows",
    "heal_overflows",
    "largest_batch_size",
    "load",
    "load_checkpoint",
    "log_probability_gap",
    "measure_training_memory",
    "memory_footprint",
    "precision_contract",
    "prepare",
    "record_precision",
    "save_checkpoint",
    "unscaled_gradients",
    "working_copies",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hf_mp' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

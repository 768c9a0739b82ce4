"""``LeanShards``: a mixin for a Trainer that saves shards of a lean layout, which accelerate's FSDP2 cannot read.

accelerate asks torch for an optimizer's state by the model's parameters, and a lean layout has split parts in their
places; whole weights it loads in the dtype of the shards, which would round the masters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from hf_mp.trainer.checkpoints import training_state
from hf_mp.trainer.checkpoints.manifest import CheckpointError
from hf_mp.trainer.checkpoints.shards import refused_together, write_shards
from hf_mp.trainer.checkpoints.untrusted import read_json
from hf_mp.weights.lean.optimizer import MasterWeightOptimizer

_FOLDER, _SETTINGS = "optimizer_and_model_shards", "optimizer.json"

_Base: Any = Trainer if TYPE_CHECKING else object


class LeanShards(_Base):
    """Saves the model and the optimizer of a lean layout under FSDP2 in safetensors; any layout there resumes it."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._has_lean_shards():
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder = Path(output_dir, _FOLDER)
        # A rank that failed alone would leave the others waiting in the writing of shards.
        with refused_together():
            tensors, plain = training_state.take(cast(nn.Module, self.model), self.optimizer)
        write_shards(folder, tensors)
        if self.args.should_save:
            (folder / _SETTINGS).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
            torch.save(self.lr_scheduler.state_dict(), folder.parent / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint, _FOLDER)
        if not folder.is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        # accelerate could read neither the names nor the layout of these shards.
        if not self.is_fsdp_enabled:
            raise CheckpointError(
                f"{resume_from_checkpoint} has the shards of a lean layout under FSDP2: resume with FSDP2, on any "
                "number of processes"
            )
        # Nothing now: weights and moments are in one set of shards, read when the optimizer is there.

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint), _FOLDER)
        if not folder.is_dir():
            super()._load_best_model()
            return
        training_state.put(folder, cast(nn.Module, self.model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint, _FOLDER)
        if folder is None or not folder.is_dir():
            self._refuse_other_state(checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with refused_together():
            plain = read_json(folder / _SETTINGS)
            scheduler = torch.load(folder.parent / SCHEDULER_NAME, weights_only=True)
        training_state.put(folder, cast(nn.Module, self.model), self.optimizer, plain)
        self.lr_scheduler.load_state_dict(scheduler)

    def _has_lean_shards(self) -> bool:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # in accelerate's wrapper
        return self.is_fsdp_enabled and isinstance(inner, MasterWeightOptimizer)

    def _refuse_other_state(self, checkpoint: str | None) -> None:
        if self._has_lean_shards() and checkpoint is not None and any(Path(checkpoint).glob("optimizer*")):
            raise CheckpointError(
                f"{checkpoint} has model and optimizer of another layout, as accelerate saves them: resume with the "
                "precision that it was saved with"
            )

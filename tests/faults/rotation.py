"""Two runs at once: one resumes from a checkpoint, while the other, which saved it, saves the next one and rotates.

Settings beside the Trainer's: ``role``; ``trainer``, ``"ours"`` or ``"callback"``; for the second role ``source``, the
directory of the first. The first waits after its second save until the second role is between loading weights and
loading the optimizer, saves once more and ends. The second then goes on to its end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import worker
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME

SECONDS = 60.0
BEFORE, AFTER = 4, 6  # the steps of its last checkpoints


def wait_for(path: Path) -> None:
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)


def loading(source: Path) -> Path:
    return source.with_name(f"{source.name}-is-loaded")


class Rotates(TrainerCallback):
    """The first role."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == BEFORE:
            wait_for(loading(self._directory))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AFTER:
            (self._directory.with_name(f"{self._directory.name}-has-rotated")).touch()
            control.should_training_stop = True


class Loads(Trainer):
    """The second role: waits in the middle of its loading until the other has saved and rotated."""

    source: Path

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        loading(self.source).touch()
        wait_for(self.source.with_name(f"{self.source.name}-has-rotated"))
        super()._load_optimizer_and_scheduler(checkpoint)


def main(output_dir: str, settings: dict[str, Any]) -> None:
    given = {name: value for name, value in settings.items() if name not in ("role", "source", "trainer")}
    kind = settings["trainer"]
    if settings["role"] == "first":
        worker.make(output_dir, kind, [Rotates(Path(output_dir))], **given).train()
        return
    Loads.source = Path(settings["source"])
    wait_for(Loads.source / f"checkpoint-{BEFORE}" / MANIFEST_NAME)
    trainer = worker.make(output_dir, kind, [worker.Events(0.0)], Loads, **given)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(Loads.source)))
    print(f"finished {trainer.state.global_step} {worker.fingerprint(trainer)}", flush=True)

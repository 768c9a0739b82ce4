"""Checkpoints of plain training loops: written by all ranks together, resumed on any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.diagnostics.overflow import attached_runtime
from hf_mp.ranks.parallelism import get_rank, get_world_size
from hf_mp.trainer.checkpoints import inspection, loaded_state, unfinished_marker
from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    FileEntry,
    find_damage,
)
from hf_mp.trainer.checkpoints.model_shards import check_same_weights, load_tensors, model_tensors, named_parameters
from hf_mp.trainer.checkpoints.optimizer_shards import allocate_state, extract_state, load_state
from hf_mp.trainer.checkpoints.shards import (
    SUFFIX,
    merge_problems,
    raise_on_all_ranks,
    read_shard_metadata,
    read_shards,
    write_shards,
)
from hf_mp.trainer.checkpoints.synced import write_synced
from hf_mp.trainer.checkpoints.untrusted import read_json

SHARDS_FOLDER = "shards"
STATE_FILE = "training_state.json"
_PAIRS = "hf_mp.pairs"  # the one key of a mapping that is written as pairs


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save model, optimizer and loss scale of a training loop; any number of processes can resume from it.

    All processes call it. Each writes its own shards (safetensors); the first one writes the rest (JSON) and, at the
    end, the manifest with the size and checksum of every file. Until then the checkpoint is marked as unfinished, and
    an older one of the same name is kept, to be loaded after a kill. Weights are saved in FP32, in the lean layouts
    too: a checkpoint resumes in any layout, under DDP, FSDP2 or neither.

    Args:
        directory: of this checkpoint, as in ``f"run/checkpoint-{step}"``, on a file system that all processes share.
        model: attached; wrapped in DDP or by ``fully_shard``, or not.
        optimizer: as ``hf_mp.prepare`` or ``attach_optimizer`` returned it.
        step: number of optimizer steps so far.
        extra: further values to save, such as ``scheduler.state_dict()``: any that JSON can hold, from the first
            process. The state of random generators is not saved.

    Raises:
        CheckpointError: on all processes, naming the rank and the reason; the earlier directory is still there. Also
            for ``extra`` that JSON cannot hold, and for an optimizer's state that cannot be split over other ranks.
    """
    target = Path(directory).absolute()
    runtime = attached_runtime(model)
    with raise_on_all_ranks():
        tensors, _ = model_tensors(model)
        state, plain = extract_state(optimizer, named_parameters(model))
        scale = None if runtime is None else runtime.state_dict()
        text = _as_json(
            {"step": step, "extra": _with_str_keys(extra or {}), "optimizer": plain, "mixed_precision": scale}
        )
    precision = "fp32" if runtime is None else str(runtime.policy)
    try:
        # raise_on_all_ranks() ends with a collective call: the other ranks write when the folder is there.
        with raise_on_all_ranks(), _as_not_saved(target):
            if get_rank() == 0:
                unfinished_marker.begin(target)
                (target / SHARDS_FOLDER).mkdir()
        files = write_shards(target / SHARDS_FOLDER, {**tensors, **state})
        with raise_on_all_ranks(), _as_not_saved(target):
            if get_rank() == 0:
                write_synced(target / STATE_FILE, text)
                # By each rank of its own files: the first would read all of them once more.
                known = {f"{SHARDS_FOLDER}/{name}": entry for name, entry in files.items()}
                unfinished_marker.complete(
                    target, known=known, step=step, world_size=get_world_size(), precision=precision
                )
    except BaseException:
        if get_rank() == 0:
            unfinished_marker.abort_save(target)
        raise


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer
) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint of :func:`save_checkpoint`, bit for bit, on any number of processes and in any layout.

    All processes call it, after ``hf_mp.prepare`` (or ``attach`` and ``attach_optimizer``) and after wrapping. Before
    anything is loaded, every file is checked against the manifest; the processes share this work.

    Args:
        directory: a checkpoint, or a run, of which the newest whole ``checkpoint-STEP`` is loaded. A warning names
            newer ones that are not whole.
        model, optimizer: as for :func:`save_checkpoint`, of the same parameters in the same groups.

    Returns:
        The step and ``extra`` that were saved.

    Raises:
        NoCheckpointError: if there is none yet.
        CheckpointError: on all processes, naming missing, truncated and unexpected files, weights of another model, and
            values that are not finite.
    """
    checkpoint = _find(Path(directory).absolute())
    runtime = attached_runtime(model)
    with raise_on_all_ranks(), loaded_state.as_checkpoint_error(checkpoint, "the state"):
        saved = read_json(checkpoint / STATE_FILE, object_hook=_with_own_keys)
        if wrong := loaded_state.wrong_setting("step", saved["step"], 0):
            raise CheckpointError(f"{checkpoint / STATE_FILE}: step {wrong}: take an earlier checkpoint")
        # First the state dict: FSDP2 then shards again what a forward left whole, and parameters by name are others.
        tensors, first = model_tensors(model)
        names, layout = named_parameters(model), read_shard_metadata(checkpoint / SHARDS_FOLDER)
        check_same_weights(tensors, layout)
        state = allocate_state(optimizer, names, layout, saved["optimizer"])
    read_shards(checkpoint / SHARDS_FOLDER, {**tensors, **state})
    with raise_on_all_ranks(), loaded_state.as_checkpoint_error(checkpoint, "the state"), torch.no_grad():
        load_tensors(model, tensors, first)
        loaded_state.check_parameters(checkpoint, model)
        with loaded_state.checking(checkpoint, optimizer):
            load_state(optimizer, names, state, saved["optimizer"])
        if runtime is not None and saved["mixed_precision"] is not None:
            runtime.load_state_dict(saved["mixed_precision"])
    if (runtime is None) != (saved["mixed_precision"] is None):
        told = "it was saved without mixed precision, so the loss scale starts anew"
        if runtime is None:
            told = (
                "no mixed precision is attached, so the loss scale is not restored, and 16-bit parameters round the "
                "saved FP32 weights: call hf_mp.prepare first"
            )
        warn_caller(f"{checkpoint}: {told}")
    return saved["step"], saved["extra"]


@contextmanager
def _as_not_saved(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{checkpoint} could not be saved: rank {get_rank()}: {error}") from error


def _as_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=2)
    except TypeError as error:
        raise CheckpointError(f"extra, or a setting of the optimizer, cannot be written as JSON: {error}") from error


def _with_str_keys(value: Any) -> Any:
    """``value`` with pairs instead of mappings whose keys JSON would turn into strings (milestones of a scheduler)."""
    if isinstance(value, Mapping):
        pairs = [(key, _with_str_keys(one)) for key, one in value.items()]
        others = [key for key in value if not isinstance(key, str)]
        # Keys of another kind stay, for JSON to refuse.
        are_known = all(isinstance(key, (int, float, type(None))) for key in others)
        return {_PAIRS: pairs} if (others and are_known) or _PAIRS in value else dict(pairs)
    return [_with_str_keys(one) for one in value] if isinstance(value, (list, tuple)) else value


def _with_own_keys(value: dict[str, Any]) -> dict[Any, Any]:
    # JSON calls this for the innermost mappings first.
    return dict(value[_PAIRS]) if value.keys() == {_PAIRS} else value


# Which checkpoint


def _find(directory: Path) -> Path:
    """``directory``, or the newest whole checkpoint in it; a collective call."""
    with raise_on_all_ranks():
        names = _candidates(directory) if get_rank() == 0 else []
    found = [Path(name) for name in merge_problems(names)]
    # A stable sort: of one step, the one in the staging folder stays the earlier, and so the second choice.
    found.sort(key=lambda path: inspection.step_of(path) or 0)
    chosen, warning = inspection.choose_newest_whole(
        directory, found, lambda checkpoint: merge_problems(inspection.find_problems(checkpoint, _problems))
    )
    if warning:
        warn_caller(warning)
    return chosen


def _candidates(directory: Path) -> list[str]:
    """The checkpoints in the directory of a run; it alone where it is itself one."""
    # Nothing is cleared here: a program that evaluates checkpoints may read while another one saves.
    aside = unfinished_marker.backup_path(directory)
    itself = [path for path in (directory, aside) if (path / MANIFEST_NAME).exists()]
    if itself or (directory / SHARDS_FOLDER).exists():
        return [str(path) for path in itself[:1] or [directory]]
    folders = [folder for folder in (directory, directory / unfinished_marker.STAGING_FOLDER) if folder.is_dir()]
    return [str(path) for folder in folders for path in inspection.list_checkpoints(folder)]


def _problems(checkpoint: Path, files: Mapping[str, FileEntry] | None) -> list[str]:
    """Why not to load a checkpoint of a loop, judged by this rank's share of its files."""
    if files is None:
        return [f"{MANIFEST_NAME} is missing: it was never finished, or is of another program"]
    if STATE_FILE not in files:
        return [f"{STATE_FILE} is missing: resume a Trainer's checkpoint with train(resume_from_checkpoint=...)"]
    # Shards that the manifest does not list would be read all the same: the reader lists their folder.
    there = {f"{SHARDS_FOLDER}/{path.name}" for path in (checkpoint / SHARDS_FOLDER).glob(f"*{SUFFIX}")}
    if strangers := sorted(there - files.keys()):
        return [f"{name} is not in the manifest: remove it" for name in strangers]
    return find_damage(checkpoint, dict(sorted(files.items())[get_rank() :: get_world_size()]))

"""``save_checkpoint`` and ``load_checkpoint`` for plain training loops."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.diagnostics.overflow import attached_runtime
from hf_mp.ranks.parallelism import get_rank, get_world_size
from hf_mp.trainer.checkpoints import inspection, loaded_state, unfinished_marker
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, CheckpointError, FileEntry, find_damage
from hf_mp.trainer.checkpoints.model_shards import check_same_weights, load_tensors, model_tensors, named_parameters
from hf_mp.trainer.checkpoints.optimizer_shards import allocate_state, extract_state, load_state
from hf_mp.trainer.checkpoints.shards import (
    SUFFIX,
    gather_from_ranks,
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
_PAIRS = "hf_mp.pairs"  # {_PAIRS: [[key, value], ...]} is a mapping with other keys than strings


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save model, optimizer and loss scale of a training loop; any number of processes can resume from it.

    All processes call it. Each writes its shards (safetensors); the first one writes the other values (JSON) and, at
    the end, a manifest with size and checksum of each file. Until then the checkpoint is marked as unfinished, and an
    older one of the same name is kept. Weights are FP32, for any weight layout, DDP or FSDP2.

    Args:
        directory: e.g. ``f"run/checkpoint-{step}"``, on a file system that all processes share.
        model: attached; may be wrapped in DDP or by ``fully_shard``.
        optimizer: returned by ``hf_mp.prepare`` or ``attach_optimizer``.
        step: number of optimizer steps taken.
        extra: JSON values of the first process, e.g. ``scheduler.state_dict()``. RNG states are not saved.

    Raises:
        CheckpointError: on all processes, if a write fails, ``extra`` is not JSON, or optimizer state cannot be split
            over other ranks. The earlier directory is unchanged.
    """
    target = Path(directory).absolute()
    runtime = attached_runtime(model)
    with raise_on_all_ranks():
        tensors, _ = model_tensors(model)
        state, plain = extract_state(optimizer, named_parameters(model))
        scale = None if runtime is None else runtime.state_dict()
        text = _to_json(
            {"step": step, "extra": _keys_to_pairs(extra or {}), "optimizer": plain, "mixed_precision": scale}
        )
    _write(target, {**tensors, **state}, text, step=step, precision="fp32" if runtime is None else str(runtime.policy))


def _write(target: Path, tensors: Mapping[str, Tensor], text: str, **about: Any) -> None:
    try:
        # raise_on_all_ranks() is a barrier: the other ranks write after the folder was created.
        with raise_on_all_ranks(), _raise_not_saved(target):
            if get_rank() == 0:
                unfinished_marker.begin(target)
                (target / SHARDS_FOLDER).mkdir()
        files = write_shards(target / SHARDS_FOLDER, tensors)
        with raise_on_all_ranks(), _raise_not_saved(target):
            if get_rank() == 0:
                write_synced(target / STATE_FILE, text)
                known = {f"{SHARDS_FOLDER}/{name}": entry for name, entry in files.items()}
                unfinished_marker.complete(target, known=known, world_size=get_world_size(), **about)
    except BaseException:
        if get_rank() == 0:
            unfinished_marker.abort_save(target)
        raise


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer
) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint of :func:`save_checkpoint`, bit for bit, on any number of processes and in any weight layout.

    All processes call it, after ``hf_mp.prepare`` and wrapping. Files are compared with the manifest first.

    Args:
        directory: a checkpoint, or that of a run, to load the newest complete ``checkpoint-STEP``; a warning names
            newer ones.
        model, optimizer: as for :func:`save_checkpoint`, with the same parameters in the same groups.

    Returns:
        The saved step and ``extra``.

    Raises:
        NoCheckpointError: if there is no checkpoint.
        CheckpointError: on all processes, for damaged or unexpected files, weights of another model, inf and NaN.
    """
    checkpoint = _find_checkpoint(Path(directory).absolute())
    runtime = attached_runtime(model)
    with raise_on_all_ranks(), loaded_state.as_checkpoint_error(checkpoint, "the state"):
        saved = read_json(checkpoint / STATE_FILE, object_hook=_pairs_to_mapping)
        wrong_step = loaded_state.wrong_setting("step", saved["step"], 0)
        if wrong_step:
            raise CheckpointError(f"{checkpoint / STATE_FILE}: step {wrong_step}: take an earlier checkpoint")
        # Before named_parameters(): state_dict() makes FSDP2 reshard its modules, which replaces their parameters.
        tensors, saved_names = model_tensors(model)
        names, layout = named_parameters(model), read_shard_metadata(checkpoint / SHARDS_FOLDER)
        check_same_weights(tensors, layout)
        state = allocate_state(optimizer, names, layout, saved["optimizer"])
    read_shards(checkpoint / SHARDS_FOLDER, {**tensors, **state})
    with raise_on_all_ranks(), loaded_state.as_checkpoint_error(checkpoint, "the state"), torch.no_grad():
        load_tensors(model, tensors, saved_names)
        loaded_state.check_parameters(checkpoint, model)
        with loaded_state.checking(checkpoint, optimizer):
            load_state(optimizer, names, state, saved["optimizer"])
        if runtime is not None and saved["mixed_precision"] is not None:
            runtime.load_state_dict(saved["mixed_precision"])
    if runtime is not None and saved["mixed_precision"] is None:
        warn_caller(f"{checkpoint}: it was saved without mixed precision, so the loss scale starts anew")
    if runtime is None and saved["mixed_precision"] is not None:
        warn_caller(
            f"{checkpoint}: no mixed precision is attached, so the loss scale is not restored, and 16-bit parameters "
            "round the saved FP32 weights: call hf_mp.prepare first"
        )
    return saved["step"], saved["extra"]


@contextmanager
def _raise_not_saved(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{checkpoint} could not be saved: rank {get_rank()}: {error}") from error


def _to_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=2)
    except TypeError as error:
        raise CheckpointError(f"extra, or a setting of the optimizer, cannot be written as JSON: {error}") from error


def _keys_to_pairs(value: Any) -> Any:
    """Replace mappings with keys that JSON would convert to strings (scheduler milestones) by pairs."""
    if isinstance(value, Mapping):
        pairs = [(key, _keys_to_pairs(one)) for key, one in value.items()]
        other_keys = [key for key in value if not isinstance(key, str)]
        would_be_converted = other_keys and all(isinstance(key, (int, float, type(None))) for key in other_keys)
        return {_PAIRS: pairs} if would_be_converted or _PAIRS in value else dict(pairs)
    return [_keys_to_pairs(one) for one in value] if isinstance(value, (list, tuple)) else value


def _pairs_to_mapping(value: dict[str, Any]) -> dict[Any, Any]:
    return dict(value[_PAIRS]) if value.keys() == {_PAIRS} else value


def _find_checkpoint(directory: Path) -> Path:
    """Return ``directory``, or the newest complete checkpoint in it. A collective call."""
    with raise_on_all_ranks():
        own = _list_candidates(directory) if get_rank() == 0 else []
    # By path, a backup has lower priority than the checkpoint of its step.
    candidates = sorted(gather_from_ranks(own)[0], key=lambda path: (inspection.step_of(path) or 0, path))

    chosen, warning = inspection.choose_newest_whole(
        directory, candidates, lambda path: merge_problems(inspection.find_problems(path, _find_problems))
    )
    if warning:
        warn_caller(warning)
    return chosen


def _list_candidates(directory: Path) -> list[Path]:
    """Return ``directory`` or its backup if it is a checkpoint, otherwise all checkpoints and backups in it."""
    # Unfinished ones are not removed: another program may be saving.
    with_manifest = [
        path for path in (directory, unfinished_marker.backup_path(directory)) if (path / MANIFEST_NAME).exists()
    ]
    if with_manifest:
        return with_manifest[:1]
    if (directory / SHARDS_FOLDER).exists():
        return [directory]
    folders = [folder for folder in (directory, directory / unfinished_marker.STAGING_FOLDER) if folder.is_dir()]
    return [path for folder in folders for path in inspection.list_checkpoints(folder)]


def _find_problems(checkpoint: Path, files: Mapping[str, FileEntry] | None) -> list[str]:
    """Each rank compares its part of the files with the manifest."""
    if files is None:
        return [f"{MANIFEST_NAME} is missing: it was never finished, or is of another program"]
    if STATE_FILE not in files:
        return [f"{STATE_FILE} is missing: resume a Trainer's checkpoint with train(resume_from_checkpoint=...)"]
    # torch reads all files in the folder.
    shards = {f"{SHARDS_FOLDER}/{path.name}" for path in (checkpoint / SHARDS_FOLDER).glob(f"*{SUFFIX}")}
    if unlisted := sorted(shards - files.keys()):
        return [f"{name} is not in the manifest: remove it" for name in unlisted]
    own_files = dict(sorted(files.items())[get_rank() :: get_world_size()])
    return find_damage(checkpoint, own_files)

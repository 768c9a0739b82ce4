"""Checkpoints of loops of one's own: written by all ranks together, and resumed on any number of them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.checkpoints import inspection, loaded_state
from hf_mp.trainer.checkpoints.atomic import make_staging_folder, publish, recover, staging_folder, write_synced
from hf_mp.trainer.checkpoints.json_files import read_json
from hf_mp.trainer.checkpoints.manifest import (
    MANIFEST_NAME,
    CheckpointError,
    FileEntry,
    Manifest,
    NoCheckpointError,
    find_damage,
    finish,
    read_manifest,
)
from hf_mp.trainer.checkpoints.optimizer_shards import make_room, put_state, take_state
from hf_mp.trainer.checkpoints.shards import (
    SUFFIX,
    read_layout,
    read_shards,
    refused_together,
    together,
    write_shards,
)
from hf_mp.trainer.checkpoints.untrusted import find_out_of_place
from hf_mp.trainer.hand_over import plain_name
from hf_mp.weights.distributed import is_running

SHARDS_FOLDER = "shards"
STATE_FILE = "training_state.json"
_MODEL = "model/"

_last: list[tuple[Path, Future[None]]] = []  # the asynchronous save that may still run


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> Future[None]:
    """Save model, optimizer and loss scale of a loop of your own, to be resumed on any number of processes.

    All processes call it, each writes its own shards (safetensors), the first one the rest (JSON) and the manifest with
    the size and checksum of every file. The directory is there whole or not at all; an older one is replaced in one
    moment. Weights are saved in FP32, in the lean layouts too: a checkpoint resumes in any layout, under DDP, FSDP2 or
    neither.

    Args:
        directory: of this checkpoint, as in ``f"run/checkpoint-{step}"``, on a file system that all processes share.
        model: attached; the DDP around it, or what ``fully_shard`` gave, is right too.
        optimizer: as ``hf_mp.prepare`` or ``attach_optimizer`` returned it.
        step: of the optimizer, after which this is.
        extra: what else to keep, values for JSON (of the first process), such as ``scheduler.state_dict()``. Random
            numbers are not saved.
        asynchronous: return when the tensors are copied to the CPU (12 bytes a parameter over all processes for AdamW),
            and write in a thread. Another save or load waits for it.

    Returns:
        A future: done at once, or when the checkpoint is in its place. Its ``result()`` raises what went wrong.

    Raises:
        CheckpointError: on all processes, naming the rank and the reason; the earlier directory is still there. Also
            for ``extra`` that JSON does not know, and for optimizer state that cannot be cut for other numbers of ranks.
    """
    _wait_for_last()
    target = Path(directory).absolute()
    with refused_together():
        tensors, _ = _of_model(model)
        state, plain = take_state(optimizer, _parameters(model))
        runtime = _runtime(model)
        scale = None if runtime is None else runtime.state_dict()
        text = _as_json({"step": step, "extra": extra or {}, "optimizer": plain, "mixed_precision": scale})
    staged = staging_folder(target.parent) / target.name

    def begin() -> None:
        recover(target.parent, inspection.is_finished)  # also clears what a killed run left half-written
        (make_staging_folder(target.parent) / target.name / SHARDS_FOLDER).mkdir(parents=True)

    def complete(files: Mapping[str, FileEntry]) -> None:
        write_synced(staged / STATE_FILE, text)
        finish(
            staged,
            step=step,
            world_size=torch.distributed.get_world_size() if is_running() else 1,
            precision="fp32" if runtime is None else str(runtime.policy),
            known={f"{SHARDS_FOLDER}/{name}": entry for name, entry in files.items()},
        )
        publish(staged, target)

    saved = write_shards(
        staged / SHARDS_FOLDER, {**tensors, **state}, begin=begin, finish=complete, asynchronous=asynchronous
    )
    if asynchronous:
        _last[:] = [(target, saved)]
    return saved


def load_checkpoint(
    directory: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer
) -> tuple[int, dict[str, Any]]:
    """Take over what :func:`save_checkpoint` saved, bit for bit, on this number of processes and in this layout.

    All processes call it, after ``hf_mp.prepare`` (or ``attach`` and ``attach_optimizer``) and after wrapping. Before
    anything is loaded, they check each file against the manifest, each its part of them.

    Args:
        directory: of a checkpoint; or of a run, of whose ``checkpoint-STEP`` the newest whole one is taken, with a
            warning that names those passed over.
        model, optimizer: as for :func:`save_checkpoint`, of the same parameters in the same groups.

    Returns:
        The step and ``extra`` that were saved.

    Raises:
        NoCheckpointError: where there is none yet.
        CheckpointError: on all processes, naming missing, torn and foreign files, weights of another model, and values
            that are not finite.
    """
    _wait_for_last()
    checkpoint = _find(Path(directory).absolute())
    tensors, first = _of_model(model)
    names, runtime, shards = _parameters(model), _runtime(model), checkpoint / SHARDS_FOLDER
    with refused_together(), loaded_state.naming(checkpoint, "the state"):
        saved, layout = read_json(checkpoint / STATE_FILE), read_layout(shards)
        _compare(tensors, layout)
        state = make_room(optimizer, names, layout, saved["optimizer"])
    read_shards(shards, {**tensors, **state})
    with refused_together(), loaded_state.naming(checkpoint, "the state"), torch.no_grad():
        unwrapped(model).load_state_dict({name: tensors[one] for name, one in first.items()})
        put_state(optimizer, names, state, saved["optimizer"])
        loaded_state.check_parameters(checkpoint, model)
        loaded_state.check_optimizer(checkpoint, optimizer)
        if runtime is not None and saved["mixed_precision"] is not None:
            runtime.load_state_dict(saved["mixed_precision"])
    if (runtime is None) != (saved["mixed_precision"] is None):
        where = "no mixed precision is attached" if runtime is None else "it was saved without mixed precision"
        warnings.warn(f"{checkpoint}: {where}, so the loss scale is not taken over", stacklevel=2)
    return saved["step"], saved["extra"]


def _as_json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, indent=2)
    except TypeError as error:
        raise CheckpointError(f"extra, or a setting of the optimizer, is no value for JSON: {error}") from error


def _wait_for_last() -> None:
    for target, saved in _last:
        wait([saved])
        if (error := saved.exception()) is not None:
            warnings.warn(f"{target} was not saved: {error}", stacklevel=3)
    _last.clear()


# What is saved


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _runtime(model: nn.Module) -> MixedPrecision | None:
    try:
        return runtime_of(model, "save_checkpoint")
    except ValueError:  # precision="fp32" attaches nothing
        return None


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in unwrapped(model).named_parameters()}


def _of_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model's tensors by ``model/NAME``, tied ones once; and for each key of its state dict that name."""
    inner = unwrapped(model)
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    identities = {name: id(tensor) for name, tensor in named}
    tensors: dict[str, Tensor] = {}
    first: dict[str, str] = {}
    seen: dict[int | str, str] = {}
    for key, value in inner.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{key} of the model's state is a {type(value).__name__}: only tensors are saved")
        first[key] = seen.setdefault(identities.get(key, key), _MODEL + plain_name(key))
        tensors.setdefault(first[key], value.detach().contiguous())
    return tensors, first


def _compare(tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> None:
    """Raise where the weights that were saved are not those of this model."""
    saved = {name for name in layout if name.startswith(_MODEL)}
    if saved != tensors.keys():
        missing, unknown = sorted(tensors.keys() - saved)[:3], sorted(saved - tensors.keys())[:3]
        raise CheckpointError(f"weights of another model: it lacks {missing} and has {unknown} besides")
    for name, tensor in tensors.items():
        stored = layout[name]
        if stored.size != tensor.shape or stored.properties.dtype.is_floating_point != tensor.is_floating_point():
            raise CheckpointError(
                f"{name} was saved as {stored.properties.dtype} of shape {tuple(stored.size)}, and is {tensor.dtype} "
                f"of shape {tuple(tensor.shape)} here"
            )


# Which checkpoint


def _find(directory: Path) -> Path:
    """``directory``, or the newest whole checkpoint in it; a collective call."""
    found = [directory / name for name in together(_candidates(directory) if _rank() == 0 else [])]
    if not found:
        raise NoCheckpointError(f"there is no checkpoint in {directory} yet: train from the start")
    passed_over: list[str] = []
    for checkpoint in sorted(found, key=lambda path: inspection.step_of(path) or 0, reverse=True):
        if not (problems := together(_problems(checkpoint))):
            if passed_over:
                newer = "; ".join(passed_over)
                warnings.warn(f"resuming from {checkpoint}; newer ones were passed over: {newer}", stacklevel=3)
            return checkpoint
        passed_over.append(f"{checkpoint.name}: {', '.join(problems)}")
    raise CheckpointError(
        f"nothing is loaded from {directory}: {'; '.join(passed_over)}. Resume from another checkpoint"
    )


def _candidates(directory: Path) -> list[str]:
    """Names of the checkpoints in the directory of a run; "." where it is itself one."""
    if not directory.is_dir() and directory.parent.is_dir():
        recover(directory.parent, inspection.is_finished)  # a kill between two renames
    if not directory.is_dir():
        return []
    if (directory / MANIFEST_NAME).exists() or (directory / SHARDS_FOLDER).exists():
        return ["."]
    return [path.name for path in inspection.list_checkpoints(directory)]


def _problems(checkpoint: Path) -> list[str]:
    """Why not to load a checkpoint, as far as this rank's part of its files tells."""
    try:
        manifest = read_manifest(checkpoint)
        if manifest is None:
            return [f"{MANIFEST_NAME} is missing: it was never finished, or is of another program"]
        if STATE_FILE not in manifest.files:
            return [f"{STATE_FILE} is missing: resume a Trainer's checkpoint with train(resume_from_checkpoint=...)"]
        return find_out_of_place(checkpoint) or _strangers(checkpoint, manifest) or _damage(checkpoint, manifest)
    except (CheckpointError, OSError) as error:
        return [str(error)]


def _strangers(checkpoint: Path, manifest: Manifest) -> list[str]:
    """Shards are found by listing their folder: there must be none besides those of the manifest."""
    listed = [f"{SHARDS_FOLDER}/{path.name}" for path in (checkpoint / SHARDS_FOLDER).glob(f"*{SUFFIX}")]
    return [f"{name} is not in the manifest: remove it" for name in sorted(set(listed) - set(manifest.files))]


def _damage(checkpoint: Path, manifest: Manifest) -> list[str]:
    ranks = torch.distributed.get_world_size() if is_running() else 1
    mine = dict(sorted(manifest.files.items())[_rank() :: ranks])
    return find_damage(checkpoint, replace(manifest, files=mine))


def _rank() -> int:
    return torch.distributed.get_rank() if is_running() else 0

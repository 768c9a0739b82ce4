"""Checkpoints that a stranger made to do harm: each is one file changed, with a manifest that fits it.

Each must be refused by an error of ours that names the file, without anything in it being run, without waiting for
ever, and without taking much memory.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers.trainer_utils import get_last_checkpoint

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, finish

SECONDS = 60
WEIGHTS, TRAINER_STATE = "model.safetensors", "trainer_state.json"
Make = Callable[[Path, Path], None]


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


class Evaluate(Touch):
    """Unpickled, it evaluates code."""

    def __reduce__(self) -> Any:
        return (eval, (f"open({str(self.path)!r}, 'w')",))


class Run(Touch):
    """Unpickled, it starts a shell."""

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


# What makes each: given the checkpoint, and the file that code in it would make.


def written(file: str, content: str | bytes) -> Make:
    data = content.encode() if isinstance(content, str) else content
    return lambda checkpoint, touched: (checkpoint / file).write_bytes(data)


def pickled(file: str) -> Make:
    def make(checkpoint: Path, touched: Path) -> None:
        (checkpoint / file).parent.mkdir(exist_ok=True)
        (checkpoint / file).write_bytes(pickle.dumps(Evaluate(touched)))

    return make


def saved(file: str, kind: type[Touch] = Touch, *, zipped: bool = True) -> Make:
    def make(checkpoint: Path, touched: Path) -> None:
        if file == "pytorch_model.bin":
            (checkpoint / WEIGHTS).unlink()
        state = {"state": kind(touched)}
        torch.save(state, checkpoint / file, _use_new_zipfile_serialization=zipped)

    return make


def shard(checkpoint: Path, touched: Path) -> None:
    dcp.save({"w": torch.ones(4), "lr": Touch(touched)}, checkpoint_id=checkpoint / "optimizer_0", no_dist=True)


def sparse(file: str) -> Make:
    return lambda checkpoint, touched: os.truncate(checkpoint / file, 2**30)  # a hole: it takes no room on the disk


def linked(file: str, target: str | None = None) -> Make:
    def make(checkpoint: Path, touched: Path) -> None:
        (checkpoint / file).unlink(missing_ok=True)
        outside = touched.with_name("outside")
        outside.write_bytes(b"secret")
        (checkpoint / file).symlink_to(target or outside)

    return make


def pipe(file: str) -> Make:
    def make(checkpoint: Path, touched: Path) -> None:
        (checkpoint / file).unlink()
        os.mkfifo(checkpoint / file)

    return make


BEYOND = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
OPTIMIZER, SCHEDULER, INDEX, SHARDS = (
    "optimizer.pt",
    "scheduler.pt",
    "model.safetensors.index.json",
    "optimizer_0/.metadata",
)
SAVED = (OPTIMIZER, SCHEDULER, "rng_state.pth", "scaler.pt", "pytorch_model.bin")

# By name: the file that the error must name, and what makes it.
HOSTILE: dict[str, tuple[str, Make]] = {
    # Code
    **{f"torch.save of a call in {file}": (file, saved(file)) for file in (*SAVED, "optimizer.bin")},
    **{f"a plain pickle in {file}": (file, pickled(file)) for file in (*SAVED, "adapter_model.bin")},
    "a shell in the old format of torch.save": (OPTIMIZER, saved(OPTIMIZER, Run, zipped=False)),
    "a pickle in the metadata of shards": (SHARDS, pickled(SHARDS)),
    "a pickled value in a shard": (SHARDS, shard),
    # never read: the only one that resumes
    "training arguments that run code": ("training_args.bin", saved("training_args.bin")),
    # Ways out of the directory
    "a manifest of 1 GiB": (MANIFEST_NAME, sparse(MANIFEST_NAME)),
    "model.safetensors linked to a file outside": (WEIGHTS, linked(WEIGHTS)),
    "optimizer.pt linked to /dev/zero": (OPTIMIZER, linked(OPTIMIZER, "/dev/zero")),
    "config.json linked to /proc/kcore": ("config.json", linked("config.json", "/proc/kcore")),
    "rng_state.pth linked to /nowhere": ("rng_state.pth", linked("rng_state.pth", "/nowhere")),
    "a folder linked to /": ("more", linked("more", "/")),
    "a pipe as optimizer.pt": (OPTIMIZER, pipe(OPTIMIZER)),
    "a pipe as the manifest": (MANIFEST_NAME, pipe(MANIFEST_NAME)),
    "an index of shards that points outside": (INDEX, written(INDEX, '{"weight_map": {"a": "../../x.safetensors"}}')),
    "an index of shards that is nested too deeply": (INDEX, written(INDEX, '{"weight_map": ' + "[" * 1_000_000)),
    "an index of shards that is a list": (INDEX, written(INDEX, "[]")),
    # Memory
    "a header of safetensors of 2**60 bytes": (WEIGHTS, written(WEIGHTS, struct.pack("<Q", 2**60) + b"{}")),
    "a header of safetensors of 90 MB": (WEIGHTS, written(WEIGHTS, struct.pack("<Q", 90_000_000) + b"[" * 90_000_000)),
    "safetensors whose tensors lie beyond the end": (
        WEIGHTS,
        written(WEIGHTS, struct.pack("<Q", len(BEYOND)) + BEYOND),
    ),
    "a trainer state of 1 GiB": (TRAINER_STATE, sparse(TRAINER_STATE)),
    "a config nested too deeply": ("config.json", written("config.json", '{"a":' * 1_000_000)),
}

RESUMES = ("training arguments that run code",)  # never read, so it resumes


def main(output_dir: str, settings: dict[str, Any]) -> None:
    """In a process of the harness: makes the checkpoint, resumes it, and prints ``hostile`` with what went wrong."""
    import worker

    name = settings["name"]
    file, make = HOSTILE[name]
    checkpoint, touched = Path(str(get_last_checkpoint(output_dir))), Path(output_dir, "touched")
    make(checkpoint, touched)
    if file != MANIFEST_NAME:
        sign(checkpoint)
    trainer = worker.make(output_dir, settings["trainer"], [], max_steps=10)
    # what runs into it is told as lost
    limit = _virtual_bytes() + 8 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(SECONDS)
    lost = resumed(trainer, checkpoint, name)
    signal.alarm(0)
    if touched.exists():
        lost = "code was run"
    print("hostile " + json.dumps(lost), flush=True)


def resumed(trainer: Any, checkpoint: Path, name: str) -> str | None:
    """What goes wrong where a checkpoint is resumed that must be refused by an error which names its file."""
    file = HOSTILE[name][0]
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except (CheckpointError, ValueError) as error:
        named = file in str(error) and len(str(error)) < 4000 and name not in RESUMES
        return None if named else f"refused, or without naming {file}: {str(error)[:200]}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None if name in RESUMES else "it was loaded"


def sign(checkpoint: Path) -> None:
    """Write a manifest that fits, of what can be read without harm to ourselves."""
    held = [path for path in checkpoint.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]
    aside = checkpoint.with_name("aside")
    aside.mkdir()
    for path in held:
        path.rename(aside / path.name)
    finish(checkpoint)
    for path in held:
        (aside / path.name).rename(path)


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

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
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import get_last_checkpoint

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME, _checksum, _dump, build_manifest

MOST_MIB = 800  # above what the process has when it begins; a file of 1 GiB in memory, or what it says, is more
SECONDS = 60
WEIGHTS, STATE, TRAINER_STATE = "model.safetensors", "mixed_precision.json", "trainer_state.json"
Make = Callable[[Path, Path], None]
HOSTILE: dict[str, tuple[str, Make]] = {}  # name to the file that the error must name, and what makes it


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


def hostile(name: str, file: str) -> Callable[[Make], Make]:
    def note(make: Make) -> Make:
        HOSTILE[name] = (file, make)
        return make

    return note


# Code


def _torch_file(file: str) -> None:
    @hostile(f"torch.save of a call in {file}", file)
    def make(checkpoint: Path, touched: Path) -> None:
        if file == "pytorch_model.bin":
            (checkpoint / WEIGHTS).unlink()
        torch.save({"state": Touch(touched)}, checkpoint / file)


def _plain_pickle(file: str) -> None:
    @hostile(f"a plain pickle in {file}", file)
    def make(checkpoint: Path, touched: Path) -> None:
        (checkpoint / file).write_bytes(pickle.dumps(Evaluate(touched)))


for _file in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin", "optimizer.bin"):
    _torch_file(_file)
for _file in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", "pytorch_model.bin", "adapter_model.bin"):
    _plain_pickle(_file)


@hostile("a shell in the old format of torch.save", "optimizer.pt")
def _old_format(checkpoint: Path, touched: Path) -> None:
    torch.save({"state": Run(touched)}, checkpoint / "optimizer.pt", _use_new_zipfile_serialization=False)


@hostile("a pickle in the metadata of shards", "optimizer_0/.metadata")
def _shard_metadata(checkpoint: Path, touched: Path) -> None:
    (checkpoint / "optimizer_0").mkdir()
    (checkpoint / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Touch(touched)))


@hostile("a pickled value in a shard", "optimizer_0/.metadata")
def _shard_value(checkpoint: Path, touched: Path) -> None:
    dcp.save({"w": torch.ones(4), "lr": Touch(touched)}, checkpoint_id=checkpoint / "optimizer_0", no_dist=True)


@hostile("training arguments that run code", "training_args.bin")
def _training_args(checkpoint: Path, touched: Path) -> None:
    torch.save(Touch(touched), checkpoint / "training_args.bin")  # never read: the only one that resumes


# Ways out of the directory


def _outside(name: str, change: Callable[[dict[str, Any]], None]) -> None:
    @hostile(f"a manifest that {name}", MANIFEST_NAME)
    def make(checkpoint: Path, touched: Path) -> None:
        content = json.loads((checkpoint / MANIFEST_NAME).read_text())
        change(content)
        del content["manifest_sha256"]
        (checkpoint / MANIFEST_NAME).write_text(_dump({**content, "manifest_sha256": _checksum(content)}))


ENTRY = {"size_bytes": 1, "sha256": "0" * 64}
_outside("points to ../", lambda content: content["files"].update({"../outside": ENTRY}))
_outside("points to an absolute path", lambda content: content["files"].update({"/etc/passwd": ENTRY}))
_outside("points to a drive", lambda content: content["files"].update({"C:\\x": ENTRY}))
_outside("has a negative size", lambda content: content["files"].update({"x": {**ENTRY, "size_bytes": -1}}))
_outside("has a negative step", lambda content: content.update(step=-4))
_outside("has no processes", lambda content: content.update(world_size=0))
_outside("is of another format", lambda content: content.update(format=99))


@hostile("a manifest nested too deeply", MANIFEST_NAME)
def _deep_manifest(checkpoint: Path, touched: Path) -> None:
    (checkpoint / MANIFEST_NAME).write_text("[" * 1_000_000)


@hostile("a manifest of 1 GiB", MANIFEST_NAME)
def _large_manifest(checkpoint: Path, touched: Path) -> None:
    _sparse(checkpoint / MANIFEST_NAME)


@hostile("a manifest with a key twice", MANIFEST_NAME)
def _twice_in_manifest(checkpoint: Path, touched: Path) -> None:
    path = checkpoint / MANIFEST_NAME
    path.write_text(path.read_text().replace("{", '{\n  "step": 1,', 1))


def _link(file: str, target: str) -> None:
    @hostile(f"{file} linked to {target}", file)
    def make(checkpoint: Path, touched: Path) -> None:
        (checkpoint / file).unlink()
        outside = touched.with_name("outside")
        outside.write_bytes(b"secret")
        (checkpoint / file).symlink_to(outside if target == "a file outside" else target)


_link(WEIGHTS, "a file outside")
_link("optimizer.pt", "/dev/zero")
_link("config.json", "/proc/kcore")
_link("rng_state.pth", "/nowhere")


@hostile("a pipe as optimizer.pt", "optimizer.pt")
def _pipe(checkpoint: Path, touched: Path) -> None:
    (checkpoint / "optimizer.pt").unlink()
    os.mkfifo(checkpoint / "optimizer.pt")


@hostile("a pipe as the manifest", MANIFEST_NAME)
def _pipe_as_manifest(checkpoint: Path, touched: Path) -> None:
    (checkpoint / MANIFEST_NAME).unlink()
    os.mkfifo(checkpoint / MANIFEST_NAME)


@hostile("a folder linked to /", "more")
def _folder(checkpoint: Path, touched: Path) -> None:
    (checkpoint / "more").symlink_to("/")


def _index(name: str, text: str) -> None:
    @hostile(f"an index of shards that {name}", "model.safetensors.index.json")
    def make(checkpoint: Path, touched: Path) -> None:
        (checkpoint / "model.safetensors.index.json").write_text(text)


_index("points outside", json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
_index("is nested too deeply", '{"weight_map": ' + "[" * 1_000_000)
_index("is a list", "[]")

# Memory


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)  # a hole: it takes no room on the disk


@hostile("a header of safetensors of 2**60 bytes", WEIGHTS)
def _huge_header(checkpoint: Path, touched: Path) -> None:
    (checkpoint / WEIGHTS).write_bytes(struct.pack("<Q", 2**60) + b"{}")


@hostile("a header of safetensors of 90 MB", WEIGHTS)
def _large_header(checkpoint: Path, touched: Path) -> None:
    (checkpoint / WEIGHTS).write_bytes(struct.pack("<Q", 90_000_000) + b"[" * 90_000_000)


@hostile("safetensors whose tensors lie beyond the end", WEIGHTS)
def _beyond(checkpoint: Path, touched: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (checkpoint / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)


@hostile("a zip bomb as optimizer.pt", "optimizer.pt")
def _zip_bomb(checkpoint: Path, touched: Path) -> None:
    with zipfile.ZipFile(checkpoint / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        with archive.open("archive/data/0", "w") as entry:
            for _ in range(1024):
                entry.write(bytes(2**20))


@hostile("a trainer state of 1 GiB", TRAINER_STATE)
def _large_state(checkpoint: Path, touched: Path) -> None:
    _sparse(checkpoint / TRAINER_STATE)


@hostile("a config nested too deeply", "config.json")
def _deep_config(checkpoint: Path, touched: Path) -> None:
    (checkpoint / "config.json").write_text('{"a":' * 1_000_000)


# Values


def _scaler(name: str, text: str) -> None:
    @hostile(f"a loss scale that is {name}", STATE)
    def make(checkpoint: Path, touched: Path) -> None:
        state = json.loads((checkpoint / STATE).read_text())
        state["loss_scaler"].update(json.loads(text))
        (checkpoint / STATE).write_text(json.dumps(state))


_scaler("NaN", '{"scale": NaN}')
_scaler("infinite", '{"scale": 1e999}')
_scaler("zero", '{"scale": 0}')
_scaler("negative", '{"scale": -8.0}')
_scaler("text", '{"scale": "8"}')
_scaler("counted below zero", '{"steps": -1}')
_scaler("counted in halves", '{"skipped_steps": 0.5}')


def _trainer_state(name: str, **changes: Any) -> None:
    @hostile(f"a trainer state with {name}", TRAINER_STATE)
    def make(checkpoint: Path, touched: Path) -> None:
        path = checkpoint / TRAINER_STATE
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


_trainer_state("a negative step", global_step=-5)
_trainer_state("text for a step", global_step="4")
_trainer_state("an epoch that is NaN", epoch=float("nan"))
_trainer_state("unknown entries", __class__="os.system")
_trainer_state("a log that is none", log_history=5)


def _weights(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    @hostile(f"weights {name}", WEIGHTS)
    def make(checkpoint: Path, touched: Path) -> None:
        tensors = load_file(checkpoint / WEIGHTS)
        save_file(change(tensors) or tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})


_weights("of another model's shapes", lambda tensors: {name: torch.zeros(3, 3) for name in tensors})
_weights("of another model's names", lambda tensors: {f"other.{name}": value for name, value in tensors.items()})
_weights("of whole numbers", lambda tensors: {name: value.to(torch.int32) for name, value in tensors.items()})
_weights("that are NaN", lambda tensors: {name: value * float("nan") for name, value in tensors.items()})


def _optimizer(name: str, change: Callable[[dict[str, Any]], Any], file: str = "optimizer") -> None:
    @hostile(f"a state of the {file} {name}", file)
    def make(checkpoint: Path, touched: Path) -> None:
        state = torch.load(checkpoint / f"{file}.pt", weights_only=True)
        change(state)
        torch.save(state, checkpoint / f"{file}.pt")


def _first(state: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = next(iter(state["state"].values()))
    return first


_optimizer("with moments that are NaN", lambda state: _first(state)["exp_avg"].fill_(float("nan")))
_optimizer("with moments of another shape", lambda state: _first(state).update(exp_avg=torch.zeros(3)))
_optimizer("with steps below zero", lambda state: _first(state).update(step=torch.tensor(-9.0)))
_optimizer("with a learning rate of inf", lambda state: state["param_groups"][0].update(lr=float("inf")))
_optimizer("of other parameters", lambda state: state["param_groups"][0]["params"].pop())
_optimizer("with what it has not", lambda state: state.update(get_last_lr=1), "scheduler")
_optimizer("with a step below zero", lambda state: state.update(last_epoch=-7), "scheduler")


@hostile("random numbers of another length", "rng_state.pth")
def _random_numbers(checkpoint: Path, touched: Path) -> None:
    state = torch.load(checkpoint / "rng_state.pth", weights_only=False)
    torch.save({**state, "cpu": torch.zeros(3, dtype=torch.uint8)}, checkpoint / "rng_state.pth")


RESUMES = ("training arguments that run code",)  # never read, so it may resume


def main(output_dir: str, settings: dict[str, Any]) -> None:
    """In a process of the harness: makes the checkpoint, resumes it, and prints ``hostile`` with what went wrong."""
    import worker

    name = settings["name"]
    file, make = HOSTILE[name]
    checkpoint, touched = Path(str(get_last_checkpoint(output_dir))), Path(output_dir, "touched")
    make(checkpoint, touched)
    if file != MANIFEST_NAME:
        (checkpoint / MANIFEST_NAME).unlink()
        built = build_manifest_of_files(checkpoint)
        (checkpoint / MANIFEST_NAME).write_text(built)
    trainer = worker.make(output_dir, "ours", [], max_steps=10)
    before = _peak_mib()
    # a limit that the system keeps, should ours be wrong
    limit = _virtual_bytes() + 8 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(SECONDS)
    lost: str | None = "it was loaded"
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        lost = None if name in RESUMES else lost
    except (CheckpointError, ValueError) as error:
        named = file in str(error) or name.startswith(("weights", "a state", "random"))
        lost = None if named and len(str(error)) < 4000 else f"the error does not name {file}: {str(error)[:200]}"
    except BaseException as error:
        lost = f"{type(error).__name__}: {str(error)[:200]}"
    signal.alarm(0)
    if touched.exists():
        lost = "code was run"
    elif lost is None and _peak_mib() - before > MOST_MIB:
        lost = f"took {_peak_mib() - before:.0f} MiB"
    print("hostile " + json.dumps(lost), flush=True)


def build_manifest_of_files(checkpoint: Path) -> str:
    """A manifest that fits, of what can be read without harm to ourselves."""
    held = [path for path in checkpoint.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]
    aside = checkpoint.with_name("aside")
    aside.mkdir()
    for path in held:
        path.rename(aside / path.name)
    manifest = build_manifest(checkpoint, step=8, world_size=1, precision="fp16", versions={})
    for path in held:
        (aside / path.name).rename(path)
    return manifest.to_json()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

"""Checkpoints of plain loops, saved on some ranks and resumed on others.

Usage: python checkpoint_worker.py FOLDER RUN...; a run is RANKS-CASE-WRAP-PLACE. Writes FOLDER/rank0.pt: by run,
what each rank found. The processes of each run are forked, so that torch is imported once.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop_worker import Wrap, batches, said_of, shard, tiny_gpt2, train, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

import hf_mp

LAYOUTS = ("fp16", "bf16", "fp16-lean")


def hybrid(model: nn.Module) -> nn.Module:
    return shard(
        model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    )


WRAPS: dict[str, Wrap] = {"ddp": DistributedDataParallel, "fsdp": shard, "hsdp": hybrid, "one": lambda model: model}


def made(precision: str, wrap: str, seed: int = 3) -> tuple[nn.Module, Any, hf_mp.MixedPrecision]:
    model, runtime = tiny_gpt2(seed, layers=1), hf_mp.MixedPrecision(precision)
    wrapped = WRAPS[wrap](runtime.attach(model))
    optimizer: Any = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    return wrapped, runtime.attach_optimizer(optimizer), runtime


def state(model: nn.Module, optimizer: Any, runtime: hf_mp.MixedPrecision) -> dict[str, Any]:
    """Weights, moments and loss scale, whole, on every rank."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: whole(value.detach()).clone() for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = whole(value).clone()
    return {"tensors": found, "runtime": runtime.state_dict(), "lr": [g["lr"] for g in optimizer.param_groups]}


def steps(model: nn.Module, optimizer: Any, runtime: hf_mp.MixedPrecision, start: int, stop: int) -> list[float]:
    ids = batches(stop, rows=8)[start:]
    return train(model, optimizer, ids, runtime=runtime)["loss"]


def save(folder: Path, wrap: str) -> dict[str, Any]:
    """Two steps and a checkpoint of each layout, then one more; what was saved is what there was then."""
    found = {}
    for precision in LAYOUTS:
        parts = made(precision, wrap)
        steps(*parts, 0, 2)
        parts[1].param_groups[0]["lr"] = 5e-4
        kept, path = state(*parts), folder / precision / "checkpoint-2"
        hf_mp.save_checkpoint(path, parts[0], parts[1], 2, extra={"epoch": 1.5})
        losses = steps(*parts, 2, 3)
        found[precision] = {"state": kept, "losses": losses, "end": state(*parts)}
    return found


def load(folder: Path, wrap: str) -> dict[str, Any]:
    """Each checkpoint that was saved in ``folder`` into a model of other weights, and one more step."""
    found = {}
    for precision in LAYOUTS:
        parts = made(precision, wrap, seed=7)
        step, extra = hf_mp.load_checkpoint(folder / precision / "checkpoint-2", parts[0], parts[1])
        kept = state(*parts)
        losses = steps(*parts, 2, 3)
        found[precision] = {"state": kept, "step": step, "extra": extra, "losses": losses, "end": state(*parts)}
    return found


def damaged(folder: Path, wrap: str) -> dict[str, Any]:
    """What is said of damaged checkpoints, which the first rank makes; nothing is loaded of them."""
    parts = made("fp16", wrap)
    for step in (1, 2):
        hf_mp.save_checkpoint(folder / f"run/checkpoint-{step}", parts[0], parts[1], step)
    found: dict[str, Any] = {"unchanged": True}
    shards = sorted((folder / "run/checkpoint-2/shards").iterdir())
    manifest = folder / "run/checkpoint-2/hf_mp_manifest.json"

    def said(name: str, change: Any, undo: Any) -> None:
        steps(*parts, 0, 1)
        before = state(*parts)["tensors"]
        change() if dist.get_rank() == 0 else None
        dist.barrier()
        try:
            hf_mp.load_checkpoint(folder / "run/checkpoint-2", parts[0], parts[1])
            found[name] = "nothing"
        except hf_mp.CheckpointError as error:
            found[name] = str(error)
        after = state(*parts)["tensors"]
        found["unchanged"] &= after.keys() == before.keys() and all(map(torch.equal, after.values(), before.values()))
        with torch.no_grad():
            parts[0](input_ids=batches(1)[0])  # after which FSDP2 leaves the root's weights whole
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[f"{name} newest"] = hf_mp.load_checkpoint(folder / "run", parts[0], parts[1])[0]
        found[f"{name} warned"] = [str(one.message) for one in caught if "passed over" in str(one.message)]
        dist.barrier()
        undo() if dist.get_rank() == 0 else None
        dist.barrier()

    aside, content, text = folder / "aside", shards[1].read_bytes(), manifest.read_text()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    stranger = shards[0].with_name("shard-00009-model-00001-of-00001.safetensors")
    dist.barrier()
    back = lambda: shards[1].write_bytes(content)  # noqa: E731
    said("missing", lambda: shards[1].rename(aside), back)
    said("torn", lambda: shards[1].write_bytes(content[:-100]), back)
    said("flipped", lambda: shards[1].write_bytes(flipped), back)
    said("stranger", lambda: stranger.write_bytes(content), lambda: stranger.unlink())
    said("unfinished", lambda: manifest.unlink(), lambda: manifest.write_text(text))
    return found


def refused(folder: Path, wrap: str) -> dict[str, str]:
    """On all ranks together, also where one alone has found it."""
    model, optimizer, _ = made("fp16", wrap)
    steps(model, optimizer, model.forward.runtime, 0, 1)
    hf_mp.save_checkpoint(folder / "run/checkpoint-1", model, optimizer, 1)
    (folder / "file").touch()

    first, *rest = model.parameters()

    def save(step: int, place: str = "run", **settings: Any) -> Any:
        return hf_mp.save_checkpoint(folder / f"{place}/checkpoint-{step}", model, optimizer, step, **settings)

    def with_state(name: str, value: Tensor | None) -> None:
        try:
            optimizer.state[first].update({} if value is None else {name: value})
            save(2)
        finally:
            optimizer.state[first].pop(name, None)

    other = hf_mp.MixedPrecision("fp16").attach(nn.Linear(4, 4))
    groups = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    said = said_of(
        {
            "another_model": lambda: hf_mp.load_checkpoint(
                folder / "run", other, torch.optim.AdamW(other.parameters())
            ),
            "other_groups": lambda: hf_mp.load_checkpoint(folder / "run", model, groups),
            "values_that_json_does_not_know": lambda: save(3, extra={"loss": torch.ones(1)}),
            "nothing_there": lambda: hf_mp.load_checkpoint(folder / "nowhere", model, optimizer),
            "no_directory": lambda: save(1, "file"),
            "factored_moments": lambda: with_state("row_var", distribute_tensor(torch.ones(4), first.device_mesh)),
            "moments_in_blocks": lambda: with_state("absmax1", torch.ones(3)),
            "one_rank_has_other_state": lambda: with_state("factor", torch.ones(3) if dist.get_rank() == 1 else None),
        }
    )
    said["files"] = ",".join(sorted(path.name for path in (folder / "run").iterdir()))
    return said


def run(rank: int, ranks: int, case: str, wrap: str, folder: Path, results: Path) -> None:
    """One rank of a run, in a process of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    if ranks > 1:
        limit = timedelta(seconds=60)
        store: Any = dist.FileStore(f"{results}.store", ranks)
        store.set_timeout(limit)
        dist.init_process_group("gloo", store=store, timeout=limit, rank=rank, world_size=ranks)
    torch.save(globals()[case](folder, wrap), f"{results}.{rank}")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main(folder: str, *runs: str) -> None:
    found = {}
    for number, name in enumerate(runs):
        ranks, case, wrap, *place = name.split("-")
        where, results = Path(folder, *place), Path(folder, f"run{number}")
        where.mkdir(exist_ok=True)
        start_processes(run, (int(ranks), case, wrap, where, results), int(ranks), start_method="fork")
        found[name] = [torch.load(f"{results}.{rank}", weights_only=False) for rank in range(int(ranks))]
        torch.save(found, Path(folder, "rank0.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])

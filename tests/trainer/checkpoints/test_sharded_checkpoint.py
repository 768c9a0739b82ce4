"""Checkpoints of plain loops on one process: what comes back, and what a failing disk leaves."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import hub_names
import pytest
import torch
from eight_bits import EightBits
from torch import Tensor, nn

import hf_mp
from hf_mp.trainer.checkpoints import manifest, sharded_checkpoint

LAYOUTS = ("fp16", "bf16", "fp16-lean", "bf16-lean", "fp32")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {"lr": torch.tensor(1e-2)}, "Adamax": {},
    "Adagrad": {}, "Adadelta": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"centered": True}, "Rprop": {},
    "Adafactor": {},
}  # fmt: skip


class Net(nn.Module):
    """Tied weights, running statistics and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x)).relu()))


def made(precision: str = "fp16", optimizer: str = "AdamW", seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    weights, others = [model.first.weight], [model.first.bias, model.norm.weight, model.norm.bias, model.last.bias]
    groups = [{"params": weights}, {"params": others, "lr": 1e-3}]
    model, wrapped = hf_mp.prepare(model, getattr(torch.optim, optimizer)(groups, **settings), precision)
    return model, wrapped


def train(model: nn.Module, optimizer: Any, start: int, stop: int, width: int = 6) -> list[float]:
    losses = []
    for step in range(start, stop):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state(model: nn.Module, optimizer: Any) -> list[Any]:
    entries = sorted(optimizer.state_dict()["state"].items())
    moments = [value for _, entry in entries for _, value in sorted(entry.items())]
    return [value.clone() if isinstance(value, Tensor) else value for value in [*model.state_dict().values(), *moments]]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(one, other) and one.dtype is other.dtype if isinstance(one, Tensor) else one == other
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("precision", LAYOUTS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, precision: str) -> None:
    model, optimizer = made(precision)
    train(model, optimizer, 0, 3)
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 3, extra={"epoch": 0.5})
    kept = state(model, optimizer)
    losses = train(model, optimizer, 3, 5)
    again, other = made(precision, seed=1)
    assert hf_mp.load_checkpoint(tmp_path / "c", again, other) == (3, {"epoch": 0.5})
    assert same(state(again, other), kept)
    assert train(again, other, 3, 5) == losses
    assert same(state(again, other), state(model, optimizer))
    assert again.first.weight is again.last.weight


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        pytest.param(kind, adapter, marks=() if kind == sampled else pytest.mark.exhaustive)
        for adapter, sampled in (("whole", "Mixtral"), ("LoRA", "DeepSeek-V3"))
        for kind in hub_names.MODELS
    ],
)
def test_models_with_other_names_on_the_hub_come_back(tmp_path: Path, kind: str, adapter: str) -> None:
    # Each kind in one layout, which the kinds share out.
    precision = ("bf16", "fp16", "bf16-lean")[list(hub_names.MODELS).index(kind) % 3]
    make, rows = hub_names.adapted if adapter == "LoRA" else hub_names.make, hub_names.rows(kind, 6)

    def made(seed: int) -> tuple[Any, Any]:
        model = make(kind, seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return hf_mp.prepare(model, optimizer, precision)

    def run(model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
        for step in range(start, stop):
            torch.manual_seed(step)  # for dropout
            model(**hub_names.collate(rows[2 * step : 2 * step + 2])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    first, again = made(0), made(1)
    run(*first, 0, 2)
    hf_mp.save_checkpoint(tmp_path / "c", *first, 2)
    assert hf_mp.load_checkpoint(tmp_path / "c", *again) == (2, {})
    assert same(state(*again), state(*first))
    for parts in (first, again):
        run(*parts, 2, 3)
    assert same(state(*again), state(*first))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_the_state_of_each_optimizer_comes_back(tmp_path: Path, precision: str, name: str) -> None:
    settings = OPTIMIZERS[name]
    model, optimizer = made(precision, name, **settings)
    train(model, optimizer, 0, 2)
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 2)
    again, other = made(precision, name, seed=1, **settings)
    hf_mp.load_checkpoint(tmp_path / "c", again, other)
    assert same(state(again, other), state(model, optimizer))
    assert train(again, other, 2, 3) == train(model, optimizer, 2, 3)
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    types = [{key: type(value) for key, value in group.items()} for group in other.param_groups]
    assert types == [{key: type(value) for key, value in group.items()} for group in optimizer.param_groups]


def test_nothing_in_it_is_pickled_and_the_manifest_has_every_file(tmp_path: Path) -> None:
    model, optimizer = made()
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 0)
    files = {path.relative_to(tmp_path / "c").as_posix() for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in files} == {".json", ".safetensors"}
    said = json.loads((tmp_path / "c/hf_mp_manifest.json").read_text())
    assert set(said["files"]) == files - {"hf_mp_manifest.json"}


@pytest.mark.parametrize("module", [sharded_checkpoint, manifest], ids=["state", "manifest"])
def test_the_older_one_stays_where_a_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    model, optimizer = made()
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 0)
    kept = state(model, optimizer)
    train(model, optimizer, 0, 1)

    def full(path: Path, *given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_synced", full)
        with pytest.raises(hf_mp.CheckpointError, match=r"could not be saved: rank 0: .*No space left on device"):
            hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert hf_mp.load_checkpoint(tmp_path / "c", model, optimizer)[0] == 0
    assert same(state(model, optimizer)[: len(model.state_dict())], kept[: len(model.state_dict())])
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    assert hf_mp.load_checkpoint(tmp_path / "c", model, optimizer)[0] == 1


@pytest.mark.parametrize("given", ["checkpoint-4", "."], ids=["itself", "its run"])
def test_after_a_kill_the_older_one_is_loaded_and_nothing_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    model, optimizer = made()
    hf_mp.save_checkpoint(tmp_path / "checkpoint-4", model, optimizer, 4)
    with monkeypatch.context() as patch:
        patch.setattr(
            sharded_checkpoint,
            "write_shards",
            lambda *_: patch.setattr(sharded_checkpoint.unfinished_marker, "abort_save", id) or 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            hf_mp.save_checkpoint(tmp_path / "checkpoint-4", model, optimizer, 5)
    before = sorted(tmp_path.rglob("*"))
    assert hf_mp.load_checkpoint(tmp_path / given, model, optimizer)[0] == 4
    assert sorted(tmp_path.rglob("*")) == before
    hf_mp.save_checkpoint(tmp_path / "checkpoint-4", model, optimizer, 6)
    assert hf_mp.load_checkpoint(tmp_path / given, model, optimizer)[0] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_what_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    hf_mp.save_checkpoint(tmp_path / "run/checkpoint-1", model, optimizer, 1)
    with pytest.raises(hf_mp.NoCheckpointError, match=r"No valid checkpoint found in .*nowhere: .*none yet"):
        hf_mp.load_checkpoint(tmp_path / "nowhere", model, optimizer)
    with pytest.raises(TypeError, match=r"the model is of type OrderedDict"):
        hf_mp.save_checkpoint(tmp_path / "c", model.state_dict(), optimizer, 1)  # type: ignore[arg-type]
    with pytest.raises(hf_mp.CheckpointError, match="extra, or a setting of the optimizer"):
        hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1, extra={"loss": torch.ones(1)})
    with pytest.raises(hf_mp.CheckpointError, match=r"group 0 of the optimizer has a parameter of shape .* not have"):
        hf_mp.save_checkpoint(tmp_path / "c", model, torch.optim.SGD([torch.zeros(3, requires_grad=True)]), 1)
    optimizer.state[next(model.parameters())]["exp_avg"] = EightBits(1.0)
    with pytest.raises(hf_mp.CheckpointError, match=r"exp_avg of .* is a EightBits.*use bitsandbytes' .*torch.save"):
        hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    half = nn.Linear(2, 2).half()
    bare = hf_mp.MasterWeightOptimizer(torch.optim.SGD(half.parameters(), momentum=0.9))
    half.weight.grad = torch.ones_like(half.weight)
    bare.step()
    with pytest.raises(hf_mp.CheckpointError, match="FP32 masters"):
        hf_mp.save_checkpoint(tmp_path / "c", half, bare, 1)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/trainer_state.json").write_text("{}")
    manifest.finish(tmp_path / "trainer", step=1, world_size=1, precision="fp16")
    with pytest.raises(hf_mp.CheckpointError, match=r"resume a Trainer's checkpoint"):
        hf_mp.load_checkpoint(tmp_path / "trainer", model, optimizer)


@pytest.mark.parametrize("other", ["SGD", "Adafactor", "Adam"])
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, other: str) -> None:
    hf_mp.save_checkpoint(tmp_path / "checkpoint-1", *made(), 1)
    with pytest.raises(hf_mp.CheckpointError, match=rf"the state of AdamW, and the optimizer is {other}: resume with"):
        hf_mp.load_checkpoint(tmp_path, *made(optimizer=other))


def test_weights_of_other_shapes_are_named(tmp_path: Path) -> None:
    small, large = (hf_mp.prepare(m := nn.Linear(n, 2), torch.optim.SGD(m.parameters())) for n in (2, 3))
    hf_mp.save_checkpoint(tmp_path / "c", *small, 1)
    with pytest.raises(
        hf_mp.CheckpointError, match=r"model/weight was saved as .* of shape \(2, 2\), and is .* \(2, 3\)"
    ):
        hf_mp.load_checkpoint(tmp_path / "c", *large)


def test_a_checkpoint_without_all_elements_is_no_checkpoint(tmp_path: Path) -> None:
    """A set of shards whose own files are whole, and which another number of ranks wrote: as hostile as torn."""
    from safetensors.torch import save_file

    model, optimizer = hf_mp.prepare(m := nn.Linear(2, 2), torch.optim.SGD(m.parameters()))
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    (shard,) = (tmp_path / "c/shards").iterdir()
    offsets = {"model/weight": {"saved_offsets": [2**40, 0]}, "model/bias": {"saved_offsets": [0]}}
    tensors = {"model/weight": torch.zeros(2, 2), "model/bias": torch.zeros(2)}
    save_file(tensors, shard, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
    (tmp_path / "c/hf_mp_manifest.json").unlink()
    manifest.finish(tmp_path / "c", step=1, world_size=1, precision="fp16")
    with pytest.raises(hf_mp.CheckpointError, match=r"holds 4 of the .* elements of model/weight: files are missing"):
        hf_mp.load_checkpoint(tmp_path / "c", model, optimizer)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_of_a_strangers_nothing_runs_and_a_header_takes_no_memory(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, 0, 1)
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    shards = tmp_path / "c/shards"
    (shards / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    (tmp_path / "c/hf_mp_manifest.json").unlink()
    manifest.finish(tmp_path / "c", step=1)
    assert hf_mp.load_checkpoint(tmp_path / "c", *made(seed=1))[0] == 1
    assert not (tmp_path / "touched").exists()
    (shard,) = shards.glob("*.safetensors")
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    moment = header["optimizer/first.weight/exp_avg"]
    start = moment["data_offsets"][0]
    moment |= {"shape": [2**20, 2**20], "data_offsets": [start, start + 2**42]}
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    (tmp_path / "c/hf_mp_manifest.json").unlink()
    manifest.finish(tmp_path / "c", step=1)
    with pytest.raises(hf_mp.CheckpointError, match=r"the state of .*/c does not fit this run: .*header"):
        hf_mp.load_checkpoint(tmp_path / "c", *made())


def test_a_scale_that_is_not_taken_over_is_told(tmp_path: Path) -> None:
    hf_mp.save_checkpoint(tmp_path / "c", *made("fp16"), 1)
    told = "no mixed precision is attached, so the loss scale is not restored, .*16-bit .*: call hf_mp.prepare first"
    with pytest.warns(UserWarning, match=told):
        hf_mp.load_checkpoint(tmp_path / "c", *made("fp32"))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    with torch.no_grad():
        model.first.bias[0] = torch.nan
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    with pytest.raises(hf_mp.CheckpointError, match=re.escape("the weight first.bias holds inf or NaN")):
        hf_mp.load_checkpoint(tmp_path / "c", model, optimizer)


def set_in_state(**settings: Any) -> Any:
    return lambda said: said["optimizer"]["groups"][1].update(settings)


RUINOUS: dict[str, tuple[Any, str]] = {
    "eps NaN": (set_in_state(eps=float("nan")), "the optimizer's eps is nan"),
    "rate inf": (set_in_state(lr=float("inf")), "the optimizer's lr is inf"),
    "rate a word": (set_in_state(lr="fast"), "the optimizer's lr is 'fast', not a number"),
    "betas of 1": (set_in_state(betas=[1.0, 0.9]), "the optimizer's betas is .*, and must be below 1"),
    "no betas": (lambda said: said["optimizer"]["groups"][0].pop("betas"), "the optimizer's betas is missing"),
    "step a word": (lambda said: said.update(step="first"), "step is 'first', not a number"),
    "step below 0": (lambda said: said.update(step=-1), "step is -1, and must not be negative"),
    "no step": (lambda said: said.pop("step"), "the state of .*/c does not fit this run: 'step'"),
    "no optimizer": (lambda said: said.update(optimizer=None), "the state of .*/c does not fit this run"),
    "squares below 0": ({"exp_avg_sq": torch.full((6,), -1.0)}, "exp_avg_sq of a .* is negative"),
    "integer moments": ({"exp_avg": torch.ones(6, dtype=torch.int32)}, "the optimizer's exp_avg holds torch.int32"),
    "step of the optimizer below 0": ({"step": torch.tensor(-1.0)}, "the optimizer's step of a .* is negative"),
}


@pytest.mark.parametrize("what", RUINOUS)
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_values_that_would_ruin_the_run_are_refused(tmp_path: Path, precision: str, what: str) -> None:
    from safetensors.torch import load_file, safe_open, save_file

    change, message = RUINOUS[what]
    model, optimizer = made(precision)
    train(model, optimizer, 0, 1)
    hf_mp.save_checkpoint(tmp_path / "c", model, optimizer, 1)
    if isinstance(change, dict):  # of the state of a parameter
        (shard,) = (tmp_path / "c/shards").iterdir()
        with safe_open(shard, "pt") as file:
            metadata = file.metadata()
        changed = {f"optimizer/first.bias/{key}": value for key, value in change.items()}
        save_file({**load_file(shard), **changed}, shard, metadata)
    else:
        state = tmp_path / "c/training_state.json"
        said = json.loads(state.read_text())
        change(said)
        state.write_text(json.dumps(said))
    (tmp_path / "c/hf_mp_manifest.json").unlink()
    manifest.finish(tmp_path / "c", step=1)
    with pytest.raises(hf_mp.CheckpointError, match=message):
        hf_mp.load_checkpoint(tmp_path / "c", *made(precision, seed=1))


def test_a_scheduler_with_milestones_goes_on(tmp_path: Path) -> None:
    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    rates = []
    model, optimizer = made()
    planned = scheduler(optimizer)
    optimizer.step()
    planned.step()
    extra = {"scheduler": planned.state_dict(), "best": [{1: 2.0, "1": None}]}
    hf_mp.save_checkpoint(tmp_path / "checkpoint-1", model, optimizer, 1, extra=extra)
    other_model, other = made(seed=1)
    resumed = scheduler(other)
    _, found = hf_mp.load_checkpoint(tmp_path, other_model, other)
    assert found == extra
    resumed.load_state_dict(found["scheduler"])
    for one, plan in ((optimizer, planned), (other, resumed)):
        for _ in range(4):
            one.step()
            plan.step()
        rates.append([group["lr"] for group in one.param_groups])
    assert rates[0] == rates[1]


def test_a_loop_resumes_8_bit_states_bit_for_bit(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def pair(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(128, 64)
        return hf_mp.prepare(model, bnb.optim.AdamW8bit(model.parameters(), lr=1e-2), precision="bf16-lean")

    model, optimizer = pair(0)
    train(model, optimizer, 0, 1, width=128)
    hf_mp.save_checkpoint(tmp_path / "checkpoint-1", model, optimizer, 1)
    other_model, other = pair(1)
    hf_mp.load_checkpoint(tmp_path, other_model, other)
    assert any(entry["state1"].dtype is torch.uint8 for entry in other.state.values())
    assert train(model, optimizer, 1, 4, width=128) == train(other_model, other, 1, 4, width=128)

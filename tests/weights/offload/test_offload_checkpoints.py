"""State in host memory: what is saved of it, what is loaded into it, and without a second copy."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from offloading import OPTIMIZERS, Run, Step, differences, make_model, start

import hf_mp
from hf_mp.trainer.checkpoints import optimizer_shards, sharded_checkpoint, shards

NAMES = ["fused AdamW", "SGD with momentum", "8-bit AdamW", "fused AdamW, amsgrad"]
STEPS = [Step(2, 0.05), Step()]


@pytest.fixture(autouse=True)
def _bitsandbytes(request: pytest.FixtureRequest) -> None:
    if "8-bit AdamW" in str(request.node.name):
        pytest.importorskip("bitsandbytes")


def rooms_of(run: Run) -> dict[int, Any]:
    """The places of state in host memory, by their addresses."""
    return {room.view.data_ptr(): room for rooms in run.optimizer.rooms.values() for room in rooms.values()}


@pytest.mark.parametrize(("first", "second"), [("all", "all"), ("optimizer", None), (None, "all")])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_goes_on_with_and_without_offload(name: str, first: str | None, second: str | None) -> None:
    begun = start(OPTIMIZERS[name], "bf16-lean", first).train(STEPS)
    file = io.BytesIO()
    torch.save({"model": begun.model.state_dict(), "optimizer": begun.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = start(OPTIMIZERS[name], "bf16-lean", second, make_model().requires_grad_())
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    again.generator.set_state(begun.generator.get_state())
    for run in (begun, again):
        run.norms.clear()
        run.skipped.clear()
        run.train(STEPS)
    assert differences(again, begun) == []
    if second is not None:
        large = [v for s in again.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        assert sum(value.data_ptr() in rooms_of(again) for value in large) == len(rooms_of(again)) > 10


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_the_slabs_themselves(name: str) -> None:
    run = start(OPTIMIZERS[name], "bf16-lean", "all").train(STEPS)
    rooms, saved = rooms_of(run), run.optimizer.state_dict()["state"]
    tensors = [value for state in saved.values() for value in hf_mp.kernels.nested.tensors_in(state)]
    assert rooms.keys() <= {tensor.data_ptr() for tensor in tensors}
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    slabs = {room.slab.data_ptr(): room.slab.nbytes for room in rooms.values()}
    assert len(file.getvalue()) < 1.3 * sum(slabs.values()) + 60_000
    tensors_of_shards, _ = optimizer_shards.extract_state(run.optimizer, dict(run.model.named_parameters()))
    assert rooms.keys() <= {tensor.data_ptr() for tensor in tensors_of_shards.values()}


def test_masters_of_a_state_dict_are_in_host_memory_and_one_of_tied_weights() -> None:
    run = start(OPTIMIZERS["fused AdamW"], "bf16-lean", "all").train(STEPS)
    saved = run.model.state_dict()
    assert all(value.dtype is torch.float32 and value.device.type == "cpu" for value in saved.values())
    assert saved["lm_head.weight"] is saved["transformer.wte.weight"]


def note_and_read(read_shards: Any, read: list[int], folder: Path, tensors: Any) -> None:
    read += [tensor.data_ptr() for tensor in tensors.values()]
    read_shards(folder, tensors)


@pytest.mark.parametrize("first", [None, "all"])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_a_loop_is_read_into_the_slabs(
    name: str, first: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_FILE_BYTES", 20_000)
    begun = start(OPTIMIZERS[name], "fp16-lean", first).train(STEPS)
    hf_mp.save_checkpoint(tmp_path / "c", begun.model, begun.optimizer, 2)
    files = list((tmp_path / "c" / "shards").iterdir())
    assert len(files) > 3 and max(path.stat().st_size for path in files) < 30_000
    for offload in (None, "optimizer", "all"):
        again = start(OPTIMIZERS[name], "fp16-lean", offload)
        read: list[int] = []
        with monkeypatch.context() as patch:
            noting = functools.partial(note_and_read, sharded_checkpoint.read_shards, read)
            patch.setattr(sharded_checkpoint, "read_shards", noting)
            assert hf_mp.load_checkpoint(tmp_path / "c", again.model, again.optimizer)[0] == 2
        if offload is not None:
            assert rooms_of(again).keys() <= set(read)
        assert len(again.state()) == len(begun.state())
        assert all(map(torch.equal, again.state(), begun.state()))


def test_moments_of_another_model_are_refused() -> None:
    run = start(OPTIMIZERS["fused AdamW"], "bf16-lean", "optimizer").train([Step()])
    state = run.optimizer.state[run.model.lm_head.weight]
    state["exp_avg"] = torch.zeros(3)
    run.backward()
    with pytest.raises(ValueError, match=r"shape \(64, 32\) are not FP32 tensors of that shape.*of another model"):
        run.optimizer.step()

"""bitsandbytes' 8-bit moments as FP32, and back: the same bits where blocks begin at the same elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_mp
from hf_mp.trainer.checkpoints import blockwise_state
from hf_mp.trainer.checkpoints.blockwise_state import as_optimizer_keeps, in_fp32

bnb = pytest.importorskip("bitsandbytes")

SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW8bit": {},
    "Lion8bit": {},
    "RMSprop8bit": {},
    "SGD8bit": {"momentum": 0.9},
    "AdEMAMix8bit": {},
    "AdamW32bit": {},
}
MOST_APART = 0.0071  # of a block's scale: half of the widest step in bitsandbytes' tables


def made(name: str, parameter: nn.Parameter, **settings: Any) -> Any:
    return getattr(bnb.optim, name)([parameter], lr=1e-3, **SETTINGS[name], **settings)


def trained(name: str, elements: int, **settings: Any) -> tuple[nn.Parameter, Any]:
    """After gradients of many magnitudes; the first blocks saw none."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(elements))
    optimizer = made(name, parameter, **settings)
    for _ in range(4):
        parameter.grad = torch.randn(elements) * 10.0 ** torch.randint(-20, 2, (elements,))
        parameter.grad *= torch.rand(elements) < 0.5
        parameter.grad[:700] = 0
        optimizer.step()
    return parameter, optimizer


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, Tensor) else value == right[key]
        for key, value in left.items()
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("elements", [100, 4096, 5001, 2**17 + 3])
def test_the_same_blocks_have_the_same_bits(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_state, "_BLOCKS_AT_ONCE", 100)
    parameter, optimizer = trained(name, elements)
    before = dict(optimizer.state[parameter])
    assert (before["state1"].dtype is torch.uint8) == (elements >= 4096 and name != "AdamW32bit")
    saved = in_fp32(before)
    if name != "AdEMAMix8bit":
        assert {key for key in saved if key.startswith(("qmap", "absmax"))} == set()
        assert all(saved[key].dtype is torch.float32 for key in saved if key.startswith("state"))
    fresh = made(name, parameter)
    assert same(before, as_optimizer_keeps(fresh, parameter, (0, 0), dict(saved)))
    assert not fresh.state


def test_what_bitsandbytes_reads_is_what_is_saved() -> None:
    parameter, optimizer = trained("AdamW8bit", 5001)
    entry = optimizer.state[parameter]
    for number in "12":
        quantized = {"absmax": entry[f"absmax{number}"], "code": entry[f"qmap{number}"], "blocksize": 256}
        expected = bnb.functional.dequantize_blockwise(entry[f"state{number}"], **quantized)
        assert torch.equal(in_fp32(entry)[f"state{number}"], expected)


@pytest.mark.parametrize(("first", "last"), [(100, 5100), (0, 4500), (256, 8192)])
def test_other_blocks_are_quantized_again(first: int, last: int) -> None:
    saved = in_fp32(trained("AdamW8bit", 8192)[1].state.popitem()[1])
    part = {key: value[first:last] if isinstance(value, Tensor) else value for key, value in saved.items()}
    parameter = nn.Parameter(torch.zeros(last - first))
    kept = as_optimizer_keeps(made("AdamW8bit", parameter), parameter, (0, 0), dict(part))
    assert kept["state1"].dtype is torch.uint8
    again = in_fp32(kept)
    for number in "12":
        scales = kept[f"absmax{number}"].repeat_interleave(256)[: last - first]
        apart = (again[f"state{number}"] - part[f"state{number}"]).abs()
        assert (apart <= MOST_APART * scales).all()
        assert scales.count_nonzero() > 3000
    if first % 256 == 0 and last % 256 == 0:
        assert same(again, part)


def test_a_part_that_is_small_here_keeps_fp32() -> None:
    parameter, optimizer = trained("AdamW8bit", 8192)
    saved = in_fp32(optimizer.state[parameter])
    fresh = made("AdamW8bit", parameter, min_8bit_size=10_000)
    assert same(as_optimizer_keeps(fresh, parameter, (0, 0), dict(saved)), saved)


def test_a_part_that_is_large_here_gets_8_bits() -> None:
    parameter, optimizer = trained("AdamW8bit", 8192, min_8bit_size=10_000)
    kept = as_optimizer_keeps(made("AdamW8bit", parameter), parameter, (0, 0), in_fp32(optimizer.state[parameter]))
    assert kept["state1"].dtype is kept["state2"].dtype is torch.uint8


def test_a_loop_resumes_8_bit_states_bit_for_bit(tmp_path: Path) -> None:
    def pair(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(128, 64)
        return hf_mp.prepare(model, bnb.optim.AdamW8bit(model.parameters(), lr=1e-2), precision="bf16-lean")

    def step(model: nn.Module, optimizer: Any) -> Tensor:
        loss = model(torch.ones(4, 128)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer = pair(0)
    step(model, optimizer)
    hf_mp.save_checkpoint(tmp_path / "checkpoint-1", model, optimizer, 1)
    other_model, other = pair(1)
    hf_mp.load_checkpoint(tmp_path, other_model, other)
    for (_, left), (_, right) in zip(optimizer.state.items(), other.state.items(), strict=True):
        assert same(left, right)
    assert any(entry["state1"].dtype is torch.uint8 for entry in other.state.values())
    assert [step(model, optimizer) for _ in range(3)] == [step(other_model, other) for _ in range(3)]


def test_states_of_other_libraries_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(128, 64)
    optimizers = {
        "bitsandbytes": bnb.optim.AdamW8bit(model.parameters()),
        "torch": torch.optim.AdamW(model.parameters()),
    }
    for name, optimizer in optimizers.items():
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        hf_mp.save_checkpoint(tmp_path / name / "checkpoint-1", model, optimizer, 1)
    with pytest.raises(hf_mp.CheckpointError, match=r"the state of AdamW8bit, without what AdamW needs \(amsgrad"):
        hf_mp.load_checkpoint(tmp_path / "bitsandbytes", model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(hf_mp.CheckpointError, match=r"the state of AdamW, without what AdamW8bit needs \(alpha"):
        hf_mp.load_checkpoint(tmp_path / "torch", model, bnb.optim.AdamW8bit(model.parameters()))

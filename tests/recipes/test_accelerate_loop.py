"""accelerate's own loop: what it prepares, saves and loads goes with ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn

import hf_mp
from accelerate_loop import main

SMALL = ["--cpu", "--pieces", "160", "--epochs", "2"]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
def test_a_resumed_run_is_the_uninterrupted_one(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = ([*SMALL, "--precision", precision, "--output_dir", str(tmp_path / name)] for name in ("a", "b"))
    main(whole)
    said = capsys.readouterr().out.splitlines()
    main([*parts, "--stop_after", "1"])
    main([*parts, "--resume"])
    assert capsys.readouterr().out.splitlines() == said
    assert "of 8 steps skipped" in said[1]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_scheduler_is_held_back_and_the_loss_scale_is_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    precision = hf_mp.MixedPrecision("params=fp32,compute=fp16,loss_scale=dynamic")
    optimizer = precision.attach_optimizer(optimizer) if precision.attach(model) else optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(precision)
    for factor in (1.0, 1.0, float("inf"), 1.0):  # the second update overflows
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).mean() * factor)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert norm.isnan() or norm.isinf()
    assert (precision.stats.steps, precision.stats.skipped_steps, scheduler.get_last_lr()) == (2, 1, [0.5])
    accelerator.save_state(str(tmp_path))
    saved = precision.state_dict()
    precision.load_state_dict(hf_mp.MixedPrecision(precision.policy).state_dict())
    assert precision.state_dict() != saved
    accelerator.load_state(str(tmp_path))
    assert precision.state_dict() == saved and saved["loss_scaler"]["scale"] == 2.0**15


def test_two_mixed_precisions_are_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(4, 1)
    model, _ = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16")
    model = accelerator.prepare_model(model)
    with pytest.raises(RuntimeError, match=r"use either torch\.autocast"):
        model(torch.ones(2, 4))

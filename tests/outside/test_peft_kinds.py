"""Adapters of PEFT's kinds in FP16: none loses more steps than with torch's algorithm. The whole: ``make outside``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("peft")

from peft_kinds import KINDS, VOCABULARY, adapted
from tiny import take_step

import hf_mp

QUICK = ("AdaLoRA", "VB-LoRA")  # what lost steps when the scale followed gradients of weights at once
STEPS = 60


def lost_steps(kind: str, loss_scale: str, tokens: int) -> int:
    model = adapted(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    policy = f"params=fp32,compute=fp16,loss_scale={loss_scale}"
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(trained, lr=1e-3), policy)
    random = torch.Generator().manual_seed(1)
    shape = (4, 16) if tokens == 64 else (16, 64)
    batches = [torch.randint(0, VOCABULARY, shape, generator=random) for _ in range(4)]
    lost = 0
    for step in range(STEPS):
        rows = batches[step % 4]
        take_step(model(input_ids=rows, labels=rows).loss, optimizer)
        lost += optimizer.step_was_skipped
    return lost


@pytest.mark.parametrize("kind", QUICK)
def test_no_step_is_lost(kind: str) -> None:
    assert lost_steps(kind, "headroom", 64) == 0


@pytest.mark.outside
@pytest.mark.parametrize("tokens", [64, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_loses_more_steps_than_with_torchs_algorithm(kind: str, tokens: int) -> None:
    assert lost_steps(kind, "headroom", tokens) <= lost_steps(kind, "dynamic", tokens)

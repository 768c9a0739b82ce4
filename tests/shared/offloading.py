"""Trainings of a small tied GPT-2 in a lean preset, with and without offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny import copies
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp
from hf_mp.weights.split_parameter import SplitParameter, master_value

SIZES = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
SETTINGS = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WINDOW = 2**14  # bytes: the windows are filled a dozen times in a step
BUCKET = 2000  # elements

Make = Callable[[Any], Optimizer]


def adamw_in_8_bits(parameters: Any) -> Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=64)


def fused_in_groups(parameters: Any) -> Optimizer:
    every = list(parameters)
    matrices, others = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2, fused=True)


OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": fused_in_groups,
    "fused Adam, lr in a tensor": lambda parameters: Adam(parameters, lr=torch.tensor(1e-2), fused=True),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2),
    "fused AdamW, amsgrad": lambda parameters: AdamW(parameters, lr=1e-2, fused=True, amsgrad=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "SGD": lambda parameters: SGD(parameters, lr=0.1),
    "8-bit AdamW": adamw_in_8_bits,
}


@dataclass
class Step:
    """One step: its micro-batches, the 2-norm to clip to, and whether its loss overflows."""

    micro_batches: int = 1
    clip: float | None = None
    overflows: bool = False


# With and without accumulation and clipping, before and after a step that is skipped.
STEPS = (Step(), Step(2, 0.05), Step(overflows=True), Step(3), Step(1, 0.05))


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES, **SETTINGS, **NO_DROPOUT)).train()


@dataclass
class Run:
    """A model, its optimizer, and what its steps showed."""

    model: Any
    optimizer: Any
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def backward(self, micro_batches: int = 1, factor: float = 1.0) -> None:
        for _ in range(micro_batches):
            ids = torch.randint(0, SIZES["vocab_size"], (2, SIZES["n_positions"]), generator=self.generator)
            ids = ids.to(self.model.device)
            (self.model(input_ids=ids, labels=ids).loss * (factor / micro_batches)).backward()

    def train(self, steps: Sequence[Step] = STEPS) -> Run:
        for step in steps:
            self.backward(step.micro_batches, 1e30 if step.overflows else 1.0)
            if step.clip is not None:
                self.norms.append(self.optimizer.clip_grad_norm_(step.clip).item())
            self.optimizer.step()
            self.skipped.append(self.optimizer.step_was_skipped)
            self.optimizer.zero_grad()
        return self

    def weights(self) -> list[Tensor]:
        """Both halves of each master weight, as one."""
        return copies(master_value(p) if isinstance(p, SplitParameter) else p for p in self.model.parameters())

    def state(self) -> list[Tensor]:
        """All that a step may change."""
        parameters = list(self.model.parameters())
        states = [self.optimizer.state.get(parameter, {}) for parameter in parameters]
        values = [value for state in states for _, value in sorted(state.items()) if isinstance(value, Tensor)]
        return [tensor.cpu() for tensor in (*copies(parameters), *self.weights(), *copies(values))]


def start(make: Make, precision: str, offload: str | None, model: Any = None, **settings: Any) -> Run:
    model = make_model() if model is None else model
    return Run(*hf_mp.prepare(model, make(model.parameters()), precision, offload=offload, **settings))


def differences(found: Run, expected: Run) -> list[str]:
    """What is not equal bit for bit."""
    ours, theirs = found.state(), expected.state()
    wrong = [] if len(ours) == len(theirs) else [f"{len(ours)} tensors for {len(theirs)}"]
    pairs = enumerate(zip(ours, theirs, strict=False))
    wrong += [f"tensor {number}" for number, (one, other) in pairs if not torch.equal(one, other)]
    same = {name: (getattr(found, name), getattr(expected, name)) for name in ("norms", "skipped")}
    return wrong + [f"{name}: {one} for {other}" for name, (one, other) in same.items() if one != other]

"""A generator and a discriminator in one attached model, each with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp import MixedPrecision

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "bnb AdamW": lambda p: bnb.optim.AdamW(p, lr=1e-2),
}


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor, part: str) -> Tensor:
        return getattr(self, part)(x)


def train(
    precision: str, make: Callable[[Any], torch.optim.Optimizer], together: bool = False, steps: int = 4
) -> tuple[Gan, Any]:
    torch.manual_seed(0)
    model = Gan()
    runtime = MixedPrecision(precision)
    runtime.attach(model)
    parts = [model] if together else [model.generator, model.discriminator]
    optimizers = [runtime.attach_optimizer(make(part.parameters())) for part in parts]
    of_generator, of_discriminator = optimizers[0], optimizers[-1]
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        real, noise = torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)
        fake = model(noise, "generator")  # used after the discriminator's step
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.softplus(-model(real, "discriminator")) + F.softplus(model(fake.detach(), "discriminator"))
        loss.mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-model(fake, "discriminator")).mean().backward()
        of_generator.step()
    return model, runtime


@pytest.mark.parametrize("together", [False, True], ids=["two", "one"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_a_graph_made_before_the_others_step_is_differentiated(precision: str, optimizer: str, together: bool) -> None:
    expected, _ = train("fp32", OPTIMIZERS[optimizer], together)
    found, runtime = train(precision, OPTIMIZERS[optimizer], together)
    reference = expected.state_dict()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, reference[name], rtol=0.05, atol=0.03)
    copies = runtime.working_copies
    for parameter in found.parameters():
        if parameter in copies:
            assert torch.equal(copies.get(parameter), parameter.detach().to(copies.dtype))


def test_weights_written_from_outside_are_read_while_the_other_part_is_updated() -> None:
    model, runtime = train("fp16", OPTIMIZERS["SGD"], steps=1)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.discriminator.parameters(), lr=0.1))
    weight = model.generator[0].weight
    model(torch.ones(2, 6), "discriminator").sum().backward()
    weight.data.fill_(0.5)
    optimizer.step()
    assert torch.equal(runtime.working_copies.get(weight), torch.full_like(weight, 0.5).half())

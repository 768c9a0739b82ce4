"""What goes wrong in FP16 arithmetic, next to the FP32 result, and what mixed precision does about it.

    python recipes/fp16_pitfalls.py

Every row is computed when the recipe runs, on a GPU where there is one. FP16 has 11 significant bits and ends at 65504
and at 2**-24; BF16 has FP32's range and 8 significant bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from torch import Tensor

import hf_mp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Pitfall:
    """One calculation that needs more than FP16.

    Attributes:
        expression: what is calculated.
        compute: calculates it in a dtype, on a device.
        why: one sentence.
        remedy: what mixed precision does about it.
    """

    expression: str
    compute: Callable[[torch.dtype, str], Tensor]
    why: str
    remedy: str


def number(value: float, dtype: torch.dtype, device: str) -> Tensor:
    """A scalar."""
    return torch.tensor(value, dtype=dtype, device=device)


def running_sum(values: Tensor) -> Tensor:
    """The sum, accumulated in the dtype of the values: torch's own ``sum`` of FP16 accumulates in FP32."""
    total = values.new_zeros(())
    for value in values:
        total = total + value
    return total


def sgd(dtype: torch.dtype, device: str, steps: int = 1000) -> Tensor:
    """A weight of 1 after many updates of 1e-4."""
    weight = number(1.0, dtype, device)
    for _ in range(steps):
        weight = weight + number(1e-4, dtype, device)
    return weight


PITFALLS = [
    Pitfall(
        "1 + 2**-24",
        lambda dtype, device: number(1.0, dtype, device) + number(2.0**-24, dtype, device),
        "FP16 can hold 2**-24, its smallest number, but not add it to 1, whose neighbour is 2**-10 away; FP32 just "
        "loses it as well, 2**-23 not.",
        "Small numbers are summed among themselves, in FP32, before they meet a large one.",
    ),
    Pitfall(
        "1 + 0.0001",
        lambda dtype, device: number(1.0, dtype, device) + number(1e-4, dtype, device),
        "A summand below 2**-11 of the other is lost.",
        "Updates are added to FP32 master weights.",
    ),
    Pitfall(
        "1 + 0.0001, 1000 times",
        lambda dtype, device: sgd(dtype, device),
        "An update that is lost is lost every time, so the weight never moves.",
        "Updates are added to FP32 master weights.",
    ),
    Pitfall(
        "sum of 4096 times 16",
        lambda dtype, device: torch.full((4096,), 16.0, dtype=dtype, device=device).sum(),
        "The result, 65536, is above FP16's largest number, 65504.",
        "Autocast runs reductions in FP32.",
    ),
    Pitfall(
        "1 added 4096 times",
        lambda dtype, device: running_sum(torch.ones(4096, dtype=dtype, device=device)),
        "From 2048 on the neighbours of an FP16 number are 2 apart, and adding 1 does nothing.",
        "Products accumulate in FP32, and gradients of micro-batches too.",
    ),
    Pitfall(
        "exp(12)",
        lambda dtype, device: number(12.0, dtype, device).exp(),
        "exp overflows FP16 from 11.09 on.",
        "Autocast runs exponentials and softmax in FP32.",
    ),
    Pitfall(
        "norm of (200, 200, 200)",
        lambda dtype, device: torch.full((3,), 200.0, dtype=dtype, device=device).square().sum().sqrt(),
        "The squares leave FP16's range, though the norm would not.",
        "Autocast runs powers and norms in FP32.",
    ),
    Pitfall(
        "1e-8 as a gradient",
        lambda dtype, device: number(1e-8, dtype, device),
        "Below 2**-25 FP16 rounds to zero: the gradient underflows.",
        "The loss scale multiplies gradients before they become FP16.",
    ),
    Pitfall(
        "1e-8 * 2**16, then / 2**16 in FP32",
        lambda dtype, device: (number(1e-8 * 2.0**16, dtype, device)).float() / 2.0**16,
        "Times a power of two only the exponent changes, and FP32 has room to take it back.",
        "That is loss scaling.",
    ),
    Pitfall(
        "2048 + 1 - 2048",
        lambda dtype, device: (
            number(2048.0, dtype, device) + number(1.0, dtype, device) - number(2048.0, dtype, device)
        ),
        "Large and small in one sum: the small one is gone before the large one is taken away.",
        "The residual stream and the losses are FP32.",
    ),
    Pitfall(
        "1 / (0 + 1e-8), Adam's eps",
        lambda dtype, device: 1.0 / (number(0.0, dtype, device) + number(1e-8, dtype, device)),
        "1e-8 is zero in FP16, so a division that eps was to protect is a division by zero.",
        "Optimizer state and its arithmetic are FP32.",
    ),
]


def table(device: str) -> Table:
    """All pitfalls, computed."""
    shown = Table(title=f"FP16 arithmetic on {device}")
    for column in ("", "calculation", "FP16", "BF16", "FP32"):
        shown.add_column(column, justify="left" if column in ("", "calculation") else "right")
    for index, pitfall in enumerate(PITFALLS, start=1):
        results = [f"{pitfall.compute(dtype, device).item():.7g}" for dtype in (FP16, BF16, FP32)]
        shown.add_row(str(index), pitfall.expression, *results)
    return shown


def products(device: str) -> Table:
    """A long product with numbers that FP16 can hold and a sum that needs FP32 on the way."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(1, 4096, generator=generator).to(device)
    right = torch.rand(4096, 1, generator=generator).to(device)
    exact = (left.double() @ right.double()).item()
    with hf_mp.autocast(FP16):
        ours = (left @ right).item()
    naive = running_sum((left.half() * right.half().T).flatten()).item()
    shown = Table(title=f"A product of 4096 terms on {device}; in FP64 it is {exact:.3f}")
    for column in ("", "result", "relative error"):
        shown.add_column(column, justify="left" if not column else "right")
    for name, value in (("accumulated in FP16", naive), ("hf_mp.autocast: FP16 operands, FP32 sum", ours)):
        shown.add_row(name, f"{value:.3f}", f"{abs(value - exact) / exact:.1e}")
    return shown


def main() -> None:
    """Print both tables."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    console.print(table(device))
    for index, pitfall in enumerate(PITFALLS, start=1):
        console.print(Padding(f"[bold]{index}[/bold]  {pitfall.why} [dim]{pitfall.remedy}[/dim]", (0, 0, 0, 1)))
    console.print(products(device))


if __name__ == "__main__":
    main()

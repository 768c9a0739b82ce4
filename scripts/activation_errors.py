"""How far the compact op tables are from FP64, next to torch's tables for CUDA and for CPUs.

    python scripts/activation_errors.py [--quick]

Three operations whose inputs autocast's tables cast to FP32 or not, and a GPT-2: its residual stream after the last
block, its logits, its gradients. Each error is the norm of the difference over the norm of the FP64 value, of the same
16-bit inputs. Stores ``scripts/results/activation_errors.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import NewGELUActivation
from transformers.utils import logging

from _results import save_result
from hf_mp import MixedPrecision
from hf_mp.casting.tables import TableName

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
TABLES: tuple[TableName, ...] = get_args(TableName)
WIDTH = 768

Errors = dict[str, float]


class Softmax(nn.Module):
    """Attention's, as a model that writes it out calls it."""

    def forward(self, scores: Tensor) -> Tensor:
        """Over the last dimension."""
        return torch.softmax(scores, -1)


def layer_norm() -> nn.Module:
    """With weights that are not 1 and 0."""
    norm = nn.LayerNorm(WIDTH)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        norm.weight.add_(0.1 * torch.randn(WIDTH, generator=generator))
        norm.bias.add_(0.1 * torch.randn(WIDTH, generator=generator))
    return norm


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": layer_norm,
    "softmax": Softmax,
    "GELU": NewGELUActivation,
}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference over the norm of ``exact``."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def attached(module: nn.Module, precision: str, tables: TableName) -> nn.Module:
    """``module`` in mixed precision."""
    return MixedPrecision(precision, tables=tables).attach(module)


def operation_errors(make: Callable[[], nn.Module], precision: str, tables: TableName) -> Errors:
    """Of the output of one operation, and of the gradient of its input."""
    generator = torch.Generator().manual_seed(2)
    values = (4.0 * torch.randn(256, WIDTH, generator=generator)).to(PRECISIONS[precision])
    direction = torch.randn(256, WIDTH, generator=generator)

    def run(module: nn.Module, value: Tensor) -> tuple[Tensor, Tensor]:
        value = value.detach().requires_grad_()
        output = module(value)
        (gradient,) = torch.autograd.grad(output, value, direction.to(output.dtype))
        return output.detach(), gradient

    exact = run(make().double(), values.double())
    # A parameter in the module, so that there is something to attach to.
    inside = nn.Sequential(make())
    inside.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    found = run(attached(inside, precision, tables), values)
    return {name: relative_error(*pair) for name, *pair in zip(("output", "input gradient"), found, exact, strict=True)}


def gpt2(config: GPT2Config) -> GPT2LMHeadModel:
    """The same weights every time."""
    torch.manual_seed(3)
    model: GPT2LMHeadModel = GPT2LMHeadModel._from_config(config, attn_implementation="eager")  # softmax is seen
    return model.float().train()


def model_errors(config: GPT2Config, precision: str, tables: TableName, exact: dict[str, Tensor]) -> Errors:
    """Of what :func:`model_values` gives."""
    found = model_values(attached(gpt2(config), precision, tables), config)
    return {name: relative_error(found[name], value) for name, value in exact.items()}


def model_values(model: nn.Module, config: GPT2Config) -> dict[str, Tensor]:
    """The residual stream after the last block, the logits and all gradients of one step."""
    kept: list[Tensor] = []
    blocks: Any = model.transformer.h  # type: ignore[union-attr]
    handle = blocks[-1].register_forward_hook(
        lambda module, args, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    ids = torch.randint(0, config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(4))
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    handle.remove()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {"residual stream": kept[0].detach(), "logits": outputs.logits.detach(), "gradients": gradients}


def gather(config: GPT2Config) -> list[dict[str, Any]]:
    """A row for each error: of what, in which precision, under each set of tables."""
    exact = model_values(gpt2(config).double(), config)
    rows = []
    for precision in PRECISIONS:
        by_tables: dict[str, Errors] = {}
        for tables in TABLES:
            by_tables[tables] = {
                f"{name}, {what}": error
                for name, make in OPERATIONS.items()
                for what, error in operation_errors(make, precision, tables).items()
            } | {f"GPT-2, {what}": error for what, error in model_errors(config, precision, tables, exact).items()}
        rows += [
            {"precision": precision, "of": of, **{tables: by_tables[tables][of] for tables in TABLES}}
            for of in by_tables[TABLES[0]]
        ]
    return rows


def main(flags: list[str]) -> None:
    """Measure, print, store."""
    logging.set_verbosity_error()
    layers = 2 if "--quick" in flags else 12
    config = GPT2Config(
        n_layer=layers, n_embd=WIDTH, n_head=12, vocab_size=5000, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    rows = gather(config)
    table = Table(title=f"relative errors against FP64 (GPT-2 of {layers} layers)")
    for column in ("precision", "of", *TABLES):
        table.add_column(column, justify="right" if column in TABLES else "left")
    for row in rows:
        table.add_row(row["precision"], row["of"], *(f"{row[tables]:.3g}" for tables in TABLES))
    Console().print(table)
    path = save_result("activation_errors", {"layers": layers, "width": WIDTH, "rows": rows})
    print(f"stored in {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])

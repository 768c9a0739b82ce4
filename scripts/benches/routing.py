"""Which experts a token gets, by the dtype of the router's product, against FP64.

    python scripts/bench.py routing

Routers of five published models, with random weights at three scales, and tokens as a norm leaves them: shares of
tokens that get the experts that FP64 chooses.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from _benchmarks import DTYPES

NAME = "compare_routing"
# Experts, of which a token gets so many, and the width of a token, by the configurations of the models.
ROUTERS = {
    "Mixtral 8x7B": (8, 2, 4096),
    "Qwen3-MoE 30B-A3B": (128, 8, 2048),
    "OLMoE 1B-7B": (64, 8, 2048),
    "DeepSeek-V3": (256, 8, 7168),
    "GPT-OSS 20B": (32, 4, 2880),
}
SCALES = (0.3, 1.0, 3.0)  # standard deviations of the logits; rounding is relative, and hardly sees them


def shares(experts: int, chosen: int, width: int, scale: float, dtype: torch.dtype, tokens: int) -> dict[str, float]:
    """Of a router in ``dtype``: shares of tokens that get the experts that FP64 chooses."""
    torch.manual_seed(0)
    x = torch.nn.functional.rms_norm(torch.randn(tokens, width), (width,))
    weight = torch.randn(experts, width) * scale / width**0.5

    def choose(logits: Tensor) -> Tensor:
        return logits.topk(chosen).indices.sort(-1).values

    expected = choose(x.double() @ weight.double().t())
    of_rounded = x.to(dtype).float() @ weight.to(dtype).float().t()
    logits = {"16 bits": of_rounded.to(dtype), "16 bits, FP32 result": of_rounded, "FP32": x @ weight.t()}
    return {name: (choose(one) == expected).all(-1).double().mean().item() for name, one in logits.items()}


def measure(tokens: Annotated[int, typer.Option(help="of each router")] = 8192) -> dict[str, Any]:
    """Compare each router in each dtype at each scale of its logits."""
    routers = {
        name: {
            dtype: {str(scale): shares(*sizes, scale, DTYPES[dtype], tokens) for scale in SCALES}
            for dtype in ("fp16", "bf16")
        }
        for name, sizes in ROUTERS.items()
    }
    return {"tokens": tokens, "routers": routers}

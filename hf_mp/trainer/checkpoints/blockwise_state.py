"""bitsandbytes' 8-bit moments of sharded parameters in checkpoints: as FP32, which every number of ranks cuts anew.

Each rank's part of a parameter has its own blocks of 256 elements with a scale each (Dettmers et al. 2021, section
2.1), and ranks with a small part keep FP32 moments: what they hold fits no other number of ranks. The moments of whole
parameters are saved as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from hf_mp.weights.blockwise_adam import BLOCK

KEYS = frozenset(f"{name}{number}" for name in ("state", "absmax", "qmap") for number in "12")
_BLOCKS_AT_ONCE = 2**14  # 16 MiB in FP32: temporary memory is some of these


def blockwise_moments(entry: Mapping[str, Any]) -> list[str]:
    """``"1"``, ``"2"``: the moments of one parameter, if each has a scale for each of its blocks; else none.

    AdEMAMix has two first moments in one tensor, which no rank could cut.
    """
    found = [number for number in "12" if f"absmax{number}" in entry]
    counts = [-(-entry[f"state{number}"].numel() // BLOCK) for number in found]
    fits = all(entry[f"absmax{number}"].shape == (count,) for number, count in zip(found, counts, strict=True))
    return found if fits else []


def in_fp32(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one parameter; blockwise moments in FP32, in the place of codes, scales and tables."""
    found = dict(entry)
    for number in blockwise_moments(entry):
        from bitsandbytes.functional import dequantize_blockwise

        name, table, scales = f"state{number}", found.pop(f"qmap{number}"), found.pop(f"absmax{number}")
        found[name] = dequantize_blockwise(found[name], absmax=scales, code=table, blocksize=BLOCK)
    return found


def as_optimizer_keeps(
    optimizer: Any, parameter: nn.Parameter, place: tuple[int, int], entry: dict[str, Any]
) -> dict[str, Any]:
    """What :func:`in_fp32` gave, as ``optimizer`` keeps it for ``parameter``, the second of ``place`` in its group.

    Blocks that begin where the saved ones did stand for the same values, bit for bit; others are quantized again.
    """
    if "state1" not in entry or "absmax1" in entry or not is_of_bitsandbytes(optimizer):
        return entry
    optimizer = innermost(optimizer)
    optimizer.check_overrides()
    is_paged, optimizer.is_paged = optimizer.is_paged, False  # bitsandbytes would keep these buffers for good
    optimizer.init_state(optimizer.param_groups[place[0]], parameter, *place)
    kept, optimizer.is_paged = optimizer.state.pop(parameter), is_paged
    for number in blockwise_moments(kept):
        codes, table, scales = kept[f"state{number}"], kept[f"qmap{number}"], kept[f"absmax{number}"]
        for start, part in _parts(entry[f"state{number}"]):
            found, scales[start : start + len(part)] = _quantize(part, table)
            codes.view(-1)[start * BLOCK :][: found.numel()] = found.flatten()[: codes.numel() - start * BLOCK]
        entry.update({f"state{number}": codes, f"qmap{number}": table, f"absmax{number}": scales})
    return entry


def innermost(optimizer: Any) -> Any:
    """The optimizer in the wrappers of accelerate and of master weights."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def is_of_bitsandbytes(optimizer: Any) -> bool:
    """Whether it keeps the state of bitsandbytes' optimizers."""
    return hasattr(innermost(optimizer), "init_state") and hasattr(innermost(optimizer), "check_overrides")


def _parts(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The blocks of ``values`` as rows, some at a time, with the number of the first; zeros fill the last one."""
    flat, elements = values.reshape(-1), _BLOCKS_AT_ONCE * BLOCK
    for start in range(0, flat.numel(), elements):
        part = flat[start : start + elements]
        yield start // BLOCK, functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)


def _quantize(blocks: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales (FP32) of the rows of ``blocks``; exact where those of ``table`` made them."""
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scale, codes = largest, _nearest(blocks, largest, table)
    # A signed table ends at -0.993, which stands for the largest value of a block where that is negative.
    if (lowest := -table[0]) > 0:
        is_exact = _is_exact(blocks, codes, scale, table)
        divided = largest / lowest
        for near in (divided, *(torch.nextafter(divided, end) for end in (largest, 2 * divided))):
            other = _nearest(blocks, near, table)
            better = ~is_exact & _is_exact(blocks, other, near, table)
            codes, scale = torch.where(better, other, codes), torch.where(better, near, scale)
            is_exact |= better
    return codes.to(torch.uint8), scale.squeeze(1)


def _nearest(blocks: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    normalized = torch.where(scale > 0, blocks / scale, -1.0)  # zeros keep code 0, which they begin with
    return torch.bucketize(normalized, (table[1:] + table[:-1]) / 2)


def _is_exact(blocks: Tensor, codes: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    return (table[codes] * scale == blocks).all(dim=1, keepdim=True)

"""bitsandbytes' 8-bit Adam over split parameters, slice by slice: large ones need no whole FP32 copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from hf_mp.kernels.split import Split, merge, split_into
from hf_mp.weights.fused_adamw import check_moment, replaces_step
from hf_mp.weights.lean.split_parameter import SplitParameter, gradient_and_factor, halves_of, note_written_halves

BLOCK = 256  # elements that share a scale (Dettmers et al. 2021, section 2.1)
_ELEMENTS = {"cpu": 2**19, "cuda": 2**22}  # of a slice: what stays in a CPU's caches; few launches on a GPU


def step_blockwise(optimizer: Any, parameters: list[nn.Parameter]) -> set[int]:
    """Update those split ``parameters`` that 8-bit ``Adam`` or ``AdamW`` of bitsandbytes treats block by block.

    The bits are those of its own step, and each gradient is freed at once. Gives the identities of those that were; the
    others (small ones, with FP32 moments) keep their gradients.

    Raises:
        ValueError: for moments of another shape than their parameter's.
    """
    if not _is_blockwise_adam(optimizer):
        return set()
    if not optimizer.initialized:  # what its own first step does
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    wanted, stepped = set(map(id, parameters)), set[int]()
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            is_wanted = id(parameter) in wanted and isinstance(parameter, SplitParameter)
            if is_wanted and _step(optimizer, parameter, (group_index, index)):
                stepped.add(id(parameter))
    if stepped:
        optimizer._opt_called = True  # for LR schedulers made before
    return stepped


def _is_blockwise_adam(optimizer: Any) -> bool:
    library = sys.modules.get("bitsandbytes.optim.optimizer")
    kind: Any = getattr(library, "Optimizer2State", None)
    if kind is None or not isinstance(optimizer, kind) or optimizer.optimizer_name != "adam" or optimizer.is_paged:
        return False
    return type(optimizer).update_step is kind.update_step and not replaces_step(vars(optimizer).get("step"))


def _step(optimizer: Any, parameter: SplitParameter, place: tuple[int, int]) -> bool:
    gradient, factor = gradient_and_factor(parameter)
    halves, group = halves_of(parameter), optimizer.param_groups[place[0]]
    config = optimizer.get_config(*place, group)
    if gradient is None or gradient.is_sparse or halves is None:
        return False
    if config["max_unorm"] > 0.0 or config.get("percentile_clipping", 100) < 100:  # by the norm of a whole gradient
        return False
    if not optimizer.state[parameter]:
        optimizer.init_state(group, parameter, *place)
    state = optimizer.state[parameter]
    if not _is_cut_into_blocks(parameter, gradient, state):
        return False
    state["step"] += 1
    update = sys.modules["bitsandbytes"].functional.optimizer_update_8bit_blockwise
    for one in _slices(gradient):
        elements = slice(one.start * BLOCK, one.stop * BLOCK)
        part = Split(*(half.view(-1)[elements] for half in halves))
        true = gradient.view(-1)[elements].to(torch.float32, copy=True)
        update(
            optimizer.optimizer_name,
            true if factor is None else true.mul_(factor.squeeze()),
            master := merge(*part),
            state["state1"].view(-1)[elements],
            state["state2"].view(-1)[elements],
            *config["betas"][:2],
            beta3=0.0,
            alpha=0.0,
            eps=config["eps"],
            step=state["step"],
            lr=config["lr"],
            qmap1=state["qmap1"],
            qmap2=state["qmap2"],
            absmax1=state["absmax1"][one],
            absmax2=state["absmax2"][one],
            weight_decay=config["weight_decay"],
            skip_zeros=config["skip_zeros"],
        )
        split_into(master, *part)
    note_written_halves(parameter)
    parameter.grad = None
    return True


def _is_cut_into_blocks(parameter: SplitParameter, gradient: Tensor, state: dict[str, Any]) -> bool:
    """Whether the moments have a scale for each block, which lies side by side in all of the parameter's tensors."""
    if "absmax1" not in state:
        return False
    for name in ("state1", "state2"):
        check_moment(name, state[name], parameter)
    return all(one.is_contiguous() for one in (gradient, parameter, state["state1"], state["state2"]))


def _slices(gradient: Tensor) -> Iterator[slice]:
    """Slices of a parameter, counted in blocks; of a fake one the first, which stands for the memory of all."""
    step = _ELEMENTS.get(gradient.device.type, _ELEMENTS["cuda"]) // BLOCK
    blocks = -(-gradient.numel() // BLOCK)
    for start in range(0, min(blocks, step) if is_fake(gradient) else blocks, step):
        yield slice(start, min(start + step, blocks))

"""What was loaded is looked at before it trains: names, dtypes, inf and NaN, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eight_bits import EightBits
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.loaded_state import (
    check_optimizer,
    check_parameters,
    check_scheduler,
    check_weights_file,
    naming,
)


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_models_own_weights_pass(tmp_path: Path, model: nn.Module, dtype: torch.dtype) -> None:
    tensors = {name: v.to(dtype) if v.is_floating_point() else v for name, v in model.state_dict().items()}
    save_file(tensors, tmp_path / "x.safetensors")
    check_weights_file(tmp_path / "x.safetensors", model)
    check_parameters(tmp_path, model)


def test_other_names_and_dtypes_do_not(tmp_path: Path, model: nn.Module) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "names.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor of this Sequential: it has 'other', sought are '0.bias'"):
        check_weights_file(tmp_path / "names.safetensors", model)
    save_file({"0.bias": torch.ones(2, dtype=torch.int8)}, tmp_path / "dtypes.safetensors")
    with pytest.raises(CheckpointError, match=r"0.bias is I8, and torch.float32 here"):
        check_weights_file(tmp_path / "dtypes.safetensors", model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        model[0].bias[1] = value  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"the weight 0.bias holds inf or NaN"):
        check_parameters("checkpoint-4", model)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg", torch.full((2, 3), float("nan")), "holds inf or NaN"),
        ("exp_avg_sq", torch.ones(6), r"has shape \(6,\)"),
        ("exp_avg", torch.ones(2, 3, dtype=torch.complex64), "is torch.complex64"),
        ("step", torch.tensor(-1.0), "is -1.0"),
        ("step", -3, "is -3"),
    ],
    ids=range(5),
)
def test_a_state_of_the_optimizer_that_cannot_be(
    optimizer: torch.optim.Optimizer, name: str, value: Any, message: str
) -> None:
    check_optimizer("checkpoint-4", optimizer)
    next(iter(optimizer.state.values()))[name] = value
    with pytest.raises(CheckpointError, match=rf"checkpoint-4: the optimizer's {name} .* {message}"):
        check_optimizer("checkpoint-4", optimizer)


def test_states_in_eight_bits_are_looked_at_by_their_parts(optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = EightBits(1.0)
    check_optimizer("checkpoint-4", optimizer)
    state["exp_avg"] = EightBits(float("nan"))
    with pytest.raises(CheckpointError, match=r"the optimizer's exp_avg of a parameter of shape .* holds inf or NaN"):
        check_optimizer("checkpoint-4", optimizer)


@pytest.mark.parametrize(
    ("name", "value"), [("lr", float("inf")), ("lr", torch.tensor(float("nan"))), ("betas", (0.9, -1.0)), ("eps", -1)]
)
def test_rates_that_cannot_be(optimizer: torch.optim.Optimizer, name: str, value: Any) -> None:
    optimizer.param_groups[0][name] = value
    with pytest.raises(CheckpointError, match=f"group 0 says {name}="):
        check_optimizer("checkpoint-4", optimizer)


def test_schedulers(optimizer: torch.optim.Optimizer) -> None:
    plateau = ReduceLROnPlateau(optimizer)  # its best is inf at first
    check_scheduler("checkpoint-4", plateau, set(plateau.state_dict()))
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    known = set(scheduler.state_dict())
    check_scheduler("checkpoint-4", scheduler, known)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": -2, "lr_lambdas": [None]})
    with pytest.raises(CheckpointError, match="last_epoch=-2"):
        check_scheduler("checkpoint-4", scheduler, known)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 1, "get_lr": 5, "lr_lambdas": [None]})
    with pytest.raises(CheckpointError, match="'get_lr', which this scheduler has not"):
        check_scheduler("checkpoint-4", scheduler, known)


def test_what_a_library_says_names_the_checkpoint() -> None:
    message = "the model of checkpoint-4 does not fit this run: size mismatch"
    with pytest.raises(CheckpointError, match=message), naming("checkpoint-4", "the model"):
        raise RuntimeError("size mismatch")
    with pytest.raises(CheckpointError, match=r"^ours$"), naming("checkpoint-4", "the model"):
        raise CheckpointError("ours")
    with pytest.raises(OSError, match="disk"), naming("checkpoint-4", "the model"):
        raise OSError("disk")


def test_states_in_fp8_are_checked_too() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"exp_avg": torch.ones(4).to(torch.float8_e4m3fn)}
    check_optimizer("run", optimizer)
    optimizer.state[parameter] = {"exp_avg": torch.full((4,), float("nan")).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match="inf or NaN"):
        check_optimizer("run", optimizer)

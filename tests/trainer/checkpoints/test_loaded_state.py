"""What was loaded is looked at before it trains: names, shapes, inf and NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints.loaded_state import check_optimizer, check_parameters, naming


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


def test_a_models_own_weights_pass(tmp_path: Path, model: nn.Module) -> None:
    check_parameters(tmp_path, model)


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
        ("exp_avg", torch.full((2, 3), float("nan")).to(torch.float8_e4m3fn), "holds inf or NaN"),
        ("exp_avg_sq", torch.ones(6), r"has shape \(6,\)"),
    ],
    ids=["NaN", "NaN in FP8", "shape"],
)
def test_a_state_of_the_optimizer_that_cannot_be(
    optimizer: torch.optim.Optimizer, name: str, value: Any, message: str
) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].to(value.dtype)
    check_optimizer("checkpoint-4", optimizer)
    state[name] = value
    with pytest.raises(CheckpointError, match=rf"checkpoint-4: the optimizer's {name} .* {message}"):
        check_optimizer("checkpoint-4", optimizer)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("mismatch"), CheckpointError, "the model of checkpoint-4 does not fit this run: mismatch"),
        (CheckpointError("ours"), CheckpointError, "^ours$"),
        (OSError("disk"), OSError, "disk"),
    ],
)
def test_what_a_library_says_names_the_checkpoint(error: Exception, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message), naming("checkpoint-4", "the model"):
        raise error

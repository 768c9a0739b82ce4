"""What was loaded is looked at before it trains: names, shapes, inf and NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim import lr_scheduler

from hf_mp import CheckpointError
from hf_mp.trainer.checkpoints import loaded_state
from hf_mp.trainer.checkpoints.loaded_state import as_checkpoint_error, check_optimizer, check_parameters, checking


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(loaded_state.logger, "warning", found.append)
    return found


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
    with pytest.raises(kind, match=message), as_checkpoint_error("checkpoint-4", "the model"):
        raise error


OF_TORCH = (
    *("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta"),
    *("ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"),
)
LIBRARIES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    **{name: partial(getattr(torch.optim, name), lr=0.01) for name in OF_TORCH},
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AMSGrad": partial(torch.optim.AdamW, lr=torch.tensor(0.01), amsgrad=True),
    "Transformers' Adafactor": transformers.optimization.Adafactor,
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 2]),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=9),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


def take_steps(optimizer: torch.optim.Optimizer, schedule: Any = None) -> None:
    for _ in range(3):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if schedule is not None:
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


@pytest.mark.parametrize("kind", LIBRARIES)
def test_each_optimizers_own_state_passes(model: nn.Module, kind: str, warnings: list[str]) -> None:
    one, other = (LIBRARIES[kind](list(model.parameters())) for _ in range(2))
    take_steps(one)
    with checking("checkpoint-4", other):
        other.load_state_dict(one.state_dict())
    assert warnings == []


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_schedules_own_state_passes(model: nn.Module, kind: str) -> None:
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    schedule, loaded = SCHEDULES[kind](one), SCHEDULES[kind](other)
    take_steps(one, schedule)
    with checking("checkpoint-4", other, loaded):
        loaded.load_state_dict(copy.deepcopy(schedule.state_dict()))
    if "_schedulers" in (state := schedule.state_dict()):
        state["_schedulers"][1]["base_lrs"] = [float("nan")]
        message = r"checkpoint-4: the scheduler's base_lrs is \[nan\]: take an earlier"
        with pytest.raises(CheckpointError, match=message), checking("checkpoint-4", other, loaded):
            loaded.load_state_dict(state)


def test_negative_sums_of_squares(model: nn.Module) -> None:
    optimizer = torch.optim.Adagrad(model.parameters())
    next(iter(optimizer.state.values()))["sum"] -= 1
    with pytest.raises(CheckpointError, match=r"the optimizer's sum of a parameter .* is negative"):
        check_optimizer("checkpoint-4", optimizer)


def test_parameters_without_state_are_counted_over_all_groups(model: nn.Module, warnings: list[str]) -> None:
    """A group without a gradient, such as a part of the model that no batch has used yet."""
    first, second = model
    optimizer = torch.optim.AdamW([{"params": first.parameters()}, {"params": second.parameters()}])
    for parameter in first.parameters():
        parameter.grad = torch.ones_like(parameter)
    check_optimizer("checkpoint-4", optimizer)
    optimizer.step()
    assert warnings == []
    check_optimizer("checkpoint-4", optimizer)
    (message,) = warnings
    assert "checkpoint-4 has no state of the optimizer for 2 of 4 parameters, one of shape (2,): they had no" in message


@pytest.mark.parametrize(
    ("said", "short"),
    [
        ("", "RuntimeError"),
        ("a\n  b.\n\n", "a b"),
        ("Errors in X:\n\tsize of a,\n\tsize of b,\n\tsize of c", "Errors in X: size of a,, and 2 more"),
        ("x" * 9999, "x" * 300),
    ],
)
def test_a_librarys_list_of_all_that_is_wrong_is_cut(said: str, short: str) -> None:
    with pytest.raises(CheckpointError) as found, as_checkpoint_error("checkpoint-4", "the model"):
        raise RuntimeError(said)
    assert str(found.value).partition("fit this run: ")[2].startswith(f"{short}. Resume with")

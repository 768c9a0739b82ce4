"""The walk over a model that is kept: what torch's own would find, whatever happens to the model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hf_mp.weights.model_walk import modules_of, parameters_of


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.BatchNorm1d(2))


def check(found: nn.Module) -> None:
    for _ in range(2):  # found, and kept
        assert list(map(id, modules_of(found))) == list(map(id, found.modules()))
        assert list(map(id, parameters_of(found))) == list(map(id, found.parameters()))


def tie(found: nn.Sequential) -> None:
    found[1][0].weight = found[0].weight


def share_module(found: nn.Sequential) -> None:
    found.append(found[0])


def replace(found: nn.Sequential) -> None:
    found[1][0] = nn.Linear(2, 2, bias=False)


def replace_parameter(found: nn.Sequential) -> None:
    found[0].weight = nn.Parameter(torch.ones(2, 2))


def remove(found: nn.Sequential) -> None:
    del found[1]


def remove_bias(found: nn.Sequential) -> None:
    found[0].bias = None


def exchange(found: nn.Sequential) -> None:
    found[0], found[1] = found[1], found[0]


def add_deep(found: nn.Sequential) -> None:
    found[1][0].adapter = nn.Linear(2, 1)


@pytest.mark.parametrize(
    "change", [tie, share_module, replace, replace_parameter, remove, remove_bias, exchange, add_deep]
)
def test_a_change_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    found = model()
    check(found)
    change(found)
    check(found)


def test_a_scripted_module_is_walked() -> None:
    check(torch.jit.script(model()))


def test_a_model_is_not_kept_alive() -> None:
    found = model()
    check(found)
    gone = weakref.ref(found[1])
    del found
    gc.collect()
    assert gone() is None

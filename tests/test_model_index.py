"""The walk over a model that is kept: what torch's own would find, whatever happens to the model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_casts import kernels as kernels
from torch import nn

from hf_mp.model_index import ModelIndex, model_parameters, modules_of

pytestmark = pytest.mark.usefixtures("kernels")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.BatchNorm1d(2))


def check(found: nn.Module) -> None:
    for _ in range(2):  # found, and kept
        assert list(map(id, modules_of(found))) == list(map(id, found.modules()))
        assert list(map(id, model_parameters(found))) == list(map(id, found.parameters()))


CHANGES: dict[str, Callable[[Any], object]] = {
    "a tied weight": lambda found: setattr(found[1][0], "weight", found[0].weight),
    "a shared module": lambda found: found.append(found[0]),
    "another module": lambda found: found[1].__setitem__(0, nn.Linear(2, 2, bias=False)),
    "another parameter": lambda found: setattr(found[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a module less": lambda found: found.__delitem__(1),
    "a parameter less": lambda found: setattr(found[0], "bias", None),
    "modules in another order": lambda found: found._modules.update({"0": found[1], "1": found[0]}),
    "a module deep inside": lambda found: setattr(found[1][0], "adapter", nn.Linear(2, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    found = model()
    check(found)
    CHANGES[change](found)
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


WEIGHTS: dict[str, Callable[[Any], object]] = {
    "frozen": lambda weight: weight.requires_grad_(False),
    "in other memory": lambda weight: setattr(weight, "data", weight.data.clone()),
    "of another dtype": lambda weight: setattr(weight, "data", weight.data.half()),
    "transposed": lambda weight: setattr(weight, "data", weight.data.t()),
    "resized": lambda weight: setattr(weight, "data", torch.ones(3, 2)),
    "a hook": lambda weight: weight.register_hook(lambda gradient: None),
    "a hook after": lambda weight: weight.register_post_accumulate_grad_hook(lambda weight: None),
}


@pytest.mark.parametrize("change", sorted({*CHANGES, *WEIGHTS} - {"a shared module"}))
def test_a_walk_equals_one_of_the_same_weights_alone(change: str) -> None:
    found = model()
    before = ModelIndex(found)
    assert ModelIndex(found) == before
    with torch.no_grad():
        found[0].weight.mul_(2)
        found[2].running_mean.add_(1)
    assert ModelIndex(found) == before
    CHANGES[change](found) if change in CHANGES else WEIGHTS[change](found[0].weight)
    assert ModelIndex(found) != before


def test_a_weight_that_was_made_frozen_is_walked() -> None:
    found = model()
    # As bitsandbytes makes its own: torch has set up nothing of autograd's on it.
    found[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.uint8), requires_grad=False)
    assert ModelIndex(found) == ModelIndex(found)


def test_a_renamed_weight_is_seen() -> None:
    found = nn.Linear(2, 2, bias=False)
    before = ModelIndex(found)
    found._parameters["other"] = found._parameters.pop("weight")
    assert ModelIndex(found) != before

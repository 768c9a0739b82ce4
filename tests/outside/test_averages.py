"""Averages of the weights of a lean model, in the ways in which torch and others make them: all see FP32 masters.

In the manner of ``torch.optim.swa_utils``, diffusers' ``EMAModel``, ``ema-pytorch``, timm's ``ModelEmaV2`` and of loops
that people write: copies of the model or of its parameters, read by ``.data``, ``detach()``, as they are or as lists.
An average of the 16-bit halves is off by up to half a unit in the last place, and that of a weight near 1 never moves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import take_step
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import hf_mp

DECAY = 0.9
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Step = Callable[[list[Tensor], list[nn.Parameter]], Any]
Update = Callable[[nn.Module], None]
Average = Callable[[nn.Module], tuple[Update, Callable[[], list[Tensor]]]]


def _averaged_model(**settings: Any) -> Average:
    def make(model: nn.Module) -> Any:
        averaged = AveragedModel(model, **settings)
        return averaged.update_parameters, lambda: list(averaged.module.parameters())

    return make


def _evaluated_average(model: nn.Module) -> Any:
    """Its forward runs with grad, so that the average has become a lean model itself."""
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def update(model: nn.Module) -> None:
        averaged(X)
        averaged.update_parameters(model)

    return update, lambda: list(averaged.module.parameters())


def _shadows(
    start: Callable[[nn.Parameter], Tensor], step: Callable[[list[Tensor], list[nn.Parameter]], Any]
) -> Average:
    def make(model: nn.Module) -> Any:
        shadows = [start(parameter) for parameter in model.parameters()]
        return lambda model: step(shadows, list(model.parameters())), lambda: shadows

    return make


def _each(step: Callable[[Tensor, nn.Parameter], Any]) -> Step:
    return lambda shadows, parameters: [step(s, p) for s, p in zip(shadows, parameters, strict=True)]


def _copy(step: Callable[[list[nn.Parameter], list[nn.Parameter]], Any], is_trained: bool = True) -> Average:
    def make(model: nn.Module) -> Any:
        copied = copy.deepcopy(model).requires_grad_(is_trained)

        def update(model: nn.Module) -> None:
            step(list(copied.parameters()), list(model.parameters()))

        return update, lambda: list(copied.parameters())

    return make


def _evaluate_with(shadows: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """Store the weights, put the average in their place, save, and restore them: no master may lose a bit."""
    stored = [parameter.detach().cpu().clone() for parameter in parameters]
    torch._foreach_copy_([parameter.data for parameter in parameters], [shadow.data for shadow in shadows])
    copy.deepcopy(parameters)
    _each(lambda kept, parameter: parameter.data.copy_(kept.data))(stored, parameters)


def _diffusers(shadows: list[Tensor], parameters: list[nn.Parameter]) -> None:
    torch._foreach_sub_(shadows, torch._foreach_sub(shadows, parameters), alpha=1 - DECAY)
    _evaluate_with(shadows, parameters)


def _cloned(parameter: nn.Parameter) -> Tensor:
    return parameter.clone().detach()


WAYS: dict[str, Average] = {
    "AveragedModel multi": _averaged_model(multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "AveragedModel each": _averaged_model(avg_fn=get_ema_avg_fn(DECAY)),
    "AveragedModel of means": _averaged_model(),
    "AveragedModel that runs": _evaluated_average,
    "mul_ and add_": _shadows(_cloned, _each(lambda s, p: s.mul_(DECAY).add_(p, alpha=1 - DECAY))),
    "data": _shadows(lambda p: p.data.clone(), _each(lambda s, p: s.copy_(DECAY * s + (1 - DECAY) * p.data))),
    "from zeros": _shadows(torch.zeros_like, _each(lambda s, p: s.detach().lerp_(p.view(-1).view_as(s), 1 - DECAY))),
    "_foreach_lerp_": _shadows(_cloned, lambda s, p: torch._foreach_lerp_(s, p, 1 - DECAY)),
    "_foreach_mul_ and add_": _shadows(
        _cloned, lambda s, p: (torch._foreach_mul_(s, DECAY), torch._foreach_add_(s, p, alpha=1 - DECAY))
    ),
    "diffusers": _shadows(_cloned, _diffusers),
    "deepcopy and lerp_": _copy(_each(lambda s, p: s.lerp_(p, 1 - DECAY))),  # type: ignore[arg-type]
    "deepcopy and data": _copy(_each(lambda s, p: s.data.lerp_(p.data, 1 - DECAY)), is_trained=False),  # type: ignore[arg-type]
}


def train(precision: str, make: Average) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The average, what it began with, and for each weight its FP32 masters after each step."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1))
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), precision)
    update, averages = make(model)
    with torch.no_grad():
        start = [value.clone() for value in averages()]
    masters = []
    for _ in range(12):
        take_step((model(X) - X[:, :1]).square().mean(), optimizer)
        before = [value.clone() for value in model.state_dict().values()]
        with torch.no_grad():
            update(model)
        after = list(model.state_dict().values())
        assert all(map(torch.equal, before, after)), "making an average has changed the model"
        masters.append(before)
    return (
        [value.detach().float() for value in averages()],
        start,
        [torch.stack(each) for each in zip(*masters, strict=True)],
    )


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_average_of_the_masters(way: str, precision: str) -> None:
    found, start, masters = train(precision, WAYS[way])
    for average, value, path in zip(found, start, masters, strict=True):
        if way == "AveragedModel of means":
            expected = path.mean(0)
        else:
            expected = path[0] if way.startswith("AveragedModel") else value
            for weight in path[1:] if way.startswith("AveragedModel") else path:
                expected = torch.lerp(expected, weight, 1 - DECAY)
        assert average.dtype is torch.float32
        torch.testing.assert_close(average, expected, rtol=2e-6, atol=1e-6)


def test_what_is_not_a_reader_sees_what_is_stored() -> None:
    model = hf_mp.MixedPrecision("bf16-lean").attach(nn.Linear(8, 4))
    weight, value = model.weight, model.state_dict()["weight"].clone()
    assert weight.dtype is weight.detach().dtype is weight.data.dtype is torch.bfloat16
    assert weight.data_ptr() == weight.data.data_ptr() == weight.detach()[1:].data_ptr() - 16
    assert nn.functional.linear(X.bfloat16(), weight).dtype is torch.bfloat16  # in the company of its own 16 bits
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.mul_(2)
    model.to("cpu")
    assert model.weight is weight and weight.dtype is torch.bfloat16
    assert torch.equal(model.state_dict()["weight"], value)


def test_an_fp32_tensor_in_the_place_of_data_is_split() -> None:
    """As code does that swaps weights with their average: ``parameter.data = shadow``, and back."""
    model = hf_mp.MixedPrecision("bf16-lean").attach(nn.Linear(8, 4))
    stored, value = model.weight.data.clone(), model.state_dict()["weight"].clone()
    average = value + 0.01
    model.weight.data = average.clone()
    assert model.weight.dtype is torch.bfloat16 and torch.equal(model.state_dict()["weight"], average)
    model.weight.data = stored
    assert model.weight.dtype is torch.bfloat16 and torch.equal(model.state_dict()["weight"], value)
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    assert model.weight.dtype is torch.bfloat16 and torch.equal(model.state_dict()["weight"], value)
    model.float()  # which leaves the weights of a lean layout alone
    assert model.weight.dtype is torch.bfloat16 and torch.equal(model.state_dict()["weight"], value)


def test_the_node_that_accumulates_gradients_is_found_as_ever() -> None:
    model = hf_mp.MixedPrecision("bf16-lean").attach(nn.Linear(8, 4))
    node = torch.autograd.graph.get_gradient_edge(model.weight).node
    assert node.name() == model.weight.expand_as(model.weight).grad_fn.next_functions[0][0].name()  # type: ignore[union-attr]
    assert node.variable is model.weight  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean"])
def test_other_tensors_are_cast_to_what_a_lean_weight_is_read_as(precision: str) -> None:
    model = nn.Linear(8, 8)
    hf_mp.MixedPrecision(precision).attach(model)
    for like in (model.weight, model.weight.detach()):
        assert torch.zeros(4).to(like).dtype is torch.float32
        assert torch.zeros(4).type_as(like).dtype is torch.float32

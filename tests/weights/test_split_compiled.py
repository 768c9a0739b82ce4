"""torch.compile in lean layouts: of the model, of the step, of code that reads weights outside of a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from tiny import Using, same, take_step
from torch import Tensor, nn

import hf_mp
from hf_mp.weights.fp32_reads import as_stored

LEAN = ("fp16-lean", "bf16-lean")
IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def prepared(precision: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Using(
        lambda model, ids: model.head(torch.relu(model.layer(model.norm(model.embedding(ids))))),
        embedding=nn.Embedding(20, 16), norm=nn.LayerNorm(16), layer=nn.Linear(16, 16), head=nn.Linear(16, 20),
    )  # fmt: skip
    return hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision)


def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(IDS).square().mean()


@pytest.mark.parametrize(("precision", "has_gradients"), covering(LEAN, [False, True], together=1))
def test_a_forward_without_grad_after_training(precision: str, has_gradients: bool) -> None:
    model, optimizer = prepared(precision)
    compiled = torch.compile(model, backend="aot_eager")  # torch's checks of a graph's inputs, and no code generation
    for _ in range(2):
        take_step(loss(compiled), optimizer)
    if has_gradients:
        loss(compiled).backward()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        found, expected = compiled(IDS), model(IDS)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert same(model.state_dict().values(), before.values())  # and every bit of the masters
    with as_stored():
        assert [p._snapshot for p in model.parameters()] == [None] * len(before)  # 2 bytes a parameter
    take_step(loss(compiled), optimizer)
    assert not same(model.state_dict().values(), before.values())


@pytest.mark.parametrize("precision", LEAN)
def test_a_compiled_step_is_the_step(precision: str) -> None:
    runs = []
    for compiles in (False, True):
        model, optimizer = prepared(precision)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for _ in range(2):
            loss(model).backward()
            step()
            optimizer.zero_grad()
        runs.append(model.state_dict())
    assert same(runs[0].values(), runs[1].values())


@pytest.mark.parametrize("precision", ["fp16", *(pytest.param(lean, marks=pytest.mark.slow) for lean in LEAN)])
def test_a_whole_training_step_that_is_compiled(precision: str) -> None:
    runs = []
    for compiles in (False, True):
        model, optimizer = prepared(precision)

        def step(model: Any = model, optimizer: Any = optimizer) -> float:
            return take_step(loss(model), optimizer)

        run = torch.compile(step, backend="eager") if compiles else step
        runs.append([run() for _ in range(3)])
    assert runs[1] == pytest.approx(runs[0], rel=1e-3)
    assert runs[0][2] < runs[0][0]


READS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "a penalty": lambda model, average: sum(p.square().sum() for p in model.parameters()),
    "a part of the model": lambda model, average: model.layer(torch.ones(2, 16)),
    "an average of weights": lambda model, average: [
        one.lerp(p.detach(), 0.5) for one, p in zip(average, model.parameters(), strict=True)
    ],
}


@pytest.mark.parametrize("precision", LEAN)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_compiled_code_outside_of_a_forward_reads_fp32(name: str, precision: str, has_gradients: bool) -> None:
    model, optimizer = prepared(precision)
    average = [p.detach().clone() for p in model.parameters()]
    take_step(loss(model), optimizer)
    if has_gradients:
        loss(model).backward()
    expected = READS[name](model, average)
    found = torch.compile(READS[name], backend="eager")(model, average)
    assert same(found if isinstance(found, list) else [found], expected if isinstance(expected, list) else [expected])

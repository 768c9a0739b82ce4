"""Twelve architectures, each leaving FP16's range in three places: healed, they train as in FP32."""

from typing import Any

import pytest
import torch
from overflowing_models import ARCHITECTURES, PLACES, batches, make, parameter_groups, plant

import hf_mp
from hf_mp.diagnostics.healing import Healer

# With the MLP's output as large as the stream, FP32 itself does not repeat its loss at the higher rate.
LEARNING_RATES = {PLACES[0]: 5e-4, PLACES[1]: 2e-4, PLACES[2]: 5e-4}
IN_CI = [("Llama", PLACES[1])]
CASES = [(name, place) for name in ARCHITECTURES for place in PLACES]


def train(name: str, place: str, steps: int, precision: str | None) -> tuple[list[float], Healer | None]:
    model = make(name)
    groups = parameter_groups(model, plant(name, place, model), LEARNING_RATES[place])
    optimizer: Any = torch.optim.Adam(groups, eps=1e-30)
    healer = None
    if precision is not None:
        runtime = hf_mp.MixedPrecision(precision, on_overflow="heal")
        runtime.attach(model)
        optimizer, healer = runtime.attach_optimizer(optimizer), hf_mp.heal_overflows(runtime)
        assert runtime.model is model
    losses = []
    for batch in batches(name, steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        assert not getattr(optimizer, "step_was_skipped", False), "a step was lost"
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, healer


def check(name: str, place: str, steps: int, last: int) -> None:
    expected, _ = train(name, place, steps, None)
    losses, healer = train(name, place, steps, "fp16")
    wanted, found = (sum(one[-last:]) / last for one in (expected, losses))
    assert healer is not None and healer.healed, "nothing left the range"
    places = {key.partition("[")[0] for healed in healer.healed for key in healed.rules}  # experts of a layer are one
    assert found == pytest.approx(wanted, rel=5e-3)
    assert len(places) <= 2


@pytest.mark.parametrize(("name", "place"), IN_CI)
def test_a_few_steps(name: str, place: str) -> None:
    check(name, place, steps=4, last=3)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_hundred_steps(name: str, place: str) -> None:
    check(name, place, steps=100, last=20)


@pytest.mark.parametrize("how", ["checkpointed", pytest.param("compiled", marks=pytest.mark.exhaustive)])
def test_together_with_what_changes_the_forward_itself(how: str) -> None:
    model: Any = make("Llama")
    for place in PLACES[:2]:
        plant("Llama", place, model)
    model.gradient_checkpointing_enable() if how == "checkpointed" else model.compile(backend="aot_eager")
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), "fp16", on_overflow="heal")
    for batch in batches("Llama", 3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
    assert hf_mp.heal_overflows(model).healed and loss.isfinite()

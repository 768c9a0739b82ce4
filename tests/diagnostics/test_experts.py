"""Findings in mixtures of experts: five classes, three implementations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixtures import IMPLEMENTATIONS, KINDS, make
from torch import Tensor, nn

import hf_mp
from hf_mp import OverflowReport, StaticLossScaler

EXPERTS = "model.layers.1.mlp.experts"
# Each class once, and one of them in each implementation; the others are run by the exhaustive tests.
SOME = {*zip(KINDS, IMPLEMENTATIONS * 2, strict=False), *(("Mixtral", one) for one in IMPLEMENTATIONS)}
ALL = pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        pytest.param(*pair, marks=() if pair in SOME else pytest.mark.exhaustive)
        for pair in itertools.product(KINDS, IMPLEMENTATIONS)
    ],
)


def in_forward(layer: nn.Module, *experts: int) -> None:
    """The products of these experts leave FP16's range."""
    layer.mlp.experts.gate_up_proj.data[[*experts]] *= 3e5


def in_backward(layer: nn.Module, expert: int) -> None:
    """Small inputs meet the large weights of one expert: at a scale of 2**15, its input's gradient overflows."""
    layer.post_attention_layernorm.weight.data *= 1e-4
    weight = layer.mlp.experts.gate_up_proj.data
    factors = torch.full((len(weight), 1, 1), 1e-3)
    factors[expert] = 3e4 if hasattr(layer.mlp.experts, "limit") else 1e5  # GPT-OSS cuts what comes from it
    weight *= factors


def beyond_fp16(layer: nn.Module, *experts: int) -> None:
    """One half of what the first product of these experts gives leaves FP16's range, and the second brings it back."""
    held, inputs = layer.mlp.experts, 300.0  # weights are in range, and so are their inputs
    layer.post_attention_layernorm.weight.data *= inputs
    getattr(layer.mlp, "router" if hasattr(held, "limit") else "gate").weight.data /= inputs
    held.gate_up_proj.data /= inputs
    for expert in experts:
        weight = held.gate_up_proj.data[expert]
        (weight if hasattr(held, "limit") else weight[len(weight) // 2 :]).mul_(3e5)
        held.down_proj.data[expert] *= 1e-5


def batch(length: int = 16) -> Tensor:
    return torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(2))


def skipped(kind: str, implementation: str, plant: Callable[[Any], None]) -> OverflowReport:
    """The report on the one step of a model with a plant in its second layer."""
    model = make(kind, implementation)
    plant(model.model.layers[1])
    runtime = hf_mp.MixedPrecision("fp16", loss_scaler=StaticLossScaler(2.0**15))
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), 1e-3))
    explainer = hf_mp.explain_overflows(model)
    model(input_ids=batch(), labels=batch()).loss.backward()
    optimizer.step()
    (report,) = explainer.reports
    return report


@ALL
def test_the_layer_whose_experts_overflow_is_named(kind: str, implementation: str) -> None:
    for phase, plant in (("forward", in_forward), ("backward", in_backward)):
        report = skipped(kind, implementation, lambda layer, plant=plant: plant(layer, 2))
        assert (report.phase, report.module, report.tensor) == (phase, EXPERTS, "")


def rules_of(kind: str, implementation: str) -> dict[str, str]:
    """What keeps the products of a layer's experts in range."""
    op = {"grouped_mm": "_grouped_mm", "batched_mm": "bmm", "eager": "matmul" if kind == "GptOss" else "linear"}
    return {f"{EXPERTS}:{op[implementation]}": "fp32" if implementation == "grouped_mm" else "scaled/64"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_rule_for_the_product_of_the_layer_is_proposed(implementation: str) -> None:
    report = skipped("Mixtral", implementation, lambda layer: beyond_fp16(layer, 1, 2))
    assert report.rules == rules_of("Mixtral", implementation)
    assert f"Pass rules={report.rules}, or train in bf16." in str(report)


@ALL
def test_the_products_of_a_layer_are_healed_where_its_experts_overflow(kind: str, implementation: str) -> None:
    model = make(kind, implementation)
    beyond_fp16(model.model.layers[1], 1, 2)
    runtime = hf_mp.MixedPrecision("fp16", on_overflow="heal")
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), 1e-6))
    for _ in range(2):
        loss = model(input_ids=batch(), labels=batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    healer = hf_mp.heal_overflows(runtime)
    assert runtime.stats.skipped_steps == 0 and loss.isfinite()
    assert runtime.remedies == rules_of(kind, implementation)
    assert f"in module {EXPERTS!r} reached" in str(healer.healed[0])


@ALL
def test_calibrate_finds_a_rule_for_the_experts_of_a_layer(kind: str, implementation: str) -> None:
    model = make(kind, implementation)
    beyond_fp16(model.model.layers[1], 2)
    report = hf_mp.calibrate(model, [{"input_ids": batch(), "labels": batch()}])
    assert report.rules.keys() == rules_of(kind, implementation).keys()
    ((module, op),) = (key.split(":") for key in report.rules)
    (found,) = (one for one in report.ops if (one.module, one.op) == (module, op))
    assert found.overflows and found.fp16_gradient is not None
    runtime = hf_mp.MixedPrecision("fp16", rules=report.rules)
    runtime.attach(model)
    assert model(input_ids=batch(), labels=batch()).loss.isfinite()


@pytest.mark.slow
def test_experts_of_a_compiled_model_are_looked_at_as_they_are_written_and_have_a_rule_that_holds() -> None:
    model = make("Mixtral")
    beyond_fp16(model.model.layers[1], 2)
    model.compile(backend="aot_eager")
    report = hf_mp.calibrate(model, [{"input_ids": batch(), "labels": batch()}])
    assert report.rules == rules_of("Mixtral", "grouped_mm")
    hf_mp.MixedPrecision("fp16", rules=report.rules).attach(model)  # the compiler gets another op for the product
    assert model(input_ids=batch(), labels=batch()).loss.isfinite()

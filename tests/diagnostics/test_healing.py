"""``on_overflow="heal"``: a forward that leaves FP16's range is kept in it, and the step runs again."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from range_models import Gated, batches
from tiny import Using
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import logging

import hf_mp
from hf_mp import CannotHealError, MixedPrecision, heal_overflows
from hf_mp.diagnostics.healing import Healer
from hf_mp.diagnostics.overflow import runtime_of
from hf_mp.diagnostics.ranges import OpRange
from hf_mp.diagnostics.remedies import (
    first_out_of_range,
    fitting_scale,
    merged,
    next_remedy,
)

FACTOR = 2.0**18
RULES = {"up:linear": "scaled/256", "down:linear": "scaled/256"}


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the healer logs."""
    messages: list[str] = []
    logging.get_logger().warning_once.cache_clear()  # which lasts as long as the process
    monkeypatch.setattr("hf_mp.diagnostics.healing.logger.warning", messages.append)
    return messages


def make(factor: float = FACTOR) -> Gated:
    torch.manual_seed(0)
    return Gated(factor=factor)


def groups(model: Gated, factor: float, lr: float = 1e-3) -> list[dict[str, Any]]:
    """Learning rates that go with the weights."""
    found: dict[float, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        rate = lr * factor if name.startswith("up.") else lr
        found.setdefault(rate, []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in found.items()]


class Loop:
    """A plain loop over a few batches."""

    def __init__(self, precision: str = "fp16", factor: float = FACTOR, **settings: Any) -> None:
        self.model = make(factor)
        optimizer = torch.optim.Adam(groups(self.model, factor), eps=1e-30)
        settings = {"on_overflow": "heal", **settings}
        self.model, self.optimizer = hf_mp.prepare(self.model, optimizer, precision, **settings)
        self.skipped: list[bool] = []

    @property
    def runtime(self) -> MixedPrecision:
        return vars(self.model)["forward"].runtime

    @property
    def healer(self) -> Healer:
        return heal_overflows(self.runtime)

    def run(self, count: int, change: Callable[[nn.Module], Any] = lambda model: None, parts: int = 1) -> list[float]:
        losses = []
        for batch in batches(count):
            for ids in batch["ids"].chunk(parts):
                loss = self.model(ids=ids, labels=ids)["loss"]
                (loss / parts).backward()
            change(self.model)
            self.optimizer.step()
            self.skipped.append(self.optimizer.step_was_skipped)
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def in_fp32(count: int, factor: float = FACTOR) -> tuple[Gated, list[float]]:
    model = make(factor)
    optimizer, losses = torch.optim.Adam(groups(model, factor), eps=1e-30), []
    for batch in batches(count):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_no_step_is_lost(precision: str, warned: list[str]) -> None:
    """As FP32 from the first step on; without healing, every step is skipped."""
    loop = Loop(precision)
    losses, (_, expected) = loop.run(20), in_fp32(20)
    assert losses == pytest.approx(expected, rel=5e-3)
    assert loop.skipped == [False] * 20 and loop.runtime.stats.skipped_steps == 0
    assert loop.runtime.scaler.state.steps == loop.runtime.stats.steps == 20
    assert loop.runtime.remedies == RULES
    assert loop.runtime.stats.remedies == ("up:linear: scaled/256", "down:linear: scaled/256")
    assert loop.runtime.stats.log_entries()["remedies"] == 2
    first = loop.healer.healed[0]
    assert (first.step, first.module, first.op) == (1, "up", "linear")
    assert first.largest > 65504 and len(warned) == 2
    assert "'linear' in module 'up' reached" in warned[0] and "and FP16 ends at 65504" in warned[0]
    skipping = Loop(precision, on_overflow="skip")
    skipping.run(3)
    assert skipping.skipped == [True] * 3


def test_a_step_is_healed_without_a_loss_scale_as_well() -> None:
    loop = Loop("params=fp32,compute=fp16,loss_scale=1")
    loop.run(3)
    assert loop.skipped == [False] * 3 and loop.runtime.remedies == RULES


@pytest.mark.parametrize("is_in_place", [False, True])
def test_the_loss_that_a_loop_holds_is_that_of_the_healed_step(is_in_place: bool, warned: list[str]) -> None:
    loop, plain, ids = Loop(), make(), batches(1)[0]["ids"].chunk(2)
    losses = [loop.model(ids=part, labels=part)["loss"] for part in ids]
    parts = [loss.div_(2) if is_in_place else loss / 2 for loss in losses]
    for part in parts:
        part.backward()
    loop.optimizer.step()
    expected = [plain(ids=part, labels=part)["loss"].item() for part in ids]
    assert all(part.isnan() for part in parts)
    assert is_in_place or torch.stack(losses).tolist() == pytest.approx(expected, rel=5e-3)
    told = f"\n  'loss' of micro-batch 2: {expected[1]:.2g}[0-9]* for nan\n .* such as loss / 4, are still inf or NaN"
    assert re.search("Step 1 is taken with the loss of its second run:" + f".*{told}", warned[-1], re.S)


@pytest.mark.parametrize("write", [lambda h: h.mul_(1e3), lambda h: h.__imul__(1e3), lambda h: h.__iadd__(h * 999.0)])
def test_an_op_in_place_is_healed_by_its_module(write: Callable[[Tensor], Tensor], warned: list[str]) -> None:
    block: Any = Using(lambda m, x: write(m.linear(x) * 100.0), linear=nn.Linear(16, 16))
    model: Any = Using(
        lambda m, x: {"loss": m.head(F.layer_norm(m.block(x), (16,))).float().square().mean()},
        block=block, head=nn.Linear(16, 4),
    )  # fmt: skip
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), on_overflow="heal")
    model(torch.randn(8, 16))["loss"].backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert runtime_of(model).remedies in ({"block": "fp32"}, {"block:mul": "fp32"})


def test_a_good_step_does_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.diagnostics.healing.diagnose_overflow", pytest.fail)
    healing, skipping = Loop(factor=1.0), Loop(factor=1.0, on_overflow="skip")
    assert healing.run(5) == skipping.run(5)
    for one, other in zip(healing.model.parameters(), skipping.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not healing.healer.healed and "remedies" not in healing.runtime.state_dict()


def test_a_scale_that_is_too_large_is_lowered_and_the_step_runs_again() -> None:
    loop = Loop("params=fp32,loss_scale=dynamic", factor=1.0, loss_scaler=hf_mp.DynamicLossScaler(init_scale=2.0**30))
    loop.run(3)
    assert loop.skipped == [False] * 3 and not loop.healer.healed and not loop.runtime.remedies
    assert 2.0**8 <= loop.runtime.scaler.get_scale() < 2.0**30 and loop.runtime.scaler.state.consecutive_skips == 0


def test_with_accumulation_all_micro_batches_run_again() -> None:
    loop = Loop()
    loop.run(3, parts=2)
    whole = Loop()
    whole.run(3)
    assert loop.skipped == [False] * 3
    for one, other in zip(loop.model.parameters(), whole.model.parameters(), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def test_a_loop_that_clips_skips_one_step(warned: list[str]) -> None:
    loop = Loop()
    losses = loop.run(5, change=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert loop.skipped[0] and "this step is skipped, because the loop has changed its gradients" in warned[-1]
    assert loop.runtime.remedies == RULES and not any(map(torch.isnan, map(torch.tensor, losses[1:])))


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_a_step_that_clips_itself_clips_the_one_that_runs_again(precision: str) -> None:
    healing, ruled = Loop(precision, max_grad_norm=1e-3), Loop(precision, max_grad_norm=1e-3, rules=RULES)
    assert healing.run(3)[1:] == pytest.approx(ruled.run(3)[1:], rel=1e-4)
    assert healing.skipped == [False] * 3 and healing.runtime.grad_norm == pytest.approx(ruled.runtime.grad_norm)


@pytest.mark.parametrize("overflows_first", [True, False])
def test_a_step_of_several_optimizers_is_healed_in_the_first_one(overflows_first: bool, warned: list[str]) -> None:
    """Once an optimizer has stepped, the forwards would run with other weights: then the overflowing one is skipped."""
    model: Any = Using(
        lambda m, x: m.large(x * 2.0**10).square().mean() * 2.0**-40 + m.small(x).square().mean(),
        large=nn.Linear(8, 8, bias=False), small=nn.Linear(8, 8, bias=False),
    )  # fmt: skip
    nn.init.constant_(model.large.weight, 2.0**5)
    runtime = MixedPrecision("fp16", on_overflow="heal")
    runtime.attach(model)
    parts = [model.large, model.small] if overflows_first else [model.small, model.large]
    optimizers: list[Any] = [runtime.attach_optimizer(torch.optim.SGD(part.parameters(), 0.1)) for part in parts]
    skipped = []
    for _ in range(3):
        model(torch.ones(4, 8)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        skipped.append([optimizer.step_was_skipped for optimizer in optimizers])
    assert skipped[1:] == [[False, False]] * 2 and "large" in " ".join(runtime.stats.remedies)
    assert skipped[0] == [False, not overflows_first] and runtime.stats.steps == 3
    assert any("has stepped another optimizer" in message for message in warned) is not overflows_first


def test_a_loss_outside_the_model_skips_one_step(warned: list[str]) -> None:
    loop = Loop()
    for batch in batches(3):
        logits = loop.model(ids=batch["ids"])["logits"]
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        loop.optimizer.step()
        loop.skipped.append(loop.optimizer.step_was_skipped)
        loop.optimizer.zero_grad()
    assert loop.skipped[0] and loop.runtime.remedies == RULES
    assert "computes its loss outside the model" in warned[-1]


def test_a_state_with_rules_of_another_model_is_refused() -> None:
    loop = Loop()
    loop.run(1)
    other, model = MixedPrecision("fp16"), nn.Sequential(nn.Linear(2, 2))
    other.attach(model)  # which it holds weakly
    with pytest.raises(ValueError, match=r"rules 'up:linear', 'down:linear' match"):
        other.load_state_dict(loop.runtime.state_dict())
    assert not other.remedies


def test_a_model_that_is_nan_in_fp32_is_not_healed(warned: list[str]) -> None:
    loop = Loop(factor=1.0)
    with torch.no_grad():
        loop.model.gate.weight.fill_(torch.nan)
    loop.run(2)
    assert loop.skipped == [True, True] and not loop.runtime.remedies
    assert warned == [
        "on_overflow='heal': not healed: it is inf or NaN in FP32, too: the cause is the model or its data"
    ]


def test_a_batch_with_inf_is_blamed_on_the_data(warned: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), on_overflow="heal")
    model(torch.full((1, 4), torch.inf)).backward()
    optimizer.step()
    assert optimizer.step_was_skipped and "it is inf or NaN in FP32, too" in warned[0]
    assert "The batch contains inf or NaN: 'input'" in str(hf_mp.explain_overflows(model).reports[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"policy": "bf16", "on_overflow": "heal"},
            "precision='bf16' has FP32's range: leave it out",
        ),
        ({"on_overflow": "repair"}, "on_overflow='repair' is not known: use 'skip' or 'heal'"),
        (
            {"policy": "fp16-lean", "free_gradients": "backward", "on_overflow": "heal"},
            "free_gradients='backward' has updated weights .* use free_gradients='step'",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecision(**settings)


def test_the_healer_of_a_model_is_one() -> None:
    loop = Loop()
    assert heal_overflows(loop.model) is loop.healer


# The pure core


def found(module: str, op: str, largest: float = 4 * 65504.0) -> OpRange:
    return OpRange(module, op, largest, is_fp16=True, is_origin=True)


OF_EXPERT = OpRange("experts", "_grouped_mm", largest=4 * 65504.0)


def remedy(place: OpRange, rules: dict[str, str] | None = None) -> dict[str, str]:
    return next_remedy(place, rules or {}).rules


def test_the_remedies_of_one_place_the_smallest_first() -> None:
    rules: dict[str, str] = {}
    for expected in (
        {"layers.1.mlp.down:linear": "scaled/128"},
        {"layers.1.mlp.down:linear": "fp32"},
        {"layers.1.mlp.down": "fp32"},
    ):
        assert remedy(found("layers.1.mlp.down", "linear"), rules) == expected
        rules |= expected
    with pytest.raises(CannotHealError, match=r"'linear' in 'layers.1.mlp.down' stays"):
        remedy(found("layers.1.mlp.down", "linear"), rules)


@pytest.mark.parametrize(
    ("place", "rules"),
    [
        (found("layers.1.mlp", "mul"), {"layers.1.mlp:mul": "fp32"}),
        (found("layers.1.mlp", "mul_"), {"layers.1.mlp": "fp32"}),
        (found("layers.1.mlp", "iadd"), {"layers.1.mlp": "fp32"}),
        (found("embed", "linear", largest=1e10), {"embed:linear": "fp32"}),
        (found("", "add"), {":add": "fp32"}),
        # 2**16 is the largest divisor, and small results of the same op are not to go below FP16.
        (replace(found("", "einsum", 2.0**30), least=2.0**30), {":einsum": "fp32"}),
        (replace(found("", "einsum", 2.0**25), least=2.0**30), {":einsum": "scaled/16384"}),
        (replace(found("", "einsum", 2.0**25), least=1.0), {":einsum": "fp32"}),
        (OF_EXPERT, {"experts:_grouped_mm": "fp32"}),
    ],
)
def test_the_next_remedy(place: OpRange, rules: dict[str, str]) -> None:
    assert remedy(place) == rules


def test_what_was_out_of_range_before_and_nan_get_no_remedy() -> None:
    carried = OpRange("layers.1", "gelu", 1e6, is_fp16=True)
    assert first_out_of_range([carried, found("embed", "linear", largest=float("nan"))]) == []


@pytest.mark.parametrize(("gradients", "fits"), [((2.0**10, 2.0**0), 2.0**4), ((2.0**10, None), 2.0**4), ((), 2.0**16)])
def test_which_loss_scale_fits(gradients: tuple[float | None, ...], fits: float) -> None:
    assert fitting_scale([OpRange("a", "linear", fp16_gradient=one) for one in gradients], 2.0**16) == fits


def test_rules_of_several_processes() -> None:
    one, two = {"a:linear": "scaled/8", "b": "fp32"}, {"a:linear": "scaled/128", "c:linear": "scaled/16"}
    assert merged([one, two]) == merged([two, one]) == {"a:linear": "scaled/128", "b": "fp32", "c:linear": "scaled/16"}
    assert merged([{"a:linear": "fp32"}, {"a:linear": "scaled/128"}]) == {"a:linear": "fp32"}

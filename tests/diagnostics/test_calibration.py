"""``calibrate``: what FP16 does not hold, measured where nothing overflows, and the rules that help."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from range_models import Gated, batches
from torch import nn

from hf_mp import MixedPrecision, RangeReport, calibrate, compare_precisions
from hf_mp.diagnostics.ranges import OpRange

FACTOR = 2.0**18


@pytest.fixture
def model() -> Gated:
    torch.manual_seed(0)
    return Gated(factor=FACTOR)


def found_in(report: RangeReport) -> dict[str, OpRange]:
    return {f"{op.module}:{op.op}": op for op in report.ops}


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_it_names_what_overflows_and_its_rules_prevent_it(model: Gated, precision: str) -> None:
    report = calibrate(model, batches(2), precision)
    assert {f"{op.module}:{op.op}" for op in report.overflows} >= {"up:linear", ":mul", "down:linear"}
    model_in_fp16 = MixedPrecision(precision).attach(model)
    assert not model_in_fp16(**batches(1)[0])["loss"].isfinite()
    vars(model)["forward"].runtime.detach()
    MixedPrecision(precision, rules=report.rules).attach(model)
    assert model(**batches(1)[0])["loss"].isfinite()


def test_magnitudes_are_those_of_fp32(model: Gated) -> None:
    """To BF16's 8 bits, forward and backward."""
    seen: dict[str, float] = {}

    def largest(one: torch.Tensor) -> float:
        return one.abs().max().item()

    up = model.up.register_forward_hook(lambda m, args, out: seen.update(up=largest(out)))
    head = model.head.register_full_backward_hook(lambda m, gi, go: seen.update(head=max(map(largest, (*gi, *go)))))
    batch = batches(1)[0]
    model(**batch)["loss"].backward()
    up.remove(), head.remove()
    seen["head"] = max(seen["head"], *(largest(one.grad) for one in model.head.parameters()))
    report = calibrate(model, [batch])
    ops = found_in(report)
    assert ops["up:linear"].largest == pytest.approx(seen["up"], rel=0.02)
    assert ops["up:linear"].headroom == pytest.approx(math.log2(65504 / seen["up"]), abs=0.05)
    assert ops["head:linear"].fp16_gradient == pytest.approx(seen["head"], rel=0.05)
    assert not ops["embed:embedding"].is_fp16 and ops["gate:linear"].is_fp16


def test_what_comes_close_gets_a_rule_as_well() -> None:
    torch.manual_seed(0)
    report = calibrate(Gated(factor=2.0**14), batches(1))
    assert not report.overflows and report.close
    assert report.rules
    safe = calibrate(Gated(factor=1.0), batches(1))
    assert not safe.rules and not safe.close
    assert "No rules are needed" in str(safe)


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("diagnosis", [lambda *given: calibrate(*given), lambda m, b, p: compare_precisions(m, b, [p])])
def test_everything_is_afterwards_as_it_was(model: Gated, diagnosis: Callable[..., Any], precision: str) -> None:
    model.norm.register_buffer("mean", torch.zeros(3))
    model.to(torch.bfloat16).train()
    model.norm.register_buffer("counter", torch.zeros(()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient = model.up.weight.grad = torch.ones_like(model.up.weight)
    parameters, random = list(model.parameters()), torch.get_rng_state()
    diagnosis(model, batches(1), precision)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is before[name].dtype and torch.equal(tensor, before[name])
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True)) and model.training
    assert model.up.weight.grad is gradient and torch.equal(random, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    for dtype in (torch.bfloat16, torch.float32):  # gradients follow the weights again
        model.to(dtype).zero_grad()
        model(**batches(1)[0])["loss"].backward()
        assert model.gate.weight.grad is not None and model.gate.weight.grad.dtype is dtype


def test_a_mask_is_no_overflow() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.linear(x)
            smallest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(x > 0, smallest) + torch.full_like(scores, float("-inf")).where(x > 1, 0.0)
            return scores.softmax(-1)

    report = calibrate(Masks(), [torch.randn(3, 4)])
    assert not report.overflows and not report.rules
    assert any("no backward" in note for note in report.notes)


def test_one_batch_needs_no_list(model: Gated) -> None:
    batch = batches(1)[0]
    assert calibrate(model, batch) == calibrate(model, [batch])
    ids = batch["ids"]
    assert calibrate(model, ids) == calibrate(model, [ids]) != calibrate(model, list(ids[:, None]))


def test_a_report_is_saved(model: Gated, tmp_path: Path) -> None:
    report = calibrate(model, batches(1))
    file = report.save(tmp_path)
    assert file.name == "precision_rules.json" and report.save(tmp_path / "other.json") == tmp_path / "other.json"
    saved = json.loads(file.read_text())
    assert saved["rules"] == report.rules and OpRange(**saved["ops"][0]) == report.ops[0]
    assert "down" in str(report) and "overflows" in str(report) and "embedding" not in str(report)
    with pytest.raises(OSError, match="nosuch"):
        report.save(tmp_path / "nosuch" / "rules.json")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"batches": []}, ValueError, "batches is empty: give at least one"),
        ({"precision": "bf16"}, ValueError, "precision='bf16' has FP32's range: calibrate is for FP16"),
        ({"model": "gpt2"}, TypeError, "the model is of type str: pass"),
    ],
)
def test_bad_input(model: Gated, given: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        calibrate(**{"model": model, "batches": batches(1), **given})


def test_an_attached_model_is_refused(model: Gated) -> None:
    MixedPrecision("fp16").attach(model)
    with pytest.raises(ValueError, match=r"mixed precision is attached"):
        calibrate(model, batches(1))


def test_a_model_that_is_nan_in_fp32_gets_no_rules(model: Gated, tmp_path: Path) -> None:
    with torch.no_grad():
        model.gate.weight.fill_(torch.nan)
    report = calibrate(model, batches(1))
    assert not report.rules and "the cause is the model" in report.notes[-1]
    assert json.loads(report.save(tmp_path).read_text(), parse_constant=pytest.fail) and "inf or NaN" in str(report)


def test_memory_that_was_not_written_yet_is_no_value() -> None:
    class Pads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = x.new_empty(len(x), 2 * x.shape[1])
            padded[:, : x.shape[1]] = x
            return super().forward(padded[:, : x.shape[1]])

    report = calibrate(Pads(8, 8), [torch.ones(4, 8)])
    assert [op.op for op in report.ops if op.op not in ("getitem", "setitem")] == ["linear"]


def test_fp64_may_be_beyond_fp32() -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.double().square().mean().div(1e-50).log()

    report = calibrate(Counts(8, 8), [torch.ones(4, 8)])
    assert max(op.largest for op in report.ops) == pytest.approx(1e50) and "inf or NaN" not in str(report)

"""How far precisions are from FP32: the numbers, where they arise, what rules buy, and bad input."""

from __future__ import annotations

import copy
import json
import math
from operator import attrgetter
from typing import Any

import pytest
import torch
from range_models import Gated, batches
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import hf_mp
from hf_mp import PrecisionComparison, compare_precisions

HEAD = {"lm_head": "fp32"}
TINY_BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip


def logits_in(model: nn.Module, batch: dict[str, Tensor], precision: str, rules: dict[str, str]) -> Tensor:
    """As an evaluation loop would see them."""
    runtime = hf_mp.MixedPrecision(precision, rules=rules)
    runtime.attach(model.eval())
    with torch.no_grad():
        logits: Tensor = model(**batch).logits.double()
    runtime.detach()
    return logits


@pytest.fixture(scope="module")
def compared() -> PrecisionComparison:
    torch.manual_seed(0)
    model = Gated()
    return compare_precisions(model, batches(2), ["bf16", "fp16", ("fp16", {"head": "fp32"})])


@pytest.mark.parametrize("rules", [{}, HEAD])
def test_its_numbers_are_those_of_a_loop(gpt2: Any, batch: dict[str, Tensor], rules: dict[str, str]) -> None:
    """RMS, largest and KL against FP64 arithmetic on logits that the model itself gives."""
    (found,) = compare_precisions(gpt2, [batch], [("fp16", rules)]).errors
    with torch.no_grad():
        exact = gpt2.eval()(**batch).logits.double()
    logits = logits_in(gpt2, batch, "fp16", rules)
    difference = logits - exact
    assert found.logits_rms == pytest.approx(difference.square().mean().sqrt().item())
    assert found.logits_maximum == pytest.approx(difference.abs().max().item())
    p, q = exact.log_softmax(-1), logits.log_softmax(-1)
    off = (q - p).gather(-1, p.argmax(-1, keepdim=True))
    assert found.log_probability_rms == pytest.approx(off.square().mean().sqrt().item())
    assert found.log_probability_maximum == pytest.approx(off.abs().max().item())
    assert found.kl == pytest.approx(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean().item())


def test_precisions_and_rules_in_order(compared: PrecisionComparison) -> None:
    named = [(one.precision, one.rules) for one in compared.errors]
    assert named == [("bf16", {}), ("fp16", {}), ("fp16", {"head": "fp32"})]


def test_bf16_is_further_off_than_fp16_and_fp32_not_at_all(compared: PrecisionComparison) -> None:
    bf16, fp16 = (next(one for one in compared.errors if one.precision == name) for name in ("bf16", "fp16"))
    # BF16 has three significant bits less: 8 times as far off, up to a factor of two
    assert 4 < bf16.logits_rms / fp16.logits_rms < 16
    (same,) = compare_precisions(Gated(), batches(1), ["fp32"]).errors
    assert same.logits_rms == same.logits_maximum == same.kl == 0.0


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_an_attached_model_is_compared_by_its_masters(gpt2: Any, batch: Any, precision: str) -> None:
    model, optimizer = hf_mp.prepare(gpt2, torch.optim.SGD(gpt2.parameters(), 0.0), precision)
    model(**batch).loss.backward()
    masters = copy.deepcopy(model)  # FP16 and 16 bits more do not hold all of FP32
    vars(masters)["forward"].runtime.detach()
    assert compare_precisions(model, [batch], ["bf16"]).errors == compare_precisions(masters, [batch], ["bf16"]).errors
    optimizer.step()
    assert not optimizer.step_was_skipped and vars(model)["forward"].runtime.model is model


@pytest.mark.exhaustive
def test_a_compiled_model_is_compared_as_it_was_written(gpt2: Any, batch: Any) -> None:
    expected = compare_precisions(gpt2, [batch], ["fp16"]).errors
    gpt2.compile(backend="eager")
    gpt2(**batch)
    assert compare_precisions(gpt2, [batch], ["fp16"]).errors == expected


class TestWhatCounts:
    """Padding does not; log-probabilities are compared of logits with several classes."""

    def test_padding_does_not_count(self, gpt2: Any, batch: Any) -> None:
        mask = torch.ones_like(batch["input_ids"])
        mask[:, :4] = 0
        found = compare_precisions(gpt2, [{**batch, "attention_mask": mask}], ["fp16"])
        assert found.positions == 4 * 28
        garbage = batch["input_ids"].masked_fill(mask == 0, 1)  # another token where nobody looks
        again = compare_precisions(gpt2, [{"input_ids": garbage, "attention_mask": mask}], ["fp16"])
        assert again.errors == found.errors

    @pytest.mark.parametrize(("labels", "has_classes"), [(3, True), (1, False)])
    def test_classes_and_a_regression(self, labels: int, has_classes: bool) -> None:
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(**TINY_BERT, num_labels=labels))
        found = compare_precisions(model, [{"input_ids": torch.randint(5, 40, (4, 8))}], ["fp16"])
        (plain,) = found.errors
        assert found.positions == 4 and plain.logits_rms > 0.0
        if has_classes:
            assert plain.kl is not None and plain.kl > 0.0
        else:
            assert plain.log_probability_rms is plain.kl is None
            assert "log-p RMS" not in str(found)

    def test_a_model_without_logits(self) -> None:
        found = compare_precisions(nn.Linear(4, 3), [torch.randn(2, 4)], ["fp16"])
        assert found.positions == 2 and found.errors[0].kl is None
        assert "its first floating output, '', is compared" in found.notes[0]


def test_what_overflows_is_said() -> None:
    torch.manual_seed(0)
    found = compare_precisions(Gated(factor=2.0**18), batches(1), ["fp16", "bf16"])
    plain = found.errors[0]
    assert not math.isfinite(plain.logits_rms) and plain.kl is not None and not math.isfinite(plain.kl)
    assert "Where FP16 gives inf or NaN, hf_mp.calibrate finds the rules" in str(found) and "inf/NaN" in str(found)
    assert math.isfinite(found.errors[-1].logits_rms)
    assert found.to_dict()["errors"][0]["logits_rms"] is None


def test_logits_that_are_masked_do_not_count() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 6)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            closed = torch.arange(6) > 3
            return {"logits": logits.masked_fill(closed, torch.finfo(logits.dtype).min).masked_fill(
                torch.arange(6) == 5, -torch.inf)}  # fmt: skip

    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 3])}
    for one in compare_precisions(Masked(), [batch]).errors:
        assert one.logits_maximum < 0.05 and one.kl is not None and one.kl < 1e-3


def test_the_table_is_80_columns_wide_and_data_is_json(compared: PrecisionComparison) -> None:
    lines = str(compared).splitlines()
    assert max(map(len, lines)) <= 80 and "fp16       head: fp32" in str(compared)
    data = json.loads(json.dumps(compared.to_dict(), allow_nan=False))
    assert data["errors"][1]["kl"] == compared.errors[1].kl
    ruled = compare_precisions(Gated(), batches(1), [("fp16", {"head": torch.float32})])
    assert ruled.to_dict()["errors"][0]["rules"] == {"head": "fp32"}


def test_one_batch_needs_no_list() -> None:
    model, batch = Gated(), batches(1)[0]
    for one in (batch, batch["ids"]):
        found = compare_precisions(model, one, ["fp16"])
        assert found.batches == 1 and found == compare_precisions(model, [one], ["fp16"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"batches": []}, ValueError, "batches is empty: give at least one"),
        ({"precisions": []}, ValueError, "precisions is empty: give at least one, such as 'fp16'"),
        ({"precisions": ["fp8"]}, ValueError, "precision='fp8' is not known: use one of fp32, fp16"),
        ({"precisions": "fp16"}, TypeError, r"precisions must be a list: write \['fp16'\]"),
        ({"precisions": [("fp16", "head")]}, TypeError, r"\('fp16', 'head'\) is no precision with rules: write"),
        ({"precisions": [("fp16", {"nosuch": "fp32"})]}, ValueError, "rule 'nosuch' matches no module of Gated"),
        ({"precisions": [("fp16", {"head": "fp8"})]}, ValueError, "rule 'head': 'fp8' is not known for modules"),
        ({"model": "gpt2"}, TypeError, "the model is of type str: pass"),
    ],
)
def test_bad_input(given: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        compare_precisions(**{"model": Gated(), "batches": batches(1), **given})


def test_a_model_that_is_nan_in_fp32_is_refused() -> None:
    model = Gated()
    with torch.no_grad():
        model.gate.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="Gated returns inf or NaN in FP32"):
        compare_precisions(model, batches(1))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inside_an_autocast_there_is_no_reference() -> None:
    message = r"inside hf_mp.autocast\(torch.float16\) nothing is plain FP32: compare precisions outside"
    with hf_mp.autocast(torch.float16), pytest.raises(RuntimeError, match=message):
        compare_precisions(Gated(), batches(1))
    with hf_mp.autocast(torch.float16, enabled=False):
        compare_precisions(Gated(), batches(1), ["fp32"])


@pytest.mark.parametrize("backend", ["cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv"])
def test_the_reference_runs_without_tf32(backend: str) -> None:
    """The precisions run as the user lets them."""
    ops: Any = attrgetter(backend)(torch.backends)

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noted.append(ops.fp32_precision)
            return super().forward(x)

    noted: list[str] = []
    before, ops.fp32_precision = ops.fp32_precision, "tf32"
    try:
        compare_precisions(Noting(4, 4), [torch.randn(2, 4)], ["fp16"])
        assert noted[0] == "ieee" and {*noted[1:], ops.fp32_precision} == {"tf32"}
    finally:
        ops.fp32_precision = before


def test_a_model_that_returns_a_loss_alone_is_refused() -> None:
    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    with pytest.raises(ValueError, match="returns no floating tensor except a loss"):
        compare_precisions(Loss(2, 2), [torch.ones(1, 2)])

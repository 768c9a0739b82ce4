"""``autocast.explain``: what ran in which dtype, as data and as text."""

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from hf_mp.casting.call_observer import ObservedCall, observe_calls
from hf_mp.casting.explain import ExplainedOp, Explanation
from hf_mp.casting.mode import active_autocast, autocast
from hf_mp.models import lm_losses
from hf_mp.scaling.scalers import StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.up(x)))


def only(explanation: Explanation, op: str) -> ExplainedOp:
    (found,) = [entry for entry in explanation.ops if entry.op == op]
    return found


def test_each_op_with_its_module_rule_and_dtypes() -> None:
    found = autocast.explain(Block(), torch.rand(2, 4))
    assert only(found, "linear") == ExplainedOp(
        "up", "linear", "lower precision", ("float32",) * 3, ("float16",) * 3, ("float16",)
    )
    norm = only(found, "layer_norm")
    assert (norm.module, norm.rule) == ("norm", "fp32")
    assert (norm.inputs, norm.cast) == (("float16", "float32", "float32"), ("float32",) * 3)
    tanh = only(found, "tanh")
    assert (tanh.module, tanh.rule, tanh.inputs, tanh.cast) == ("", "unlisted", ("float32",), ("float32",))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_dtype_tables_and_rules_are_those_given(dtype: torch.dtype) -> None:
    block = Block()
    name = str(dtype).removeprefix("torch.")
    found = autocast.explain(block, torch.rand(2, 4), dtype=dtype, rules={"norm": "fp32", torch.tanh: "widest"})
    assert only(found, "linear").outputs == (name,)
    assert [entry.op for entry in found.ops if entry.rule == "widest type"] == ["tanh"]
    norm = only(found, "layer_norm")
    assert (norm.module, norm.rule, norm.inputs) == ("norm", "unlisted", ("float32",) * 3)
    on_cpu = autocast.explain(block, torch.rand(2, 4), dtype=dtype, tables="cpu")
    assert only(on_cpu, "layer_norm").rule == "unlisted"


def test_an_observed_call_has_its_module_and_its_name_in_the_tables_or_out_of_them() -> None:
    block, x, mode = Block(), torch.rand(2, 4), autocast("cpu", FP16)
    assert mode.dtype is FP16
    seen: list[tuple[str, str | None]] = []

    def called(call: ObservedCall) -> Tensor:
        seen.append((call.module, call.name))
        return call.make()

    with observe_calls({"block": block, "up": block.up}, mode, called), mode:
        block(x)
    assert [found for found in seen if found[1]] == [("up", "linear"), ("block", "layer_norm"), ("block", "tanh")]


def test_an_op_has_one_name_in_every_spelling_and_under_every_rule() -> None:
    x = torch.rand(2, 2)

    def calls(x: Tensor) -> list[Tensor]:
        return [torch.tanh(x), x.tanh(), torch.nn.functional.gelu(x), torch.linalg.inv(x), x.T, torch.special.i0e(x)]

    names = {"tanh", "gelu", "linalg.inv", "T", "special.i0e"}
    assert {entry.op for entry in autocast.explain(calls, x).ops} == names
    ruled = autocast.explain(calls, x, rules={torch.tanh: "fp32", torch.linalg.inv: "fp32", torch.special.i0e: "fp32"})
    assert {entry.op for entry in ruled.ops} == names
    assert {entry.op for entry in ruled.ops if entry.rule == "fp32"} == {"tanh", "linalg.inv", "special.i0e"}


def test_calls_that_are_alike_are_counted() -> None:
    layer = nn.Linear(4, 4)
    found = autocast.explain(lambda x: layer(layer(layer(x))), torch.rand(2, 4))
    counts = {entry.inputs: entry.count for entry in found.ops if entry.op == "linear"}
    assert counts == {("float32",) * 3: 1, ("float16", "float32", "float32"): 2}
    assert sum(entry.count for entry in found.ops) == 3


def test_widest_and_fp32_output_rules() -> None:
    found = autocast.explain(
        lambda a, b: torch.dot(a, b) + b.softmax(0).sum(), torch.rand(3).half(), torch.rand(3).half()
    )
    assert (only(found, "dot").rule, only(found, "dot").cast) == ("widest type", ("float16", "float16"))
    softmax = only(found, "softmax")
    assert (softmax.rule, softmax.inputs, softmax.outputs) == ("fp32 output", ("float16",), ("float32",))


def test_as_text() -> None:
    header, module, line, *_ = str(autocast.explain(Block(), torch.rand(2, 4))).splitlines()
    assert header.split() == ["rule", "came", "as", "ran", "as", "gave", "calls"]
    assert module == "up"
    assert line.split() == ["linear", "lower", "precision", "fp32", "x3", "fp16", "x3", "fp16", "1"]


def test_an_attached_model_is_explained_as_it_runs(
    gpt2: GPT2LMHeadModel, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_losses, "FEW_ELEMENTS", 0)
    plain = autocast.explain(gpt2, **batch, dtype=BF16)
    runtime = MixedPrecision("bf16", loss_scaler=StaticLossScaler(1.0), tables="cuda")
    runtime.attach(gpt2)
    found = autocast.explain(gpt2, **batch)
    key = {(e.module, e.op, e.rule, e.cast, e.outputs, e.count) for e in found.ops if e.rule != "unlisted"}
    # all but the loss, which reads the logits as they are; weights come in 16 bits
    assert key == {
        (e.module, e.op, e.rule, e.cast, e.outputs, e.count)
        for e in plain.ops
        if e.rule != "unlisted" and e.op != "cross_entropy_loss"
    }
    assert [(e.inputs[0], e.outputs) for e in found.ops if e.op == "cross_entropy"] == [("bfloat16", ("float32",))]
    assert runtime.autocast.call_override is None
    gpt2(**batch).loss.backward()
    assert all(p.grad.dtype is FP32 for p in gpt2.parameters())


def test_nothing_stays_behind_also_after_an_exception() -> None:
    block = Block()
    autocast.explain(block, torch.rand(2, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        autocast.explain(block, torch.rand(2, 3))
    assert active_autocast() is None
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in block.modules())

"""A person's own rules: by op, with all its spellings, and by module name."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Using
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from hf_mp.casting.mode import active_autocast, autocast
from hf_mp.casting.rules import match_modules, parse_rules
from hf_mp.casting.tables import CUDA_TABLES

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def half(*shape: int) -> Tensor:
    return torch.rand(*shape).half() + 0.5


@pytest.fixture(scope="module")
def double() -> Iterator[Any]:
    """An op of a person's library, in three spellings."""

    @torch.library.custom_op("hf_mp_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    yield double


class TestOps:
    @pytest.mark.parametrize(
        ("op", "rule", "call", "inputs", "expected"),
        [
            (torch.softmax, "unlisted", lambda x: F.softmax(x, dim=-1), FP16, FP16),
            (torch.softmax, "unlisted", lambda x: x.softmax(-1), FP16, FP16),
            (F.softmax, "unlisted", lambda x: torch.softmax(x, -1), FP16, FP16),
            (torch.matmul, "fp32", lambda x: x @ x, FP16, FP32),
            (torch.matmul, "unlisted", lambda x: x @ x, FP32, FP32),
            (torch.pow, "lower_precision", lambda x: x**2, FP32, FP16),
            (torch.tanh, "fp32", torch.tanh, FP16, FP32),
            (torch.tanh, "fp32", Tensor.tanh, FP16, FP32),
            (torch.tanh, "lower_precision", torch.tanh, FP32, FP16),
            (torch.add, "widest", lambda x: torch.add(x, x.float()), FP16, FP32),
            (F.gelu, "fp32", nn.GELU(), FP16, FP32),
        ],
    )
    def test_a_rule_holds_for_every_spelling(
        self, op: Any, rule: str, call: Callable[[Tensor], Tensor], inputs: torch.dtype, expected: torch.dtype
    ) -> None:
        x = torch.rand(4, 4).to(inputs)
        with autocast(rules={op: rule}):
            assert call(x).dtype is expected
        with autocast(rules={torch.erf: "fp32"}):
            assert call(x).dtype is not expected or rule == "widest"

    def test_other_ops_keep_their_rules(self) -> None:
        with autocast(rules={torch.softmax: "unlisted"}):
            assert torch.log_softmax(half(3, 3), -1).dtype is FP32
            assert (torch.rand(3, 3) @ torch.rand(3, 3)).dtype is FP16

    def test_a_banned_op_can_be_allowed(self) -> None:
        with autocast(rules={F.binary_cross_entropy: "fp32"}):
            assert F.binary_cross_entropy(half(3) * 0.5, half(3) * 0.5).dtype is FP32

    def test_ops_of_ones_own(self, double: Any) -> None:
        x = torch.rand(3)
        for key in (double, torch.ops.hf_mp_tests.double, torch.ops.hf_mp_tests.double.default):
            with autocast(rules={key: "lower_precision"}):
                assert torch.ops.hf_mp_tests.double.default(x).dtype is FP16
                assert torch.ops.hf_mp_tests.double(x).dtype is (
                    FP32 if isinstance(key, torch._ops.OpOverload) else FP16
                )
        assert torch.ops.hf_mp_tests.double(x).dtype is FP32

    def test_fp64_and_integers_are_left_alone(self) -> None:
        with autocast(rules={torch.tanh: "lower_precision", torch.add: "lower_precision"}):
            assert torch.tanh(torch.rand(3, dtype=FP64)).dtype is FP64
            assert torch.add(torch.arange(3), 1).dtype is torch.long

    def test_nothing_holds_where_autocast_is_disabled(self) -> None:
        with autocast(enabled=False, rules={torch.tanh: "lower_precision"}):
            assert torch.tanh(torch.rand(3)).dtype is FP32


class TestModules:
    def test_lm_head_in_fp32(self, gpt2: GPT2LMHeadModel, batch: dict[str, Tensor]) -> None:
        expected = gpt2.eval()(input_ids=batch["input_ids"]).logits
        with autocast(FP16):
            lowered = gpt2(input_ids=batch["input_ids"]).logits
        with autocast(FP16, rules={"lm_head": "fp32"}, model=gpt2):
            found = gpt2(input_ids=batch["input_ids"]).logits
        assert (lowered.dtype, found.dtype) == (FP16, FP32)
        assert not torch.equal(found, found.half().float()) and not torch.equal(found, expected)

    def test_inputs_are_cast_up_and_autocast_is_off_inside_only(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        seen: list[tuple[torch.dtype, torch.dtype]] = []
        for layer in model:
            layer.register_forward_hook(lambda m, args, output: seen.append((args[0].dtype, output.dtype)))
        with autocast(FP16, rules={"1": "fp32"}, model=model):
            model(torch.rand(2, 4))
        assert seen == [(FP32, FP16), (FP32, FP32), (FP32, FP16)]

    @pytest.mark.parametrize(
        ("pattern", "matched"),
        [("lm_head", 1), ("transformer.h.*.mlp", 2), ("transformer.h.*.ln_?", 4), ("transformer.h.1*", 10), ("*", 30)],
    )
    def test_patterns(self, gpt2: GPT2LMHeadModel, pattern: str, matched: int) -> None:
        rules = parse_rules({pattern: "fp32"}, CUDA_TABLES)[1]
        found = [module for module, _ in match_modules(rules, gpt2)]
        assert len(found) == matched if matched < 10 else len(found) >= matched
        assert all(any(m is module for module in gpt2.modules()) for m in found)

    def test_a_module_with_a_rule_inside_a_module_with_a_rule(
        self, gpt2: GPT2LMHeadModel, batch: dict[str, Tensor]
    ) -> None:
        expected = gpt2(**batch)
        with autocast(
            FP16, rules={"transformer": "fp32", "transformer.h.*.mlp": "fp32", "lm_head": "fp32"}, model=gpt2
        ):
            found = gpt2(**batch)
        assert torch.equal(found.logits, expected.logits)

    def test_of_two_rules_the_last_holds_also_when_others_are_added(self) -> None:
        model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(4, 4)}), "c": nn.Linear(4, 4)})
        mode = autocast(FP16, rules={"*.b": "bf16", "a*": "fp32"}, model=model)
        for added in ({}, {"c": "fp32"}, {"*.b": "bf16"}):
            mode.add_rules(added, model)
            with mode:
                assert model["a"]["b"](torch.rand(2, 4)).dtype is FP32

    def test_no_hook_stays(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mode = autocast(FP16, rules={"0": "fp32"}, model=model)
        for _ in range(3):
            with mode, mode:
                assert model[0](torch.rand(2, 4)).dtype is FP32
                assert len(model[0]._forward_pre_hooks) == len(model[0]._forward_hooks) == 1
        assert not model[0]._forward_pre_hooks and not model[0]._forward_hooks
        with autocast(FP16):
            assert model[0](torch.rand(2, 4)).dtype is FP16

    def test_an_exception_inside_a_module_with_a_rule(self) -> None:
        model = nn.Sequential(Using(lambda m, x: 1 // 0), nn.Linear(4, 4))
        with autocast(FP16, rules={"0": "fp32"}, model=model) as mode:
            with pytest.raises(ZeroDivisionError):
                model(torch.rand(2, 4))
            assert active_autocast() is mode
            assert model[1](torch.rand(2, 4)).dtype is FP16
        assert active_autocast() is None


class TestErrors:
    def test_what_is_no_mapping(self) -> None:
        with pytest.raises(TypeError, match=r"is no mapping: write \{'lm_head': 'fp32'\}"):
            autocast(rules=["lm_head"])  # type: ignore[arg-type]

    @pytest.mark.parametrize("key", [len, print, lambda x: x, 3, None, nn.Linear, (torch.softmax,)])
    def test_something_that_is_no_torch_function(self, key: Any) -> None:
        with pytest.raises(TypeError, match=r"rules are for torch functions and module names, and .* is neither"):
            autocast(rules={key: "fp32"})

    @pytest.mark.parametrize("rule", ["fp16", "FP61", "", None, FP16])
    def test_a_rule_that_is_not_known(self, rule: Any) -> None:
        with pytest.raises(ValueError, match=r"is not known: use 'fp32'"):
            autocast(rules={torch.softmax: rule})

    @pytest.mark.parametrize("rule", ["FP32", "float32", FP32])
    def test_other_spellings_of_fp32(self, rule: Any) -> None:
        with autocast(rules={torch.mm: rule, "0": rule}, model=nn.Sequential(nn.Linear(2, 2))):
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is FP32

    def test_modules_know_fp32_alone(self) -> None:
        with pytest.raises(ValueError, match=r"rule '0': 'widest' is not known"):
            autocast(rules={"0": "widest"}, model=nn.Sequential(nn.Linear(2, 2)))

    def test_a_pattern_that_matches_no_module(self, gpt2: GPT2LMHeadModel) -> None:
        for pattern, nearest in {
            "lm_haed": "lm_head",
            "*.h.1.mlp.c_fcc": "transformer.h.1.mlp.c_fc",
            "h.0.attn.c_atn:addmm": "transformer.h.0.attn.c_attn",
        }.items():
            message = f"rule '{re.escape(pattern)}' matches no module of GPT2LMHeadModel; close to it are '{nearest}'$"
            with pytest.raises(ValueError, match=message):
                autocast(rules={pattern: "fp32"}, model=gpt2)
        with pytest.raises(
            ValueError, match=r"rules 'zz', 'lm_haed' match no module of .* close to it are '.*', 'lm_head'"
        ):
            autocast(rules={"zz": "fp32", "lm_haed": "fp32"}, model=gpt2)

    def test_names_without_a_model(self) -> None:
        with pytest.raises(ValueError, match=r"rules by module name \('lm_head'\) need the model .* model=\.\.\."):
            autocast(rules={"lm_head": "fp32"})

"""Forwards without grad: as those with grad, with caches of keys and values in 16 bits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import Using, linear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import (
    DynamicCache,
    StaticCache,
)

from hf_mp import MixedPrecision
from hf_mp.weights.attached_autocast import AttachedAutocast


def block(
    use: Callable[[Any, Tensor], Tensor] = lambda m, x: m.head(F.dropout(F.gelu(m.linear(m.norm(x))), 0.5, m.training)),
) -> Any:
    parts = {"linear": linear(256, 512), "head": nn.Linear(512, 256, bias=False)}
    return Using(use, norm=nn.LayerNorm(256), **parts)


def attached(model: nn.Module, precision: str = "bf16", **settings: object) -> MixedPrecision:
    runtime = MixedPrecision(precision, **settings)  # type: ignore[arg-type]
    runtime.attach(model.eval())
    return runtime


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-lean"])
def test_a_gradient_that_a_forward_without_grad_takes(precision: str) -> None:
    """Training at test time: a step inside of the forward."""

    def use(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = m.linear(x).square().mean()
            return torch.autograd.grad(inner, m.linear.weight)[0]

    model, x = block(use), torch.randn(3, 256)
    with torch.no_grad():
        expected = model(x)
        attached(model, precision)
        for _ in range(3):
            assert (model(x) - expected).norm() < 0.02 * expected.norm()


class InPart(nn.Module):
    """``model``, whose result under ``torch.no_grad()`` has a gradient all the same: a state that somebody keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.head(x)  # type: ignore[no-any-return]
        with torch.enable_grad():
            self.kept = self.model(x)
            self.kept = getattr(self.kept, "logits", self.kept)
        return self.kept  # type: ignore[no-any-return]


def of_no_table() -> nn.Module:
    use = lambda m, x: m.linear(m.norm(x)) * m.gain  # noqa: E731
    return Using(use, norm=nn.LayerNorm(16), linear=nn.Linear(16, 128), gain=nn.Parameter(torch.ones(128)))


@pytest.mark.parametrize("is_given_later", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-lean", "fp16-lean"])
@pytest.mark.parametrize("kind", ["no table", "experts"])
def test_a_part_that_switches_grad_on_has_its_gradients(kind: str, precision: str, is_given_later: bool) -> None:
    torch.manual_seed(0)
    if kind == "experts":
        model, x = InPart(small("Mixtral", num_key_value_heads=4, num_local_experts=2)()), torch.randint(128, (2, 4))
    else:
        model, x = InPart(of_no_table()), torch.randn(4, 16)

    def gradients(of: nn.Module) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        for _ in range(3):  # kernels may make the calls from the second on
            of.zero_grad()
            with torch.no_grad():
                of(x)
            result = of(of.kept) if is_given_later else of.kept
            result.float().square().sum().backward()
            found.append(
                {name: weight.grad.float() for name, weight in of.named_parameters() if weight.grad is not None}
            )
        return found

    expected = gradients(copy.deepcopy(model))[0]
    attached(model, precision)
    for found in gradients(model):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_a_mode_of_your_own_is_asked_all_the_same() -> None:
    asked = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            asked.append(func)
            return func(*args, **(kwargs or {}))

    model, x = block(), torch.randn(3, 256)
    attached(model)
    with torch.no_grad(), Asked():
        model(x)
    assert {"dropout", "layer_norm", "linear"} <= {getattr(func, "__name__", "") for func in asked}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_without_grad_is_as_with_grad(precision: str) -> None:
    model, x = block(), torch.randn(3, 256)
    attached(model, precision)
    model.train()
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def small(name: str, task: str = "ForCausalLM", **settings: Any) -> Callable[[], nn.Module]:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
             "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, name + task)(
            getattr(transformers, name + "Config")(**sizes | settings)
        )
        return model

    return make


_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32}  # fmt: skip
_BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
CACHED: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": small("GPT2", "LMHeadModel"),
    "Llama": small("Llama", num_key_value_heads=2),
    "Llama, eager": small("Llama", num_key_value_heads=2, attn_implementation="eager"),
    "Gemma 2": small("Gemma2", num_key_value_heads=2, head_dim=16, sliding_window=4),
    "DeepSeek-V3": small("DeepseekV3", **_MLA),
    "BART": small("Bart", "ForConditionalGeneration", **_BART),
}


def generated(model: nn.Module, **settings: Any) -> Any:
    return model.generate(  # type: ignore[operator]
        torch.arange(3, 9).repeat(2, 1), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **{"disable_compile": True, **settings},
    )  # fmt: skip


def layers_of(cache: Any) -> list[Any]:
    if not hasattr(cache, "self_attention_cache"):
        return list(cache.layers)
    return [*layers_of(cache.self_attention_cache), *layers_of(cache.cross_attention_cache)]


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-lean"])
@pytest.mark.parametrize("name", CACHED)
def test_a_cache_in_16_bits_gives_the_bits_of_one_in_fp32(
    name: str, precision: str, cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama's keys are rotated in FP32, and Transformers makes a static cache of their dtype for values as well."""
    model = CACHED[name]()
    runtime = attached(model, precision)
    found = generated(model, **cache)
    kept = {tensor.dtype for layer in layers_of(found.past_key_values) for tensor in (layer.keys, layer.values)}
    assert kept == {runtime.policy.compute}
    monkeypatch.setattr(AttachedAutocast, "lowers_attention", lambda self: False)
    expected = generated(model)  # a static cache in FP32 takes no values in 16 bits where a window slides
    assert torch.equal(found.sequences, expected.sequences)
    if not cache:  # attention over a static cache sums more zeros
        assert all(map(torch.equal, found.logits, expected.logits)) and len(found.logits) == 6


@pytest.mark.parametrize(
    "rule",
    [F.scaled_dot_product_attention, torch.matmul, "*.self_attn:scaled_dot_product_attention", "*.self_attn:matmul"],
)
def test_a_cache_stays_in_fp32_for_attention_in_fp32(rule: Any) -> None:
    model, ids = CACHED["Llama, eager" if "matmul" in str(rule) else "Llama"](), torch.arange(3, 9)[None]
    attached(model, rules={rule: "fp32"})
    assert generated(model).past_key_values.layers[0].keys.dtype is torch.float32
    assert torch.equal(generated(model).sequences, generated(model, cache_implementation="static").sequences)
    with torch.no_grad():
        found = model(ids, use_cache=True).logits
    assert torch.equal(found, model(ids, use_cache=True).logits)


def test_a_rule_that_comes_later_counts() -> None:
    model = CACHED["Llama"]()
    runtime = attached(model)
    for dtype in (torch.bfloat16, torch.float32):
        assert generated(model).past_key_values.layers[0].keys.dtype is dtype
        runtime.add_rules({"*.self_attn:scaled_dot_product_attention": "fp32"})


def test_flex_attention_has_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)  # it takes seconds
    model = small("Llama", attn_implementation="flex_attention")()
    attached(model)
    with torch.no_grad():
        cache = model(torch.arange(3, 9)[None], use_cache=True).past_key_values
    assert cache.layers[0].keys.dtype is torch.float32


def test_a_static_cache_that_was_made_in_fp32_takes_keys_in_16_bits() -> None:
    model, ids = CACHED["Llama"](), torch.arange(4)[None]
    attached(model)
    cache = StaticCache(config=model.config, max_cache_len=8)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        expected = model(ids, use_cache=True).logits
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        assert torch.equal(model(ids, **{name: cache}).logits, expected)
    assert cache.layers[0].keys.dtype is torch.float32


def test_rules_for_what_asks_in_python_hold_without_grad() -> None:
    model, x = Using(lambda m, x: F.silu(m.linear(x)), linear=linear(4, 4)), torch.randn(3, 4)
    attached(model, rules={F.silu: "fp32"})
    with torch.no_grad():
        assert torch.equal(model(x), F.silu(F.linear(x.bfloat16(), *map(Tensor.bfloat16, model.parameters())).float()))


def test_detached_models_and_other_forwards_leave_caches_alone() -> None:
    model, ids = CACHED["Llama"](), torch.arange(4)[None]
    runtime, one = attached(model), torch.ones(1, 1, 1, 1)
    assert model(ids, use_cache=True).past_key_values.layers[0].keys.dtype is torch.float32  # with grad
    assert DynamicCache().update(key_states=one, value_states=one, layer_idx=0)[0].dtype is torch.float32
    runtime.detach()
    with torch.no_grad():
        assert model(ids, use_cache=True).past_key_values.layers[0].keys.dtype is torch.float32


def test_a_model_that_scales_cached_keys_in_fp32_reads_them_rounded() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        keys = m.norm(m.key(x))[None, None]  # FP32
        return DynamicCache().update(keys, keys, 0)[0].float() * 3

    model, x = Using(use, key=linear(), norm=nn.LayerNorm(8)), torch.randn(4, 8)
    attached(model)
    with_grad = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), (with_grad / 3).bfloat16().float() * 3) and not torch.equal(model(x), with_grad)

"""Methods of Transformers and PEFT that compute new weights give a lean model the FP32 values of an ordinary one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from transformers import LlamaConfig, LlamaForCausalLM

import hf_mp
from hf_mp.weights.split_parameter import SplitParameter

every_lean = pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])


def small_llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **settings))


def with_adapters(kind: str) -> Any:
    configs: dict[str, peft.PeftConfig] = {
        "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False),
        "dora": peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=True),
        "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False),
        "ia3": peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[], init_ia3_weights=False),
        "trained head": peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False
        ),
    }  # fmt: skip
    return peft.get_peft_model(small_llama(), configs[kind])


def lean(model: Any, precision: str = "bf16-lean", **settings: Any) -> Any:
    hf_mp.prepare(model, SGD(model.parameters(), lr=0.0), precision, **settings)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    # Near 0, an FP16 working copy and its remainder have steps of 2**-39 (see hf_mp.kernels.split).
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-39)


@every_lean
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "ia3", "trained head"])
def test_merged_adapters(kind: str, precision: str) -> None:
    expected = with_adapters(kind)
    model = lean(copy.deepcopy(expected), precision)
    assert_same(values(model.merge_and_unload()), values(expected.merge_and_unload()))


def test_adapters_that_are_merged_and_unmerged() -> None:
    expected = with_adapters("lora")
    model = lean(copy.deepcopy(expected))
    for method in ("merge_adapter", "unmerge_adapter"):
        getattr(model, method)()
        getattr(expected, method)()
        assert_same(values(model), values(expected))
    assert all(isinstance(p, SplitParameter) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("combination", ["linear", "cat", "dare_linear", "svd"])
def test_weighted_adapters(combination: str) -> None:
    expected = with_adapters("lora")
    expected.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model = lean(copy.deepcopy(expected))
    for one in (model, expected):
        torch.manual_seed(0)
        one.add_weighted_adapter(["default", "other"], [0.3, 0.9], "sum", combination_type=combination, density=0.5)
    assert_same(values(model), values(expected))


@every_lean
@pytest.mark.parametrize("is_tied", [False, True])
def test_resized_embeddings(precision: str, is_tied: bool) -> None:
    expected: Any = small_llama(tie_word_embeddings=is_tied)
    model = lean(copy.deepcopy(expected), precision)
    for one in (model, expected):
        torch.manual_seed(0)
        one.resize_token_embeddings(70)
    assert_same(values(model), values(expected))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    ids = torch.arange(70)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad.shape == (70, 32)


def test_an_error_leaves_the_split_parameters() -> None:
    model = lean(with_adapters("lora"))
    before = values(model)
    with pytest.raises(ValueError, match="absent"):
        model.add_weighted_adapter(["default", "absent"], [1.0, 1.0], "sum")
    assert_same(values(model), before)
    assert all(isinstance(p, SplitParameter) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("leave", [hf_mp.detach, lambda model: pickle.loads(pickle.dumps(hf_mp.detach(model)))])
def test_a_detached_model_has_its_own_methods(leave: Callable[[Any], Any]) -> None:
    model = leave(lean(with_adapters("lora")))
    assert not any("merge_adapter" in vars(one) or "resize_token_embeddings" in vars(one) for one in model.modules())


def test_a_copy_has_methods_of_its_own() -> None:
    model = lean(with_adapters("lora"))
    copied, before = copy.deepcopy(model), values(model)
    copied.merge_adapter()
    assert_same(values(model), before)
    assert not torch.equal(values(copied)[name := next(n for n in before if "q_proj.base_layer" in n)], before[name])


def test_offloaded_weights_keep_their_shapes() -> None:
    model = lean(small_llama(), offload="optimizer")
    with pytest.raises(RuntimeError, match="before a weight is resized"):
        model.resize_token_embeddings(70)


def test_fp64_parameters_are_refused() -> None:
    model: Any = nn.Linear(2, 2).double()
    with pytest.raises(TypeError, match="is FP64"):
        lean(model)
    assert type(model.weight) is nn.Parameter

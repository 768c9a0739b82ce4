"""Mixtures of experts of five classes: gradients against FP64's, dtypes of their products, routers, adapters."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import covering
from mixtures import IMPLEMENTATIONS, KINDS, ROUTERS, config_of, make, token_ids
from tiny import Dispatched
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from transformers import MixtralForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4Router

import hf_mp
from hf_mp.models.routers import is_router

BF16 = torch.bfloat16

PRESETS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
# Rounding alone leaves 0.99997 in BF16. Where two experts are nearly as good for a token, 16 bits may choose the other
# one, which changes more than rounding does: in BF16, for one of 32 tokens here.
LEAST_COSINE = {torch.float16: 0.9995, torch.bfloat16: 0.99}


def gradient_of(model: Any, passes: int = 1) -> Tensor:
    ids = token_ids()
    for _ in range(passes):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
    return torch.cat([one.detach().double().flatten() for one in found])


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_fp64(kind: str, implementation: str, precision: str) -> None:
    expected = gradient_of(make(kind, "eager").double())
    model = make(kind, implementation)
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    found = gradient_of(model, passes=2)  # the first forward learns what the model does with its weights
    assert abs(found.norm() / expected.norm() - 1) < 0.01
    assert F.cosine_similarity(found, expected, 0) > LEAST_COSINE[runtime.policy.compute]


EXPERT_WIDTH = 56  # columns or rows of the weights of experts, and of nothing else


def dtypes_of(products: Dispatched) -> set[torch.dtype]:
    """Of the operands of what was dispatched."""
    return {arg.dtype for _, args in products.calls for arg in args[:2]}


def of_experts() -> Dispatched:
    return Dispatched("_grouped_mm", "bmm", "mm", only=lambda args: EXPERT_WIDTH in args[0].shape[-2:])


def of_routers() -> Dispatched:
    return Dispatched("mm", "addmm", only=lambda args: args[-1].shape[-1] == 4)  # experts


@pytest.mark.parametrize(
    ("implementation", "stock"), [("grouped_mm", torch.float32), ("batched_mm", BF16), ("eager", BF16)]
)
def test_dtypes_of_experts_by_implementation(implementation: str, stock: torch.dtype) -> None:
    """The table of docs/experts.md: of torch.autocast, grouped_mm is FP32 (pytorch issue 174763)."""
    model = MixtralForCausalLM(config_of("Mixtral", intermediate_size=EXPERT_WIDTH))
    model.set_experts_implementation(implementation)
    ids = token_ids()
    for autocast, expected in ((torch.autocast("cpu", BF16), stock), (hf_mp.autocast(BF16), BF16)):
        with autocast, of_experts() as found:
            model(input_ids=ids)
        assert dtypes_of(found) == {expected}
    hf_mp.MixedPrecision("bf16").attach(model)
    for _ in range(2):
        with of_experts() as found:
            model(input_ids=ids).logits.sum().backward()
        assert dtypes_of(found) == {BF16}


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_without_a_token_has_a_gradient_of_0_and_no_overflow(
    kind: str, implementation: str, precision: str
) -> None:
    model = make(kind, implementation)
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3), precision)
    (name, weight), *_ = [(n, p) for n, p in model.named_parameters() if n.endswith("down_proj") and p.dim() == 3]
    ids = torch.full((1, 4), 5)  # one token, four times: two experts at most get them in a layer without positions
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradient = weight.grad
        assert gradient is not None and gradient.isfinite().all(), name
        of_experts = gradient.flatten(1).count_nonzero(1)
        assert 0 in of_experts and of_experts.any()
        optimizer.step()
        assert not optimizer.step_was_skipped


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
@pytest.mark.parametrize("kind", KINDS)
def test_routers_run_in_fp32_unless_a_rule_names_them(kind: str, precision: str) -> None:
    ids = token_ids()
    for rules, expected in ((None, torch.float32), ({ROUTERS[kind]: "lower_precision"}, BF16)):
        model = make(kind, "grouped_mm")
        hf_mp.MixedPrecision(precision, rules=rules).attach(model)
        for _ in range(2):
            with of_routers() as found:
                model(input_ids=ids).logits.sum().backward()
            assert dtypes_of(found) == {expected}
        hf_mp.detach(model)
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("llama4", "Llama4Router", True),
        ("switch_transformers", "SwitchTransformersTop1Router", True),
        ("jetmoe", "JetMoeTopKGating", True),
        ("hunyuan_v1_moe", "HunYuanMoEV1Gate", True),
        ("d_fine", "DFineGate", False),
        ("mixtral", "MixtralRMSNorm", False),
    ],
)
def test_routers_are_known_by_their_class(module: str, name: str, expected: bool) -> None:
    home = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    assert is_router(getattr(home, name)) is expected


def test_a_router_that_is_a_linear_layer_runs_in_fp32() -> None:
    sizes = {"hidden_size": 16, "num_local_experts": 4, "num_experts_per_tok": 1}
    model = nn.Sequential(nn.Linear(16, 16), Llama4Router(SimpleNamespace(**sizes)))
    hf_mp.MixedPrecision("bf16").attach(model)
    with of_routers() as found:
        model(torch.randn(8, 16))[1].sum().backward()
    assert dtypes_of(found) == {torch.float32}


# A router with a bias; compiling is slow.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k == "GptOss" else pytest.mark.exhaustive) for k in KINDS],
)
def test_a_compiled_model_is_one_graph_that_routes_alike(kind: str) -> None:
    torch._dynamo.reset()
    ids = token_ids()
    model = make(kind, "batched_mm")  # without a product that stops the compiler on a CPU
    del model.model.layers[:-1]  # the last has experts
    hf_mp.MixedPrecision("bf16").attach(model)
    model(input_ids=ids)
    expected = model(input_ids=ids).logits
    backend = CompileCounterWithBackend("aot_eager")
    found = torch.compile(model, backend=backend)(input_ids=ids).logits
    assert backend.frame_count == 1
    # Compiled code rounds elsewhere; a token that got other experts would be as far off as tokens are from each other.
    assert (found - expected).abs().max() < 0.25 * expected.std()


# LoRA on stacked experts (PEFT's target_parameters), whose sum with the weight a parametrization makes

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapted(model: Any) -> Any:
    """``model`` with adapters of all its experts, whose both factors have gradients."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=list(EXPERTS)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


@pytest.mark.parametrize("base", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_experts_have_the_gradients_of_fp64(kind: str, base: torch.dtype) -> None:
    model = adapted(make(kind).to(base))
    reference = copy.deepcopy(model).double()
    reference.get_base_model().set_experts_implementation("eager")  # torch has no grouped product in FP64
    expected = gradient_of(reference)
    for precision in ("fp16", "fp16-lean"):
        trained = copy.deepcopy(model)
        hf_mp.MixedPrecision(precision).attach(trained)
        found = gradient_of(trained, passes=2)
        assert abs(found.norm() / expected.norm() - 1) < 0.01
        assert F.cosine_similarity(found, expected, 0) > LEAST_COSINE[torch.float16]


# bitsandbytes takes no DeepSeek-V3 of this size
@pytest.mark.parametrize(
    ("kind", "quantized", "precision"),
    covering(["Mixtral", "GptOss", "Qwen3Moe"], ["int8", "nf4"], ["bf16", "bf16-lean"], together=1),
)
def test_qlora_trains_beside_experts_in_16_bits(tmp_path: Path, kind: str, quantized: str, precision: str) -> None:
    pytest.importorskip("bitsandbytes")
    make(kind).save_pretrained(tmp_path)
    model = adapted(hf_mp.load(tmp_path, quantized))
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if p.dim() == 3 and not p.requires_grad}
    assert len(frozen) == 4
    assert {weight.dtype for weight in frozen.values()} == {torch.float16}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(trained, 3e-2), precision)
    losses, ids = [], token_ids()
    for _ in range(8):
        with Dispatched("_grouped_mm") as found:
            losses.append(model(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
        assert dtypes_of(found) == {BF16}
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.25
    assert all((now - start).norm() > 0.05 * start.norm() for now, start in zip(trained, before, strict=True))
    assert all(torch.equal(parameter, frozen[n]) for n, parameter in model.named_parameters() if n in frozen)

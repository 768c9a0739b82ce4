"""Autocast by kernels of torch's dispatcher, with the results of the mode."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import covering
from mixtures import make as make_mixture
from native_casts import kernels as kernels
from tiny import Using, copies, linear, same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_mp
from hf_mp.casting import dispatcher_kernels
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.attached_autocast import AttachedAutocast

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
IDS = torch.arange(24).reshape(2, 12)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "BERT": (
        lambda: BertForSequenceClassification(BertConfig(num_attention_heads=2, intermediate_size=64, **TINY)),
        {"input_ids": IDS, "labels": torch.tensor([0, 1])},
    ),
    "Llama": (
        lambda: LlamaForCausalLM(LlamaConfig(num_attention_heads=2, intermediate_size=64, **TINY)),
        {"input_ids": IDS, "labels": IDS},
    ),
    "T5": (
        lambda: T5ForConditionalGeneration(
            T5Config(d_model=32, d_kv=8, num_layers=2, num_heads=2, d_ff=64, vocab_size=64, decoder_start_token_id=0)
        ),
        {"input_ids": IDS, "labels": IDS},
    ),
    "Mamba": (
        lambda: MambaForCausalLM(MambaConfig(state_size=4, **TINY)),
        {"input_ids": IDS, "labels": IDS},
    ),
    "Mixtral": (lambda: make_mixture("Mixtral"), {"input_ids": IDS, "labels": IDS}),
    "ConvNext": (
        lambda: ConvNextForImageClassification(ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
        {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])},
    ),
}


@pytest.fixture(autouse=True)
def _nothing_is_compiled(kernels: str) -> None:
    torch._dynamo.reset()


def attached(use: Callable[..., Any], precision: str = "bf16", **parts: Any) -> Any:
    model = MixedPrecision(precision).attach(Using(use, **({"layer": linear()} | parts)))
    model(X)  # intercepted
    return model


def train(make: Callable[[], nn.Module], inputs: dict[str, Tensor], precision: str = "bf16") -> list[Tensor]:
    torch.manual_seed(0)
    model = make().train()
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(**inputs).loss
        loss.backward()
        found += [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        found, _ = copies(found), optimizer.zero_grad()
    with torch.no_grad():
        found += [model.eval()(**inputs).loss, model(**inputs).loss]
    return found


@pytest.mark.parametrize(
    ("kind", "precision"), covering(MODELS, ["bf16", "bf16-lean", "fp16", "fp16-lean"], together=1)
)
def test_training_and_reading_are_those_of_the_mode(kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    enter = dispatcher_kernels.kernels_enabled
    monkeypatch.setattr("hf_mp.step.forward.kernels_enabled", lambda forward: entered.append(forward) or enter(forward))
    found = train(*MODELS[kind], precision)
    assert len(entered) == 5
    monkeypatch.setattr(AttachedAutocast, "may_be_dispatched", lambda self: False)
    assert same(found, train(*MODELS[kind], precision))


def test_a_known_forward_asks_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached(lambda m, x: F.softmax(m.layer(x), -1))
    monkeypatch.setattr(AttachedAutocast, "__torch_function__", None)
    assert model(X).dtype is torch.float32
    assert torch._C._len_torch_function_stack() == 0


OPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "lower precision": lambda m, x: x @ x.t(),
    "fp32": lambda m, x: F.layer_norm(m.layer(x), (8,)),
    "fp32 output": lambda m, x: m.layer(x).log_softmax(-1),
    "widest type": lambda m, x: torch.addcmul(m.layer(x), x, x),
    "a loss": lambda m, x: F.mse_loss(m.layer(x), x),
    "a loss of rows": lambda m, x: F.cross_entropy(m.layer(x), torch.arange(4)),
    "a norm": lambda m, x: m.layer(x).norm(dim=-1),
    "in no table": lambda m, x: m.layer(x) + 1.0,
    "C++ of several ops": lambda m, x: torch.cov(x),
    "a pseudoinverse": lambda m, x: torch.linalg.pinv(m.layer.bias[:, None].float()),
    "a sparse matrix": lambda m, x: torch.sparse.mm(torch.eye(4).to_sparse(), m.layer(x).float()),
    "attention": lambda m, x: F.scaled_dot_product_attention(*[m.layer(x).reshape(1, 1, 4, 8)] * 3),
    "torch's disabled region": lambda m, x: _in(torch.autocast("cpu", enabled=False), lambda: x @ x.t()),
    "our disabled region": lambda m, x: _in(hf_mp.autocast(enabled=False), lambda: x @ x.t()),
    "nested in FP16": lambda m, x: _in(hf_mp.autocast(torch.float16), lambda: x @ x.t()),
    "a disabled region with 16-bit weights": lambda m, x: _in(hf_mp.autocast(enabled=False), lambda: m.layer(x)),
    "a checkpoint": lambda m, x: checkpoint(m.layer, x, use_reentrant=False),
    "a gradient inside": lambda m, x: torch.autograd.grad((y := x.detach().requires_grad_()) @ y.t(), y, X @ X.t())[0],
}


def _in(context: Any, call: Callable[[], Tensor]) -> Tensor:
    with context:
        return call()


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_computed_as_by_the_mode(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def use(model: Any, x: Tensor) -> Tensor:
        out = OPS[op](model, x)
        seen.append(out.dtype)
        return out

    model = attached(use)
    results = [model(X), model(X)]
    monkeypatch.setattr(AttachedAutocast, "may_be_dispatched", lambda self: False)
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], model(X))
    assert len(set(seen)) == 1


def test_nothing_stays_after_an_error_nor_holds_elsewhere() -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        def elsewhere() -> None:
            found.append(F.linear(x, x).dtype)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        if model.fails:
            raise KeyError("a bug of the model")
        return model.layer(x)

    found: list[torch.dtype] = []
    model = attached(use, fails=False)
    model.fails = True
    with pytest.raises(KeyError, match="a bug of the model"):
        model(X)
    assert found == [torch.float32] * 2
    assert F.linear(X, X).dtype is torch.float32


def test_what_a_forward_leaves_switched_on_stays_on() -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        torch.set_autocast_enabled("cpu", model.switches_on)
        return model.layer(x)

    model = attached(use, switches_on=False)
    model.switches_on = True
    try:
        model(X)
        assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_autocast_enabled("cpu", False)


LATE_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "data": lambda weight: weight.data.mul_(0.5),
    "set data": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("write", LATE_WRITES)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_write_in_a_later_forward_is_seen_at_once(precision: str, write: str, is_checkpointed: bool) -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.write(model.layer.weight)
        return checkpoint(model.layer, x, use_reentrant=False) if is_checkpointed else model.layer(x)

    model = attached(use, precision, write=lambda weight: None, layer=linear(bias=False))
    before, expected = model.layer.weight.clone(), model(X).detach()
    for factor in (0.5, 0.25):
        model.write = LATE_WRITES[write]
        found = model(X)
        assert torch.equal(model.layer.weight, before * factor)
        assert torch.equal(found, expected * factor)
        model.write = lambda weight: None
        assert torch.equal(model(X), found)


def test_a_function_of_torchscript_computes_as_the_function_does() -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).sigmoid() * 2

    def gradients(function: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = attached(lambda m, x: function(m.layer(x).float(), m.weight), weight=nn.Parameter(torch.ones(8, 8)))
        for _ in range(5):  # TorchScript differentiates by its own formulas from the third call on
            model.zero_grad()
            model(X).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(torch.jit.script(product)), gradients(product)))


def test_a_function_that_is_compiled_late_has_the_mode_from_then_on() -> None:
    compiled = torch.compile(lambda x: x @ x.t(), backend="eager")
    model = attached(lambda m, x: compiled(m.layer(x).float()) if m.compiles else m.layer(x), compiles=False)
    model.compiles = True
    model(X)
    assert compiled(X).dtype is torch.float32
    assert torch.equal(model(X), model(X))
    assert compiled(X).dtype is torch.float32


def test_a_torch_without_the_key_warns_once_and_keeps_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_kernels, "_set_excluded", None)
    monkeypatch.setattr(dispatcher_kernels, "_key", functools.cache(dispatcher_kernels._key.__wrapped__))
    with pytest.warns(UserWarning, match="takes no kernels for the key AutocastIPU"):
        model = attached(lambda m, x: m.layer(x))
    assert model(X).dtype is torch.float32

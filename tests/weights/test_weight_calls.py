"""What a forward does to its own weights, other than products: writes, replacements, other threads, FP32 kernels."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from tiny import Using, gradients_of, linear, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from hf_mp.casting.active import state
from hf_mp.step.mixed_precision import MixedPrecision

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda weight: weight.clamp_(-0.1, 0.1),
    "an item": lambda weight: weight.__setitem__(0, 0.7),
    "foreach": lambda weight: torch._foreach_mul_([weight], 1.5),
    "data": lambda weight: weight.data.mul_(0.5),
}
both = pytest.mark.parametrize("precision", ["bf16", "fp16"])


def attached(use: Callable[..., Any], precision: str = "bf16", **parts: Any) -> Any:
    return MixedPrecision(precision).attach(Using(use, **({"layer": linear()} | parts)))


@both
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["frozen", "no grad", "trained"])
def test_a_write_reaches_the_parameter_and_its_copy(precision: str, write: str, kind: str) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.write(m.layer.weight)
        return m.head(m.layer(x))

    plain, model = (Using(use, layer=linear(), head=linear(), write=lambda weight: None) for _ in range(2))
    model.layer.requires_grad_(kind != "frozen")
    MixedPrecision(precision).attach(model)
    plain.write = model.write = WRITES[write]
    with torch.set_grad_enabled(kind != "no grad"):
        for _ in range(2):
            expected, found = plain(X), model(X)
    assert torch.equal(model.layer.weight, plain.layer.weight)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if kind != "no grad":
        found.sum().backward()
        assert (model.layer.weight.grad is None) == (kind == "frozen")
    assert type(vars(model.layer)["_parameters"]["weight"]).__name__ == "DataTrackedParameter"


@pytest.mark.parametrize("grad", [True, False])
def test_what_the_forward_puts_in_the_place_of_a_weight_stays(grad: bool) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        m.layer.weight = nn.Parameter(torch.zeros(8, 8))
        return m.layer(x)

    model = attached(use)
    with torch.set_grad_enabled(grad):
        model(X)
    assert not model.layer.weight.any() and isinstance(model.layer.weight, nn.Parameter)


@both
@pytest.mark.parametrize("grad", [True, False])
def test_a_functional_call_inside_of_a_forward_takes_the_weights_that_it_is_given(precision: str, grad: bool) -> None:
    zeros = {"weight": torch.zeros(8, 8), "bias": torch.zeros(8)}
    model = attached(lambda m, x: torch.func.functional_call(m.layer, zeros, (x,)), precision)
    with torch.set_grad_enabled(grad):
        assert not any(model(X).any() for _ in range(2))
    assert model.layer.weight.any()


@both
def test_threads_share_a_model_only_to_read_it(precision: str) -> None:
    began, go = threading.Event(), threading.Event()

    def use(m: Any, x: Tensor) -> Tensor:
        if threading.current_thread().name == "reader":
            began.set()
            assert go.wait(30)
            assert state.forward.began_without_grad  # another thread's forward has ended meanwhile
        return m.layer(x)

    model = attached(use, precision)
    model(X).sum().backward()
    read: list[Tensor] = []

    def reads() -> None:
        with torch.no_grad():
            read.append(model(X))

    reader = threading.Thread(target=reads, name="reader")
    reader.start()
    assert began.wait(30)
    with pytest.raises(RuntimeError, match=r"another thread ran one of the same.*copy\.deepcopy of the model"):
        model(X)
    with torch.no_grad():
        expected = model(X)
    go.set()
    reader.join(30)
    assert torch.equal(read[0], expected)
    model(X).sum().backward()


@both
@pytest.mark.parametrize("trained_first", [True, False])
def test_torchs_encoder_leaves_its_one_kernel(precision: str, trained_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = Using(
        lambda m, x, padding=None: m.encoder(x, src_key_padding_mask=padding), encoder=nn.TransformerEncoder(layer, 2)
    )
    x, padding = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        expected = [model.eval()(x), model(x, padding)[~padding]]
    MixedPrecision(precision, tables="cpu").attach(model)
    if trained_first:
        model.train()(x).sum().backward()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close([model(x), model(x, padding)[~padding]], expected, rtol=3e-2, atol=3e-2)


def test_an_evaluation_or_a_failure_that_comes_first_decides_nothing() -> None:
    def use(m: Any, x: Tensor | None) -> Tensor:
        y = m.layer(X).square().mean()
        if x is None:
            raise ValueError
        return y + m.layer.weight.double().norm() if m.training else y

    values = []
    for first in ("training", "evaluation", "evaluation without grad", "failure"):
        model = attached(use)
        if first.startswith("evaluation"):
            with torch.set_grad_enabled(first == "evaluation"):
                model.eval()(X)
        elif first == "failure":
            with pytest.raises(ValueError):
                model(None)
        model.train()
        values += [model(X).item(), model(X).item()]
    assert len(set(values)) == 1


@both
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("op", [lambda w: (w * 2).sum(), lambda w: torch.cat([w, w * 3]).square().mean(), torch.norm])
def test_gradient_checkpointing_changes_no_bit_of_the_first_step(
    precision: str, use_reentrant: bool, op: Callable[[Tensor], Tensor]
) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.layer(x) * op(m.layer.weight)

    gradients = []
    for use in (body, lambda m, x: checkpoint(body, m, x, use_reentrant=use_reentrant)):
        model = attached(use, precision)
        gradients += [gradients_of(model, lambda: model(X.clone().requires_grad_()).mean()) for _ in range(2)]  # noqa: B023
    assert same(gradients[0], gradients[2]) and same(gradients[1], gradients[3])


@both
def test_the_dtype_of_a_weight_is_fp32_in_each_forward(precision: str) -> None:
    dtypes: list[torch.dtype] = []
    model = attached(
        lambda m, x: (dtypes.append(m.conv.weight.dtype), m.conv(x[..., None]))[1], precision, conv=nn.Conv1d(8, 8, 1)
    )
    for _ in range(3):
        model(X).sum().backward()
    assert dtypes == [torch.float32] * 3 and not any(model.forward.runtime.weights._intercepts_by_key.values())


@both
@pytest.mark.parametrize("kind", ["T5", "Mamba"])
def test_a_model_of_transformers_that_casts_by_the_dtype_of_a_weight_is_not_intercepted(
    kind: str, precision: str
) -> None:
    ids = torch.arange(3, 19).reshape(2, 8)
    tokens = {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1}
    model: Any = {
        "T5": lambda: T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **tokens)
        ),
        "Mamba": lambda: MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **tokens)),
    }[kind]()
    MixedPrecision(precision).attach(model)
    model.eval()
    found = [gradients_of(model, lambda: model(input_ids=ids, labels=ids).loss) for _ in range(2)]
    assert same(*found)  # of a forward that is intercepted, and of one that is not
    assert not any(model.forward.runtime.weights._intercepts_by_key.values())


@both
def test_dora_takes_the_norm_of_its_weight_in_fp32(precision: str) -> None:
    norms: list[Tensor] = []
    config = peft.LoraConfig(target_modules=["layer"], use_dora=True, r=2)
    model: Any = peft.get_peft_model(Using(lambda m, x: m.layer(x), layer=linear()), config)
    dora = model.base_model.model.layer.lora_magnitude_vector["default"]
    norm_of = dora.get_weight_norm
    dora.get_weight_norm = lambda *args, **kwargs: (norms.append(norm_of(*args, **kwargs)), norms[-1])[1]
    MixedPrecision(precision).attach(model)
    for _ in range(2):
        model(X)
    assert len(norms) == 2 and all(torch.equal(norm, dora.weight) for norm in norms)


@both
def test_a_model_that_casts_before_a_norm_is_told_fp32_each_time(precision: str) -> None:
    """As Gemma 4's embedder does, whose family is not among those that cast for a product alone."""
    name = "transformers.models.gemma4_unified.modeling_gemma4_unified"
    source = "use = lambda m, x: m.layer(norm((x * 1e5).to(m.layer.weight.dtype), (8,)))"
    exec(source, namespace := {"__name__": name, "norm": nn.functional.layer_norm})
    model = attached(namespace["use"], precision)
    first, *others = [model(X) for _ in range(3)]
    assert first.isfinite().all() and all(torch.equal(first, one) for one in others)


def test_a_part_that_accelerate_offloads_runs() -> None:
    from accelerate import cpu_offload

    model = nn.Sequential(linear().requires_grad_(False), linear())
    expected = model(X).detach()
    cpu_offload(model[0], execution_device="cpu")
    MixedPrecision("bf16").attach(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(X), expected, rtol=2e-2, atol=2e-2)


@both
@pytest.mark.parametrize("grad", [True, False])
def test_a_copy_made_inside_of_a_forward_holds_the_fp32_weights(precision: str, grad: bool) -> None:
    copied: list[Any] = []
    model = attached(
        lambda m, x: (copied.append((copy.deepcopy(m.layer), m.layer.state_dict())), m.layer(x))[1], precision
    )
    with torch.set_grad_enabled(grad):
        model(X)
        model(X)
    for layer, saved in copied:
        assert isinstance(layer.weight, nn.Parameter) and torch.equal(layer.weight, model.layer.weight)
        assert torch.equal(saved["weight"], model.layer.weight)


@both
@pytest.mark.usefixtures("nothing_is_small")
def test_a_later_forward_may_be_the_first_to_differentiate_a_weight(precision: str) -> None:
    class Penalized(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x).square().sum()
            return torch.autograd.grad(y, self.weight, create_graph=True)[0].sum() if x.sum() > 0 else y

    torch.manual_seed(0)
    model = Penalized(2, 2)
    expected = gradients_of(model, lambda: model(torch.ones(1, 2)))
    MixedPrecision(precision).attach(model)
    model(torch.zeros(1, 2)).backward()
    model.zero_grad()
    torch.testing.assert_close(gradients_of(model, lambda: model(torch.ones(1, 2))), expected, rtol=2e-2, atol=1e-3)

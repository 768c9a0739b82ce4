"""What a forward does to its own weights, other than products: writes, replacements, other threads, FP32 kernels."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hf_mp
from hf_mp.step.mixed_precision import MixedPrecision

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_.add_": lambda weight: weight.mul_(0.5).add_(0.25),
    "clamp_": lambda weight: weight.clamp_(-0.1, 0.1),
    "copy_": lambda weight: weight.copy_(torch.full((8, 8), 0.3)),
    "an item": lambda weight: weight.__setitem__(0, 0.7),
    "*=": lambda weight: weight.__imul__(2.0),
    "foreach": lambda weight: torch._foreach_mul_([weight], 1.5),
    "init": nn.init.zeros_,
    "data": lambda weight: weight.data.mul_(0.5),
}


class Writer(nn.Module):
    """Writes the weight of a layer in its forward when it is told to; the layer's result, before and after."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.write: Callable[[Tensor], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self.layer.weight)
        return self.head(self.layer(x))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["frozen", "no grad", "trained"])
def test_a_write_reaches_the_parameter_and_its_copy(precision: str, write: str, kind: str) -> None:
    plain, model = Writer(), Writer()
    model.layer.requires_grad_(kind != "frozen")
    MixedPrecision(precision).attach(model)
    model(X)  # learned: the slot holds the working copy from the beginning of the next forward on
    plain.write = model.write = WRITES[write]
    if (kind, precision, write) == ("trained", "fp16", "data"):
        pytest.skip("an alias behind a border, which torch refuses to write to")
    with torch.set_grad_enabled(kind != "no grad"):
        expected, found = plain(X), model(X)
    assert torch.equal(model.layer.weight, plain.layer.weight)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    if kind != "no grad":
        found.sum().backward()
        assert (model.layer.weight.grad is None) == (kind == "frozen")
    assert type(vars(model.layer)["_parameters"]["weight"]).__name__ == "WatchedParameter"


def test_a_momentum_encoder_follows_after_an_evaluation_came_first() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
            self.key.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                        key.mul_(0.999).add_(query, alpha=0.001)
            return (self.query(x) * self.key(x)).mean()

    keys = []
    for precision in ("fp32", "fp16"):
        model = Momentum()
        model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.query.parameters(), 0.0), precision)
        model.eval()(X)
        model.train()
        for _ in range(5):
            model(X).backward()
            optimizer.step()
        keys.append(model.key.weight.clone())
    assert torch.equal(*keys)


def test_what_the_forward_puts_in_the_place_of_a_weight_stays() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight = nn.Parameter(torch.zeros(8, 8))
            return self.layer(x)

    for grad in (True, False):
        model = MixedPrecision("bf16").attach(Replacing())
        with torch.set_grad_enabled(grad):
            model(X)
        assert not model.layer.weight.any() and isinstance(model.layer.weight, nn.Parameter)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_functional_call_inside_of_a_forward_takes_the_weights_that_it_is_given(precision: str, grad: bool) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            zeros = {"weight": torch.zeros(8, 8), "bias": torch.zeros(8)}
            return torch.func.functional_call(self.layer, zeros, (x,))

    model = MixedPrecision(precision).attach(Functional())
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            assert not model(X).any()
    assert model.layer.weight.any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_threads_share_a_model_only_to_read_it(precision: str) -> None:
    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.began, self.go = threading.Event(), threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread().name == "reader":
                self.began.set()
                assert self.go.wait(30)
            return self.layer(x)

    model = MixedPrecision(precision).attach(Waiting())
    model(X).sum().backward()
    read: list[Tensor] = []

    def reads() -> None:
        with torch.no_grad():
            read.append(model(X))

    reader = threading.Thread(target=reads, name="reader")
    reader.start()
    assert model.began.wait(30)
    with pytest.raises(RuntimeError, match=r"another thread ran one of the same.*copy\.deepcopy of the model"):
        model(X)
    with torch.no_grad():
        expected = model(X)
    model.go.set()
    reader.join(30)
    assert torch.equal(read[0], expected)
    model(X).sum().backward()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("trained_first", [True, False])
def test_torchs_encoder_in_one_kernel_has_its_weights_in_fp32(precision: str, trained_first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    model, x, padding = Model(), torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        expected = [model.eval()(x), model(x, padding)]
    MixedPrecision(precision, tables="cpu").attach(model)
    if trained_first:
        model.train()(x).sum().backward()
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close([model(x), model(x, padding)], expected, rtol=3e-2, atol=3e-2)


def test_an_evaluation_or_a_failure_that_comes_first_decides_nothing() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor | None) -> Tensor:
            y = self.layer(X).square().mean()
            if x is None:
                raise ValueError
            return y + self.layer.weight.double().norm() if self.training else y

    values = []
    for first in ("training", "evaluation", "evaluation without grad", "failure"):
        model = MixedPrecision("bf16").attach(Model())
        if first.startswith("evaluation"):
            with torch.set_grad_enabled(first == "evaluation"):
                model.eval()(X)
        elif first == "failure":
            with pytest.raises(ValueError):
                model(None)
        model.train()
        values += [model(X).item(), model(X).item()]
    assert len(set(values)) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("op", [lambda w: (w * 2).sum(), lambda w: torch.cat([w, w * 3]).square().mean(), torch.norm])
def test_gradient_checkpointing_changes_no_bit_of_the_first_step(
    precision: str, use_reentrant: bool, op: Callable[[Tensor], Tensor]
) -> None:
    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.checkpointed = nn.Linear(8, 8), checkpointed

        def body(self, x: Tensor) -> Tensor:
            return self.layer(x) * op(self.layer.weight)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=use_reentrant) if self.checkpointed else self.body(x)

    gradients = []
    for checkpointed in (False, True):
        model = MixedPrecision(precision).attach(Model(checkpointed))
        for _ in range(2):
            model.zero_grad()
            model(X.clone().requires_grad_()).mean().backward()
            gradients.append(model.layer.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3])


def test_a_weight_that_a_reading_forward_thaws_is_trained() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.layer.requires_grad_(True)
            return self.head(self.layer(x)).mean()

    model = MixedPrecision("bf16").attach(Model())
    model(X)
    with torch.no_grad():
        model(X)
    model(X).backward()
    assert model.layer.weight.grad.any()


def test_doras_norm_is_that_of_fp32_weights() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.dora import DoraLinearLayer

    class Norms(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.dtypes: set[torch.dtype] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "linalg_vector_norm":
                self.dtypes.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    settings = LoraConfig(target_modules=["0"], use_dora=True, r=4, init_lora_weights=False)
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), settings)
    assert any(isinstance(module, DoraLinearLayer) for module in model.modules())
    MixedPrecision("bf16").attach(model)
    with Norms() as norms:
        for _ in range(3):
            model(X).sum().backward()
    assert norms.dtypes == {torch.float32}


def test_a_weight_whose_dtype_a_forward_reads_is_the_same_from_the_first_forward_on() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(torch.randn(8, 8))
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Tensor:
            self.dtypes.append(self.raw.dtype)
            return torch.einsum("bi,ij->bj", x, self.raw)

    model = MixedPrecision("bf16").attach(Reading())
    for _ in range(3):
        model(X).sum().backward()
    assert model.dtypes == [torch.float32] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_that_was_traced_runs() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(8, 8), X), nn.Linear(8, 8))
    MixedPrecision("bf16").attach(model)
    for _ in range(2):
        model(X).sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_a_part_that_accelerate_offloads_runs() -> None:
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = model(X).detach()
    model[0].requires_grad_(False)
    cpu_offload(model[0], execution_device="cpu")
    MixedPrecision("bf16").attach(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(X), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_copy_made_inside_of_a_forward_holds_16_bits(precision: str) -> None:
    """A limit: a module holds the working copies while a forward runs."""

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.copied: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.copied.append(copy.deepcopy(self.layer))
            return self.layer(x)

    model = MixedPrecision(precision).attach(Copying())
    with torch.no_grad():
        model(X)
        model(X)
    assert model.copied[-1].weight.dtype in (torch.bfloat16, torch.float16)
    assert model.state_dict()["layer.weight"].dtype is torch.float32

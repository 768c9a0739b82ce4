"""Custom autograd functions that recompute a part of an attached model in their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import linear
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import ReformerConfig, ReformerModelWithLMHead

import hf_mp
from hf_mp.casting.autocast_stack import state
from hf_mp.casting.torch_patches import Patches
from hf_mp.step.custom_backward import BACKWARD_PATCHES

PRECISIONS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]
SCALED = ["fp16", "fp16-lean"]
Block = Callable[[Tensor], Tensor]
Applied = Callable[..., Tensor]


class Saving(Function):
    """Keeps its input alone, and recomputes ``block`` in the backward."""

    @staticmethod
    def forward(ctx: Any, block: Block, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.weights = block, weights
        ctx.save_for_backward(x.detach())
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = recomputed(ctx)
        torch.autograd.backward(y, gradient.to(y.dtype))
        return None, x.grad


def recomputed(ctx: Any) -> tuple[Tensor, Tensor]:
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        return x, ctx.block(x)


def saving(backward: Callable[[Any, Tensor], Any]) -> Applied:
    """:class:`Saving` with another ``backward``."""
    applied: Applied = type("Custom", (Saving,), {"backward": staticmethod(backward)}).apply  # type: ignore[attr-defined]
    return applied


def by_grad(ctx: Any, gradient: Tensor) -> Any:
    """Returns the gradients of the weights that the function was given."""
    x, y = recomputed(ctx)
    return None, *torch.autograd.grad(y, [x, *ctx.weights], gradient, allow_unused=True)


def by_a_product(ctx: Any, gradient: Tensor) -> Any:
    """The gradient is a factor of the loss, whose own gradient is 1."""
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        (ctx.block(x) * gradient).sum().backward()
    return None, x.grad


def after_other_ops(ctx: Any, gradient: Tensor) -> Any:
    parts = torch.chunk(gradient.float() * 1.0, 2, dim=0)
    buffer = torch.empty(gradient.shape)
    buffer[:] = torch.cat(parts)
    x, y = recomputed(ctx)
    torch.autograd.backward([y], [buffer.to(y.dtype)])
    return None, x.grad


def without_with(ctx: Any, gradient: Tensor) -> Any:
    x = ctx.saved_tensors[0].detach().requires_grad_()
    torch.set_grad_enabled(True)
    torch.autograd.backward(ctx.block(x), gradient)
    return None, x.grad


class TorchAmp(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, block: Block, x: Tensor) -> Any:
        return Saving.forward(ctx, block, x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Saving.backward(ctx, gradient)


class HfMp(Function):
    @staticmethod
    @hf_mp.custom_fwd
    def forward(ctx: Any, block: Block, x: Tensor) -> Any:
        return Saving.forward(ctx, block, x)

    @staticmethod
    @hf_mp.custom_bwd
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Saving.backward(ctx, gradient)


class RestoringAutocast(Function):
    """As checkpoints did before torch had one: the state of torch.autocast is kept, and entered in the backward."""

    @staticmethod
    def forward(ctx: Any, block: Block, x: Tensor) -> Any:
        ctx.autocast = {"enabled": torch.is_autocast_enabled("cpu"), "dtype": torch.get_autocast_dtype("cpu")}
        return Saving.forward(ctx, block, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", **ctx.autocast):
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class RestoringFirst(RestoringAutocast):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.autocast("cpu", **ctx.autocast), torch.set_grad_enabled(True):
            y = ctx.block(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Model(nn.Module):
    """Its ``use`` calls a block of a norm and a linear layer by a function that it is given."""

    def __init__(self, use: Callable[[Any, Applied, Tensor], Tensor], apply: Applied) -> None:
        super().__init__()
        self.use, self.apply_block = use, apply
        self.first, self.norm, self.middle, self.last = linear(), nn.LayerNorm(8), linear(), linear(8, 4)
        self.beside = linear()
        self.dtypes: list[torch.dtype] = []
        self.external = [torch.ones(8, requires_grad=True)]
        self.weights: list[Tensor] = []

    def block(self, x: Tensor) -> Tensor:
        y = self.middle(self.norm(x))
        self.dtypes.append(y.dtype)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.apply_block, self.first(x).float()))


def inline(block: Block, x: Tensor, *weights: Tensor) -> Tensor:
    return block(x)


def gradients(
    use: Callable[[Any, Applied, Tensor], Tensor], apply: Applied, precision: str, *, steps: int = 3
) -> tuple[list[dict[str, Tensor]], Any]:
    """Those of some steps of two micro-batches, by name; and the model."""
    torch.manual_seed(0)
    model = Model(use, apply)
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), precision)
    model.weights = [model.norm.weight, model.middle.weight]
    found = []
    for step in range(steps):
        for batch in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + batch))
            model(x).square().mean().backward()
        named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        external, model.external[0].grad = model.external[0].grad, None
        found.append(named if external is None else named | {"external": external})
        optimizer.step()
        optimizer.zero_grad()
    assert state.forward is state.backward is None and not state.active
    return found, model


def close(left: list[dict[str, Tensor]], right: list[dict[str, Tensor]], tolerance: float) -> bool:
    assert [one.keys() for one in left] == [one.keys() for one in right]
    pairs = [(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a]
    return all([(a - b).norm() <= tolerance * b.norm() for a, b in pairs])


def once(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return apply(model.block, x)


def nested(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return apply(lambda t: apply(model.block, t).float() + model.beside(t), x)


def outside_too(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return apply(model.block, model.block(x).float())


def with_aliases(model: Any, apply: Applied, x: Tensor) -> Tensor:
    """Gives the function the weights as the modules hold them in the forward."""
    return apply(model.block, x, *model.norm.parameters(), *model.middle.parameters())


def with_weights(model: Any, apply: Applied, x: Tensor) -> Tensor:
    """Gives the function the parameters themselves."""
    return apply(model.block, x, *model.weights, model.norm.bias, model.middle.bias)


def past_the_modules(model: Any, apply: Applied, x: Tensor) -> Tensor:
    """The block reads a weight and a tensor from outside of the model by a closure."""
    return apply(lambda t: F.linear(t * model.external[0], model.weights[1]), x)


def checkpointed(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return apply(lambda t: checkpoint(model.block, t, use_reentrant=True), x)


def in_a_checkpoint(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return checkpoint(lambda t: apply(model.block, t), x, use_reentrant=False)


def in_a_reentrant_checkpoint(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return checkpoint(lambda t: apply(model.block, t), x, use_reentrant=True)


CASES: dict[str, tuple[Callable[[Any, Applied, Tensor], Tensor], Applied]] = {
    "backward": (once, Saving.apply),
    "nested twice": (nested, Saving.apply),
    "weights used outside of it too": (outside_too, Saving.apply),
    "torch.autograd.grad of aliases": (with_aliases, saving(by_grad)),
    "torch.autograd.grad of parameters": (with_weights, saving(by_grad)),
    "the gradient is a factor": (once, saving(by_a_product)),
    "the gradient was cast and copied": (once, saving(after_other_ops)),
    "hf_mp.custom_bwd": (once, HfMp.apply),
    "torch.amp.custom_bwd": (once, TorchAmp.apply),
    "torch.autocast in enable_grad": (once, RestoringAutocast.apply),
    "enable_grad in torch.autocast": (once, RestoringFirst.apply),
    "past the modules": (past_the_modules, Saving.apply),
    "a checkpoint in it": (checkpointed, Saving.apply),
    "in a checkpoint": (in_a_checkpoint, Saving.apply),
    "in a reentrant checkpoint": (in_a_reentrant_checkpoint, Saving.apply),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_without_the_function(case: str, precision: str) -> None:
    use, apply = CASES[case]
    found, model = gradients(use, apply, precision)
    expected, other = gradients(use, inline, precision)
    # Two uses of a weight: without the function, autograd sums their gradients in 16 bits.
    assert close(found, expected, {"fp16": 2e-3, "bf16": 2e-2}[precision[:4]] if use is outside_too else 0.0)
    assert set(model.dtypes) == set(other.dtypes)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_enabled_by_a_call_leave_the_recomputation_in_fp32(precision: str) -> None:
    found, model = gradients(once, saving(without_with), precision)
    expected, _ = gradients(once, inline, precision)
    assert close(found, expected, {"fp16": 2e-3, "bf16": 2e-2}[precision[:4]])
    assert torch.float32 in model.dtypes


def in_an_island(model: Any, apply: Applied, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return apply(lambda t: model.middle(t), x)


def by_checkpoint(block: Block, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("apply", [Saving.apply, RestoringAutocast.apply, RestoringFirst.apply, by_checkpoint])
def test_an_autocast_disabled_region_is_one_in_the_recomputation(apply: Applied, precision: str) -> None:
    found, _ = gradients(in_an_island, apply, precision)
    assert close(found, gradients(in_an_island, inline, precision)[0], 0.0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_cast_by_custom_fwd_are_in_fp32_in_the_recomputation(precision: str) -> None:
    class InFP32(HfMp):
        forward = staticmethod(hf_mp.custom_fwd(Saving.forward, cast_inputs=torch.float32))

    found, _ = gradients(lambda m, apply, x: apply(lambda t: m.middle(t), x), InFP32.apply, precision)
    assert close(found, gradients(in_an_island, inline, precision)[0], 0.0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_reformer(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ReformerConfig(
        attention_head_size=8, hidden_size=16, num_attention_heads=2, feed_forward_size=16, vocab_size=32,
        axial_pos_embds=False, attn_layers=["local", "local"], local_attn_chunk_length=4, is_decoder=True,
        max_position_embeddings=16, hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.arange(32).reshape(2, 16)

    def found(precision: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = ReformerModelWithLMHead(config).train()
        model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.0), precision)
        for _ in range(2):  # of the second, no mode sees the calls
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, actual = found("fp32"), found(precision)
    assert expected.keys() == actual.keys()
    tolerance = 2e-2 if precision.startswith("fp16") else 1e-1
    largest = max(one.norm() for one in expected.values())
    assert all((actual[name] - one).norm() <= tolerance * largest for name, one in expected.items())


def adding(second: Callable[[Any, Tensor, Tensor], None]) -> Applied:
    """A function with a backward of its own that is complete in itself: it makes its gradients larger."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = recomputed(ctx)
        torch.autograd.backward(y, gradient)
        second(ctx, *recomputed(ctx))
        return None, x.grad

    return saving(backward)


def of_a_loss(ctx: Any, x: Tensor, y: Tensor) -> None:
    with torch.enable_grad():
        loss = y.float().square().sum()
    loss.backward()


def of_ones(ctx: Any, x: Tensor, y: Tensor) -> None:
    torch.autograd.backward(y, 0.5 * torch.ones_like(y))


def of_outputs(ctx: Any, x: Tensor, y: Tensor) -> None:
    """Takes the gradient of a loss by ``torch.autograd.grad``, as an inner optimization does."""
    with torch.enable_grad():
        loss = y.float().square().sum()
    (inner,) = torch.autograd.grad(loss, x)
    assert 1e-3 < inner.norm() < 1e2
    of_a_loss(ctx, *recomputed(ctx))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("second", [of_a_loss, of_ones, of_outputs])
def test_a_backward_that_is_complete_in_itself_is_not_scaled(second: Any, precision: str) -> None:
    found, _ = gradients(once, adding(second), precision, steps=2)
    expected, _ = gradients(once, adding(second), "fp32", steps=2)
    assert close(found, expected, 1e-2 if precision.startswith("fp16") else 5e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_adapter_is_optimized_in_a_backward(precision: str) -> None:
    """Its own attached model, forward, backward and step run inside of the backward of another."""

    def inner(gradient: Tensor) -> None:
        with torch.enable_grad():
            adapter(X).square().mean().backward()

    torch.manual_seed(0)
    plain = linear()
    adapter: Any = linear()
    adapter.load_state_dict(plain.state_dict())
    X = torch.randn(4, 8)
    hf_mp.MixedPrecision(precision).attach(adapter)
    model = hf_mp.MixedPrecision(precision).attach(linear())
    output = model(X)
    output.register_hook(inner)
    output.sum().backward()
    plain(X).square().mean().backward()
    assert torch.allclose(adapter.weight.grad, plain.weight.grad, rtol=5e-2, atol=1e-2 * plain.weight.grad.abs().max())


def of_numpy(ctx: Any, gradient: Tensor) -> Any:
    x, y = recomputed(ctx)
    torch.autograd.backward(y, torch.from_numpy(gradient.float().numpy()))
    return None, x.grad


def of_values(ctx: Any, gradient: Tensor) -> Any:
    x, y = recomputed(ctx)
    y.backward(y.detach())
    return None, x.grad


def of_a_number(ctx: Any, gradient: Tensor) -> Any:
    x, y = recomputed(ctx)
    torch.autograd.backward(y, torch.full_like(y, gradient.sum().item()))
    return None, x.grad


def of_a_square(ctx: Any, gradient: Tensor) -> Any:
    x, y = recomputed(ctx)
    with torch.enable_grad():
        product = y * gradient
    product.backward(gradient)
    return None, x.grad


@pytest.mark.parametrize("backward", [of_numpy, of_values, of_a_number, of_a_square])
@pytest.mark.parametrize("precision", SCALED)
def test_a_backward_of_unknown_scale_is_refused(backward: Any, precision: str) -> None:
    with pytest.raises(RuntimeError, match=r"Custom runs another backward.*cannot tell.*unscaled_gradients"):
        gradients(once, saving(backward), precision)


@pytest.mark.parametrize("backward", [of_numpy, of_values, of_a_number, of_a_square])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_unscaled_gradients_make_it_right(backward: Any, precision: str) -> None:
    found, _ = gradients(once, saving(hf_mp.unscaled_gradients(backward)), precision, steps=2)
    expected, _ = gradients(once, saving(backward), "fp32", steps=2)
    assert close(found, expected, 2e-2 if precision.startswith("fp16") else 1e-1)


def writes_gradients(ctx: Any, gradient: Tensor) -> Any:
    weight = ctx.weights[0]
    x, y = recomputed(ctx)
    found, of_weight = torch.autograd.grad(y, [x, weight], gradient)
    weight.grad = of_weight.float() if weight.grad is None else weight.grad + of_weight
    return None, found, None


def writes_past_the_setter(ctx: Any, gradient: Tensor) -> Any:
    weight = ctx.weights[0]
    x, y = recomputed(ctx)
    found, of_weight = torch.autograd.grad(y, [x, weight], gradient)
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad.add_(of_weight)
    return None, found, None


def writes_while_it_recomputes(ctx: Any, gradient: Tensor) -> Any:
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        y, weight = ctx.block(x), ctx.block.__self__.norm.weight
        found, of_weight = torch.autograd.grad(y, [x, weight], gradient)
        weight.grad = of_weight
    return None, found


def with_middle(model: Any, apply: Applied, x: Tensor) -> Tensor:
    return apply(model.block, x, model.weights[1])


@pytest.mark.parametrize("backward", [writes_gradients, writes_past_the_setter])
@pytest.mark.parametrize("precision", SCALED)
def test_a_scaled_gradient_written_by_hand_is_refused(backward: Any, precision: str) -> None:
    with pytest.raises(RuntimeError, match=r"Custom wrote \.grad of a weight"):
        gradients(with_middle, saving(backward), precision)


@pytest.mark.parametrize("precision", SCALED)
def test_a_gradient_written_to_an_alias_is_refused(precision: str) -> None:
    with pytest.raises(RuntimeError, match=r"Custom wrote \.grad of a weight while"):
        gradients(once, saving(writes_while_it_recomputes), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_unscaled_gradient_is_written_by_hand(precision: str) -> None:
    backward = hf_mp.unscaled_gradients(writes_gradients)
    found, _ = gradients(with_middle, saving(backward), precision, steps=2)
    expected, _ = gradients(with_middle, saving(writes_gradients), "fp32", steps=2)
    assert close(found, expected, 1e-2 if precision.startswith("fp16") else 5e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_recomputation_in_a_hook_is_refused_where_gradients_are_scaled(precision: str) -> None:
    def recompute(model: Any, x: Tensor, gradient: Tensor) -> None:
        with torch.enable_grad():
            y = model.block(x.detach().requires_grad_())
        y.backward(gradient.to(y.dtype))

    def use(model: Any, apply: Applied, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: recompute(model, x, gradient))
        return model.block(x)

    if precision.startswith("fp16"):
        with pytest.raises(RuntimeError, match=r"a hook runs a backward from a given"):
            gradients(use, inline, precision)
    else:
        found, _ = gradients(use, inline, precision, steps=1)
        assert close(found, gradients(use, inline, "fp32", steps=1)[0], 5e-2)


def test_an_error_in_the_recomputation_leaves_nothing_behind() -> None:
    def fails(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.block(x)
            raise KeyError("ours")

    torch.manual_seed(0)
    model = Model(once, saving(fails))
    hf_mp.MixedPrecision("fp16").attach(model)
    loss = model(torch.ones(2, 8)).sum()
    with pytest.raises(KeyError, match="ours"):
        loss.backward()
    assert torch._C._len_torch_function_stack() == 0 and torch.is_grad_enabled()
    assert state.forward is state.backward is None and not state.active
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values())
    model.apply_block = Saving.apply
    model(torch.ones(2, 8)).sum().backward()
    assert model.middle.weight.grad.abs().max() < 1e3


def test_the_patches_are_taken_off() -> None:
    def patched() -> list[Any]:
        return [torch.enable_grad.__enter__, torch.set_grad_enabled.__exit__, torch.autograd._make_grads]

    before, patches = patched(), Patches(BACKWARD_PATCHES.table)
    patches.acquire()
    assert not {*patched()} & {*before}
    patches.release()
    assert patched() == before

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_mp.casting.mode import active_autocast, autocast

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
every_way = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Block(nn.Module):
    """The ops of a Transformer's block: products, attention, a norm, an activation; records its dtypes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.into = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.seen: list[tuple[str, torch.dtype]] = []

    def note(self, name: str, tensor: Tensor) -> Tensor:
        self.seen.append((name, tensor.dtype))
        return tensor

    def forward(self, x: Tensor) -> Tensor:
        normed = self.note("norm", self.norm(x))
        q, k, v = self.note("product", self.into(normed)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = self.note("attention", nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.out(self.dropout(nn.functional.gelu(attended.transpose(1, 2).reshape(2, 5, 8))))


class Model(nn.Module):
    """Two blocks: each weight is used once, as autocast's own cast of a weight sums its gradients in 16 bits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = Block(dropout), Block(dropout)

    @property
    def seen(self) -> list[tuple[str, torch.dtype]]:
        return self.first.seen + self.second.seen


def check_computed(model: Model, *, times: int, dtype: torch.dtype) -> None:
    """Each of the two blocks ran ``times``, also the times that torch stopped as soon as it had what it needed."""
    assert [name for name, _ in model.seen].count("norm") == 2 * times
    assert set(model.seen) == {("norm", FP32), ("product", dtype), ("attention", dtype)}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def run_backward(loss: Tensor) -> None:
    loss.backward()


def run_backward_elsewhere(loss: Tensor) -> None:
    """As the backward of a GPU does: in another thread, which knows of no autocast."""
    failed: list[Exception] = []
    left: list[object] = []

    def run() -> None:
        try:
            loss.backward()
        except Exception as error:
            failed.append(error)
        left.extend([active_autocast(), torch.overrides._get_current_function_mode_stack()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert left == [None, []]
    if failed:
        raise failed[0]


Forward = Callable[[Model, Tensor], Tensor]


def gradients(
    model: Model,
    x: Tensor,
    forward: Forward,
    context: AbstractContextManager[object],
    backward: Callable[[Tensor], None] = run_backward,
) -> list[Tensor]:
    """The gradients of all parameters and of ``x``, with the backward run outside of ``context``."""
    model.zero_grad()
    x.grad = None
    for block in (model.first, model.second):
        block.seen.clear()
    torch.manual_seed(3)
    with context:
        loss = forward(model, x).float().square().sum()
    backward(loss)
    assert active_autocast() is None and not torch.overrides._get_current_function_mode_stack()
    return [tensor.grad.clone() for tensor in (x, *model.parameters()) if tensor.grad is not None]


def plain(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x))


def checkpointed(use_reentrant: bool) -> Forward:
    return lambda model, x: checkpoint(
        model.second, checkpoint(model.first, x, use_reentrant=use_reentrant), use_reentrant=use_reentrant
    )


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@every_way
@pytest.mark.parametrize("backward", [run_backward, run_backward_elsewhere])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_gradients_are_bit_for_bit_those_without_checkpointing(
    model: Model, x: Tensor, dtype: torch.dtype, backward: Callable[[Tensor], None], use_reentrant: bool
) -> None:
    expected = gradients(model, x, plain, autocast(dtype))
    check_computed(model, times=1, dtype=dtype)
    check_equal(gradients(model, x, checkpointed(use_reentrant), autocast(dtype), backward), expected)
    check_computed(model, times=2, dtype=dtype)


@every_way
@pytest.mark.parametrize("around_backward", [nullcontext, autocast], ids=["outside", "inside of another"])
def test_what_ran_disabled_recomputes_disabled(
    model: Model, x: Tensor, around_backward: Callable[[], AbstractContextManager[object]], use_reentrant: bool
) -> None:
    def disabled_inside(model: Model, x: Tensor) -> Tensor:
        with autocast(enabled=False):
            return checkpointed(use_reentrant)(model, x)

    def backward(loss: Tensor) -> None:
        with around_backward():
            loss.backward()

    expected = gradients(model, x, plain, nullcontext())
    check_equal(gradients(model, x, disabled_inside, autocast(), backward), expected)
    check_computed(model, times=2, dtype=FP32)


every_call = pytest.mark.parametrize(
    "run", [torch.autograd.backward, Tensor.backward], ids=["autograd.backward", "Tensor.backward"]
)


@every_way
@every_call
def test_what_ran_without_autocast_recomputes_without(
    model: Model, x: Tensor, run: Callable[[Tensor], None], use_reentrant: bool
) -> None:
    def backward(loss: Tensor) -> None:
        with autocast():
            run(loss)

    expected = gradients(model, x, plain, nullcontext())
    check_equal(gradients(model, x, checkpointed(use_reentrant), nullcontext(), backward), expected)
    check_computed(model, times=2, dtype=FP32)


@every_way
@every_call
def test_backward_inside_of_the_same_autocast(
    model: Model, x: Tensor, run: Callable[[Tensor], None], use_reentrant: bool
) -> None:
    expected = gradients(model, x, plain, autocast())
    model.zero_grad()
    x.grad = None
    with autocast() as inside:
        run(checkpointed(use_reentrant)(model, x).float().square().sum())
        assert active_autocast() is inside and len(torch.overrides._get_current_function_mode_stack()) == 1
    check_equal([t.grad for t in (x, *model.parameters()) if t.grad is not None], expected)


# Another autocast within that of the forward, and what it has its blocks computed in.
WITHIN: dict[str, Callable[[bool], Forward]] = {
    "around the blocks": lambda way: lambda model, x: autocast(BF16)(checkpointed(way))(model, x),
    "in the block": lambda way: lambda model, x: checkpoint(autocast(BF16)(plain), model, x, use_reentrant=way),
}


@every_way
@pytest.mark.parametrize("within", WITHIN)
def test_the_innermost_autocast_applies(model: Model, x: Tensor, within: str, use_reentrant: bool) -> None:
    expected = gradients(model, x, plain, autocast(BF16))
    check_equal(gradients(model, x, WITHIN[within](use_reentrant), autocast(FP16)), expected)
    check_computed(model, times=2, dtype=BF16)


def test_a_checkpoint_within_a_checkpoint(model: Model, x: Tensor) -> None:
    def nested(model: Model, x: Tensor) -> Tensor:
        return checkpoint(checkpointed(False), model, x, use_reentrant=False)

    expected = gradients(model, x, plain, autocast())
    check_equal(gradients(model, x, nested, autocast()), expected)


@every_way
@pytest.mark.parametrize("backward", [run_backward, run_backward_elsewhere])
def test_an_exception_in_the_recomputation_leaves_nothing_behind(
    model: Model, x: Tensor, backward: Callable[[Tensor], None], use_reentrant: bool
) -> None:
    active: list[bool] = []

    def fails_the_second_time(x: Tensor) -> Tensor:
        active.append(active_autocast() is not None)
        if len(active) == 2:
            raise ZeroDivisionError
        return plain(model, x)

    def failing(_: Model, x: Tensor) -> Tensor:
        return checkpoint(fails_the_second_time, x, use_reentrant=use_reentrant)

    with pytest.raises(ZeroDivisionError):
        gradients(model, x, failing, autocast(), backward)
    assert active == [True, True]
    assert active_autocast() is None and not torch.overrides._get_current_function_mode_stack()


def test_keywords_of_the_function_may_have_any_name() -> None:
    def scaled(x: Tensor, *, original: float) -> Tensor:
        return torch.mm(x, x) * original

    x = torch.ones(2, 2, requires_grad=True)
    with autocast(torch.bfloat16):
        found = checkpoint(scaled, x, use_reentrant=False, original=2.0)
    found.sum().backward()
    assert found.dtype is torch.bfloat16 and torch.equal(x.grad, torch.full((2, 2), 8.0))

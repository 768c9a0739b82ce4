import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_mp.kernels import cross_entropy as module
from hf_mp.kernels.cross_entropy import cross_entropy, cross_entropy_reference

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# Both forms compute in FP32 and round the gradient once. They differ in the order of sums, so an element of the
# gradient may be rounded to the neighbouring number: one unit in the last place.
GRADIENT_TOLERANCE = {FP32: 2e-6, FP16: 2.0**-10, BF16: 2.0**-7}


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._BLOCK_ELEMENTS, "cpu", 64)


def loss_and_gradient(function: Any, logits: Tensor, labels: Tensor, scale: float = 1.0, **kwargs: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    loss = function(leaf * 1, labels, **kwargs)
    (loss * scale).backward()
    return loss.detach(), leaf.grad


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    classes=st.integers(2, 40),
    dtype=st.sampled_from([FP16, BF16, FP32]),
    reduction=st.sampled_from(["mean", "sum"]),
    scale=st.sampled_from([1.0, 1024.0]),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_reference(
    rows: int, classes: int, dtype: torch.dtype, reduction: str, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * 4).to(dtype)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    labels[1::3] = -100
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, scale, reduction=reduction)
    expected_loss, expected = loss_and_gradient(cross_entropy_reference, logits, labels, scale, reduction=reduction)
    assert loss.dtype is FP32 and gradient.dtype is dtype
    torch.testing.assert_close(loss, expected_loss, rtol=3e-6, atol=1e-6)
    # probabilities are off by FP32's last place of 1
    factor = scale / ((labels != -100).sum().item() if reduction == "mean" else 1)
    torch.testing.assert_close(gradient, expected, rtol=GRADIENT_TOLERANCE[dtype], atol=1e-6 * factor)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("counts", [True, False])
def test_inf_and_nan_come_through(poison: float, counts: bool) -> None:
    logits = torch.randn(4, 50).half()
    logits[2, 7] = poison
    labels = torch.tensor([1, 2, 7 if counts else -100, 3])
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels)
    expected_loss, expected = loss_and_gradient(cross_entropy_reference, logits, labels)
    assert loss.isfinite() == expected_loss.isfinite()
    # by rows: of a row with an infinite logit, torch spoils every element
    assert torch.equal(gradient.isfinite().all(1), expected.isfinite().all(1))


def test_no_row_counts() -> None:
    labels = torch.full((3,), -100)
    loss, gradient = loss_and_gradient(cross_entropy, torch.randn(3, 5).half(), labels, reduction="sum")
    assert loss == 0 and not gradient.any()
    assert loss_and_gradient(cross_entropy, torch.randn(3, 5).half(), labels)[0].isnan()  # as torch's mean of nothing
    assert cross_entropy(torch.randn(0, 5).half(), torch.zeros(0, dtype=torch.long), reduction="sum") == 0


def test_small_gradients_survive_because_the_scale_is_known() -> None:
    # softmax probabilities of about 2**-20, divided by 2**10 rows: FP16 ends at 2**-24
    logits = torch.zeros(2**10, 64).half()
    logits[:, 0] = 14.0
    labels = torch.zeros(2**10, dtype=torch.long)
    unscaled = loss_and_gradient(cross_entropy, logits, labels)[1]
    scaled = loss_and_gradient(cross_entropy, logits, labels, scale=2.0**16)[1]
    assert not unscaled[:, 1].any()
    assert scaled[:, 1].all()


HOLD: dict[str, Callable[[Tensor], Tensor] | None] = {
    "nobody": None,
    "somebody": lambda logits: logits,
    "a view": lambda logits: logits[2].detach(),
}


class TestInPlace:
    def gradient_of_logits(
        self, hold: Callable[[Tensor], Tensor] | None, dtype: torch.dtype = FP16, **backward: Any
    ) -> tuple[bool, Tensor, Tensor]:
        """Whether a backward wrote where the logits were, and the loss and the leaf; what ``hold`` holds stays."""
        leaf = torch.randn(6, 50).to(dtype).requires_grad_()
        logits = leaf * 1
        address = logits.data_ptr()
        found: list[int] = []
        logits.register_hook(lambda gradient: found.append(gradient.data_ptr()))
        loss = cross_entropy(logits, torch.arange(6))
        kept = None if hold is None else hold(logits)
        before = None if kept is None else kept.detach().clone()
        del logits
        loss.backward(**backward)
        assert kept is None or torch.equal(kept, before)
        return found[0] == address, loss, leaf

    @pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
    def test_the_gradient_takes_the_place_of_logits_that_nobody_holds(self, hold: Any) -> None:
        in_place, _, _ = self.gradient_of_logits(hold)
        assert in_place == (hold is None)

    @pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
    @pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
    def test_a_graph_that_is_kept_can_be_gone_through_again(self, hold: Any, dtype: torch.dtype) -> None:
        in_place, loss, leaf = self.gradient_of_logits(hold, dtype, retain_graph=True)
        first, leaf.grad = leaf.grad, None
        loss.backward()
        assert not in_place
        assert first is not None and torch.equal(leaf.grad, first)  # type: ignore[arg-type]

    @pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
    def test_a_loss_that_is_kept_does_not_keep_the_logits(self, hold: Any) -> None:
        _, loss, _ = self.gradient_of_logits(hold)
        assert loss.grad_fn is not None and loss.grad_fn.logits is None  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def test_logits_that_were_written_meanwhile_are_noticed(self) -> None:
        logits = torch.randn(6, 50).half().requires_grad_() * 1
        loss = cross_entropy(logits, torch.arange(6))
        with torch.no_grad():
            logits.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_second_derivatives() -> None:
    def second(function: Any) -> Tensor:
        leaf = torch.linspace(-2, 2, 30).view(5, 6).requires_grad_()
        loss = function(leaf * 1, torch.arange(5))
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        gradient.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(second(cross_entropy), second(cross_entropy_reference))


def test_no_grad_and_inference_mode() -> None:
    logits, labels = torch.randn(3, 5).half(), torch.arange(3)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(cross_entropy(logits, labels), cross_entropy_reference(logits, labels))


@pytest.mark.parametrize(
    ("logits", "labels"), [((2, 3, 4), (6,)), ((2, 3, 4), (2,)), ((6, 4), (5,)), ((6, 4), (6, 1))], ids=str
)
def test_bad_shapes_are_refused(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
    message = f"logits must be of shape (rows, classes) and labels of shape (rows,), not {logits} and {labels}: flatten"
    with pytest.raises(ValueError, match=re.escape(message)):
        cross_entropy(torch.randn(logits), torch.zeros(labels, dtype=torch.long))


@pytest.mark.usefixtures("other_default_dtype")
def test_whatever_the_default_dtype() -> None:
    logits = torch.linspace(-4.0, 4.0, 120, dtype=FP32).view(4, 30).half()
    labels = torch.tensor([0, 29, -100, 7])
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels)
    expected_loss, expected = loss_and_gradient(cross_entropy_reference, logits, labels)
    torch.testing.assert_close(loss, expected_loss)
    assert (gradient.float() - expected.float()).abs().max() <= GRADIENT_TOLERANCE[FP16]

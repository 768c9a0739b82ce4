"""Who is blamed for what is not finite, op by op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_mp.casting.mode import autocast
from hf_mp.diagnostics.nonfinite_tracker import NonfiniteOrigin, NonfiniteTracker
from hf_mp.diagnostics.values import Finiteness, TensorRange, finiteness
from hf_mp.kernels.nested import named_tensors

INF = float("inf")
NAN = float("nan")


def origin_of(function: Callable[[], Tensor]) -> NonfiniteOrigin | None:
    tracker, mode = NonfiniteTracker(), autocast(torch.float16)
    with tracker.tracking(mode, nn.Identity()), mode:
        result = function()
    return tracker.get(result)


def x() -> Tensor:
    return torch.tensor([1.0, 2.0])


BLAMED = {
    "the-division": (lambda: (x() / 0.0).add(1).mul(2).view(2, 1), "div"),
    "the-first-of-two": (lambda: x().mul(INF).log().sub(INF), "mul"),
    "the-log-not-what-used-its-minus-inf": (lambda: (x() * 0).log() * 0.0, "log"),
    "the-softmax-of-a-full-mask": (lambda: x().masked_fill(x() > 0, -INF).softmax(0), "softmax"),
    "in-place-on-finite-values": (lambda: x().div_(0.0), "div_"),
    "what-was-copied-into-a-buffer": (lambda: torch.empty(2, 2).copy_((x() / 0.0).expand(2, 2)), "div"),
    "what-was-written-into-a-row": (lambda: rows_of(x() / 0.0), "div"),
    "the-cast": (lambda: (x() * 1e5).half() + 1, "half"),
    "an-accumulation": (lambda: torch.zeros(2).add_(x() * INF), "mul"),
    "over-memory-that-was-bad-before": (lambda: torch.full((2,), NAN).copy_(x()).div_(0.0), "div_"),
    "what-replaces-something-bad": (lambda: torch.full((2,), NAN).copy_(x() / 0.0), "div"),
    "what-is-written-out": (lambda: torch.mul(x() / 0.0, 1.0, out=torch.full((2,), NAN)), "div"),
    # To -inf, which is no mask where an overflow made it.
    "product": (lambda: torch.tensor([-300.0], dtype=torch.float16) * 300, "mul"),
    "cast": (lambda: torch.tensor([-1e9, 1.0]).half(), "half"),
    "copy": (lambda: torch.zeros(2, dtype=torch.float16).copy_(x() * -1e5), "copy_"),
    "sum": (lambda: torch.full((2,), -65504.0, dtype=torch.float16).add_(x().half() * -300), "add_"),
    "everything-hidden-by-a-cast-mask": (lambda: lowest_in_half(x() > 0).softmax(0), "half"),
}


def rows_of(row: Tensor) -> Tensor:
    result = torch.empty(3, 2)
    result[0] = 1.0
    result[1] = row
    result[2] = 2.0
    return result


@pytest.mark.parametrize("name", BLAMED)
def test_the_op_that_made_it_from_finite_values_is_blamed(name: str) -> None:
    function, op = BLAMED[name]
    origin = origin_of(function)
    assert origin is not None
    assert (origin.phase, origin.op, origin.is_mask) == ("forward", op, False)


def test_memory_that_nobody_has_written_is_no_culprit() -> None:
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        assert torch.empty(2).isnan().all()
        origin = origin_of(lambda: rows_of(x() / 0.0))
        assert origin_of(lambda: rows_of(x())) is None
        scores = torch.full((1, 2, 2), 1e30)
        product = origin_of(lambda: torch.baddbmm(torch.empty(1, 2, 2), scores, scores, beta=0.0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert origin is not None and product is not None
    assert (origin.op, product.op) == ("div", "baddbmm")


UNBLAMED = {
    "finite": lambda: x() + 1,
    "an-inf-that-where-drops": lambda: torch.where(x() > 5, x() / 0.0, x()),
    "memory-that-nobody-has-written": lambda: torch.empty(4).fill_(1.0),
    "exp-of-a-mask": lambda: x().masked_fill(x() > 1, -INF).exp(),
    "softmax-of-a-cast-mask": lambda: lowest_in_half(x() > 1).softmax(0),
    "softmax-of-the-lowest-plus-scores": lambda: (lowest_in_half(x() > 1, torch.float16) - 200.0).softmax(0),
}


def lowest_in_half(hidden: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask of the lowest number of ``dtype``, in FP16."""
    return torch.zeros(2, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min).half()


@pytest.mark.parametrize("name", UNBLAMED)
def test_nobody_is_blamed_for_finite_results(name: str) -> None:
    assert origin_of(UNBLAMED[name]) is None


MASKS = {
    "full": lambda: torch.full((2,), -INF) + x(),
    "where": lambda: torch.where(x() > 1, x(), -INF),
}


@pytest.mark.parametrize("name", MASKS)
def test_minus_inf_of_a_mask_is_no_overflow(name: str) -> None:
    origin = origin_of(MASKS[name])
    assert origin is not None and origin.is_mask


def test_a_constant_that_was_bad_before_is_laid_at_the_door_of_who_used_it() -> None:
    constant = torch.tensor([INF, 1.0])
    origin = origin_of(lambda: x() + constant)
    assert origin is not None
    assert (origin.op, origin.inputs[1].inf_count) == ("add", 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], Finiteness.FINITE),
        ([0.0, -1.0], Finiteness.FINITE),
        ([1.0, -INF], Finiteness.MINUS_INF),
        ([1.0, INF], Finiteness.NOT_FINITE),
        ([NAN, -INF], Finiteness.NOT_FINITE),
    ],
    ids=["empty", "finite", "minus-inf", "inf", "nan"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finiteness(values: list[float], expected: Finiteness, dtype: torch.dtype) -> None:
    assert finiteness(torch.tensor(values, dtype=dtype)) is expected


def test_ranges() -> None:
    found = TensorRange.of("scores", torch.tensor([[1.0, -3.5], [NAN, -INF]], dtype=torch.float16))
    assert found == TensorRange("scores", "float16", (2, 2), 3.5, 1.0, 1, 1)
    assert str(found) == "scores (float16, 2×2): magnitudes 1 to 3.5, 1 inf, 1 NaN"
    assert TensorRange.of("", torch.tensor([NAN])).largest is None
    assert TensorRange.of("", torch.tensor([])).nan_count == 0


def test_names_of_nested_tensors() -> None:
    a, b, c = torch.zeros(3)
    found = named_tensors({"batch": [a, {"mask": b}], "flag": True, "pair": (c, None)})
    assert [name for name, _ in found] == ["batch.0", "batch.1.mask", "pair.0"]

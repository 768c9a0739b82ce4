import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_provider import ScaleProvider
from tiny import saved_tensors
from torch import Tensor, nn

from hf_mp.casting import cpu_handlers as handlers
from hf_mp.casting import plans
from hf_mp.casting.cpu import blockwise
from hf_mp.casting.cpu.matmul import multiply
from hf_mp.casting.cpu.upcast import run_through_fp32
from hf_mp.casting.mode import autocast
from hf_mp.scale_boundary import cast_to_output, unscaling_aliases
from hf_mp.step.mixed_precision import MixedPrecision

pytestmark = pytest.mark.usefixtures("nothing_is_small")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# How far two ways of computing one product may lie apart, in units in the last place of its dtype. Both round an FP32
# sum once; the sums are made in another order, so they may fall on two sides of a rounding boundary: one unit, never
# two. Where terms cancel, the FP32 sums themselves differ, by up to two roundings of 2**-24 for each term added.
ULPS = {FP16: 1, BF16: 1}
FP32_ROUNDINGS_PER_TERM = 2
every_dtype = pytest.mark.parametrize("dtype", ULPS, ids=str)


def brought_in(weight: Tensor, rounded: Tensor, scale_provider: ScaleProvider) -> Tensor:
    """The working copy of a weight outside, as an attached model gives it to a product."""
    _, (copy,) = unscaling_aliases([weight], [rounded], scale_provider)
    assert copy is not None
    return copy


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def random(*shape: int, dtype: torch.dtype = FP16, seed: int = 0, **settings: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(**settings)


def operands(
    rows: tuple[int, ...], inner: int, outer: int, *, bias: bool, transposed: bool, dtype: torch.dtype
) -> Operands:
    return Operands(
        random(*rows, inner, dtype=dtype, seed=1),
        random(*((inner, outer) if transposed else (outer, inner)), dtype=dtype, seed=2),
        random(outer, dtype=dtype, seed=3) if bias else None,
    )


def plainly(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    return run_through_fp32(F.linear, (x, weight.t() if transposed else weight, bias), {}, x.dtype)


def unit_in_last_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from ``values`` to the next larger number of ``dtype``, in FP64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.double().abs())[1] - 1
    return (info.eps * torch.exp2(exponent.double())).clamp(min=info.tiny * info.eps)


def check_close(found: Tensor, expected: Tensor, terms: Tensor, count: int) -> None:
    """``terms``: for each element, the sum of the magnitudes of the ``count`` terms that it is the sum of."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    allowed = ULPS[found.dtype] * unit_in_last_place(torch.maximum(found.abs(), expected.abs()), found.dtype)
    allowed += FP32_ROUNDINGS_PER_TERM * count * 2.0**-24 * terms.double().view(found.shape)
    off = (found.double() - expected.double()).abs()
    assert (off <= allowed).all(), f"off by up to {(off / allowed).max():.2f} times what is allowed"


def check_product(given: Operands, *, transposed: bool, gradient: Tensor | None = None) -> None:
    """Compare :func:`multiply` with its reference: the result and each gradient."""
    x, weight, bias = (None if t is None else t.detach().double().abs() for t in given)
    assert x is not None and weight is not None
    if transposed:
        weight = weight.t()
    found, expected = multiply(*given, transposed=transposed), plainly(*given, transposed=transposed)
    check_close(found.detach(), expected.detach(), F.linear(x, weight, bias), x.shape[-1])

    gradient = random(*found.shape, dtype=found.dtype, seed=4) if gradient is None else gradient
    wanted = [tensor for tensor in given if tensor is not None]
    found_grads = torch.autograd.grad(found, wanted, gradient)
    expected_grads = torch.autograd.grad(expected, wanted, gradient)
    direction = gradient.double().abs().reshape(-1, gradient.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    to_weight = direction.t() @ rows
    check_close(found_grads[0], expected_grads[0], direction @ weight, weight.shape[0])
    check_close(found_grads[1], expected_grads[1], to_weight.t() if transposed else to_weight, len(rows))
    if bias is not None:
        check_close(found_grads[2], expected_grads[2], direction.sum(0), len(rows))


def penalty(compute: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of a loss, and those of their sum of squares."""
    loss = torch.tanh(compute(*inputs).float() / 4).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(gradient.float().square().mean() for gradient in first), inputs)  # type: ignore[arg-type]
    return [gradient.detach() for gradient in (*first, *second)]


def check_penalty(found: list[Tensor], exact: list[Tensor]) -> None:
    for ours, theirs in zip(found, exact, strict=True):
        # each pass through the product rounds to FP16, by 2**-11; there are four
        assert (ours.float() - theirs).norm() <= 8 * 2.0**-11 * theirs.norm()


@pytest.fixture(params=["one block", "many blocks", "long rows"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many elements a block holds: all, or so few that there are several blocks of rows and of columns.

    Long rows are taken in several pieces as well.
    """
    size = 2**20 if request.param == "one block" else 24
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", size)
    if request.param == "long rows":
        monkeypatch.setattr(blockwise, "LONGEST_ROW", 5)
    return size


class TestAgainstTheReference:
    @settings(deadline=None, derandomize=True, max_examples=40)
    @given(
        rows=st.lists(st.integers(1, 12), min_size=1, max_size=3),
        inner=st.integers(1, 40),
        outer=st.integers(1, 40),
        size=st.sampled_from([16, 100, 2**20]),
        bias=st.booleans(),
        transposed=st.booleans(),
        dtype=st.sampled_from([FP16, BF16]),
    )
    def test_any_shape(
        self, rows: list[int], inner: int, outer: int, size: int, bias: bool, transposed: bool, dtype: torch.dtype
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blockwise, "BLOCK_ELEMENTS", size)
            given = operands(tuple(rows), inner, outer, bias=bias, transposed=transposed, dtype=dtype)
            check_product(given, transposed=transposed)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: (random(9, 7).t(), random(13, 9)),
            lambda: (random(7, 18)[:, ::2], random(26, 9)[::2]),
            lambda: (random(1, 9).expand(7, 9), random(13, 9)),
            lambda: (random(7, 9), random(9, 13).t()),
            lambda: (random(5, 2, 9).transpose(0, 1), random(13, 1).expand(13, 9)),
            lambda: (random(8, 9)[1:], random(13, 10)[:, 1:]),
        ],
        ids=["x.t()", "strided", "x expanded", "weight.t()", "3-D x, weight expanded", "offset"],
    )
    @pytest.mark.usefixtures("blocks")
    def test_operands_that_are_not_contiguous(self, make: Callable[[], tuple[Tensor, Tensor]]) -> None:
        x, weight = make()
        check_product(Operands(x, weight, random(26)[::2]), transposed=False)
        check_product(Operands(x, weight.t(), None), transposed=True)

    @pytest.mark.parametrize(
        "make",
        [lambda: random(1, 1).expand(7, 13), lambda: random(13, 7).t(), lambda: random(7, 26)[:, ::2]],
        ids=["expanded", "transposed", "strided"],
    )
    @pytest.mark.usefixtures("blocks")
    def test_gradients_that_are_not_contiguous(self, make: Callable[[], Tensor]) -> None:
        given = operands((7,), 9, 13, bias=True, transposed=False, dtype=FP16)
        check_product(given, transposed=False, gradient=make().detach())

    @pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
    @pytest.mark.usefixtures("blocks")
    def test_only_the_gradients_that_are_asked_for_are_made(self, frozen: tuple[int, ...]) -> None:
        given = operands((7,), 9, 13, bias=True, transposed=False, dtype=FP16)
        all_grads = torch.autograd.grad(multiply(*given, transposed=False).sum(), given)
        for i in frozen:
            given[i].requires_grad_(False)
        result = multiply(*given, transposed=False)
        assert result.requires_grad
        result.sum().backward()
        for i in range(3):
            assert given[i].grad is None if i in frozen else torch.equal(given[i].grad, all_grads[i])


class TestPrecision:
    @pytest.mark.parametrize(
        ("x", "weight", "result"),
        [
            ([256.0, 1.0], [255.0, 224.0], 65504.0),
            ([65504.0, 15.0], [1.0, 1.0], 65504.0),
            ([65504.0, 16.0], [1.0, 1.0], math.inf),
            ([-65504.0, -16.0], [1.0, 1.0], -math.inf),
            ([65504.0, 65504.0], [65504.0, -65504.0], 0.0),
            ([2.0**-14, 0.0], [2.0**-10, 0.0], 2.0**-24),
            ([2.0**-14, 0.0], [3 * 2.0**-12, 0.0], 2.0**-24),
            ([2.0**-14, 0.0], [2.0**-11, 0.0], 0.0),
            ([2.0**-14, 2.0**-14], [2.0**-11, 2.0**-11], 2.0**-24),
            ([2.0**-24, 2.0**-24], [1.0, 2.0], 3 * 2.0**-24),
            ([math.inf, 0.0], [1.0, 1.0], math.inf),
            ([math.inf, 1.0], [-1.0, 1.0], -math.inf),
            ([math.inf, 1.0], [0.0, 1.0], math.nan),
            ([math.inf, math.inf], [1.0, -1.0], math.nan),
            ([math.nan, 1.0], [0.0, 1.0], math.nan),
            ([1.0, 1.0], [1.0, math.nan], math.nan),
        ],
        ids=str,
    )
    @pytest.mark.usefixtures("blocks")
    def test_at_the_ends_of_fp16s_range(self, x: list[float], weight: list[float], result: float) -> None:
        found = multiply(torch.tensor([x], dtype=FP16), torch.tensor([weight], dtype=FP16), None, transposed=False)
        torch.testing.assert_close(found, torch.tensor([[result]], dtype=FP16), rtol=0, atol=0, equal_nan=True)


class TestParameters:
    """As an attached model multiplies: the gradient leaves to FP32 masters, unscaled on its way."""

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize(("dtype", "native"), [(FP16, False), (BF16, False), (BF16, True)], ids=str)
    @pytest.mark.usefixtures("blocks")
    def test_gradients_are_rounded_then_unscaled_in_fp32(
        self, dtype: torch.dtype, native: bool, transposed: bool
    ) -> None:
        scale = 2.0**12
        scale_provider = ScaleProvider(scale)
        x16, weight16, bias16 = operands((7,), 9, 13, bias=True, transposed=transposed, dtype=dtype)
        assert bias16 is not None
        # masters off the grid of 16 bits: the product must read their roundings
        weight, bias = (nn.Parameter(t.detach().float() * (1 + 2.0**-13)) for t in (weight16, bias16))
        found = multiply(
            x16,
            brought_in(weight, weight16.detach(), scale_provider),
            brought_in(bias, bias16.detach(), scale_provider),
            transposed=transposed,
            native=native,
        )
        inside = multiply(x16, weight16, bias16, transposed=transposed, native=native)
        assert torch.equal(found, inside)
        scaled = random(7, 13, seed=4) * 0.01 * scale
        to_x, to_weight, to_bias = torch.autograd.grad(inside, (x16, weight16, bias16), scaled)
        found.backward(scaled)
        assert weight.grad is not None and bias.grad is not None
        assert weight.grad.dtype is bias.grad.dtype is FP32
        assert torch.equal(weight.grad, to_weight.float() / scale)
        assert torch.equal(bias.grad, to_bias.float() / scale)
        assert torch.equal(x16.grad, to_x), "the gradient inside stays scaled"

    @pytest.mark.parametrize("place", [0, 1], ids=["weight", "bias"])
    def test_only_outputs_of_an_unscale_node_are_unscaled(self, place: int) -> None:
        inside = [torch.ones(3, 2, dtype=FP16, requires_grad=True), torch.ones(3, dtype=FP16, requires_grad=True)]
        master, other = nn.Parameter(inside[place].detach().float()), inside[1 - place]
        inside[place] = brought_in(master, inside[place].detach(), ScaleProvider(4.0))
        multiply(torch.ones(8, 2, dtype=FP16), *inside, transposed=False).sum().backward()
        assert master.grad is not None and (master.grad == 2.0).all()
        assert other.grad is not None and (other.grad == 8.0).all()

    @pytest.mark.usefixtures("blocks")
    def test_an_overflow_of_the_scaled_gradient_is_not_hidden_by_unscaling(self) -> None:
        weight = nn.Parameter(torch.ones(3, 2))
        factor = brought_in(weight, weight.detach().half(), ScaleProvider(2.0**10))
        multiply(torch.full((4, 2), 300.0, dtype=FP16), factor, None, transposed=False).sum().mul(100.0).backward()
        assert weight.grad is not None and weight.grad.isinf().all()

    @pytest.mark.parametrize("scale", [1.0, 2.0**10])
    @pytest.mark.usefixtures("blocks")
    def test_a_gradient_penalty_on_masters_is_that_of_fp32(self, scale: float) -> None:
        x, scale_provider = random(7, 9, seed=1).detach(), ScaleProvider(scale)
        masters = [nn.Parameter(random(*shape, seed=2).detach().float()) for shape in ((13, 9), (13,))]

        def through_unscale_nodes(*masters: Tensor) -> Tensor:
            weight, bias = (brought_in(master, master.detach().half(), scale_provider) for master in masters)
            return cast_to_output(multiply(x, weight, bias, transposed=False), scale_provider)

        found = penalty(through_unscale_nodes, masters)
        assert {gradient.dtype for gradient in found} == {FP32}
        check_penalty(found, penalty(lambda weight, bias: F.linear(x.float(), weight, bias), masters))


class TestSavedTensors:
    @every_dtype
    @pytest.mark.parametrize("transposed", [False, True])
    def test_they_are_the_16_bit_operands(self, transposed: bool, dtype: torch.dtype) -> None:
        given = operands((7,), 9, 13, bias=True, transposed=transposed, dtype=dtype)
        with saved_tensors() as tensors:
            multiply(*given, transposed=transposed)
        assert {tensor.dtype for tensor in tensors} == {dtype}
        assert {tensor.data_ptr() for tensor in tensors} <= {t.data_ptr() for t in given if t is not None}

    def test_a_master_takes_no_memory(self) -> None:
        weight = nn.Parameter(torch.ones(13, 9))
        with saved_tensors() as tensors:
            factor = brought_in(weight, weight.detach().half(), ScaleProvider(1.0))
            multiply(random(7, 9), factor, None, transposed=False)
        assert all(tensor.dtype is FP16 or tensor.data_ptr() == weight.data_ptr() for tensor in tensors)

    @pytest.mark.parametrize("frozen", [(1, 2), (0,)], ids=["frozen weights (LoRA)", "an input without grad"])
    def test_only_what_backward_needs_is_saved(self, frozen: tuple[int, ...]) -> None:
        given = operands((7,), 9, 13, bias=True, transposed=False, dtype=FP16)
        for i in frozen:
            given[i].requires_grad_(False)
        with saved_tensors() as tensors:
            multiply(*given, transposed=False)
        unneeded = given.weight if frozen == (0,) else given.x
        assert unneeded.data_ptr() not in {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("blocks")
def test_a_gradient_penalty_is_that_of_fp32(bias: bool, transposed: bool) -> None:
    given = [t for t in operands((7,), 9, 13, bias=bias, transposed=transposed, dtype=FP16) if t is not None]

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype is FP16:
            return multiply(x, weight, bias, transposed=transposed)
        return F.linear(x, weight.t() if transposed else weight, bias)

    found = penalty(product, given)
    assert {gradient.dtype for gradient in found} == {FP16}
    check_penalty(found, penalty(product, [t.detach().float().requires_grad_() for t in given]))


class Spelling(NamedTuple):
    """One way to write a product."""

    compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    rows: tuple[int, ...] = (7,)
    bias: bool = False
    transposed: bool = True


SPELLINGS: dict[str, Spelling] = {
    "F.linear": Spelling(lambda x, w, b: F.linear(x, w, b), bias=True, transposed=False),
    "F.linear, 3-D": Spelling(lambda x, w, b: F.linear(x, w, b), rows=(2, 3), bias=True, transposed=False),
    "F.linear, no bias": Spelling(lambda x, w, b: F.linear(x, w), transposed=False),
    "F.linear by keyword": Spelling(lambda x, w, b: F.linear(x, bias=b, weight=w), bias=True, transposed=False),
    "torch.addmm": Spelling(lambda x, w, b: torch.addmm(b, x, w), bias=True),
    "torch.addmm by keyword": Spelling(lambda x, w, b: torch.addmm(b, mat1=x, mat2=w, beta=1), bias=True),
    "Tensor.addmm": Spelling(lambda x, w, b: b.addmm(x, w), bias=True),
    "torch.matmul": Spelling(lambda x, w, b: torch.matmul(x, w)),
    "torch.matmul, 3-D": Spelling(lambda x, w, b: torch.matmul(x, w), rows=(2, 3)),
    "torch.matmul by keyword": Spelling(lambda x, w, b: torch.matmul(x, other=w)),
    "Tensor.matmul": Spelling(lambda x, w, b: x.matmul(w), rows=(2, 3)),
    "torch.mm": Spelling(lambda x, w, b: torch.mm(x, w)),
    "torch.mm by keyword": Spelling(lambda x, w, b: torch.mm(x, mat2=w)),
    "Tensor.mm": Spelling(lambda x, w, b: x.mm(w)),
    "@": Spelling(lambda x, w, b: x @ w),
    "@, 3-D": Spelling(lambda x, w, b: x @ w, rows=(2, 2, 3)),
    "__rmatmul__": Spelling(lambda x, w, b: w.__rmatmul__(x)),
}


class TestThroughAutocast:
    @pytest.fixture
    def multiplied(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.dtype]]:
        """A CPU without products in 16 bits; collects the products that were made block by block."""
        calls: list[tuple[torch.Size, torch.dtype]] = []

        def counted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((x.shape, x.dtype))
            return multiply(x, *args, **kwargs)

        monkeypatch.setattr(handlers, "multiply", counted)
        monkeypatch.setattr(plans, "runs_natively", lambda dtype, *_: dtype is FP32)
        return calls

    @every_dtype
    @pytest.mark.parametrize("name", SPELLINGS)
    @pytest.mark.usefixtures("blocks")
    def test_every_spelling_is_one_product(
        self, name: str, dtype: torch.dtype, multiplied: list[tuple[torch.Size, torch.dtype]]
    ) -> None:
        compute, rows, has_bias, transposed = SPELLINGS[name]
        x, weight, bias = operands(rows, 9, 13, bias=True, transposed=transposed, dtype=FP32)
        assert bias is not None
        with autocast(dtype):
            found = compute(x, weight, bias)
        assert multiplied == [((*rows, 9), dtype)]
        inside = [x.detach().to(dtype), weight.detach().to(dtype), bias.detach().to(dtype) if has_bias else None]
        given = Operands(*(t if t is None else t.requires_grad_() for t in inside))
        assert torch.equal(found, multiply(*given, transposed=transposed))
        gradient = random(*found.shape, dtype=dtype, seed=4)
        found.backward(gradient)
        expected = multiply(*given, transposed=transposed)
        expected.backward(gradient)
        for outside, of in zip((x, weight, bias), given, strict=True):
            if of is not None:
                assert outside.grad is not None and outside.grad.dtype is FP32
                assert torch.equal(outside.grad, of.grad.float())
        check_product(given, transposed=transposed)

    @pytest.mark.parametrize(
        "compute",
        [
            lambda: torch.matmul(random(9), random(9, 13)),
            lambda: torch.matmul(random(7, 9), random(9)),
            lambda: torch.matmul(random(2, 7, 9), random(2, 9, 13)),
            lambda: torch.addmm(random(7, 13), random(7, 9), random(9, 13)),
            lambda: torch.addmm(random(13), random(7, 9), random(9, 13), alpha=2),
            lambda: torch.addmm(random(13), random(7, 9), random(9, 13), beta=0),
            lambda: F.linear(random(9), random(13, 9)),
            lambda: F.linear(random(0, 9), random(13, 9)),
            lambda: torch.mm(random(7, 0), random(0, 13)),
        ],
        ids=[
            "vector @",
            "@ vector",
            "batch",
            "addmm 2-D",
            "alpha",
            "beta",
            "linear of a vector",
            "no rows",
            "no inner",
        ],
    )
    def test_other_forms_go_another_way_to_the_same_end(
        self, compute: Callable[[], Tensor], multiplied: list[tuple[torch.Size, torch.dtype]]
    ) -> None:
        with autocast():
            found = compute()
        assert multiplied == [] and found.dtype is FP16
        torch.testing.assert_close(found, compute())

    @pytest.mark.usefixtures("multiplied")
    def test_torchs_function_transforms(self) -> None:
        x, weight = random(4, 7, 9, dtype=FP32), random(13, 9, dtype=FP32)

        def loss(weight: Tensor, x: Tensor) -> Tensor:
            with autocast():
                return F.linear(x, weight).float().square().sum()

        per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
        for found, sample in zip(per_sample, x, strict=True):
            (expected,) = torch.autograd.grad(loss(weight, sample), weight)
            assert found.dtype is expected.dtype is FP32
            assert (found - expected).norm() <= 2.0**-10 * expected.norm()

    def test_a_wrong_call_gets_torchs_error(self, multiplied: list[tuple[torch.Size, torch.dtype]]) -> None:
        with autocast():
            for wrong, message in [
                (lambda: F.linear(random(2, 3), random(4, 5)), "shapes cannot be multiplied"),
                (lambda: F.linear(random(2, 3), random(4, 3), random(5)), "expanded|size|shape"),
                (lambda: torch.mm(random(2, 3), random(2, 4, 3)), "must be a matrix"),
            ]:
                with pytest.raises(RuntimeError, match=message):
                    wrong()
            with pytest.raises(TypeError, match=r"unexpected|argument"):
                F.linear(random(2, 3), random(4, 3), wait=True)  # type: ignore[call-arg]

    def test_the_default_device_is_no_matter(self, multiplied: list[tuple[torch.Size, torch.dtype]]) -> None:
        x, weight = random(2, 3), random(4, 3)
        with torch.device("meta"), autocast():
            assert F.linear(x, weight).device.type == "cpu"


@every_dtype
@pytest.mark.parametrize("native", [False, True], ids=["blocks", "native"])
def test_a_result_may_be_changed_in_place(dtype: torch.dtype, native: bool) -> None:
    if native and dtype is FP16:
        pytest.skip("torch's own FP16 products are 200 times slower here")
    x, weight, bias = operands((2, 3), 8, 5, bias=True, transposed=False, dtype=dtype)
    assert bias is not None
    result = multiply(x, weight, bias, transposed=False, native=native)
    result += 1.0  # as in `h = linear(x); h += residual`
    result.sum().backward()
    assert result._base is None
    assert x.grad is not None


def test_a_large_weight_of_a_cpu_with_the_product_has_its_gradient_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[torch.Size, bool]] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool, native: bool) -> Tensor:
        written.append((weight.shape, native))
        return multiply(x, weight, bias, transposed=transposed, native=native)

    gradients = []
    for own_elements in (handlers.MIN_ELEMENTS, 64):
        monkeypatch.setattr(handlers, "MIN_ELEMENTS", own_elements)
        monkeypatch.setattr(handlers, "multiply", counted)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
        MixedPrecision("bf16").attach(model)
        for _ in range(2):
            model(random(4, 8, dtype=FP32)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert written == [((16, 8), True)] * 2
    for found, expected in zip(*gradients, strict=True):
        assert found is not None and found.dtype is FP32
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-7)  # one rounding to BF16 may differ

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tiny import Dispatched, saved_tensors
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_mp import autocast
from hf_mp.casting.cpu import upcast as through_fp32
from hf_mp.casting.cpu.upcast import run_through_fp32, runs_natively

pytestmark = pytest.mark.usefixtures("nothing_is_small")

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [FP16, BF16]


class Case(NamedTuple):
    """An op with the shapes of its operands, and how many of these its backward needs as they are.

    torch copies an operand inside of ``einsum`` and of a ``matmul`` that broadcasts, and saves the copy.
    """

    op: Callable[..., Tensor]
    shapes: list[tuple[int, ...]]
    saved: int


CASES: dict[str, Case] = {
    "conv2d": Case(F.conv2d, [(2, 3, 6, 7), (4, 3, 3, 3), (4,)], 2),
    "conv1d, strided": Case(lambda x, w: F.conv1d(x, w, stride=2, padding=1), [(2, 3, 9), (4, 3, 3)], 2),
    "bmm": Case(torch.bmm, [(2, 3, 4), (2, 4, 5)], 2),
    "bmm, transposed": Case(lambda x, y: torch.bmm(x, y.transpose(1, 2)), [(2, 3, 4), (2, 5, 4)], 2),
    "baddbmm": Case(lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5), [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2),
    "matmul, broadcast": Case(torch.matmul, [(2, 3, 4, 5), (3, 5, 2)], 1),
    "einsum": Case(lambda x, y: torch.einsum("bhqd,bkhd->bhqk", x, y), [(2, 3, 4, 5), (2, 6, 3, 5)], 1),
    "sdpa": Case(F.scaled_dot_product_attention, [(2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8)], 3),
    "sdpa, causal": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(1, 2, 5, 8)] * 3, 3
    ),
    "prelu": Case(F.prelu, [(3, 4), (1,)], 2),
    "mv": Case(torch.mv, [(3, 4), (4,)], 2),
    "a copy, expanded": Case(lambda x, y: x.clone()[:, :1].expand(3, 4) * y, [(3, 4), (3, 4)], 1),
}
every_case = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype = FP16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(case: Case, dtype: torch.dtype) -> list[Tensor]:
    return [random(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(case.shapes)]


def plainly(op: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The same arithmetic in differentiable casts: all that autograd saves is FP32."""
    return op(*(tensor.float() for tensor in inputs)).to(inputs[0].dtype)


def with_gradients(compute: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradient of each input."""
    result = compute(*inputs)
    direction = random(*result.shape, dtype=result.dtype, seed=9)
    return [result.detach(), *torch.autograd.grad(result, inputs, direction)]


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


EMPTY = {"bmm": [0, 1], "baddbmm": [0, 1, 2], "conv2d": [0], "sdpa": [0, 1, 2], "einsum": [0, 1], "mv": [0]}


@every_dtype
@pytest.mark.parametrize(("name", "empty"), [*((name, []) for name in CASES), *EMPTY.items()])
def test_result_and_gradients_are_those_of_fp32_rounded_once(name: str, empty: list[int], dtype: torch.dtype) -> None:
    case = CASES[name]
    shapes = [(0, *shape[1:]) if place in empty else shape for place, shape in enumerate(case.shapes)]
    inputs = operands(case._replace(shapes=shapes), dtype)
    found = with_gradients(lambda *args: run_through_fp32(case.op, args, {}, dtype), *inputs)
    assert {tensor.dtype for tensor in found} == {dtype}
    check_equal(found, with_gradients(lambda *args: plainly(case.op, *args), *inputs))


@every_dtype
@every_case
def test_what_backward_needs_of_the_inputs_is_saved_in_16_bits(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    inputs = operands(case, dtype)
    with saved_tensors() as saved:
        run_through_fp32(case.op, inputs, {}, dtype)
    addresses = {tensor.data_ptr() for tensor in inputs}
    assert len({tensor.data_ptr() for tensor in saved} & addresses) == case.saved, "not the operands themselves"
    # attention saves its own output as well, and the logarithms of its sums: no inputs, so they stay FP32
    if not name.startswith("sdpa"):
        assert {tensor.dtype for tensor in saved} == {dtype}


@pytest.mark.parametrize("kept", ["result", "graph"])
def test_the_upcasts_are_released_when_the_op_is_done(kept: str) -> None:
    upcasts: list[weakref.ref[Tensor]] = []

    def op(x: Tensor, y: Tensor) -> Tensor:
        upcasts.extend([weakref.ref(x), weakref.ref(y)])
        return torch.bmm(x, y)

    result = run_through_fp32(op, operands(CASES["bmm"], FP16), {}, FP16)
    held = result if kept == "result" else result.grad_fn
    assert held is not None
    assert [upcast() is None for upcast in upcasts] == [True, True]


def test_what_is_not_of_the_dtype_is_passed_on() -> None:
    given: dict[str, Any] = {}

    def op(*args: Any, **kwargs: Any) -> Tensor:
        given.update(kwargs, args=args)
        return kwargs["wide"]

    wide, index, other = random(2, dtype=FP64), torch.tensor([1]), random(2, dtype=BF16)
    single, half = random(2, dtype=FP32), random(2)
    result = run_through_fp32(op, (half, "text", [half, 3]), {"wide": wide, "i": index, "o": other, "s": single}, FP16)
    assert result is wide
    assert given["args"][0].dtype is FP32 and given["args"][1] == "text"
    assert given["args"][2][0].dtype is FP32 and given["args"][2][1] == 3
    assert given["i"] is index and given["o"] is other and given["s"] is single


@every_dtype
def test_every_floating_result_is_rounded(dtype: torch.dtype) -> None:
    values, indices = run_through_fp32(torch.max, (random(3, 4, dtype=dtype), 1), {}, dtype)
    assert (values.dtype, indices.dtype) == (dtype, torch.int64)
    parts = run_through_fp32(lambda x: [x / 3, (x, None)], (random(3, dtype=dtype),), {}, dtype)
    assert parts[0].dtype is parts[1][0].dtype is dtype and parts[1][1] is None


# torch's fused attention has none
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("sdpa")])
def test_second_derivatives_are_those_of_the_plain_form(name: str) -> None:
    case = CASES[name]

    def second(compute: Callable[..., Tensor]) -> list[Tensor]:
        inputs = operands(case, FP16)
        first = torch.autograd.grad((compute(*inputs).float() ** 2).sum(), inputs, create_graph=True)
        penalty = sum(gradient.float().square().mean() for gradient in first)
        return list(torch.autograd.grad(penalty, inputs))  # type: ignore[arg-type]

    ours = second(lambda *args: run_through_fp32(case.op, args, {}, FP16))
    check_equal(ours, second(lambda *args: plainly(case.op, *args)))


@every_dtype
@every_case
def test_small_operands_have_the_bits_of_large_ones(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found, wide = CASES[name], [], []
    for small in (0, 2**16):
        monkeypatch.setattr(through_fp32, "SMALL_ELEMENTS", small)
        inputs = operands(case, dtype)
        with saved_tensors() as kept:
            result = run_through_fp32(case.op, inputs, {}, dtype)
        wide.append([tensor.dtype for tensor in kept].count(FP32))
        found.append([result, *torch.autograd.grad(result.sum(), inputs)])
    assert all(map(torch.equal, *found)) and wide[0] < wide[1]


class TestChangedInPlace:
    @pytest.mark.parametrize("which", [0, 1])
    def test_a_saved_input_that_was_changed_is_an_error(self, which: int) -> None:
        inputs = [tensor * 1 for tensor in operands(CASES["bmm"], FP16)]
        result = run_through_fp32(torch.bmm, inputs, {}, FP16)
        inputs[which].mul_(2)
        with pytest.raises(
            RuntimeError, match=r"float16 tensor of shape \(2, .*modified by an in-place operation: it is"
        ):
            result.sum().backward()

    def test_the_result_may_change(self) -> None:
        x, y = operands(CASES["bmm"], FP16)
        result = run_through_fp32(torch.bmm, (x, y), {}, FP16)
        result.mul_(2).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, 2 * y.detach().float().sum(2).to(FP16)[:, None].expand(2, 3, 4))


def within(hooks: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Tensor]:
    def run(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with hooks():
            return block(*inputs)

    return run


def to_disk_and_back() -> saved_tensors_hooks:
    """Packs to plain bytes: nothing of the tensor but its values, dtype and shape comes back."""
    return saved_tensors_hooks(
        lambda tensor: (tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape),
        lambda packed: torch.frombuffer(bytearray(packed[0]), dtype=packed[1]).view(packed[2]),
    )


class TestInsideOfOtherHooks:
    """Gradient checkpointing and offloading work by saved-tensor hooks, as the op itself does."""

    @pytest.mark.parametrize(
        "outside",
        [
            functools.partial(checkpoint, use_reentrant=True),
            functools.partial(checkpoint, use_reentrant=False),
            within(save_on_cpu),
            within(to_disk_and_back),
        ],
        ids=["reentrant checkpoint", "checkpoint", "save_on_cpu", "plain bytes"],
    )
    @every_case
    def test_gradients_are_the_same(self, name: str, outside: Callable[..., Tensor]) -> None:
        case = CASES[name]

        def block(*args: Tensor) -> Tensor:
            return torch.tanh(run_through_fp32(case.op, [torch.sin(arg) for arg in args], {}, FP16))

        inputs = operands(case, FP16)
        check_equal(
            self.accumulated(lambda *args: outside(block, *args), inputs), self.accumulated(block, operands(case, FP16))
        )

    def test_a_hook_need_not_keep_the_layout(self) -> None:
        def block(x: Tensor, y: Tensor) -> Tensor:
            return run_through_fp32(torch.bmm, (x.transpose(1, 2), y), {}, FP16)

        plain, packed = ([random(2, 4, 3).requires_grad_(), random(2, 4, 5).requires_grad_()] for _ in range(2))
        found = self.accumulated(lambda *args: within(to_disk_and_back)(block, *args), packed)
        check_equal(found, self.accumulated(block, plain))

    @staticmethod
    def accumulated(block: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
        result = block(*inputs)
        result.backward(random(*result.shape, seed=9))
        return [result.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


class TestNativeProducts:
    def test_on_a_cpu_torch_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not torch.backends.mkldnn.is_available():
            pytest.skip("this torch has no oneDNN")
        monkeypatch.setattr(through_fp32, "CPU_PRODUCTS", through_fp32._cpu_products())
        assert runs_natively(FP16, "cpu") == torch.ops.mkldnn._is_mkldnn_fp16_supported()

    @pytest.mark.parametrize(
        ("avx512", "avx512_bf16", "onednn", "is_native"),
        [
            (True, False, True, False),
            (True, True, True, True),
            (False, False, True, True),
            (False, False, False, False),
        ],
        ids=["AVX512 that only converts", "AVX512-BF16", "Arm with BF16", "neither"],
    )
    def test_bf16_that_is_only_converted_is_not_native(
        self, avx512: bool, avx512_bf16: bool, onednn: bool, is_native: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        has = {"avx512_f": avx512, "avx512_bf16": avx512_bf16} if avx512 else {}  # Arm knows no such names
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
        asked = SimpleNamespace(_is_mkldnn_fp16_supported=lambda: False, _is_mkldnn_bf16_supported=lambda: onednn)
        monkeypatch.setattr(torch.ops, "mkldnn", asked)
        monkeypatch.setattr(through_fp32, "CPU_PRODUCTS", through_fp32._cpu_products())
        assert runs_natively(BF16, "cpu") is runs_natively(BF16, "cpu", "conv2d") is is_native

    @every_dtype
    def test_without_onednn_there_are_none(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        monkeypatch.setattr(through_fp32, "CPU_PRODUCTS", through_fp32._cpu_products())
        assert not runs_natively(dtype, "cpu")
        assert runs_natively(FP32, "cpu") and runs_natively(dtype, "cuda")

    def test_no_cpu_has_fp16_convolutions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(through_fp32, "CPU_PRODUCTS", {FP32: True, FP16: True, BF16: True})
        assert not runs_natively(FP16, "cpu", "conv2d") and not runs_natively(FP16, "cpu", "conv_transpose1d")
        assert runs_natively(FP16, "cpu", "linear") and runs_natively(BF16, "cpu", "conv2d")
        assert runs_natively(FP16, "cuda", "conv2d")

    @pytest.mark.parametrize("rules", [None, {torch.conv2d: "lower_precision"}])
    def test_the_gradient_of_an_fp16_convolution_is_one_of_fp32(
        self, rules: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(through_fp32, "CPU_PRODUCTS", {FP32: True, FP16: True, BF16: True})
        model = nn.Conv2d(3, 4, 3)

        with autocast(FP16, rules=rules):
            output = model(torch.randn(2, 3, 6, 7))
        assert output.dtype is FP16
        with Dispatched("convolution_backward") as seen:
            output.sum().backward()
        assert [{tensor.dtype for tensor in args[:3]} for _, args in seen.calls] == [{FP32}]

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.casting.mode import active_autocast, autocast

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def random(*shape: int, **settings: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **settings)


def product_dtype() -> torch.dtype:
    """In which dtype a product of FP32 tensors comes out where this is called."""
    return (random(2, 3) @ random(3, 2)).dtype


def modes_on_the_stack() -> int:
    return len(torch.overrides._get_current_function_mode_stack())


def check_nothing_is_left() -> None:
    assert active_autocast() is None
    assert modes_on_the_stack() == 0
    assert product_dtype() is FP32


class WritingData(torch.optim.Optimizer):
    """Updates each parameter by ``write``."""

    def __init__(self, parameters: Any, write: Callable[[Any], Any]) -> None:
        super().__init__(parameters, {})
        self.write = write

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.write(parameter)


def write_by_numpy(parameter: nn.Parameter) -> None:
    parameter.detach().numpy()[...] -= 0.1 * parameter.grad.numpy()  # type: ignore[union-attr]


class CastsOf(TorchDispatchMode):
    """Counts the casts of one tensor's memory to 16 bits."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.address = tensor.data_ptr()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype in (FP16, BF16):
            self.count += args[0].data_ptr() == self.address
        return result


class TestScope:
    def test_inside_products_are_lowered_and_afterwards_no_more(self) -> None:
        with autocast() as inside:
            assert product_dtype() is FP16
            assert active_autocast() is inside
        check_nothing_is_left()

    def test_disabled_inside_and_enabled_in_that_again(self) -> None:
        with autocast():
            with autocast(enabled=False) as disabled:
                assert product_dtype() is FP32
                assert torch.exp(random(2).half()).dtype is FP16
                assert active_autocast() is disabled
                with autocast(BF16):
                    assert product_dtype() is BF16
                assert product_dtype() is FP32
            assert product_dtype() is FP16
        check_nothing_is_left()

    def test_the_innermost_casts_alone(self) -> None:
        """An outer autocast that cast what the inner one computes would round to both dtypes."""
        x, w = random(8, 8), random(8, 8)
        full = x @ w
        with autocast(BF16):
            alone = x @ w
        with autocast(FP16), autocast(BF16):
            assert torch.equal(x @ w, alone)
        with autocast(BF16), autocast(FP32):
            assert torch.equal(x @ w, full)

    def test_one_autocast_may_be_entered_twice(self) -> None:
        twice = autocast()
        with twice:
            with twice:
                assert product_dtype() is FP16
            assert product_dtype() is FP16
            assert active_autocast() is twice
        check_nothing_is_left()
        with twice:
            assert product_dtype() is FP16
        check_nothing_is_left()

    def test_an_exception_inside_of_an_op_leaves_nothing_behind(self) -> None:
        with autocast() as outside:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), autocast(BF16):
                _ = random(2, 3) @ random(2, 3)
            assert active_autocast() is outside and modes_on_the_stack() == 1
            assert product_dtype() is FP16
        check_nothing_is_left()

    def test_decorator(self) -> None:
        @autocast(BF16)
        def decorated(x: Tensor, *, weight: Tensor) -> tuple[Tensor, autocast | None]:
            """What it does."""
            return x @ weight, active_autocast()

        result, active = decorated(random(2, 3), weight=random(3, 2))
        assert result.dtype is BF16 and active is not None
        assert (decorated.__name__, decorated.__doc__) == ("decorated", "What it does.")
        check_nothing_is_left()
        with autocast():
            assert decorated(random(2, 3), weight=random(3, 2))[0].dtype is BF16
            assert product_dtype() is FP16


class TestWhatIsLeftAlone:
    def test_fp64(self) -> None:
        x, w = random(2, 3, dtype=FP64), random(3, 2, dtype=FP64)
        with autocast():
            assert torch.equal(x @ w, torch.mm(x, w)) and (x @ w).dtype is FP64
            assert F.linear(x, w.t()).dtype is FP64
            assert torch.exp(x).dtype is FP64
            assert torch.softmax(x, -1).dtype is FP64
            assert x.sum().dtype is FP64

    def test_integers(self) -> None:
        x = torch.arange(6).view(2, 3)
        with autocast():
            assert (x @ x.t()).tolist() == [[5, 14], [14, 50]]
            assert x.sum().dtype is torch.int64
            assert x.cumsum(0).dtype is torch.int64
            assert x.pow(2).dtype is torch.int64

    def test_in_place_ops(self) -> None:
        x = random(3, 3).half()
        with autocast():
            assert x.pow_(2) is x and x.dtype is FP16
            full = random(3, 3)
            assert full.addmm_(full, full).dtype is FP32

    @pytest.mark.parametrize("dtype", [FP16, BF16, FP64])
    def test_a_dtype_that_the_caller_names(self, dtype: torch.dtype) -> None:
        x = random(3, 4).half()
        with autocast():
            assert torch.softmax(x, -1, dtype=dtype).dtype is dtype
            assert torch.softmax(x, -1, dtype).dtype is dtype
            assert F.log_softmax(x, -1, dtype=dtype).dtype is dtype
            assert x.sum(dtype=dtype).dtype is dtype
            assert x.cumsum(0, dtype=dtype).dtype is dtype
            assert F.softmax(x, -1, dtype=None).dtype is torch.softmax(x, -1, None).dtype is FP32


class TestErrors:
    @pytest.mark.parametrize("dtype", ["fp17", 16, torch.Tensor, len])
    def test_a_dtype_that_is_none(self, dtype: Any) -> None:
        with pytest.raises(TypeError, match=rf"must be a torch.dtype or its name, not {type(dtype).__name__}"):
            autocast(dtype)

    @pytest.mark.parametrize("dtype", [FP64, torch.int32, torch.complex64, torch.float8_e4m3fn])
    def test_a_dtype_that_cannot_be_used(self, dtype: torch.dtype) -> None:
        with pytest.raises(ValueError, match=rf"autocast cannot use {dtype}: use one of torch\.float16"):
            autocast(dtype)

    def test_tables_that_do_not_exist(self) -> None:
        with pytest.raises(ValueError, match="tables='tpu' is not known"):
            autocast(tables="tpu")  # type: ignore[arg-type]


class TestCastsOfParameters:
    @pytest.fixture
    def layer(self) -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(3, 5, bias=False)

    def test_a_parameter_is_cast_once_while_it_lasts(self, layer: nn.Linear) -> None:
        with CastsOf(layer.weight) as casts:
            with autocast():
                for _ in range(3):
                    layer(random(2, 3))
                with autocast(enabled=False):
                    layer(random(2, 3))
                layer(random(2, 3))
            assert casts.count == 1
            with autocast():
                layer(random(2, 3))
            assert casts.count == 2

    def test_gradients_of_all_uses_arrive(self, layer: nn.Linear) -> None:
        x, y = random(2, 3), random(4, 3)
        with autocast():
            (layer(x).sum() + layer(y).sum()).backward()
        expected = (x.half().sum(0) + y.half().sum(0)).float()
        torch.testing.assert_close(layer.weight.grad, expected.expand(5, 3), rtol=2**-9, atol=2**-9)

    def test_one_changed_in_place_is_cast_again(self, layer: nn.Linear) -> None:
        with autocast():
            layer(random(2, 3))
            with torch.no_grad():
                layer.weight.fill_(0.5)
            assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 5), 1.5, dtype=FP16))

    @pytest.mark.parametrize("kind", ["fused", "foreach", "data", "NumPy in a step"])
    def test_a_loop_inside_of_one_autocast_reads_what_the_optimizer_writes(self, kind: str) -> None:
        """``fused=True`` raises no version counter, and ``.data`` has one of its own."""
        makes: dict[str, Callable[[Any], Any]] = {
            "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
            "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
            "data": lambda parameters: WritingData(parameters, lambda p: p.data.add_(p.grad, alpha=-0.1)),
            "NumPy in a step": lambda parameters: WritingData(parameters, write_by_numpy),
        }

        def losses(inside: bool) -> list[float]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
            optimizer, found, around = makes[kind](model.parameters()), [], autocast(BF16)
            with around if inside else contextlib.nullcontext():
                for _ in range(5):
                    with contextlib.nullcontext() if inside else autocast(BF16):
                        loss = (model(random(8, 3)) - 1).square().mean()
                        with torch.no_grad():
                            evaluated = model(random(8, 3)).float().sum()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found += [loss.item(), evaluated.item()]
            assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
            return found

        expected = losses(inside=False)
        assert losses(inside=True) == expected and len(set(expected)) > 8

    @pytest.mark.parametrize("keeps", [False, True])
    def test_one_written_through_data_is_cast_again(self, layer: nn.Linear, keeps: bool) -> None:
        with CastsOf(layer.weight) as casts, autocast():
            layer(random(2, 3))
            alias = layer.weight.data.fill_(0.5)
            if not keeps:
                del alias
            assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 5), 1.5, dtype=FP16))
            if keeps:
                alias.numpy()[...] = 1.0
                assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 5), 3.0, dtype=FP16))
            else:
                layer(torch.ones(1, 3))
                assert casts.count == 2

    def test_an_autocast_inside_another_leaves_a_parameter_tracked(self, layer: nn.Linear) -> None:
        with autocast():
            layer(random(2, 3))
            with autocast(BF16):
                layer(random(2, 3))
            layer.weight.data.fill_(0.5)
            assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 5), 1.5, dtype=FP16))
        assert type(layer.weight) is nn.Parameter
        with autocast():
            with autocast(BF16):
                layer(random(2, 3))
            layer(random(2, 3))
            layer.weight.data.fill_(1.0)
            assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 5), 3.0, dtype=FP16))

    def test_a_tensor_that_cannot_be_tracked_is_cast_at_each_use(self) -> None:
        class Special(nn.Parameter):
            pass

        for weight in (Special(torch.ones(2, 2)), torch.ones(2, 2, requires_grad=True)):
            with autocast() as mode:
                mode.cast(weight, FP16)
                weight.data.fill_(0.5)
                assert torch.equal(mode.cast(weight, FP16), torch.full((2, 2), 0.5, dtype=FP16))

    def test_each_dtype_has_its_own_cast(self, layer: nn.Linear) -> None:
        with autocast():
            layer(random(2, 3))
            assert torch.exp(layer.weight).dtype is FP32
            with autocast(BF16):
                assert layer(random(2, 3)).dtype is BF16
            assert layer(random(2, 3)).dtype is FP16

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_a_cast_made_without_grad_is_not_used_with_grad(self, layer: nn.Linear, context: Callable[[], Any]) -> None:
        with autocast():
            with context():
                layer(random(2, 3))
            layer(random(2, 3)).sum().backward()
            assert layer.weight.grad is not None
            with context():
                assert not layer(random(2, 3)).requires_grad

    def test_parameters_made_in_inference_mode(self) -> None:
        with torch.inference_mode():
            layer = nn.Linear(3, 5, bias=False)
            with autocast():
                assert layer(random(2, 3)).dtype is FP16
                layer.weight.fill_(0.5)
                assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 5), 1.5, dtype=FP16))

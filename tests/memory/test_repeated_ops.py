"""An op that is called again with the same shapes and dtypes gives new tensors like its first ones, uncomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mp.memory import fake_tensors
from hf_mp.memory.fake_tensors import FakeValueMode
from hf_mp.memory.training import estimate_training_memory

from .conftest import CONFIGS

_aten = torch.ops.aten


class Reached(TorchDispatchMode):
    """Counts the calls that come down to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reached() -> Iterator[Reached]:
    with Reached() as reached, FakeValueMode():
        yield reached


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def facts(result: Any) -> list[Any]:
    tensors = [result] if isinstance(result, Tensor) or result is None else list(result)
    return [
        one if one is None else (one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes()) for one in tensors
    ]


OPS: dict[str, Callable[[Tensor], Any]] = {
    "native_layer_norm": lambda x: _aten.native_layer_norm(x, [6], None, None, 1e-5),
    "native_layer_norm_backward": lambda x: _aten.native_layer_norm_backward(
        x, x, [6], made(len(x), 1), made(len(x), 1), None, None, [True, False, False]
    ),
    "gelu": F.gelu,
    "add": lambda x: x + x.t().contiguous().t(),
    "linalg_vector_norm": torch.linalg.vector_norm,
    "_foreach_mul": lambda x: torch._foreach_mul([x, x.half()], 2.0),
    "_to_copy": Tensor.half,
}


@pytest.mark.parametrize("op", OPS)
def test_the_second_result_is_like_the_first_and_not_computed(op: str, reached: Reached) -> None:
    first, second = OPS[op](made(4, 6)), OPS[op](made(4, 6))
    assert facts(first) == facts(second) and type(first) is type(second)
    assert reached.calls[op] == 1
    assert facts(OPS[op](made(8, 6).half())) != facts(first) or op == "linalg_vector_norm"


def test_what_shares_memory_with_an_argument_does_so_each_time(reached: Reached) -> None:
    x = made(4, 6)
    for _ in range(2):
        # By its schema, the first returns new memory.
        for view in (_aten._unsafe_view(x, [24]), x.view(24), x[1:], *x.split(2)):
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert x.add_(1) is x
    assert reached.calls["_unsafe_view"] == reached.calls["add_"] == 2


def test_a_part_of_larger_memory_is_computed_each_time() -> None:
    whole = torch.empty(8, 6, device="meta")
    for result in ((whole[:2],), (whole[2:],), (whole, whole), (whole, whole[:2])):
        assert fake_tensors._as_new_tensors(result, ()) is None
    assert fake_tensors._as_new_tensors((torch.empty(2),), ()) is None  # not on the meta device
    assert fake_tensors._as_new_tensors((whole, None), ()) == ((whole.shape, whole.stride(), whole.dtype), None)


def test_numbers_of_another_type_and_other_devices_are_other_calls(reached: Reached) -> None:
    ids = made(3, dtype=torch.long)
    for _ in range(2):
        assert [(ids + one).dtype for one in (True, 1, 1.0)] == [torch.long, torch.long, torch.float32]
        assert torch.ones(2).device.type == "cpu" and made(2).is_meta
        assert (made(2) + torch.ones(())).is_meta


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["trainer-fp16", "fp16", "bf16-lean", "fp16-adamw8bit", "nf4-lora"])
def test_a_step_takes_the_memory_that_it_takes_if_each_op_is_computed(precision: str, monkeypatch: Any) -> None:
    step: dict[str, Any] = {"batch_size": 2, "seq_len": 32, "gradient_checkpointing": True}
    found = estimate_training_memory(CONFIGS["llama"](), precision, **step)
    monkeypatch.setattr(fake_tensors, "_returns_new_tensors", lambda func: False)
    assert estimate_training_memory(CONFIGS["llama"](), precision, **step) == found

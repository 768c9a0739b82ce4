"""What torch says about autocast inside ours, autocast-disabled regions of other code, and torch's own left alone."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import generic

from hf_mp.casting.mode import active_autocast, autocast

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LOWER = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4), torch.randn(4, 5)


class TestQuestions:
    @LOWER
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_inside_they_are_answered_for_ours(self, device: str, dtype: torch.dtype) -> None:
        with autocast(dtype):
            assert torch.is_autocast_enabled(device) and torch.is_autocast_enabled()
            assert torch.get_autocast_dtype(device) is dtype
            assert torch.get_autocast_gpu_dtype() is torch.get_autocast_cpu_dtype() is dtype  # of old
            assert torch.is_autocast_cpu_enabled()
            with autocast(enabled=False):
                assert not torch.is_autocast_enabled(device)
            assert torch.is_autocast_enabled(device)

    def test_outside_they_are_torchs(self) -> None:
        with autocast():
            pass
        assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cpu") is BF16 and torch.get_autocast_dtype("cuda") is FP16
        with torch.autocast("cpu", FP16):
            assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cpu") is FP16
        with pytest.raises((RuntimeError, TypeError)):
            torch.is_autocast_enabled("no device")

    def test_another_thread_is_not_asked_about_ours(self) -> None:
        found: list[Any] = []

        def ask() -> None:
            found.extend([torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")])
            found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            with torch.autocast("cpu", BF16):
                found.append(torch.is_autocast_enabled("cpu"))

        with autocast(FP16):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        assert found == [False, BF16, FP32, True]


DISABLED: dict[str, Callable[[], Any]] = {
    "cpu": lambda: torch.autocast("cpu", enabled=False),
    "cuda": lambda: torch.autocast("cuda", enabled=False),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast(enabled=False),
    "maybe_autocast": lambda: generic.maybe_autocast("cpu", enabled=False),
}


class TestIslands:
    @pytest.mark.parametrize("disabled", DISABLED)
    @pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast:FutureWarning")
    def test_they_switch_ours_off(self, pair: tuple[Tensor, Tensor], disabled: str) -> None:
        a, b = pair
        with autocast(FP16):
            with DISABLED[disabled]():
                assert (a @ b).dtype is FP32 and torch.equal(a @ b, torch.mm(a, b))
                assert not torch.is_autocast_enabled("cuda") and torch.sum(a.half()).dtype is FP16
            assert DISABLED[disabled]()(torch.mm)(a, b).dtype is FP32  # as a decorator
            assert (a @ b).dtype is FP16

    def test_one_object_entered_twice_and_again_outside(self, pair: tuple[Tensor, Tensor]) -> None:
        a, b = pair
        disabled = torch.autocast("cpu", enabled=False)
        with autocast(FP16):
            with disabled, disabled:
                assert (a @ b).dtype is FP32
            assert (a @ b).dtype is FP16
        with torch.autocast("cpu", BF16):
            with disabled:
                assert (a @ b).dtype is FP32
            assert (a @ b).dtype is BF16

    def test_ours_inside_a_disabled_region_of_torchs(self, pair: tuple[Tensor, Tensor]) -> None:
        with autocast(FP16), torch.autocast("cpu", enabled=False), autocast(BF16):
            assert (pair[0] @ pair[1]).dtype is BF16

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_in_a_recomputation(self, use_reentrant: bool) -> None:
        layer, seen = nn.Linear(4, 4), []

        def block(x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = layer(x)
                seen.append(x.dtype)
            return layer(x)

        x = torch.randn(2, 4, requires_grad=True)
        with autocast(FP16):
            result = checkpoint(block, x, use_reentrant=use_reentrant)
        result.float().sum().backward()
        assert seen == [FP32, FP32]


class TestBothAtOnce:
    @LOWER
    def test_torchs_inside_of_ours_is_an_error(self, dtype: torch.dtype) -> None:
        with autocast(dtype):
            with pytest.raises(RuntimeError, match=r"torch.autocast was entered inside hf_mp.autocast.*enabled=False"):
                torch.autocast("cpu", dtype=BF16).__enter__()
            assert active_autocast() is not None
        assert active_autocast() is None and not torch.is_autocast_enabled("cpu")

    def test_ours_inside_of_torchs_is_an_error(self, pair: tuple[Tensor, Tensor]) -> None:
        with torch.autocast("cpu", BF16):
            with pytest.raises(RuntimeError, match=r"torch.autocast is active"), autocast():
                raise AssertionError("was entered")
            assert (pair[0] @ pair[1]).dtype is BF16
        assert active_autocast() is None


class TestTransformers:
    @LOWER
    def test_rotary_embeddings_stay_in_fp32(self, dtype: torch.dtype) -> None:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=4096)).eval()
        rotary, positions = model.model.rotary_emb, torch.arange(3000, 3010)[None]
        expected = rotary(torch.zeros(1, 10, 32), positions)
        with autocast(dtype):  # in 16 bits, position 3001 is position 3000
            found = rotary(torch.zeros(1, 10, 32), positions)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_torch_jit_script_compiles_torchs_autocast_as_before(pair: tuple[Tensor, Tensor]) -> None:
    @torch.jit.script
    def product(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
            return a @ b

    assert product(*pair).dtype is BF16


@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 8))])
def test_torch_script_computes_as_under_torchs_autocast(make: Callable[[nn.Module], nn.Module]) -> None:
    scripted, x = make(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))), torch.randn(3, 8)

    def run(context: AbstractContextManager[Any]) -> list[Tensor]:
        scripted.zero_grad()
        with context:
            output = scripted(x)
        output.float().square().sum().backward()
        return [output.detach(), *(parameter.grad for parameter in scripted.parameters())]

    default = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
    in_fp32 = run(nullcontext())
    for _ in range(4):  # TorchScript differentiates by its own formulas from the third call on
        found, expected = run(autocast(BF16, tables="cpu")), run(torch.autocast("cpu", BF16))
        assert all(map(torch.equal, found, expected)) and not torch.equal(found[1], in_fp32[1])
    with autocast(BF16), torch.autocast("cpu", enabled=False):
        assert torch.equal(scripted(x), in_fp32[0])
    with pytest.raises(RuntimeError), autocast(BF16):
        scripted(torch.ones(3, 7))
    assert (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")) == default
    assert torch.equal(scripted(x), in_fp32[0])

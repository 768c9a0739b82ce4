"""What replaces something of ``torch.amp`` takes its arguments, by place and by name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_mp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (hf_mp.autocast, torch.autocast),
        (hf_mp.DynamicLossScaler, torch.amp.GradScaler),
        (hf_mp.custom_fwd, torch.amp.custom_fwd),
        (hf_mp.custom_bwd, torch.amp.custom_bwd),
    ],
)
def test_parameters_of_torchs_come_first_and_in_its_order(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    expected = list(inspect.signature(theirs).parameters.values())
    found = list(inspect.signature(ours).parameters.values())[: len(expected)]
    assert [one.kind for one in found] == [one.kind for one in expected]
    if theirs.__name__.startswith("custom"):  # the method to decorate, which nobody names
        found, expected = found[1:], expected[1:]
    assert [one.name for one in found] == [one.name for one in expected]


@pytest.mark.parametrize(
    ("args", "settings", "dtype", "tables"),
    [
        ((FP16,), {}, FP16, "cuda"),
        ((), {}, FP16, "cuda"),
        ((), {"dtype": BF16}, BF16, "cuda"),
        (("cuda",), {}, FP16, "cuda"),
        (("cuda", BF16, True, False), {}, BF16, "cuda"),
        (("cuda:1", FP16), {}, FP16, "cuda"),
        (("cpu",), {}, BF16, "cpu"),
        (("cpu", FP16), {"tables": "compact"}, FP16, "compact"),
        ((), {"device_type": "cpu", "dtype": FP16, "enabled": True, "cache_enabled": True}, FP16, "cpu"),
    ],
)
def test_autocast_means_what_torchs_does(
    monkeypatch: pytest.MonkeyPatch, args: Any, settings: Any, dtype: torch.dtype, tables: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    mode = hf_mp.autocast(*args, **settings)
    assert (mode.dtype, mode.tables) == (dtype, tables)
    with mode:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


@pytest.mark.parametrize("args", [("cuda",), ("cuda:0", FP16), (torch.device("cuda"), BF16)])
def test_without_cuda_its_autocast_is_switched_off_with_a_warning_as_torchs(
    monkeypatch: pytest.MonkeyPatch, args: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available or torch_xla"):
        assert not torch.autocast("cuda", *args[1:])._enabled
    dtype = args[1] if args[1:] else FP16
    with pytest.warns(UserWarning, match=rf"CUDA is not available: .* switched off.* autocast\({dtype}\) computes in"):
        mode = hf_mp.autocast(*args)
    with mode:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is FP32
    with warnings.catch_warnings(action="error"):
        assert not hf_mp.autocast(*args, enabled=False).enabled
        assert hf_mp.DynamicLossScaler("cuda").is_enabled()  # which changes no gradient


@pytest.mark.parametrize(
    ("args", "dtype"),
    [(("fp16",), FP16), (("cpu", "Half"), FP16), ((None, "bfloat16"), BF16), (("torch.float32",), FP32)],
)
def test_a_dtype_may_be_given_by_name(args: Any, dtype: torch.dtype) -> None:
    with hf_mp.autocast(*args):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


def test_what_is_neither_a_device_nor_a_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"or its name, not str \('fp17'\): use one of torch.float16, .*torch.float32"):
        hf_mp.autocast("fp17")


@pytest.mark.parametrize("cache_enabled", [None, True, False])
def test_weights_are_cast_once_or_at_each_use(cache_enabled: bool | None) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with hf_mp.autocast("cpu", FP16, cache_enabled=cache_enabled) as mode:
        once, again = mode.cast(weight, FP16), mode.cast(weight, FP16)
    assert (once is again) is (cache_enabled is not False)


def test_a_scale_in_the_place_of_the_device_is_told_apart() -> None:
    with pytest.raises(TypeError, match=r"device=8\.0 is no device"):
        hf_mp.DynamicLossScaler(8.0)  # type: ignore[arg-type]


def test_decorators_take_a_device_type() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @hf_mp.custom_fwd(device_type="cuda", cast_inputs=FP32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @hf_mp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    x = torch.ones(2, dtype=FP16, requires_grad=True)
    with hf_mp.autocast(FP16):
        doubled = Double.apply(x)
    assert doubled.dtype is FP32
    doubled.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]

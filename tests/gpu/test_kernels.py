"""The Triton kernels against their references: on a GPU, or with ``TRITON_INTERPRET=1`` in Triton's interpreter.

``tests/kernels/test_triton_interpreted.py`` runs this file in the interpreter, in a process of its own: the variable
must be set before Triton is imported.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_references import largest_magnitude_reference
from torch import Tensor, nn

import hf_mp
from hf_mp.kernels import registry
from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, _whole_master, adamw_by_torch, adamw_reference
from hf_mp.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from hf_mp.kernels.gradient_scan import (
    all_finite,
    largest_magnitude,
    largest_magnitude_and_norm,
    total_norm,
)
from hf_mp.kernels.split import split

pytest.importorskip("triton", reason="Triton is not installed")
from hf_mp.kernels.triton_tables import blocks_of

if not registry.is_interpreting():
    pytestmark = pytest.mark.gpu

DEVICE = "cpu" if registry.is_interpreting() else "cuda"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
LOWER = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
BLOCK = 4096


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(registry.VARIABLE, "triton")
    yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were chosen instead of their references."""
    names: list[str] = []
    original = registry.chosen

    def spy(name: str, tensors: Any) -> Any:
        launcher = original(name, tensors)
        names.extend([name] if launcher is not None else [])
        return launcher

    for module in ("kernels.gradient_scan", "kernels.adamw", "kernels.cross_entropy", "weights.fused_adamw"):
        monkeypatch.setattr(f"hf_mp.{module}.chosen", spy)
    return names


@pytest.mark.parametrize("kernel", registry.KERNELS)
def test_the_check_of_first_use_is_passed(kernel: str) -> None:
    assert registry.module_of(kernel).check(torch.device(DEVICE)) is None


@pytest.mark.usefixtures("other_default_dtype")
@pytest.mark.parametrize("kernel", registry.KERNELS)
def test_the_check_of_first_use_is_passed_whatever_the_default_dtype(kernel: str) -> None:
    assert registry.module_of(kernel).check(torch.device(DEVICE)) is None


@pytest.mark.parametrize("kernel", registry.KERNELS)
def test_the_check_of_first_use_is_passed_whatever_the_default_device(kernel: str) -> None:
    blocks_of.cache_clear()
    with torch.device("meta"):
        assert registry.module_of(kernel).check(torch.device(DEVICE)) is None


class TestGradientScan:
    def check(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        given = [tensor.to(DEVICE) for tensor in tensors]
        expected = largest_magnitude_reference(tensors)
        largest, norm = largest_magnitude_and_norm(given)
        for found in (largest, largest_magnitude(given)):  # bit for bit; which NaN it is, nobody says
            assert found.dtype is FP32 and found.shape == ()
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert all_finite(given) == bool(expected.isfinite())
        exact = torch.cat([tensor.double().flatten() for tensor in tensors]).norm().float()
        for found in (norm, total_norm(given)):
            torch.testing.assert_close(found.cpu(), exact, rtol=1e-6, atol=0, equal_nan=True)
        return largest, norm

    @DTYPES
    @pytest.mark.parametrize("count", [1, 16, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
    def test_sizes(self, count: int, dtype: torch.dtype, launched: list[str]) -> None:
        self.check([torch.randn(count).to(dtype)])
        assert set(launched) == {"gradient_scan"}

    @DTYPES
    def test_many_tensors_of_many_shapes(self, dtype: torch.dtype) -> None:
        shapes = [(), (0,), (3, 7), (BLOCK,), (2, BLOCK), (5, 0), (16,)]
        self.check([torch.randn(shape).to(dtype) for shape in shapes])

    def test_dtypes_together(self) -> None:
        self.check([torch.randn(300), torch.randn(16).half(), torch.randn(5000).bfloat16()])

    @DTYPES
    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("place", [0, BLOCK + 2, 2 * BLOCK])
    def test_inf_and_nan(self, place: int, poison: float, dtype: torch.dtype) -> None:
        tensor = torch.randn(2 * BLOCK + 1).to(dtype)
        tensor[place] = poison
        self.check([torch.ones(3, dtype=dtype), tensor])
        tensor[7] = math.nan
        self.check([tensor])

    @DTYPES
    def test_zeros_and_subnormals(self, dtype: torch.dtype) -> None:
        self.check([torch.zeros(20, dtype=dtype)])
        smallest = torch.finfo(dtype).smallest_normal / 4
        tensor = torch.full((20,), -smallest, dtype=dtype)
        assert largest_magnitude([tensor.to(DEVICE)]) == tensor.abs().max().float().to(DEVICE) > 0

    @DTYPES
    def test_tied_and_unaligned(self, dtype: torch.dtype) -> None:
        whole = torch.randn(2 * BLOCK).to(dtype)
        self.check([whole, whole])
        here = whole.to(DEVICE)[1:]
        assert torch.equal(largest_magnitude([here]).cpu(), whole[1:].float().abs().max())

    def test_not_contiguous_is_left_to_the_reference(self, launched: list[str]) -> None:
        registry._warn_once.cache_clear()
        with pytest.warns(UserWarning, match=r"gradient_scan is used, because a tensor of shape \(5, 4\) is not cont"):
            assert largest_magnitude([torch.arange(20.0, device=DEVICE).view(4, 5).t()]) == 19.0
        assert not launched


SETTINGS = AdamWSettings(lr=1e-2, weight_decay=0.1)
LAYOUTS = pytest.mark.parametrize("layout", ["whole", "whole fp16", "whole bf16", "split fp16", "split bf16"])


def weights(count: int) -> Tensor:
    """FP32 of every size that FP16 has: large, ordinary, subnormal, zeros of both signs."""
    values = torch.randn(count) * 10.0 ** torch.randint(-9, 5, (count,))
    values[::7], values[3::7] = 0.0, -0.0
    return values


def make(master: Tensor, gradient: Tensor, layout: str) -> AdamWTensors:
    dtype = {"fp16": FP16, "bf16": BF16}.get(layout.partition(" ")[2])
    state = (torch.zeros(master.shape), torch.zeros(master.shape), torch.zeros(()))
    if layout.startswith("split"):
        assert dtype is not None
        return AdamWTensors(gradient, *state, None, *split(master, dtype))
    return AdamWTensors(gradient, *state, master.clone(), None if dtype is None else master.to(dtype))


def bits(tensor: Tensor) -> Tensor:
    integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    return integers.masked_fill(tensor.isnan(), -1) if tensor.is_floating_point() else integers


class TestAdamW:
    def check(
        self, given: list[AdamWTensors], settings: AdamWSettings = SETTINGS, steps: int = 3, **kwargs: Any
    ) -> Any:
        """Bit for bit the reference of the same order of operations; returns what the kernel left, on the CPU."""
        adamw_ = registry.launcher("adamw")
        ours = [tensors.map(lambda tensor: tensor.to(DEVICE, copy=True)) for tensors in given]
        plain = [tensors.map(Tensor.clone) for tensors in given]
        for _ in range(steps):
            adamw_(ours, settings, **{name: tensor.to(DEVICE) for name, tensor in kwargs.items()})
            adamw_reference(plain, settings, **kwargs)
        ours = [tensors.map(Tensor.cpu) for tensors in ours]
        for found, expected in zip(ours, plain, strict=True):
            for name, one, other in zip(found._fields, found, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(bits(one), bits(other)), name
        return ours

    @LAYOUTS
    @DTYPES
    @pytest.mark.parametrize("count", [16, BLOCK + 5])
    def test_sizes(self, count: int, dtype: torch.dtype, layout: str) -> None:
        given = make(weights(count), torch.randn(count).to(dtype), layout)
        (after,) = self.check([given], factor=torch.tensor([0.37 / 1024]))
        assert after.step == 3 and not torch.equal(after.exp_avg, given.exp_avg)

    @LAYOUTS
    @pytest.mark.parametrize(
        "settings",
        [
            replace(SETTINGS, weight_decay=0.0),
            replace(SETTINGS, decoupled=False),
            replace(SETTINGS, maximize=True),
            replace(SETTINGS, beta1=0.25, beta2=0.5, eps=1e-3),
        ],
        ids=["no decay", "adam", "maximize", "betas"],
    )
    def test_settings(self, settings: AdamWSettings, layout: str) -> None:
        self.check([make(weights(200), torch.randn(200), layout)], settings)

    @LAYOUTS
    @pytest.mark.parametrize("where", ["gradient", "weight"])
    def test_special_values(self, where: str, layout: str) -> None:
        master, gradient = weights(200), torch.randn(200)
        special = torch.tensor([math.nan, math.inf, -math.inf, 2.0**-24, -(2.0**-25), 2.0**-149, 3e38, 0.0, -0.0])
        (gradient if where == "gradient" else master)[70 : 70 + len(special)] = special
        self.check([make(master, gradient, layout)])

    @LAYOUTS
    def test_masters_that_grow_out_of_fp16(self, layout: str) -> None:
        master = torch.full((20,), 65500.0)
        self.check([make(master, -torch.ones(20), layout)], AdamWSettings(lr=10.0, weight_decay=0.0))

    @LAYOUTS
    def test_many_tensors_in_one_launch(self, layout: str) -> None:
        shapes = [(), (0,), (3, 7), (BLOCK,), (2, BLOCK), (16,)]
        self.check([make(torch.randn(shape), torch.randn(shape), layout) for shape in shapes])

    @LAYOUTS
    @pytest.mark.parametrize("found", [0.0, 1.0])
    def test_nothing_is_updated_where_inf_was_found(self, found: float, layout: str) -> None:
        (after,) = self.check([make(weights(200), torch.randn(200), layout)], found_inf=torch.tensor(found))
        assert after.step == (0 if found else 3)

    @LAYOUTS
    def test_unaligned(self, layout: str) -> None:
        given = make(weights(BLOCK + 1), torch.randn(BLOCK + 1), layout)
        self.check([given.map(lambda tensor: tensor[1:] if tensor.dim() else tensor)])

    @LAYOUTS
    def test_torchs_fused_adamw(self, layout: str) -> None:
        """It fuses a product and a sum where the kernel rounds twice: one ulp of the larger of the two."""
        given = make(torch.randn(5000), torch.randn(5000), layout)
        adamw_ = registry.launcher("adamw")
        ours, plain = given.map(lambda tensor: tensor.to(DEVICE, copy=True)), given.map(Tensor.clone)
        for _ in range(2):
            adamw_([ours], SETTINGS)
            adamw_by_torch(plain, SETTINGS)
        ulp = 2.0**-23
        for name in ("exp_avg", "exp_avg_sq"):
            difference = (getattr(ours, name).cpu() - getattr(plain, name)).abs()
            bound = ulp * torch.maximum(getattr(plain, name).abs(), given.gradient.abs() * 0.1)
            assert (difference <= bound).all(), name
        masters = [_whole_master(t.map(Tensor.cpu)) for t in (ours, plain)]
        assert ((masters[0] - masters[1]).abs() <= ulp * masters[1].abs() + 1e-8).all()


# order of sums and the exponential: an element of the gradient may be rounded to the neighbouring number
TOLERANCE = {FP32: 2e-5, FP16: 2.0**-10, BF16: 2.0**-7}


class TestCrossEntropy:
    def losses(self, logits: Tensor, labels: Tensor, scale: float = 1.0, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
        """Loss and gradient of the kernel, and of the reference."""
        found = []
        for function, device in ((cross_entropy, DEVICE), (cross_entropy_reference, "cpu")):
            leaf = logits.to(device, copy=True).requires_grad_()
            loss = function(leaf * 1, labels.to(device), **kwargs)
            (loss * scale).backward()
            assert leaf.grad is not None
            found.append((loss.detach().cpu(), leaf.grad.cpu()))
        return found

    @DTYPES
    @pytest.mark.parametrize("classes", [2, 100, BLOCK + 9])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_sizes_and_reductions(self, reduction: str, classes: int, dtype: torch.dtype, launched: list[str]) -> None:
        logits = (torch.randn(5, classes) * 4).to(dtype)
        labels = torch.tensor([0, -100, classes - 1, 1, -100])
        (loss, gradient), (expected_loss, expected) = self.losses(logits, labels, 1024.0, reduction=reduction)
        assert launched == ["cross_entropy"] * 2 and gradient.dtype is dtype
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCE[dtype], atol=2e-6 * 1024)
        assert not gradient[1].any() and not gradient[4].any()

    @DTYPES
    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("counts", [True, False], ids=["counts", "ignored"])
    def test_inf_and_nan(self, counts: bool, poison: float, dtype: torch.dtype) -> None:
        logits = torch.randn(4, 50).to(dtype)
        logits[2, 7] = poison
        labels = torch.tensor([1, 2, 7 if counts else -100, 3])
        (loss, gradient), (expected_loss, expected) = self.losses(logits, labels)
        assert loss.isfinite() == expected_loss.isfinite()
        assert torch.equal(gradient.isfinite().all(1), expected.isfinite().all(1))

    @LOWER
    def test_a_first_block_of_masked_logits(self, dtype: torch.dtype) -> None:
        logits = torch.randn(2, BLOCK + 40).to(dtype)
        logits[:, : BLOCK + 7] = -math.inf
        (loss, gradient), (expected_loss, expected) = self.losses(logits, torch.tensor([BLOCK + 7, BLOCK + 30]))
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCE[dtype], atol=1e-6)

    @LOWER
    def test_zeros_and_subnormals(self, dtype: torch.dtype) -> None:
        for value in (0.0, -0.0, torch.finfo(dtype).smallest_normal / 4):
            logits = torch.full((3, 70), value, dtype=dtype)
            (loss, gradient), (expected_loss, expected) = self.losses(logits, torch.arange(3))
            torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(gradient, expected, rtol=TOLERANCE[dtype], atol=1e-7)

    def test_small_gradients_survive_because_the_scale_is_known(self) -> None:
        logits = torch.zeros(256, 64).half()
        logits[:, 0] = 14.0
        labels = torch.zeros(256, dtype=torch.long)
        assert not self.losses(logits, labels)[0][1][:, 1].any()
        assert self.losses(logits, labels, scale=2.0**16)[0][1][:, 1].all()

    @DTYPES
    def test_in_place(self, dtype: torch.dtype) -> None:
        logits = torch.randn(6, 50, dtype=dtype, device=DEVICE).requires_grad_() * 1
        address = logits.data_ptr()
        found: list[int] = []
        logits.register_hook(lambda gradient: found.append(gradient.data_ptr()))
        loss = cross_entropy(logits, torch.arange(6, device=DEVICE))
        del logits
        loss.backward()
        assert found == [address]

    def test_no_rows(self, launched: list[str]) -> None:
        empty = torch.zeros(0, dtype=torch.long, device=DEVICE)
        assert cross_entropy(torch.randn(0, 5, device=DEVICE).half(), empty, reduction="sum") == 0
        assert not launched

    def test_a_label_that_is_no_class_makes_the_loss_nan(self) -> None:
        logits = torch.randn(2, 5, device=DEVICE)
        loss = cross_entropy(logits.requires_grad_(), torch.tensor([1, 5], device=DEVICE))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.isnan() and gradient[0].isfinite().all() and gradient[1].isnan().all()  # so that a step is skipped


class TestSteps:
    """A whole update through ``prepare``, with the kernels and without."""

    def run(self, precision: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
        monkeypatch.setenv(registry.VARIABLE, setting)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 5)).to(DEVICE)
        optimizer: Any = torch.optim.AdamW(
            [{"params": model[0].parameters(), "lr": 1e-2}, {"params": [*model[1:].parameters()]}],
            lr=1e-3,
            fused=True,
        )
        schedule = None if "lean" in precision else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
        inputs = torch.randn(8, 40, device=DEVICE)
        for _ in range(3):
            model(inputs).square().sum().backward()
            (getattr(optimizer, "clip_grad_norm_", None) or self.clip(model))(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        state = [optimizer.state[parameter][name] for parameter in model.parameters() for name in ("exp_avg", "step")]
        copies = model.__dict__["forward"].runtime.layout.copies
        for parameter in model.parameters() if "lean" not in precision else ():
            if parameter in copies:
                entry = copies._entries[id(parameter)]
                assert torch.equal(entry.copy, parameter.detach().to(entry.copy.dtype))
                assert entry.seen == (parameter._version, parameter.data_ptr())
        return [value.detach().cpu().clone() for value in copy.copy(model.state_dict()).values()], state

    @staticmethod
    def clip(model: nn.Module) -> Any:
        return lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
    def test_a_few_steps(self, precision: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        ours, state = self.run(precision, "triton", monkeypatch)
        # without a scale or a norm to clip by, a CPU finds out otherwise whether gradients are finite
        assert {"adamw"} | ({"gradient_scan"} if precision != "bf16" else set()) <= set(launched)
        launched.clear()
        plain, plain_state = self.run(precision, "reference", monkeypatch)
        assert not launched
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(state, plain_state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

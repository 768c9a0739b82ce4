"""The Triton kernels against their references: on a GPU, or with ``TRITON_INTERPRET=1`` in Triton's interpreter.

``tests/kernels/test_triton_interpreted.py`` runs this file in the interpreter, in a process of its own: the variable
must be set before Triton is imported.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gradient_references import largest_magnitude_reference
from host_reads import host_reads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import hf_mp
from hf_mp.kernels import registry
from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_reference, power
from hf_mp.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from hf_mp.kernels.gradient_scan import (
    all_finite,
    largest_magnitude,
    largest_magnitude_and_norm,
    total_norm,
)
from hf_mp.kernels.split import split
from hf_mp.kernels.tensors import traits_of
from hf_mp.weights.split_parameter import gradient_and_factor

pytest.importorskip("triton", reason="Triton is not installed")
from triton.language import bfloat16
from triton.runtime import interpreter

from hf_mp.kernels import triton_adamw, triton_cross_entropy, triton_gradient_scan, triton_tables

if not registry.is_interpreting():
    pytestmark = pytest.mark.gpu

DEVICE = "cpu" if registry.is_interpreting() else "cuda"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=["fp32", "fp16", "bf16"])
LOWER = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
CAPTURED = pytest.mark.parametrize("precision", ["bf16", "params=fp32,compute=fp16,loss_scale=1024", "bf16-lean"])
BLOCK = 4096


def _cast_with_bf16(self: Any, source: Any, kind: Any) -> Any:
    """To and from BF16 as a GPU casts: Triton's interpreter truncates, and reads subnormal numbers wrongly."""
    kind, values = kind.scalar, source.data
    if source.dtype.scalar == bfloat16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if kind == bfloat16:
        bits = values.view(np.uint32)
        values = np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return type(source)(values.astype(interpreter._get_np_dtype(kind)), kind)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(registry.VARIABLE, "triton")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", _cast_with_bf16)
    yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were chosen instead of their references."""
    names: list[str] = []
    original = registry.kernel_for

    def spy(name: str, tensors: Any) -> Any:
        launcher = original(name, tensors)
        names.extend([name] if launcher is not None else [])
        return launcher

    for module in ("kernels.gradient_scan", "kernels.cross_entropy", "weights.fused_adamw"):
        monkeypatch.setattr(f"hf_mp.{module}.kernel_for", spy)
    return names


LAUNCHED = {
    triton_adamw: ("advance_kernel", "adamw_kernel"),
    triton_gradient_scan: ("scan_kernel", "reduce_kernel"),
    triton_cross_entropy: ("forward_kernel", "backward_kernel"),
}


READ_GRADIENTS = {"scan_kernel": "DTYPE", "adamw_kernel": "GRADIENT"}  # with the constant that tells their dtype


def elements_of(args: tuple[Any, ...]) -> int:
    """How many elements the tensors have that a launch goes through."""
    _, numels, *others = args
    blocks = next(one for one in others if isinstance(one, Tensor) and one.dim() == 2 and one.shape[1] == 2)
    return int(numels[blocks[:, 0].unique()].sum())


def update(given: list[AdamWTensors], settings: AdamWSettings, **kwargs: Any) -> None:
    """A step by the kernel."""
    registry.launcher("adamw")(given, [len(given)])([one.gradient for one in given], [settings], **kwargs)


@dataclass
class Launch:
    """What one launch of a kernel was given."""

    name: str
    programs: int
    numbers: list[Any]  # Python's, and the constants; of tensors their addresses
    constants: dict[str, Any]
    gradient_bytes: int  # that it reads


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []

    class Spy:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                numbers = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
                with _disable_current_modes():  # the interpreter copies by torch
                    self.kernel[grid](*args, **constants)
                    dtype = constants.get(READ_GRADIENTS.get(self.name, ""))
                    read = 0 if dtype is None else elements_of(args) * dtype.primitive_bitwidth // 8
                found.append(Launch(self.name, grid[0], numbers, constants, read))

            return launch

    for module, names in LAUNCHED.items():
        for name in names:
            monkeypatch.setattr(module, name, Spy(name, getattr(module, name)))
    return found


class TestTables:
    """Which launch a tensor belongs to, and what a step that follows one like it does not make again."""

    def test_one_odd_tensor_leaves_whole_vectors_to_all_others(self, launches: list[Launch]) -> None:
        even, odd = torch.randn(3 * BLOCK, device=DEVICE), torch.randn(BLOCK + 1, device=DEVICE)
        assert largest_magnitude([even, odd, even[16:]]) == max(even.abs().max(), odd.abs().max())
        assert [(one.name, one.constants.get("ALIGNED"), one.programs) for one in launches] == [
            ("scan_kernel", True, 6),
            ("scan_kernel", False, 5),
            ("reduce_kernel", None, 1),
        ]
        launches.clear()
        given = [make(torch.randn(count), torch.randn(count), "whole fp16") for count in (64, 2, 16)]
        update([one.map(lambda tensor: tensor.to(DEVICE)) for one in given], SETTINGS)
        assert [(one.name, one.constants.get("ALIGNED"), one.programs) for one in launches] == [
            ("advance_kernel", None, 1),
            ("adamw_kernel", True, 2),
            ("adamw_kernel", False, 1),
        ]

    @pytest.mark.parametrize("place", range(5))
    def test_each_tensor_of_a_parameter_counts(self, place: int, launches: list[Launch]) -> None:
        given = make(torch.randn(32), torch.randn(32), "whole fp16").map(lambda tensor: tensor.to(DEVICE, copy=True))
        moved = [name for name in given._fields if name not in ("step", "remainder")][place]
        shifted = torch.cat([getattr(given, name := moved)[:1], getattr(given, name)])[1:]
        update([given._replace(**{moved: shifted})], SETTINGS)
        assert [one.constants["ALIGNED"] for one in launches if one.name == "adamw_kernel"] == [False]

    def test_the_table_of_the_same_addresses_is_kept(self) -> None:
        def table(tensors: list[Tensor]) -> triton_tables.Table:
            return triton_tables.table_of(*traits_of(tensors), device, stream)

        tensors = [torch.randn(64, device=DEVICE), torch.randn(5, device=DEVICE)]
        device, stream = tensors[0].device, triton_tables.stream_of(tensors[0].device)
        before, moved = table(tensors), table([tensor.clone() for tensor in tensors])
        assert table(tensors) is before
        assert moved.numels is before.numels and moved.parts is before.parts
        assert moved.addresses is not before.addresses and moved.addresses[0] != before.addresses[0]

    def test_gradients_at_other_addresses_are_those_that_a_kept_update_reads(self) -> None:
        given = [make(torch.randn(count), torch.randn(count), "whole fp16") for count in (64, 2, 0, 33)]
        ours, plain = [one.map(lambda tensor: tensor.to(DEVICE, copy=True)) for one in given], given
        kept = registry.launcher("adamw")(ours, [len(ours)])
        for aligns in (True, False, True):
            gradients = [
                torch.randn(one.gradient.numel() + 1)[0 if aligns else 1 :][: one.gradient.numel()] for one in given
            ]
            plain = [one._replace(gradient=gradient) for one, gradient in zip(plain, gradients, strict=True)]
            padded = [torch.cat([torch.zeros(1), gradient]).to(DEVICE)[1:] for gradient in gradients]
            kept(padded if aligns else [gradient.to(DEVICE) for gradient in gradients], [SETTINGS])
            adamw_reference(plain, SETTINGS)
        for found, expected in zip(ours, plain, strict=True):
            for one, other in zip((found.step, *found.state()), (expected.step, *expected.state()), strict=True):
                assert torch.equal(bits(one.cpu()), bits(other))


@pytest.mark.parametrize("steps", [1, 2, 3, 1000, 2**20, 2**24 - 1])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 1 - 2.0**-30])
def test_powers_are_those_of_python_up_to_rounding(beta: float, steps: int) -> None:
    assert power(beta, steps) == pytest.approx(beta**steps, rel=steps * 2.0**-52, abs=1e-300)
    given = make(torch.randn(5), torch.randn(5), "whole")
    settings = replace(SETTINGS, beta1=beta, beta2=beta)
    ours, plain = given.map(lambda tensor: tensor.to(DEVICE, copy=True)), given.map(Tensor.clone)
    for tensors in (ours, plain):
        tensors.step.fill_(steps - 1)
    update([ours], settings)
    adamw_reference([plain], settings)
    assert ours.step == steps and torch.equal(ours.master.cpu(), plain.master)  # type: ignore[union-attr]


@pytest.mark.usefixtures("other_default_dtype")
@pytest.mark.parametrize("kernel", registry.KERNELS)
def test_the_check_of_first_use_is_passed_whatever_the_default_dtype(kernel: str) -> None:
    assert registry.reference_mismatch(kernel, torch.device(DEVICE)) is None


@pytest.mark.parametrize("kernel", registry.KERNELS)
def test_the_check_of_first_use_is_passed_whatever_the_default_device(kernel: str) -> None:
    for table in (triton_tables.table_of, triton_tables.on_device, triton_tables._parts):
        table.cache_clear()
    with torch.device("meta"):
        assert registry.reference_mismatch(kernel, torch.device(DEVICE)) is None


def poisoned(*values: tuple[int, float]) -> list[Tensor]:
    """Ones, and a tensor of more than two blocks with these values at these places."""
    tensor = torch.randn(2 * BLOCK + 1)
    for place, value in values:
        tensor[place] = value
    return [torch.ones(3), tensor]


SCANNED: dict[str, Callable[[], list[Tensor]]] = {
    **{f"{count} elements": partial(lambda count: [torch.randn(count)], count) for count in (1, 16, BLOCK - 1, BLOCK)},
    "many shapes": lambda: [torch.randn(shape) for shape in [(), (0,), (3, 7), (BLOCK,), (2, BLOCK), (5, 0), (16,)]],
    "one tensor twice": lambda: [torch.randn(2 * BLOCK)] * 2,
    "zeros": lambda: [torch.zeros(20)],
    **{
        f"{value} at {place}": partial(poisoned, (place, value))
        for value in (math.nan, math.inf, -math.inf)
        for place in (0, BLOCK + 2, 2 * BLOCK)
    },
    "inf and nan": partial(poisoned, (7, math.nan), (BLOCK, math.inf)),
}


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
    @pytest.mark.parametrize("case", SCANNED)
    def test_what_is_scanned(self, case: str, dtype: torch.dtype, launched: list[str]) -> None:
        self.check([tensor.to(dtype) for tensor in SCANNED[case]()])
        assert set(launched) == {"gradient_scan"}

    def test_dtypes_together(self) -> None:
        self.check([torch.randn(300), torch.randn(16).half(), torch.randn(5000).bfloat16()])

    @DTYPES
    def test_subnormals_and_unaligned(self, dtype: torch.dtype) -> None:
        smallest = torch.full((21,), -torch.finfo(dtype).smallest_normal / 4, dtype=dtype)
        expected = smallest.abs().max().float()
        assert largest_magnitude([smallest.to(DEVICE)[1:]]).cpu() == expected > 0

    def test_not_contiguous_is_left_to_the_reference(self, launched: list[str]) -> None:
        registry._warn_once.cache_clear()
        with pytest.warns(UserWarning, match=r"gradient_scan is used, because it reads contig.* of shape \(5, 4\)"):
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


ADAMW_SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": 0.0}, {"beta1": 0.25, "beta2": 0.5, "eps": 1e-3},
]  # fmt: skip


def special(in_gradient: bool) -> list[tuple[Tensor, Tensor]]:
    master, gradient = weights(200), torch.randn(200)
    values = torch.tensor([math.nan, math.inf, -math.inf, 2.0**-24, -(2.0**-25), 2.0**-149, 3e38, 0.0, -0.0])
    (gradient if in_gradient else master)[70 : 70 + len(values)] = values
    return [(master, gradient)]


# Masters and gradients.
UPDATED: dict[str, Callable[[], list[tuple[Tensor, Tensor]]]] = {
    "special gradients": lambda: special(True),
    "special weights": lambda: special(False),
    "out of FP16": lambda: [(torch.full((20,), 65500.0), -torch.ones(20))],
    "many shapes": lambda: [
        (torch.randn(shape), torch.randn(shape)) for shape in [(), (0,), (3, 7), (BLOCK,), (2, BLOCK), (16,)]
    ],
    "more than one program counts the steps of": lambda: [(torch.randn(n), torch.randn(n)) for n in [1, 0, 16] * 60],
    "a block and one": lambda: [(weights(BLOCK + 1), torch.randn(BLOCK + 1))],
}


class TestAdamW:
    def check(
        self, given: list[AdamWTensors], settings: AdamWSettings = SETTINGS, steps: int = 3, **kwargs: Any
    ) -> Any:
        """Bit for bit the reference of the same order of operations; returns what the kernel left, on the CPU."""
        ours = [tensors.map(lambda tensor: tensor.to(DEVICE, copy=True)) for tensors in given]
        plain = [tensors.map(Tensor.clone) for tensors in given]
        kept = registry.launcher("adamw")(ours, [len(ours)])
        gradients = [tensors.gradient for tensors in ours]
        for _ in range(steps):
            kept(gradients, [settings], **{name: tensor.to(DEVICE) for name, tensor in kwargs.items()})
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
    @pytest.mark.parametrize("settings", ADAMW_SETTINGS, ids=str)
    def test_settings(self, settings: dict[str, Any], layout: str) -> None:
        self.check([make(weights(200), torch.randn(200), layout)], replace(SETTINGS, **settings))

    @LAYOUTS
    @pytest.mark.parametrize("case", UPDATED)
    def test_values_and_shapes(self, case: str, layout: str) -> None:
        given = [make(master, gradient, layout) for master, gradient in UPDATED[case]()]
        self.check(given, AdamWSettings(lr=10.0, weight_decay=0.0) if case == "out of FP16" else SETTINGS)
        unaligned = [one.map(lambda tensor: tensor[1:] if tensor.dim() else tensor) for one in given]
        self.check([one.map(Tensor.contiguous) if len(given) > 1 else one for one in unaligned])

    @LAYOUTS
    @pytest.mark.parametrize("found", [0.0, 1.0])
    def test_nothing_is_updated_where_inf_was_found(self, found: float, layout: str) -> None:
        (after,) = self.check([make(weights(200), torch.randn(200), layout)], found_inf=torch.tensor(found))
        assert after.step == (0 if found else 3)

    @pytest.mark.parametrize("dtype", [FP32, torch.float64])
    def test_a_learning_rate_on_the_device(self, dtype: torch.dtype) -> None:
        given, rate = make(weights(200), torch.randn(200), "whole fp16"), torch.tensor(0.003, dtype=dtype)
        on_device = given.map(lambda tensor: tensor.to(DEVICE, copy=True))
        update([on_device], replace(SETTINGS, lr=rate.to(DEVICE)))
        adamw_reference([given], replace(SETTINGS, lr=rate.item()))
        for one, other in zip(on_device.state(), given.state(), strict=True):
            assert torch.equal(bits(one.cpu()), bits(other))


# order of sums and the exponential: an element of the gradient may be rounded to the neighbouring number
TOLERANCE = {FP32: 2e-5, FP16: 2.0**-10, BF16: 2.0**-7}


def with_poison(poison: float, label: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(4, 50)
    logits[2, 7] = poison
    return logits, torch.tensor([1, 2, label, 3])


def masked_at_first(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A first block of masked logits."""
    logits = torch.randn(2, BLOCK + 40)
    logits[:, : BLOCK + 7] = -math.inf
    return logits, torch.tensor([BLOCK + 7, BLOCK + 30])


def constant(dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    return torch.full((3, 70), factor * torch.finfo(dtype).smallest_normal, dtype=dtype), torch.arange(3)


LOGITS: dict[str, Callable[[torch.dtype], tuple[Tensor, Tensor]]] = {
    **{
        f"{poison} {'counts' if label == 7 else 'is ignored'}": partial(
            lambda poison, label, dtype: with_poison(poison, label), poison, label
        )
        for poison in (math.nan, math.inf, -math.inf)
        for label in (7, -100)
    },
    "masked at first": masked_at_first,
    "zeros": partial(constant, factor=0.0),
    "zeros below": partial(constant, factor=-0.0),
    "subnormals": partial(constant, factor=0.25),
}


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
    @pytest.mark.parametrize("classes", [2, 17, 96, 100, BLOCK + 9])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_sizes_and_reductions(self, reduction: str, classes: int, dtype: torch.dtype, launched: list[str]) -> None:
        logits = (torch.randn(5, classes) * 4).to(dtype)
        labels = torch.tensor([0, -100, classes - 1, 1, -100])
        (loss, gradient), (expected_loss, expected) = self.losses(logits, labels, 1024.0, reduction=reduction)
        assert launched == ["cross_entropy"] and gradient.dtype is dtype
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, expected, rtol=TOLERANCE[dtype], atol=2e-6 * 1024)
        assert not gradient[1].any() and not gradient[4].any()

    @DTYPES
    @pytest.mark.parametrize("case", LOGITS)
    def test_values(self, case: str, dtype: torch.dtype) -> None:
        logits, labels = LOGITS[case](dtype)
        (loss, gradient), (expected_loss, expected) = self.losses(logits.to(dtype), labels)
        assert loss.isfinite() == expected_loss.isfinite()
        rows = expected.isfinite().all(1)
        assert torch.equal(gradient.isfinite().all(1), rows)
        torch.testing.assert_close(gradient[rows], expected[rows], rtol=TOLERANCE[dtype], atol=1e-6)
        if loss.isfinite():
            torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)

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


class Dispatched(TorchDispatchMode):
    """Torch's own kernels, what they read and write of gradients, and the reads of a value by the host."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self.parameters = list(parameters)
        self.kernels: list[str] = []
        self.numbers: list[list[Any]] = []  # of Python's, that went into each op
        self.gradient_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        given = tree_leaves((args, kwargs))
        objects = (Tensor, torch._C.ScriptObject)  # the second are spans for a profiler
        self.numbers.append([name, *[one for one in given if not isinstance(one, objects)]])
        if self.parameters and not func.is_view:
            gradients = {raw.data_ptr() for one in self.parameters if (raw := gradient_and_factor(one)[0]) is not None}
            touched = [one for one in given if isinstance(one, Tensor) and one.data_ptr() in gradients]
            passes = 2 if name.endswith("_") else 1  # in place
            self.gradient_bytes += passes * sum(one.nbytes for one in touched)
        if not (func.is_view or name.startswith(("empty", "_local_scalar", "detach", "lift"))):
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))


# Scan, norm, clipping (read and written), scan, update; with the clipping in the step: scan, update. A lean norm is
# a pass of its own.
PASSES = {
    ("fp16", "torch's clipping"): 6, ("bf16", "torch's clipping"): 5,
    ("fp16", "in the step"): 2, ("bf16", "in the step"): 2, ("fp16-lean", "in the step"): 3,
    ("bf16-lean", "in the step"): 3,
}  # fmt: skip


def capturable(precision: str) -> tuple[Any, Any, Tensor, Callable[[], None]]:
    """A model, its optimizer, the learning rate on the device, and a step that a graph can capture."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 16)).to(DEVICE)
    rate, inputs = torch.tensor(1e-3, device=DEVICE), torch.randn(8, 48, device=DEVICE)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    model, optimizer = hf_mp.prepare(model, optimizer, precision, max_grad_norm=1.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none="lean" in precision)
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, optimizer, rate, step


class TestLaunches:
    """What a guarded step starts on a device that skips by itself, in Triton and in torch; without clipping."""

    @pytest.fixture(autouse=True)
    def as_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_mp.step.gradients._DEVICES_WITH_FOUND_INF", (DEVICE,))
        for module in ("step.gradients", "weights.fused_adamw"):
            monkeypatch.setattr(f"hf_mp.{module}.is_on_host", lambda tensor: False)

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_a_step_starts_at_most_twelve_kernels(self, precision: str, launches: list[Launch]) -> None:
        model: Any = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 5)).to(DEVICE)
        groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, *model[1].parameters()]}]
        optimizer: Any = torch.optim.AdamW(groups, fused=True)
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, as do their tables
            model(torch.randn(8, 40, device=DEVICE)).square().mean().backward()
            launches.clear()
            with Dispatched() as torchs:
                optimizer.step()
        names = [launch.name for launch in launches] + torchs.kernels
        assert names.count("scan_kernel") == 2 and not optimizer.step_was_skipped
        assert names.count("adamw_kernel") == 4  # norms have no working copies
        assert len(names) <= 12 + (DEVICE == "cuda"), names  # and a copy of found_inf to the host

    @pytest.mark.parametrize("precision, clips", PASSES)
    def test_bytes_of_gradients_that_a_step_moves(self, precision: str, clips: str, launches: list[Launch]) -> None:
        model: Any = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 16)).to(DEVICE)
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        settings = {"max_grad_norm": 1e-3} if clips == "in the step" else {}
        model, optimizer = hf_mp.prepare(model, optimizer, precision, **settings)
        for _ in range(3):
            loss = model(torch.randn(8, 48, device=DEVICE)).square().mean()
            launches.clear()
            loss.backward()
            with Dispatched(model.parameters()) as torchs:
                if not settings:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
            optimizer.zero_grad()
        moved = torchs.gradient_bytes + sum(launch.gradient_bytes for launch in launches)
        size = 2 if "lean" in precision else 4
        assert moved == size * PASSES[precision, clips] * sum(p.numel() for p in model.parameters())

    @CAPTURED
    def test_a_whole_step_that_a_graph_could_capture(self, precision: str, launches: list[Launch]) -> None:
        """Forward, backward, clipping and update twice: the same numbers of Python went in, and nothing was read."""
        _, optimizer, rate, step = capturable(precision)
        taken = []
        for number in range(5):
            assert not optimizer.step_was_skipped  # asked before a capture, as a step that goes before it
            launches.clear()
            with host_reads() as reads, Dispatched() as torchs:
                step()
            if number >= 2:  # the first steps make copies, moments and tables
                assert "read" not in reads and {one.name for one in launches} >= {"scan_kernel", "adamw_kernel"}
                numbers = [[n for n in one.numbers if not isinstance(n, int) or n < 2**20] for one in launches]
                taken.append((torchs.numbers, numbers, [(one.name, one.programs, one.constants) for one in launches]))
            rate.fill_(1e-3 / (number + 2))  # as a schedule does
        assert taken[0] == taken[1] == taken[2]
        assert optimizer.state[next(iter(optimizer.state))]["step"] == 5


@pytest.mark.gpu
@CAPTURED
def test_a_captured_step_is_the_step(precision: str) -> None:
    found = []
    for captures in (True, False):
        model, optimizer, _, step = capturable(precision)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                step()
                assert not optimizer.step_was_skipped
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph) if captures else contextlib.nullcontext():
            step()
        for _ in range(4 if captures else 3):  # what is captured does not run
            (graph.replay if captures else step)()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def move(tensor: Tensor) -> None:
    """Have ``tensor`` lie somewhere else, and NaN where it was."""
    before, tensor.data = tensor.data, tensor.data.clone()
    with torch.no_grad():
        (before.as_subclass(Tensor) if before.is_floating_point() else before.view(torch.float16)).fill_(math.nan)


def replace_moment(optimizer: Any, parameter: Any, name: str) -> None:
    state = optimizer.state[parameter]
    before, state[name] = state[name], state[name] + 0.5
    before.fill_(math.nan)


def transposed_gradient(parameter: Any) -> None:
    parameter.grad = parameter.grad.t().contiguous().t()


def another_group(model: Any, optimizer: Any) -> None:
    model[3].weight.requires_grad_()
    optimizer.add_param_group({"params": [model[3].weight], "lr": 0.1})


# What happens between a backward and its step, given the model, its optimizer and its widest weight.
DISTURBANCES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a loaded state": lambda model, optimizer, weight: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a moved moment": lambda model, optimizer, weight: move(optimizer.state[weight]["exp_avg"]),
    "a new moment": lambda model, optimizer, weight: replace_moment(optimizer, weight, "exp_avg_sq"),
    "a new step": lambda model, optimizer, weight: replace_moment(optimizer, weight, "step"),
    "no state": lambda model, optimizer, weight: optimizer.state.clear(),
    "no moment": lambda model, optimizer, weight: optimizer.state.pop(weight),
    "no gradient": lambda model, optimizer, weight: setattr(weight, "grad", None),
    "no first gradient": lambda model, optimizer, weight: setattr(model[0].bias, "grad", None),
    "a moved gradient": lambda model, optimizer, weight: setattr(weight, "grad", weight.grad.clone()),
    "a transposed gradient": lambda model, optimizer, weight: transposed_gradient(weight),
    "a moved weight": lambda model, optimizer, weight: setattr(weight, "data", weight.data.clone()),
    "a written weight": lambda model, optimizer, weight: nn.init.ones_(weight),
    "a transposed weight": lambda model, optimizer, weight: setattr(
        weight, "data", weight.detach().t().contiguous().t()
    ),
    "other betas": lambda model, optimizer, weight: optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "another group": lambda model, optimizer, weight: another_group(model, optimizer),
    "a parameter that changes its group": lambda model, optimizer, weight: optimizer.param_groups[1]["params"].insert(
        0, optimizer.param_groups[0]["params"].pop()
    ),
}


SAME_VALUES = ("a loaded state", "a moved moment", "a moved gradient", "a moved weight")


class TestKeptUpdates:
    """A step that finds kept tables out of date writes what a step without any would."""

    undisturbed: ClassVar[dict[str, list[Tensor]]] = {}

    def run(
        self, precision: str, monkeypatch: pytest.MonkeyPatch, disturb: Any = None, keeps: bool = True
    ) -> tuple[list[Tensor], list[int]]:
        """Weights and state after some steps, and the number of tables before each step and at the end."""
        made: list[Any] = []
        original = triton_adamw.Update
        monkeypatch.setattr(triton_adamw, "Update", lambda *given: (made.append(given[1]), original(*given))[1])
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(24, 16), nn.LayerNorm(16), nn.Linear(16, 2), nn.Linear(2, 2)).to(DEVICE)
        model[3].requires_grad_(False)
        weight = model[0].weight
        groups = [{"params": [model[0].bias, weight]}, {"params": [*model[1:3].parameters()], "betas": (0.8, 0.9)}]
        optimizer: Any = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        model, optimizer = hf_mp.prepare(model, optimizer, precision)
        updates = optimizer._updates if "lean" in precision else optimizer.step.hf_mp_guard._updates
        counts = []
        for number in range(3):
            model(torch.randn(8, 24, device=DEVICE)).square().sum().backward()
            if number == 1 and disturb is not None:
                with torch.no_grad():
                    disturb(model, optimizer, weight)
            counts.append(len(made))
            if not keeps:
                updates._kernels.clear()
            optimizer.step()
            assert not optimizer.step_was_skipped
            optimizer.zero_grad()
        monkeypatch.setattr(triton_adamw, "Update", original)
        state = [
            value for one in model.parameters() if one in optimizer.state for value in optimizer.state[one].values()
        ]
        found = [*map(getattr(optimizer, "master", Tensor.detach), model.parameters()), *state]
        copies = model.__dict__["forward"].runtime.weights.layout.copies
        for parameter in model.parameters():
            if parameter in copies and "lean" not in precision:
                assert torch.equal(copies.get(parameter), parameter.detach().to(copies.dtype))
        return [tensor.detach().cpu().clone() for tensor in found], [*counts, len(made)]

    @pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
    def test_steps_that_are_alike_make_no_tables(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kept, made = self.run(precision, monkeypatch)
        anew, remade = self.run(precision, monkeypatch, keeps=False)
        tables = 2 if "lean" in precision else 1
        assert made == [0, *[tables] * 3] and remade == [tables * number for number in range(4)]
        assert all(map(torch.equal, kept, anew))

    @pytest.mark.parametrize("what", DISTURBANCES)
    @pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
    def test_what_has_changed_is_seen(self, precision: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kept, _ = self.run(precision, monkeypatch, DISTURBANCES[what])
        anew, _ = self.run(precision, monkeypatch, DISTURBANCES[what], keeps=False)
        assert len(kept) == len(anew) and all(map(torch.equal, kept, anew))
        assert all(tensor.isfinite().all() for tensor in kept)
        if precision not in self.undisturbed:
            self.undisturbed[precision], _ = self.run(precision, monkeypatch)
        expected = self.undisturbed[precision]
        assert (what in SAME_VALUES) == (len(kept) == len(expected) and all(map(torch.equal, kept, expected)))

    @pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
    def test_a_change_of_the_setting_is_followed(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def turn_off(*given: Any) -> None:
            monkeypatch.setenv(registry.VARIABLE, "reference")

        _, made = self.run(precision, monkeypatch, turn_off)
        assert len({*made[1:]}) == 1

    @pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
    def test_moments_that_were_replaced_are_let_go(self, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        references: list[Any] = []

        def load(model: Any, optimizer: Any, weight: Any) -> None:
            references.append(weakref.ref(optimizer.state[weight]["exp_avg"]))
            DISTURBANCES["a loaded state"](model, optimizer, weight)
            assert references[0]() is None

        self.run(precision, monkeypatch, load)
        assert references


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
            by_torch = partial(nn.utils.clip_grad_norm_, model.parameters())
            getattr(optimizer, "clip_grad_norm_", by_torch)(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        state = [optimizer.state[parameter][name] for parameter in model.parameters() for name in ("exp_avg", "step")]
        copies = model.__dict__["forward"].runtime.weights.layout.copies
        for parameter in model.parameters() if "lean" not in precision else ():
            if parameter in copies:
                entry = copies._entries[id(parameter)]
                assert torch.equal(entry.copy, parameter.detach().to(entry.copy.dtype))
                assert entry.source[:2] == (parameter._version, parameter.data_ptr())
        return [value.detach().cpu().clone() for value in copy.copy(model.state_dict()).values()], state

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

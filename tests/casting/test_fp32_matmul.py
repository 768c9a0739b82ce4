import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_mp.casting.cpu import fp32_matmul
from hf_mp.casting.cpu.fp32_matmul import fp32_product, fp32_product_reference

needs_onednn = pytest.mark.skipif(not fp32_matmul.HAS_ONEDNN_PRODUCTS, reason="this torch has no oneDNN on this CPU")

# Rounding errors of a sum of K products grow with K at worst; 2**-24 is half a unit in the last place of 1.
ROUNDINGS_PER_TERM = 1


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "a view with gaps":
        wide = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + 5)
        wide[:, 2:-3] = tensor
        return wide[:, 2:-3]
    return tensor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that oneDNN was asked to multiply."""
    seen: list[torch.Size] = []
    monkeypatch.setattr(fp32_matmul, "PREFERS_ONEDNN", True)  # as on a CPU that Intel has not made
    original = torch.ops.mkldnn._linear_pointwise

    class Watched:
        _linear_pointwise = staticmethod(lambda left, *rest: seen.append(left.shape) or original(left, *rest))

    monkeypatch.setattr(torch.ops, "mkldnn", Watched)
    return seen


@needs_onednn
class TestOneDNN:
    @pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
    @pytest.mark.parametrize("right", ["contiguous", "transposed", "a view with gaps"])
    @pytest.mark.parametrize("left", ["contiguous", "transposed", "a view with gaps"])
    def test_is_the_product(self, left: str, right: str, bias: bool, calls: list[torch.Size]) -> None:
        a, b = random(96, 160, seed=1), random(160, 192, seed=2)
        c = random(192, seed=3) if bias else None
        found = fp32_product(laid_out(a, left), laid_out(b, right), c)
        exact = a.double() @ b.double() + (0.0 if c is None else c.double())
        magnitude = a.double().abs() @ b.double().abs() + (0.0 if c is None else c.double().abs())
        assert calls == [a.shape] and found.is_contiguous()
        assert ((found - exact).abs() <= ROUNDINGS_PER_TERM * 161 * 2.0**-24 * magnitude).all()

    @pytest.mark.parametrize(
        "bias", [random(384, seed=3)[::2], random(1, seed=3).expand(192)], ids=["gaps", "expanded"]
    )
    def test_a_bias_is_read_by_its_strides(self, bias: Tensor, calls: list[torch.Size]) -> None:
        a, b = random(96, 160, seed=1), random(160, 192, seed=2)
        torch.testing.assert_close(fp32_product(a, b, bias), fp32_product_reference(a, b, bias), rtol=0.0, atol=1e-4)
        assert calls

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (random(1, 2048, seed=1), random(2048, 1024, seed=2)),
            (random(2048, 3, seed=1)[:, :1].t(), random(2048, 1024, seed=2)),
            (random(2048, 1024, seed=1), random(1024, 3, seed=2)[:, 1:2]),
            (random(2048, 5, seed=1)[:, 2:3], random(1024, 4, seed=2)[:, 1:2].t()),
            (random(1, 2048, seed=1).expand(64, 2048), random(1, 1024, seed=2).expand(2048, 1024)),
        ],
        ids=["one row", "one row of a column", "one column", "one term", "expanded"],
    )
    def test_odd_strides(self, left: Tensor, right: Tensor, calls: list[torch.Size]) -> None:
        expected = fp32_product_reference(left.contiguous(), right.contiguous())
        allowed = left.shape[1] * 2.0**-24 * (left.abs() @ right.abs()).max()
        assert (fp32_product(left, right) - expected).abs().max() <= allowed
        assert calls

    @pytest.mark.parametrize(("rows", "enabled"), [(8, True), (128, False)], ids=["small", "oneDNN switched off"])
    def test_others_stay_with_blas(self, rows: int, enabled: bool, calls: list[torch.Size]) -> None:
        a, b = random(rows, 160, seed=1), random(160, 192 if rows > 8 else 8, seed=2)
        with torch.backends.mkldnn.flags(enabled=enabled):
            assert torch.equal(fp32_product(a, b), a @ b)
        assert calls == []


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "is_of_intel"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n", "x86_64", True),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n", "x86_64", False),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "aarch64", False),
        (None, "Intel64 Family 6 Model 106 Stepping 6, GenuineIntel", True),
        (None, "AMD64 Family 25 Model 1 Stepping 1, AuthenticAMD", False),
        (None, "", False),
    ],
    ids=["Intel", "AMD", "Arm", "Windows, Intel", "Windows, AMD", "unknown"],
)
def test_whose_cpu_it_is(
    cpuinfo: str | None, processor: str, is_of_intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: processor)
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert fp32_matmul._is_of_intel(file) is is_of_intel
    assert fp32_matmul._is_of_intel(tmp_path) is ("GenuineIntel" in processor)  # what cannot be read


def test_without_onednn_blas_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_matmul, "PREFERS_ONEDNN", False)
    a, b, c = random(128, 160, seed=1), random(160, 192, seed=2), random(192, seed=3)
    assert torch.equal(fp32_product(a, b, c), torch.addmm(c, a, b))

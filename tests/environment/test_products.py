"""One timed product in each dtype; no figure is asserted but that FP32's rate is 1."""

from __future__ import annotations

import pytest
import torch

from hf_mp.environment import products
from hf_mp.environment.products import time_products

CPU = torch.device("cpu")


def by_dtype(found):
    return {(product.dtype, product.way): product for product in found}


def test_every_dtype_has_a_rate_beside_fp32s():
    found = by_dtype(time_products(CPU, size=32, rounds=1))
    assert {dtype for dtype, _ in found} == {"FP32", "FP16", "BF16", "INT8"}
    assert found["FP32", "torch"].rate == 1.0
    assert all(product.device == "CPU" for product in found.values())
    assert all(product.rate > 0 for product in found.values() if product.rate is not None)


def test_arithmetic_is_what_torch_tells(monkeypatch):
    monkeypatch.setattr(products, "runs_natively", lambda dtype, device_type: dtype is torch.float16)
    found = by_dtype(time_products(CPU, size=32, rounds=1))
    assert found["FP16", "torch"].is_native is True
    assert found["BF16", "torch"].is_native is False
    assert ("FP16", "hf_mp, through FP32") not in found


def test_without_instructions_ours_stands_beside_torchs_which_stays_small(monkeypatch):
    monkeypatch.setattr(products, "runs_natively", lambda dtype, device_type: False)
    found = by_dtype(time_products(CPU, size=32, rounds=1))
    assert found["FP16", "torch"].is_native is False
    assert found["FP16", "hf_mp, through FP32"].rate > 0
    sizes = {(c.dtype, c.way): c.size for c in products._contenders(CPU, 512)}
    assert sizes.pop(("FP16", "torch")) == sizes.pop(("BF16", "torch")) == 256
    assert set(sizes.values()) == {512}


def test_a_product_that_torch_does_not_have_has_no_rate(monkeypatch):
    def missing(*args):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert by_dtype(time_products(CPU, size=32, rounds=1))["INT8", "torch, sums in INT32"].rate is None


def test_without_fp32_nothing_has_a_rate(monkeypatch):
    def seconds(multiply, device, rounds):
        return None if multiply().dtype is torch.float32 else 1.0

    monkeypatch.setattr(products, "_seconds", seconds)
    assert {product.rate for product in time_products(CPU, size=32, rounds=1)} == {None}


def test_the_number_of_threads_is_as_before(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "_int_mm", lambda *args: asked.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        time_products(CPU, size=32, rounds=1)
        assert (set(asked), torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_rates_too():
    found = by_dtype(time_products(torch.device("cuda", 0), size=256, rounds=1))
    assert found["FP16", "torch"].device == "GPU 0"
    assert found["FP16", "torch"].rate > 0

"""What the benchmarks share: the workload and its floors."""

from __future__ import annotations

import torch

from _benchmarks import DeviceRates, Workload, matmul_flops_per_second, update_bytes

SIZES = {"layers": 3, "width": 32, "heads": 2, "vocab": 100, "batch": 2, "seq": 16}


def test_flops_are_those_of_the_products_of_forward_and_backward():
    workload = Workload(**SIZES)
    tokens, width = 2 * 16, 32
    weights = 3 * 12 * width**2 + width * 100  # of the blocks, and of the output layer
    attention = 3 * 2 * 2 * tokens * 16 * width  # two products of FLOPs 2 x tokens x seq x width, in each layer
    assert workload.flops() == 3 * (2 * tokens * weights + attention)


def test_accumulation_counts_in_tokens_and_flops():
    one, four = Workload(**SIZES), Workload(**SIZES, accumulation=4)
    assert (four.tokens, four.flops()) == (4 * one.tokens, 4 * one.flops())


def test_everyone_trains_the_same_weights_on_the_same_tokens():
    workload = Workload(**SIZES)
    first, second = workload.model(), workload.model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(workload.token_ids(), workload.token_ids())
    assert workload.token_ids(batch=8).shape == (8, 16)


def test_an_update_reads_gradients_twice_and_everything_else_once():
    assert update_bytes(gradient=4, master=4, moments=8, copy=2) == 4 + (4 + 4 + 8) + (4 + 8 + 2)


def test_a_floor_is_products_and_then_bytes():
    rates = DeviceRates({"bf16": 1e9}, 1e6)
    assert rates.floor_seconds("bf16", 2e9, 3e6) == 5.0


def test_fp16_has_the_rate_in_which_its_products_run(monkeypatch, quick_rates):
    monkeypatch.setattr("_benchmarks.runs_natively", lambda dtype, device: False)
    measured = []

    def rate(dtype, device, shapes):
        measured.append(dtype)
        return float(len(measured))

    monkeypatch.setattr("_benchmarks.matmul_flops_per_second", rate)
    rates = DeviceRates.measure(Workload(**SIZES)).flops_per_second
    assert rates["fp16"] == rates["fp32"] == 1.0
    assert measured == [torch.float32, torch.bfloat16]


def test_the_rate_is_that_of_the_fastest_product(monkeypatch):
    # two layouts of the right factor, by two libraries in FP32
    seconds = iter([1.0, 2.0, 4.0, 0.5, 1.0, 2.0, 4.0, 1.0])
    monkeypatch.setattr("_benchmarks.fastest_seconds", lambda call: next(seconds))
    assert matmul_flops_per_second(torch.float32, "cpu", [(2, 3, 4), (2, 3, 4)]) == 2 * 2 * 3 * 4 / 0.5
    assert next(seconds, None) is None

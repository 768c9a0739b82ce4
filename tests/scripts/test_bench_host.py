"""What a step counts, whatever the machine: figures that must not creep up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bench
from benches import host as bench_host
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

# Of one more layer of GPT-2, at most: Python calls, autograd nodes written in Python, kernels, reads by the host.
LIMITS = {
    "hf_mp bf16": (530, 1, 96, 0),
    "hf_mp bf16, loss scaled": (580, 1, 100, 0),
    "hf_mp bf16-lean": (930, 1, 122, 0),
    "hf_mp fp16": (1070, 5, 203, 0),  # products of its own, where a CPU has none of FP16
    "hf_mp fp16-lean": (1440, 5, 255, 0),
}


@pytest.fixture(autouse=True)
def native_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CPU_PRODUCTS, torch.bfloat16, True)  # as on a GPU: no product of ours


@pytest.mark.parametrize("contender", LIMITS)
def test_a_layer_costs_no_more_calls_nodes_kernels_and_reads(contender: str) -> None:
    fewer, more = (bench_host.count(bench_host.make_step(contender, layers, 32, 8)) for layers in (2, 3))
    found = [more[name] - fewer[name] for name in fewer]
    assert all(one <= limit for one, limit in zip(found, LIMITS[contender], strict=True)), found


@pytest.mark.parametrize("contender", bench_host.OURS)
def test_reads_of_a_step(contender: str) -> None:
    peer, ours = (bench_host.count(bench_host.make_step(c, 3, 32, 8)) for c in (bench_host.PEER, contender))
    # found_inf, and on a CPU whether a block of split masters is finite.
    assert ours["host_reads"] == peer["host_reads"] + 1 + ("lean" in contender)
    if contender in ("hf_mp bf16", "hf_mp bf16, loss scaled"):
        assert ours["kernels"] < peer["kernels"]


def test_reads_that_no_dispatcher_hears_of_are_counted() -> None:
    value = torch.ones(2)

    def step() -> None:
        value.tolist(), value.numpy(), value[0].item(), bool(value[0])

    assert bench_host.count(step)["host_reads"] == 4


def test_the_counts_are_stored_with_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_host, "CONTENDERS", ("fp32", bench_host.PEER, "hf_mp bf16"))
    bench.command("host")(layers=1, width=32, tokens=8, rounds=1, output_dir=tmp_path)
    stored = json.loads((tmp_path / "bench_host.json").read_text())["result"]
    assert stored["counts"].keys() == stored["contenders"].keys() == set(bench_host.CONTENDERS)
    assert stored["contenders"][bench_host.PEER]["step"]["ratio_to_torch_autocast"] == 1.0

"""The ways of training a step: what each computes in, and which of them run where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import _contenders
from _benchmarks import Workload
from _contenders import (
    CONTENDERS,
    choose,
    find_contender,
    has_cpp_compiler,
    loop_step,
    peak_bytes,
    training,
    why_not_here,
)

BF16, FP32 = torch.bfloat16, torch.float32
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.fixture
def workload(tiny_model) -> Workload:
    return Workload(**tiny_model, batch=2, seq=16, accumulation=2)


class ProductDtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.seen.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", FP32),
        ("torch.autocast bf16", BF16),
        ("hf_mp.autocast bf16", BF16),
        ("hf_mp bf16", BF16),
        ("hf_mp bf16-lean", BF16),
        # without FP16 arithmetic, its products run in FP32
        ("hf_mp fp16", FP32),
    ],
)
def test_a_loop_computes_in_the_dtype_of_its_name(name, dtype, workload, monkeypatch):
    monkeypatch.setattr("hf_mp.casting.cpu.upcast.runs_natively", lambda dtype, device: dtype is BF16)
    step = loop_step(CONTENDERS[name], workload, compiled=False)
    with ProductDtypes() as products:
        step()
    assert products.seen == {dtype}


@pytest.mark.parametrize("name", [n for n in CONTENDERS if n not in ("torch.autocast fp16", "Trainer fp16=True")])
def test_every_contender_trains(name, workload, monkeypatch):
    trained = {}
    original = Workload.model

    def model(self):
        trained["model"] = original(self)
        trained["before"] = [parameter.detach().clone() for parameter in trained["model"].parameters()]
        return trained["model"]

    monkeypatch.setattr(Workload, "model", model)
    with training(name, workload) as step:
        step()
        step()
        after = [parameter.detach().float() for parameter in trained["model"].parameters()]
    # Two small updates of a norm's weight, 1, are lost in the 16 bits of a lean model, but not in its masters.
    changed = [not torch.equal(a, b) for a, b in zip(after, trained["before"], strict=True) if (b != 1.0).any()]
    assert sum(changed) > len(changed) / 2


@pytest.mark.parametrize(
    ("name", "accelerate", "ours"),
    [("Trainer bf16=True", "bf16", None), ("MixedPrecisionTrainer fp16-lean", "no", "fp16-lean")],
)
def test_a_trainer_has_the_precision_of_its_name(name, accelerate, ours, workload, monkeypatch):
    seen = []
    monkeypatch.setattr(_contenders, "StepByStep", lambda trainer: seen.append(trainer) or _Idle())
    with training(name, workload):
        (trainer,) = seen
        assert trainer.accelerator.mixed_precision == accelerate
        assert trainer.args.gradient_accumulation_steps == 2
        assert ours is None or str(trainer.precision_policy) == ours


class _Idle:
    def step(self) -> None: ...
    def close(self) -> None: ...


def test_the_peak_holds_weights_gradients_and_state(workload):
    workload = replace(workload, vocab=2000, seq=128)
    state = 4 * 4 * workload.parameters()  # FP32 weights, gradients and two moments
    logits = 4 * workload.batch * workload.seq * workload.vocab  # in FP32
    fp32, mixed = (peak_bytes(name, workload, 2) for name in ("fp32", "hf_mp bf16"))
    assert state + logits < fp32 < state + 6 * logits
    assert mixed < fp32 - logits / 2
    assert abs(peak_bytes("Trainer fp32", workload, 2) / fp32 - 1) < 0.2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Trainer fp16=True", "on a CPU, fp16=True trains in FP32"),
        ("Trainer fp16=True compiled", "on a CPU, fp16=True trains in FP32"),
        ("hf_mp bf16 compiled", "needs a C\\+\\+ compiler"),
        ("torch.autocast fp16", "about 50 times FP32's time"),
    ],
)
def test_what_cannot_run_here_is_left_out_with_its_reason(name, reason, monkeypatch):
    monkeypatch.setattr(_contenders, "has_cpp_compiler", lambda: False)
    monkeypatch.setattr(_contenders, "runs_natively", lambda dtype, device: dtype is BF16)
    chosen, left_out = choose(["fp32", name], "cpu", compiled=False)
    assert chosen == ["fp32"]
    assert list(left_out) == [name]
    with pytest.raises(ValueError, match=reason):
        choose([name], "cpu", compiled=False)


def test_on_a_gpu_everything_runs(monkeypatch):
    monkeypatch.setattr(_contenders, "runs_natively", lambda dtype, device: True)
    monkeypatch.setattr(_contenders, "has_cpp_compiler", lambda: False)
    assert all(why_not_here(f"{name}{suffix}", "cuda") is None for name in CONTENDERS for suffix in ("", " compiled"))


def test_compiled_twins_are_added(monkeypatch):
    monkeypatch.setattr(_contenders, "has_cpp_compiler", lambda: True)
    chosen, _ = choose(["fp32", "hf_mp bf16 compiled"], "cpu", compiled=True)
    assert chosen == ["fp32", "hf_mp bf16 compiled", "fp32 compiled"]
    assert find_contender("fp32 compiled") == (CONTENDERS["fp32"], True)


def test_a_compiled_contender_is_compiled(workload, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    loop_step(CONTENDERS["fp32"], workload, compiled=True)()
    assert len(compiled) == 1


def test_a_compiler_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not has_cpp_compiler()
    (tmp_path / "clang++").touch(mode=0o755)
    assert has_cpp_compiler()


def test_an_unknown_contender_is_refused():
    with pytest.raises(ValueError, match=r"contender 'apex O2' is not known: use some of fp32, .* ' compiled'"):
        choose(["apex O2"], "cpu", compiled=False)

"""The ways of training a step: what each computes in, and which of them run where."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import _contenders
from _benchmarks import Workload
from _contenders import (
    CONTENDERS,
    Contender,
    choose,
    loop_step,
    make_trainer,
    peak_bytes,
    trainers_in_turns,
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
    monkeypatch.setattr("hf_mp.casting.cpu.upcast.runs_natively", lambda dtype, *where: dtype is BF16)
    step = loop_step(name, workload)
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
    if Contender.of(name).is_trainer:
        with make_trainer(name, workload, 2) as trainer:
            trainer.train()
    else:
        step = loop_step(name, workload)
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
def test_a_trainer_has_the_precision_of_its_name(name, accelerate, ours, workload):
    with make_trainer(name, workload, 1) as trainer:
        assert trainer.accelerator.mixed_precision == accelerate
        assert trainer.args.gradient_accumulation_steps == 2
        assert ours is None or str(trainer.precision_policy) == ours


def test_trainers_train_in_turns_and_in_reverse_and_each_step_is_timed_once(workload):
    seen = []

    def make(name: str, max_steps: int):
        seen.append((name, max_steps))
        return make_trainer("Trainer fp32", workload, max_steps)

    makers = {name: functools.partial(make, name) for name in ("one", "other")}
    *before, seconds = trainers_in_turns(makers, rounds=4, warmup=1, trainings=2)
    assert list(before[0]) == ["one"]  # and not one that has no step yet
    assert seen == [("one", 4), ("other", 4), ("other", 4), ("one", 4)]
    assert {name: len(found) for name, found in seconds.items()} == {"one": 4, "other": 4}
    assert min(map(min, seconds.values())) > 0
    (found,) = trainers_in_turns({"one": makers["one"]}, rounds=2, warmup=0, trainings=1)
    assert len(found["one"]) == 2


def test_the_peak_holds_weights_gradients_and_state(workload):
    workload = replace(workload, vocab=2000, seq=128)
    state = 4 * 4 * workload.parameters()  # FP32 weights, gradients and two moments
    logits = 4 * workload.batch * workload.seq * workload.vocab  # in FP32
    fp32, mixed = (peak_bytes(name, workload, 2) for name in ("fp32", "hf_mp bf16"))
    assert state + logits < fp32 < state + 6 * logits
    assert mixed < fp32 - logits / 2
    assert abs(peak_bytes("Trainer fp32", workload, 2) / fp32 - 1) < 0.2


def test_what_cannot_run_here_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setattr(_contenders, "runs_natively", lambda dtype, device: dtype is BF16)
    names = ["fp32", "Trainer fp16=True", "Trainer fp16=True compiled", "torch.autocast fp16"]
    chosen, left_out = choose(names, "cpu")
    assert chosen == ["fp32"] and list(left_out) == names[1:]
    assert left_out["Trainer fp16=True"] == "on a CPU, fp16=True trains in FP32"
    assert left_out["torch.autocast fp16"].startswith("takes about 50 times FP32's time")


def test_a_compiled_contender_is_compiled(workload, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, backend: compiled.append(model) or model)
    loop_step("fp32 compiled", workload)()
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("name", "dtype", "policy", "moved"),
    [
        ("fp32", "fp32", "fp32", 32),
        ("hf_mp fp16-lean compiled", "fp16", "fp16-lean", 28),
        ("hf_mp bf16, loss scaled", "bf16", "params=fp32,compute=bf16,loss_scale=headroom", 34),
        ("Trainer bf16=True", "bf16", "bf16", 34),
    ],
)
def test_a_name_says_dtype_precision_and_bytes(name, dtype, policy, moved):
    contender = Contender.of(name)
    assert (contender.dtype, contender.policy, contender.update) == (dtype, policy, moved)


def test_an_unknown_contender_is_refused():
    with pytest.raises(ValueError, match=r"contenders apex O2 are not known: use some of fp32, .* ' compiled'"):
        choose(["apex O2"], "cpu")

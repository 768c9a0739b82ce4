"""What is recorded of a step, that it is true, and that the training does not change by it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from op_log import OpLog
from planted_faults import Mlp, gpt2, tokens, vectors
from torch import Tensor, nn

from hf_mp import MixedPrecision, StaticLossScaler, record_precision
from hf_mp.diagnostics import magnitude_collector
from hf_mp.diagnostics.contract.lost_update_count import count_lost_updates
from hf_mp.diagnostics.magnitude_collector import COMPILED
from hf_mp.diagnostics.magnitudes import histogram
from hf_mp.diagnostics.precision_recorder import PrecisionRecorder
from hf_mp.diagnostics.step_magnitudes import Kind, StepMagnitudes, as_record, from_record
from hf_mp.weights.split_parameter import SplitParameter, master_value

PRECISIONS = ["fp16", "bf16", "fp16-lean", "bf16-lean"]


class Loop:
    """A model and its optimizer, stepped on seeded batches of tokens."""

    def __init__(
        self, path: Path | None, precision: str = "fp16", model: Callable[[], nn.Module] = gpt2, scale: float = 2.0**10,
        lr: float = 0.1, steps: int = 1, momentum: float = 0.0,
    ) -> None:  # fmt: skip
        torch.manual_seed(2)
        random.seed(2)
        self.model: Any = model().train()
        scaler = StaticLossScaler(scale) if precision.startswith("fp16") else None
        self.runtime = MixedPrecision(precision, loss_scaler=scaler)
        self.runtime.attach(self.model)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.optimizer = self.runtime.attach_optimizer(optimizer)
        self.recorder: PrecisionRecorder | None = None
        if path is not None:
            self.recorder = record_precision(self.model, path, histogram_steps=steps)

    def backward(self, seed: int, factor: float = 1.0) -> None:
        is_mlp = isinstance(self.model, Mlp)
        loss = self.model(**vectors(seed)).square().mean() if is_mlp else self.model(**tokens(seed)).loss
        (loss * factor).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @classmethod
    def stepped(cls, path: Path, *args: Any, **settings: Any) -> Loop:
        """One that has taken a step."""
        loop = cls(path, *args, **settings)
        loop.backward(0)
        loop.step()
        return loop

    @property
    def found(self) -> StepMagnitudes:
        assert self.recorder is not None and self.recorder.latest is not None
        return self.recorder.latest

    def masters(self) -> dict[str, Tensor]:
        return {
            name: (master_value(p) if isinstance(p, SplitParameter) else p.detach()).clone()
            for name, p in self.model.named_parameters()
        }


def of(found: StepMagnitudes, kind: Kind, name: str) -> Any:
    layer, _, tensor = (
        name.rpartition(".") if kind not in (Kind.ACTIVATIONS, Kind.ACTIVATION_GRADIENTS) else (name, "", "")
    )
    (row,) = (t for t in found.tensors if (t.kind, t.layer, t.tensor) == (kind, layer, tensor))
    return row


# The training is the same


@pytest.mark.parametrize("steps", [0, 100], ids=["off", "between"])
def test_steps_that_are_not_looked_at_run_the_same_ops(steps: int, tmp_path: Path) -> None:
    logs = []
    for path in (tmp_path, None):
        loop = Loop(path, steps=steps)
        loop.backward(0)
        loop.step()
        with OpLog() as log:
            loop.backward(1)
            loop.step()
        logs.append(log.ops)
    assert logs[0] == logs[1]


# What is recorded is true


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_gradients_and_updates_are_those_of_the_masters(precision: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path, precision)
    before = loop.masters()
    loop.backward(0)
    loop.backward(1)  # what both add up to
    gradients = {}
    if "lean" not in precision:  # reading .grad would change its form
        gradients = {name: p.grad.clone() for name, p in loop.model.named_parameters()}
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)  # not what clipping leaves
    loop.step()
    after = loop.masters()
    for name, weight in before.items():
        assert of(loop.found, Kind.WEIGHTS, name).histogram == histogram(weight), name
        assert of(loop.found, Kind.UPDATES, name).histogram == histogram(after[name] - weight), name
        if gradients:
            assert of(loop.found, Kind.WEIGHT_GRADIENTS, name).histogram == histogram(gradients[name]), name
    assert loop.found.step == 1 and loop.found.notes == ()


def test_activations_and_their_gradients_are_those_of_the_first_micro_batch(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    name, kept = "transformer.h.1.mlp.c_fc", []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    loop.model.get_submodule(name).register_forward_hook(keep)
    loop.backward(0)
    loop.backward(1)
    loop.step()
    assert len(kept) == 2 and kept[0].dtype is torch.float16
    assert of(loop.found, Kind.ACTIVATIONS, name).histogram == histogram(kept[0])
    found = of(loop.found, Kind.ACTIVATION_GRADIENTS, name)
    assert found.histogram == histogram(kept[0].grad.float() / 2.0**10)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing_of_what_is_recorded(reentrant: bool, tmp_path: Path) -> None:
    model = functools.partial(gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    plain, checkpointed = Loop(tmp_path / "a", model=model), Loop(tmp_path / "b", model=model)
    checkpointed.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for loop in (plain, checkpointed):
        loop.backward(0)
        loop.step()
    rows = [{(t.kind, t.layer, t.tensor): t.histogram for t in loop.found.tensors} for loop in (plain, checkpointed)]
    assert rows[0].keys() == rows[1].keys()
    assert all(found == rows[1][key] for key, found in rows[0].items())


def test_tied_weights_count_once(tmp_path: Path) -> None:
    loop = Loop.stepped(tmp_path)
    weights = [(t.layer, t.tensor) for t in loop.found.tensors if t.kind is Kind.WEIGHTS]
    assert ("transformer.wte", "weight") in weights and ("lm_head", "weight") not in weights
    assert loop.found.of(Kind.WEIGHTS).total == sum(p.numel() for p in loop.model.parameters())
    assert loop.found.of(Kind.ACTIVATIONS, "lm_head").total > 0


# Planted situations


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_lost_updates_are_those_of_all_masters(precision: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path, precision, lr=3e-3)
    before = loop.masters()
    loop.backward(0)
    loop.step()
    after = loop.masters()
    lost = [count_lost_updates(weight, after[name] - weight, torch.bfloat16) for name, weight in before.items()]
    found = loop.found.lost_updates()
    assert found == tuple(map(sum, zip(*lost, strict=True))) and 0.05 < found.share < 1.0


def test_the_step_after_a_skipped_one_is_recorded_in_its_place(tmp_path: Path) -> None:
    loop = Loop(tmp_path, steps=100)
    loop.backward(0, factor=1e30)
    loop.step()
    assert loop.runtime.step_was_skipped and loop.recorder is not None and loop.recorder.latest is None
    loop.backward(1)
    loop.step()
    assert loop.found.step == 2 and loop.found.of(Kind.UPDATES).total > 0


def test_large_tensors_are_sampled_and_count_for_all_of_their_elements(tmp_path: Path) -> None:
    loop = Loop(tmp_path, model=lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3)))
    loop.model(torch.randn(4, 512)).square().mean().backward()
    loop.step()
    row = of(loop.found, Kind.WEIGHTS, "0.weight")
    assert row.stride > 1 and row.histogram.total <= 2**15
    total = loop.found.of(Kind.WEIGHTS, "0").total
    assert total == pytest.approx(512 * 512 + 512, rel=1e-3)
    assert loop.found.lost_updates("0").updates > 0.5 * 512 * 512


# Compiled models


@pytest.mark.parametrize("how", [pytest.param("wrapper", marks=pytest.mark.exhaustive), "block"])
def test_a_compiled_model_is_recorded_without_activations(how: str, tmp_path: Path) -> None:
    ends = []
    for path in (tmp_path, None):
        torch._dynamo.reset()
        loop = Loop(path, model=Mlp)
        call = loop.model
        if how == "wrapper":
            call = torch.compile(loop.model, backend="eager")
        else:
            loop.model.first.compile(backend="eager")
        for seed in range(2):
            call(**vectors(seed)).square().mean().backward()
            loop.step()
        ends.append(loop.masters())
        if path is not None:
            found = loop.found
            assert found.notes == (COMPILED,)
            assert found.of(Kind.ACTIVATIONS).total == 0
            assert found.of(Kind.WEIGHT_GRADIENTS).total == found.of(Kind.WEIGHTS).total > 0
            assert found.of(Kind.UPDATES).total > 0
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


# Odd loops


def test_a_forward_without_a_backward_leaves_nothing_behind(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.model(**tokens(0))  # somebody forgets torch.no_grad()
    loop.backward(1)
    loop.step()
    assert loop.found.of(Kind.UPDATES).total > 0
    loop.model(**tokens(0))
    loop.runtime.detach()
    assert not any(m._forward_hooks for m in loop.model.modules())


def test_updates_are_seen_that_are_made_inside_of_the_backward(tmp_path: Path) -> None:
    loop = Loop(tmp_path, model=Mlp)

    def update(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad)
        parameter.grad = None

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    before = loop.masters()
    loop.backward(0)
    loop.step()
    assert any("weight gradients: none were left" in note for note in loop.found.notes)
    change = loop.masters()["first.weight"] - before["first.weight"]
    assert of(loop.found, Kind.UPDATES, "first.weight").histogram == histogram(change)


def test_of_a_sharded_model_the_parameters_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnitude_collector, "is_sharded", lambda model: True)
    loop = Loop.stepped(tmp_path)
    assert loop.found.notes == (magnitude_collector.SHARDED,)
    assert {tensor.kind for tensor in loop.found.tensors} == {Kind.ACTIVATIONS, Kind.ACTIVATION_GRADIENTS}


# In the log


def test_a_record_is_what_was_recorded(tmp_path: Path) -> None:
    loop = Loop.stepped(tmp_path)
    found = loop.found
    assert from_record(as_record(found)) == found

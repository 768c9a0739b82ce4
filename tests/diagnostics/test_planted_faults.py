"""Each planted fault is found, and the run goes on bit for bit as without diagnostics."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from planted_faults import FAULTS, MODELS, Fault
from torch import Tensor, nn

import hf_mp
from hf_mp import OverflowReport, StaticLossScaler


def run(fault: Fault, explained: bool) -> tuple[dict[str, Any], list[OverflowReport]]:
    """A clean step, one that meets the fault, and one more; returns all that the run has become."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    make, batch_of = MODELS[fault.model]
    model = make(**fault.settings).train()
    if fault.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": fault.checkpointing})
        model.enable_input_require_grads()
    scaler = None if fault.scale is None else StaticLossScaler(2.0**10)
    needs_less_than_1 = fault.name.startswith("large-factor")  # and the third step is to overflow, too
    below_1 = hf_mp.HeadroomLossScaler(backoff_factor=0.5, min_scale=2.0**-14) if needs_less_than_1 else None
    runtime = hf_mp.MixedPrecision(fault.precision, loss_scaler=scaler or below_1)
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    reports = hf_mp.explain_overflows(model).reports if explained else []
    states = []
    for step in range(3):
        if step == 1:
            fault.plant(model)
            if scaler is not None:
                scaler.state = replace(scaler.state, scale=fault.scale)
        for number in range(1, fault.micro_batches + 1):
            batch = batch_of(10 * step + number)
            if fault.model == "mlp":
                batch.pop("labels", None)
            if step >= 1 and number == fault.bad and fault.spoil is not None:
                batch = fault.spoil(batch)
            loss = fault.loss(model(**batch)) if step >= 1 else FAULTS[0].loss(model(**batch))
            loss.backward()
        optimizer.step()
        gradients = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
        states.append([gradients, state_of(model, optimizer, runtime)])
        optimizer.zero_grad()
        assert runtime.step_was_skipped == (step >= 1)
    return {str(number): state for number, state in enumerate(states)}, reports


def state_of(model: nn.Module, optimizer: Any, runtime: hf_mp.MixedPrecision) -> dict[str, Any]:
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [buffer._version for buffer in model.buffers()]
    modes = [(module.training, sorted(module.__dict__), getattr(module, "calls", 0)) for module in model.modules()]
    momenta = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    generators = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    scaler = [runtime.scaler.state_dict(), asdict(runtime.stats)]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return {"all": [copied, versions, modes, momenta, generators, scaler, hooks, runtime.autocast.call_override]}


def same(left: Any, right: Any) -> bool:
    """Equality to the last bit, of NaN too."""
    if isinstance(left, Tensor):
        return left.dtype is right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, np.ndarray):
        return left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.fixture(scope="module", autouse=True)
def _imports_draw_random_names() -> None:
    run(FAULTS[0], explained=False)


# The first 36 are weights and ops, of which every second one is like the one before, in another model.
CASES = [
    pytest.param(fault, id=fault.name, marks=pytest.mark.exhaustive if number < 36 and number % 2 else [])
    for number, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize("fault", CASES)
def test_the_culprit_is_named_and_the_run_is_unchanged(fault: Fault) -> None:
    explained, reports = run(fault, explained=True)
    assert reports, "no report"
    report = reports[0]
    print(report)
    assert (report.phase, report.module, report.op, report.tensor) == (
        fault.phase,
        fault.module,
        fault.op,
        fault.tensor,
    )
    assert (report.step, report.micro_batch, report.micro_batches) == (2, fault.bad, fault.micro_batches)
    assert not any(note.startswith("the replay failed") for note in report.notes)
    assert not any(note.startswith("not tried in") for note in report.notes)
    if fault.name == "cast-to-half-bert":  # the cast is the model's own: it overflows without autocast too
        assert report.finite_in_fp32 is False
    assert report.nonfinite_gradients or fault.phase == "loss outside of the model"
    if fault.name.startswith(("scale", "large-factor")):
        assert report.smaller_scale_helps
    if fault.phase in ("forward", "weight", "input"):
        assert report.smaller_scale_helps is False
    plain, _ = run(fault, explained=False)
    assert same(explained, plain)

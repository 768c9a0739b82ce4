"""``explain_overflows``: when it explains, what it costs, what it keeps, and what it does where it cannot."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_functions import Identity, LargeFactor
from op_log import OpLog
from planted_faults import Mlp, gpt2, put, tokens, vectors
from torch import Tensor, nn
from trainer_runs import arguments, callback_of, make_trainer, poisoned, tiny_gpt2, token_rows
from transformers import Trainer

import hf_mp
from hf_mp import (
    LossScaleError,
    MixedPrecision,
    MixedPrecisionArguments,
    StaticLossScaler,
    explain_overflows,
)
from hf_mp.diagnostics import overflow

NAN = float("nan")
ACT = "transformer.h.0.mlp.act"


class Loop:
    """A model and its optimizer, stepped batch by batch."""

    def __init__(
        self, precision: str = "fp16", scaler: Any = None, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        torch.manual_seed(2)
        self.model: Any = Mlp() if model is None else model
        self.runtime = MixedPrecision(precision, loss_scaler=scaler)
        self.runtime.attach(self.model)
        self.optimizer = self.runtime.attach_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self.explainer = explain_overflows(self.model, **kwargs)

    @property
    def reports(self) -> list[Any]:
        return self.explainer.reports

    def backward(self, batch: dict[str, Any], factor: float = 1.0) -> None:
        (self.model(**batch).square().mean() * factor).backward()

    def step(self, batch: dict[str, Any], factor: float = 1.0) -> bool:
        """Whether the step was skipped."""
        self.backward(batch, factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.runtime.step_was_skipped


def bad(seed: int = 0) -> dict[str, Tensor]:
    return {"x": vectors(seed)["x"] * NAN}


# What good steps pay


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
def test_good_steps_run_the_same_ops(precision: str) -> None:
    logs = []
    for explained in (True, False):
        torch.manual_seed(2)
        model, optimizer = hf_mp.prepare(net := gpt2().train(), torch.optim.SGD(net.parameters(), lr=0.1), precision)
        if explained:
            explain_overflows(model)
        model(**tokens(0))  # the first forward measures the weights
        with OpLog() as log:
            for seed in range(3):
                model(**tokens(seed)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        logs.append(log.ops)
    # One view of the loss a step: no kernel, no synchronisation.
    assert len(logs[0]) == len(logs[1]) + 3
    assert sorted(logs[0]) == sorted([*logs[1], *["aten.detach.default"] * 3])


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
@pytest.mark.parametrize("learning_rate", [1e6, 1e-3])
def test_weights_that_have_diverged_are_told_first(learning_rate: float, precision: str) -> None:
    loop = Loop(precision, StaticLossScaler(1.0))
    loop.optimizer.param_groups[0]["lr"] = learning_rate
    loop.step(vectors(0))
    loop.step(vectors(1), 1e38)
    (report,) = loop.reports
    advises = report.advice.startswith("The weights have diverged")
    assert advises == ("Lower the learning rate first" in str(report)) == (learning_rate == 1e6)


def steps(loop: Loop, batch: dict[str, Tensor]) -> Any:
    loop.backward(batch)
    return loop.optimizer.step


def is_detached(loop: Loop, batch: dict[str, Tensor]) -> Any:
    loop.backward(batch)
    return loop.runtime.detach


def forgets_no_grad(loop: Loop, batch: dict[str, Tensor]) -> Any:
    outputs = [loop.model(**batch)]  # somebody evaluates and forgets torch.no_grad()
    return outputs.clear


@pytest.mark.parametrize("end_of", [steps, is_detached, forgets_no_grad])
def test_inputs_go_with_the_step_or_their_graph(end_of: Any) -> None:
    loop, batch = Loop(), vectors(0)
    alive = weakref.ref(batch["x"])
    end = end_of(loop, batch)
    del batch
    assert alive() is not None
    end()
    gc.collect()
    assert alive() is None


# When it explains


def test_a_headroom_scaler_that_calibrates_is_left_alone() -> None:
    loop = Loop()
    assert loop.step(vectors(0), factor=1e12)
    assert loop.reports == []
    assert not loop.step(vectors(1))
    assert loop.step(vectors(2), factor=1e12)
    assert [report.phase for report in loop.reports] == ["backward"]


def test_a_loss_that_is_not_finite_is_explained_from_the_first_step_on() -> None:
    loop = Loop(model=gpt2().train())
    put("transformer.h.0.mlp.act", lambda x: x / (x - x))(loop.model)
    loop.model(**tokens(0)).loss.backward()
    loop.optimizer.step()
    assert loop.reports[0].module == "transformer.h.0.mlp.act"


def test_of_skips_in_a_row_the_first_second_fourth_are_replayed_and_one_is_logged(caplog: Any) -> None:
    loop = Loop()
    loop.step(vectors(0))
    for seed in range(5):
        assert loop.step(bad(seed))
    assert [report.step for report in loop.reports] == [2, 3, 5]
    assert sum("'x'" in record.getMessage() for record in caplog.records) == 1
    loop.step(vectors(1))
    loop.step(bad(9))
    assert loop.reports[-1].step == 8


def test_training_that_stops_says_who_it_was() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8, max_consecutive_skips=3))
    loop.step(bad())
    loop.step(bad())
    with pytest.raises(LossScaleError) as caught:
        loop.step(bad())
    what, last, *found = str(caught.value).splitlines()
    # What to do comes first, and once.
    assert re.fullmatch(r"3 optimizer steps in a row .*\)\. No smaller loss scale helps\. Clean the data\.", what)
    assert last == "The last one that was replayed:" and "contains inf or NaN: 'x'" in found[0]
    assert "loss scale helps" not in "".join(found) and "learning rate" not in str(caught.value)


# What it finds in unusual steps


@pytest.mark.parametrize("seed", range(3))
def test_dropout_falls_the_same(seed: int) -> None:
    class OneOverKept(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / nn.functional.dropout(torch.ones(()), 0.5, self.training)

    loop = Loop(scaler=StaticLossScaler(2.0**8))
    loop.model.act = OneOverKept()
    torch.manual_seed(seed)
    skipped = loop.step(vectors(0))
    assert [report.module for report in loop.reports] == (["act"] if skipped else [])


class NanOnce(nn.Module):
    """NaN in its first call; ``later`` makes the others."""

    def __init__(self, later: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.later, self.calls = later, iter([True])  # an iterator is none of what a replay restores

    def forward(self, x: Tensor) -> Tensor:
        return x * NAN if next(self.calls, False) else self.later(x)


def test_a_replay_that_differs_says_so() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8), model=gpt2().train())
    loop.model.transformer.h[1].mlp.act = NanOnce()
    # A non-finite gradient comes in as well: the loss is not blamed for it, since the replay differs.
    (loop.model(**tokens(0)).loss * NAN).backward()
    loop.optimizer.step()
    assert loop.reports[0].phase == "not found"
    assert any("came to" in note and "in the replay" in note for note in loop.reports[0].notes)


def test_two_forwards_of_one_backward() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    left, right = loop.model(**vectors(0)), loop.model(**bad(1))
    (left - right).square().mean().backward()
    loop.optimizer.step()
    (report,) = loop.reports
    assert (report.phase, report.tensor, report.micro_batches) == ("input", "x", 1)


def test_a_forward_whose_input_came_from_another_graph() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    before = nn.Linear(16, 16)
    loop.model.act = LargeFactorModule()
    loop.model(x=before(vectors(0)["x"])).square().mean().backward()
    loop.optimizer.step()
    assert (loop.reports[0].phase, loop.reports[0].module) == ("backward", "act")


class LargeFactorModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LargeFactor.apply(x)


def test_how_large_a_scale_may_be() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**30))
    assert loop.step(vectors(0))
    (report,) = loop.reports
    assert report.smaller_scale_helps and report.rules == {}  # none are needed
    assert report.largest_finite_scale is not None
    assert 2.0**8 <= report.largest_finite_scale < 2.0**30
    fitting = Loop(scaler=StaticLossScaler(report.largest_finite_scale))
    assert not fitting.step(vectors(0))
    assert Loop(scaler=StaticLossScaler(2 * report.largest_finite_scale)).step(vectors(0))


def test_the_rules_that_are_proposed_are_all_that_it_takes() -> None:
    """The next product reads what FP16 does not hold."""
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    put("act", lambda x: (x + 300) * (x + 300))(loop.model)
    loop.step(vectors(0))
    (report,) = loop.reports
    assert report.finite_in_fp32 and report.finite_in_bf16 and f"Pass rules={report.rules}" in str(report)
    assert report.rules and {key.partition(":")[0] for key in report.rules} == {"act", "last"}
    assert not loop.model(**vectors(0)).isfinite().all()
    loop.runtime.add_rules(report.rules)
    assert loop.model(**vectors(0)).isfinite().all()


def test_lean_layouts_are_tried_in_fp32_with_their_masters() -> None:
    for spoil, finite in ((put(ACT, lambda x: (x + 300) * (x + 300)), True), (put(ACT, lambda x: x / (x - x)), False)):
        loop = Loop("fp16-lean", model=gpt2().train())
        spoil(loop.model)
        loop.model(**tokens(0)).loss.backward()
        loop.optimizer.step()
        (report,) = loop.reports
        assert (report.phase, report.finite_in_fp32) == ("forward", finite)
        advice = (
            "In FP32 the same micro-batch is finite. Pass rules=" if finite else "the cause is the model or its data"
        )
        assert advice in str(report)


# Gradients that are finite, and too large to be squared


def test_a_finite_gradient_too_large_to_be_squared_is_named() -> None:
    loop = Loop("bf16", model=gpt2().train())
    norm = loop.model.transformer.h[1].ln_2  # computes in FP32
    norm.register_forward_hook(lambda module, args, output: TooLarge.apply(output))
    loop.model(**tokens(0)).loss.backward()
    loop.optimizer.step()
    (report,) = loop.reports
    assert report.phase == "not found" and "transformer.h.1.ln_2.weight" in report.nonfinite_gradients
    assert "its square is not (2**64 or more)" in str(report)


class TooLarge(Identity):
    """The identity; the gradient of one element is 2**100."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        large = gradient.clone()
        large.view(-1)[3] = 2.0**100
        return large


def test_a_loss_that_sends_too_large_a_gradient() -> None:
    loop = Loop("bf16")
    assert loop.step(vectors(0), factor=1e25)
    (report,) = loop.reports
    assert (report.phase, report.tensor) == ("loss outside of the model", "")
    assert "magnitude of 2**64 or more" in str(report) and "too large a factor in the loss" in str(report)


def test_a_sum_of_micro_batches_too_large_to_be_squared_is_not_shown() -> None:
    loop = Loop("bf16")
    loop.model.eval()
    loop.backward(vectors(0))
    largest = max(p.grad.abs().max().item() for p in loop.model.parameters())
    loop.optimizer.zero_grad()
    for _ in range(2):
        loop.backward(vectors(0), factor=0.6 * 2.0**64 / largest)
    loop.optimizer.step()
    assert [report.phase for report in loop.reports] == ["not found"]


def test_statistics_that_the_forward_spoiled_are_noted() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    loop.step(bad())
    assert any("norm.running_mean" in note for note in loop.reports[0].notes)


def test_gradients_spoiled_after_the_backward_are_not_blamed_on_anybody() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    loop.backward(vectors(0))
    loop.model.last.weight.grad.fill_(NAN)
    loop.optimizer.step()
    assert loop.reports[0].phase == "not found"
    assert "did not find the origin" in str(loop.reports[0])


def test_large_gradients_are_kept_after_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow, "KEPT_ELEMENTS", 16)
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    for _ in range(2):
        outputs = loop.model(**vectors(0))
        (outputs / (outputs.detach() * 0.0)).sum().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    first, second = loop.reports
    assert first.phase == "not found"
    assert any("too large to keep" in note for note in first.notes)
    assert second.phase == "loss outside of the model"


def test_a_replay_that_fails_is_told_and_training_goes_on() -> None:
    loop = Loop(scaler=StaticLossScaler(2.0**8))
    loop.model.act = NanOnce(later={}.__getitem__)
    assert loop.step(vectors(0))
    assert loop.reports[0].notes[0].startswith("the replay failed: KeyError: tensor(")
    loop.model.act = nn.ReLU()
    loop.model.norm.reset_running_stats()
    assert not loop.step(vectors(0))


def test_a_compiled_model_is_replayed_op_by_op() -> None:
    model = torch.compile(Mlp(), backend="eager")
    put("act", lambda x: x / (x - x))(model._orig_mod)
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    explainer = explain_overflows(model)
    model(**vectors(0)).square().mean().backward()
    optimizer.step()
    (report,) = explainer.reports
    assert (report.phase, report.module.removeprefix("_orig_mod."), report.op) == ("forward", "act", "div")


def test_several_optimizers_over_one_model() -> None:
    model = Mlp()
    runtime = MixedPrecision("fp16", loss_scaler=StaticLossScaler(2.0**8))
    runtime.attach(model)
    groups = [list(model.first.parameters()), list(model.last.parameters())]
    optimizers = [runtime.attach_optimizer(torch.optim.SGD(group, lr=0.1)) for group in groups]
    explainer = explain_overflows(runtime)
    model(**bad()).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        assert runtime.step_was_skipped
    assert len(explainer.reports) == 1


# Bad input


def test_bad_input_is_refused_and_the_explainer_of_a_model_is_one() -> None:
    with pytest.raises(TypeError, match=r"the model is of type SGD"):
        explain_overflows(torch.optim.SGD(Mlp().parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no mixed precision is attached"):
        explain_overflows(Mlp())
    with pytest.raises(ValueError, match="precision='fp32' skips no steps"):
        explain_overflows(MixedPrecision("fp32"))
    loop = Loop()
    assert explain_overflows(loop.model) is explain_overflows(loop.runtime) is loop.explainer


# Trainer and callback


@pytest.mark.parametrize("contender", ["subclass", "callback"])
@pytest.mark.parametrize("asked", [None, False])
def test_both_adapters_explain_by_default(contender: str, asked: bool | None, tmp_path: Path) -> None:
    named = {} if asked is None else {"explain_overflows": asked}
    args = arguments(tmp_path, MixedPrecisionArguments, **named)
    base, rows = poisoned(Trainer, (2,)), token_rows()
    trainer: Any = make_trainer(contender, "fp16", tiny_gpt2(), args, base, train_dataset=rows)
    trainer.train()
    reports = (trainer if contender == "subclass" else callback_of(trainer)).overflow_reports
    expected = [("loss outside of the model", 3)] if asked is None else []
    assert [(report.phase, report.step) for report in reports] == expected

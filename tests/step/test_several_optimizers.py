"""Several optimizers of one model: the loss scale changes once between two backwards, from what all of them found."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Using, linear, same
from torch import Tensor, nn

import hf_mp
from hf_mp.diagnostics.run_log import read_run
from hf_mp.scaling.rules import StepReport

INF = float("inf")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")


class Parts(nn.Module):
    """Heads with an optimizer each, and a trunk that the first optimizer has: of all of them, or of the first alone."""

    def __init__(self, number: int, is_shared: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(number))
        self.is_shared = is_shared

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(self.trunk(x) if self.is_shared or number == 0 else x) for number, head in enumerate(self.heads)]

    def parameters_of(self, number: int) -> list[nn.Parameter]:
        return [*(self.trunk.parameters() if number == 0 else ()), *self.heads[number].parameters()]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def attached(
    number: int, precision: str, scaler: Any = None, make: Callable[..., Any] = sgd, is_shared: bool = True
) -> tuple[Any, Parts, list[Any]]:
    model, runtime = Parts(number, is_shared), hf_mp.MixedPrecision(precision, loss_scaler=scaler)
    runtime.attach(model)
    return runtime, model, [runtime.attach_optimizer(make(model.parameters_of(one))) for one in range(number)]


def loss_of(outputs: Sequence[Tensor], factors: Iterable[float]) -> Tensor:
    """Of one part, a gradient of inf for a factor of inf; of the trunk, too."""
    return torch.stack([out.square().mean() * factor for out, factor in zip(outputs, factors, strict=True)]).sum()


# Which optimizers step in an iteration, and the part whose gradients overflow in it (None: none).
EACH: list[tuple[tuple[int, ...], int | None]] = [
    ((0, 1, 2), part) for part in (None, 1, None, None, None, 0, 2, None, None, None, None, None)
]
RHYTHMS: list[tuple[tuple[int, ...], int | None]] = [
    (tuple(one for one, every in enumerate((1, 2, 4)) if step % every == 0), part)
    for step, part in enumerate((None, 0, 1, 2, None, None, None, 2, 1, None, None, None, None), 1)
]


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("plan", [EACH, RHYTHMS], ids=["each", "rhythms"])
def test_scales_and_skips_are_those_of_torchs_scaler(
    plan: list[tuple[tuple[int, ...], int | None]], precision: str, defers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if defers:  # as on a GPU: the device decides whether the fused optimizer skips
        monkeypatch.setattr("hf_mp.step.gradients._DEVICES_WITH_FOUND_INF", ("cpu",))
    theirs, scaler = Parts(3, is_shared=False), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    their_optimizers = [sgd(theirs.parameters_of(one)) for one in range(3)]
    ours = hf_mp.DynamicLossScaler(init_scale=2.0**10, growth_interval=3)
    runtime, model, optimizers = attached(3, precision, ours, fused, is_shared=False)
    for number, (steps, part) in enumerate(plan, 1):
        factors = [INF if one == part else 1.0 for one in range(3)]
        scaler.scale(loss_of(theirs(X), factors)).backward()
        loss_of(model(X), factors).backward()
        skips, their_skips = [], []
        for one in steps:
            scaler.step(their_optimizers[one])
            their_skips.append(bool(sum(scaler._found_inf_per_device(their_optimizers[one]).values())))
            optimizers[one].step()
            skips.append(optimizers[one].step_was_skipped)
            for optimizer in (their_optimizers[one], optimizers[one]):
                optimizer.zero_grad()
        scaler.update()
        assert skips == their_skips and runtime.step_was_skipped is skips[-1]
        found = runtime.scaler.get_scale(), runtime.scaler.state.growth_tracker
        assert found == (scaler.get_scale(), scaler._get_growth_tracker())
        assert (runtime.stats.steps, runtime.stats.loss_scale) == (number, scaler.get_scale())
        assert runtime.scaler.state.steps == number
    assert 0 < runtime.stats.skipped_steps == runtime.scaler.state.skipped_steps < len(plan)


@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_scale_is_that_of_one_optimizer(precision: str, number: int, make: Callable[..., Any]) -> None:
    runtime, model, optimizers = attached(number, precision, make=make)
    alone = hf_mp.MixedPrecision(precision)
    other = alone.attach(Parts(number))
    optimizer = alone.attach_optimizer(make(other.parameters()))
    for factor in (1.0, 1.0, INF, 1.0, 1e-3, INF, 1.0, INF, 1.0, 1.0):
        for one, stepped in ((model, optimizers), (other, [optimizer])):
            loss_of(one(X), [factor] * number).backward()
            for each in stepped:
                each.step()
                each.zero_grad()
        assert {each.step_was_skipped for each in optimizers} == {optimizer.step_was_skipped}
        assert runtime.stats == alone.stats and runtime.scaler.state == alone.scaler.state
        assert runtime.scaler.get_scale() >= 1.0
    assert runtime.stats.skipped_steps == 3 and same(model.state_dict().values(), other.state_dict().values())


@pytest.mark.parametrize("overflowing", range(3))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_order_of_the_optimizers_does_not_matter(order: tuple[int, ...], overflowing: int) -> None:
    runtime, model, optimizers = attached(3, "fp16", is_shared=False)
    scales = []
    for part in (None, None, overflowing, None, None):
        loss_of(model(X), [INF if one == part else 1.0 for one in range(3)]).backward()
        for one in order:
            optimizers[one].step()
            assert optimizers[one].step_was_skipped is (one == part)
            optimizers[one].zero_grad()
        scales.append(runtime.scaler.get_scale())
    assert scales[2] == 1.0 and min(scales[:2] + scales[3:]) > 2.0**8
    assert (runtime.stats.steps, runtime.stats.skipped_steps) == (5, 1)
    assert runtime.stats.loss_scale_min == 1.0 and runtime.stats.loss_scale_max == max(scales[:4])


class TestRhythms:
    """One optimizer steps after each second or fourth backward, another after the others; both get the overflow."""

    def run(self, precision: str, every: int, overflows: Sequence[int]) -> tuple[Any, list[float]]:
        runtime, model, optimizers = attached(2, precision)
        scales = []
        for number in range(1, 13):
            loss_of(model(X), [INF if number in overflows else 1.0] * 2).backward()
            steps = number % every != 0, number % every == 0
            for optimizer, is_due in zip(optimizers, steps, strict=True):
                if is_due:
                    optimizer.step()
                    optimizer.zero_grad()
            scales.append(runtime.scaler.get_scale())
        return runtime, scales

    @pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
    @pytest.mark.parametrize("every", [2, 4])
    def test_one_overflow_lowers_the_scale_once(self, precision: str, every: int) -> None:
        runtime, scales = self.run(precision, every, overflows=[5])
        assert min(scales) == 1.0 == scales[4] and scales[3] > 2.0**8
        assert runtime.stats.loss_scale_min >= 1.0
        # The second one skips when it is its turn, and its skip teaches the scale nothing.
        assert scales[6] > 2.0**8 and scales[-1] > 2.0**8

    @pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
    def test_a_new_overflow_at_the_lower_scale_lowers_it_again(self, precision: str) -> None:
        _, scales = self.run(precision, 4, overflows=[5, 6])
        assert scales[4] == 1.0 and scales[5] == 2.0**-20

    def test_gradients_that_were_thrown_away_hold_no_overflow_any_more(self) -> None:
        runtime, model, (first, second) = attached(2, "fp16")
        for _ in range(3):
            loss_of(model(X), [1.0, 1.0]).backward()
            first.step()
            model.zero_grad()
        loss_of(model(X), [INF, INF]).backward()
        first.step()  # the second one's gradients hold the same overflow
        model.zero_grad()
        assert runtime.scaler.get_scale() == 1.0
        loss_of(model(X), [INF, INF]).backward()
        second.step()
        assert second.step_was_skipped and runtime.scaler.get_scale() == 2.0**-20


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
def test_muon_for_matrices_and_adamw_for_the_rest(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    kinds: list[Any] = [torch.optim.Muon, torch.optim.AdamW]
    parameters = [[p for p in model.parameters() if (p.ndim == 2) is matrices] for matrices in (True, False)]
    optimizers = [runtime.attach_optimizer(kind(of, lr=1e-2)) for kind, of in zip(kinds, parameters, strict=True)]
    losses = []
    for factor in (1.0, 1.0, INF, *[1.0] * 20):
        loss = model(X).square().mean()
        (loss * factor).backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    is_scaled = precision.startswith("fp16")
    assert (runtime.stats.steps, runtime.stats.skipped_steps) == (23, 1)
    assert runtime.stats.loss_scale_min == 1.0 and (runtime.scaler.get_scale() > 2.0**10) is is_scaled
    assert losses[2] == losses[3] and losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gan_with_a_shared_trunk(precision: str, together: bool) -> None:
    """Two losses of one model; each has its backward and its optimizer, the trunk belongs to the first one."""
    runtime, model, optimizers = attached(2, precision)
    for number in range(8):
        for part, optimizer in enumerate(optimizers):
            loss = model(X)[part].square().mean()
            (loss * INF if (number, part) == (3, 0) else loss).backward()
            if not together:
                optimizer.step()
                model.zero_grad()
        for optimizer in optimizers if together else ():
            optimizer.step()
            optimizer.zero_grad()
    is_scaled = precision.startswith("fp16")
    assert (runtime.stats.steps, runtime.stats.skipped_steps) == (8 if together else 16, 1)
    assert runtime.stats.loss_scale_min == 1.0 and (runtime.scaler.get_scale() > 2.0**10) is is_scaled


def test_two_models_of_one_scaler_change_it_once() -> None:
    """As a GAN of two models with one ``GradScaler``."""
    scaler = hf_mp.DynamicLossScaler(init_scale=2.0**10, growth_interval=3)
    models, runtimes = [linear(), linear()], [hf_mp.MixedPrecision("fp16", loss_scaler=scaler) for _ in range(2)]
    optimizers = []
    for model, runtime in zip(models, runtimes, strict=True):
        runtime.attach(model)
        optimizers.append(runtime.attach_optimizer(torch.optim.SGD(model.parameters(), 0.1)))
    scales = []
    for factor in (INF, 1.0, 1.0, 1.0):
        (models[1](models[0](X)).square().mean() * factor).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [512.0, 512.0, 512.0, 1024.0]
    assert [(one.stats.steps, one.stats.skipped_steps, one.stats.loss_scale_min) for one in runtimes] == [
        (4, 1, 512.0)
    ] * 2


def test_steps_without_a_backward_between_them_count_each() -> None:
    """Gradients that a loop sets itself."""
    model = linear()
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "fp16")
    for number in range(1, 4):
        model.weight.grad = torch.ones(8, 8)
        optimizer.step()
        assert model.forward.runtime.stats.steps == number  # type: ignore[union-attr]


def test_a_loaded_or_changed_scale_is_not_undone_by_a_later_step() -> None:
    runtime, model, (first, second) = attached(2, "fp16", hf_mp.DynamicLossScaler(init_scale=2.0**10))
    loss_of(model(X), [INF, INF]).backward()
    first.step()
    runtime.scaler.update(2.0**5)
    second.step()
    assert runtime.scaler.get_scale() == 2.0**4


def test_a_saved_state_between_two_optimizers_is_that_of_one() -> None:
    scaler = hf_mp.DynamicLossScaler(init_scale=2.0**10, growth_interval=2)
    runtime, model, (first, second) = attached(2, "fp16", scaler)
    loss_of(model(X), [1.0, 1.0]).backward()
    first.step()
    saved = json.loads(json.dumps(runtime.state_dict()))
    second.step()
    assert saved == runtime.state_dict() and saved["loss_scaler"]["steps"] == 1
    copied = scaler.copy()
    for one in (scaler, copied):
        one.update_scale(StepReport(False))
    assert scaler.state == copied.state and scaler.get_scale() == 2.0**11


# Diagnostics


def test_an_overflow_of_the_second_optimizer_is_explained_and_recorded_once(tmp_path: Path) -> None:
    runtime, model, optimizers = attached(2, "fp16", is_shared=False)
    explainer = hf_mp.explain_overflows(model)
    recorder = hf_mp.record_precision(model, tmp_path)
    for number in range(6):
        loss_of(model(X), [1.0, INF if number in (3, 4) else 1.0]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert not explainer.backwards or number not in (3, 4)
    recorder.end()
    assert [report.step for report in explainer.reports] == [4, 5]
    assert {report.phase for report in explainer.reports} == {"loss outside of the model"}
    assert {report.loss_scale for report in explainer.reports[:1]} == {read_run(tmp_path).steps[4].loss_scale}
    assert [(one.step, one.skipped) for one in read_run(tmp_path).steps.values()] == [
        (1, False), (2, False), (3, False), (4, True), (5, True), (6, False),
    ]  # fmt: skip
    assert runtime.stats.skipped_steps == 2


@pytest.mark.parametrize("first", [True, False])
def test_no_gradient_counts_as_repaired_where_another_optimizer_has_it(first: bool) -> None:
    runtime, model, optimizers = attached(2, "fp16", is_shared=False)
    loss_of(model(X), [INF, 1.0] if first else [1.0, INF]).backward()
    with warnings.catch_warnings(action="error"):
        for optimizer in optimizers:
            optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [first, not first]
    assert runtime.scaler.get_scale() == 1.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_in_which_something_else_is_stepped(precision: str) -> None:
    """An optimizer whose ``step`` steps an attached one is not taken for an optimizer that was not attached."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model: Any = Using(lambda m, x: m.part(x), part=linear())
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), 0.1, fused=True), precision)
    around = Around(optimizer)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            model(X).square().mean().backward()
            around.step()
            optimizer.zero_grad()
    assert model.forward.runtime.stats.steps == 3

"""The runtime: the invariants of attaching mixed precision to a model and an optimizer.

What holds for every preset: test_loops.py.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Using, assert_true, attached, copies, gradients_of, same, take_step, weights
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from transformers import GPT2LMHeadModel

import hf_mp
from hf_mp.casting import deferred_output
from hf_mp.casting.mode import active_autocast
from hf_mp.scaling.scalers import DynamicLossScaler, LossScaleError, StaticLossScaler
from hf_mp.step.forward import AttachedForward
from hf_mp.step.mixed_precision import MixedPrecision

Batch = dict[str, Tensor]


@pytest.fixture
def run(gpt2: GPT2LMHeadModel, batch: Batch) -> Any:
    """A model, what is attached to it, its optimizer, and the loss of a batch."""
    optimizer = SGD(gpt2.parameters(), lr=0.1)
    hf_mp.prepare(gpt2, optimizer)
    runtime: Any = gpt2.forward.runtime
    return SimpleNamespace(model=gpt2, optimizer=optimizer, runtime=runtime, loss=lambda: gpt2(**batch).loss)


def assert_copies_are_rounded_masters(runtime: MixedPrecision) -> None:
    found = runtime.weights.layout.copies
    assert len(found) > 0 and runtime.model is not None
    for parameter in runtime.model.parameters():
        assert torch.equal(found.get(parameter), parameter.detach().to(found.dtype))


# Gradients


def test_gradients_do_not_depend_on_the_scale_and_would_underflow_without_it(
    gpt2: GPT2LMHeadModel, batch: Batch
) -> None:
    def gradients(scale: float) -> list[Tensor]:
        model = copy.deepcopy(gpt2)
        attached(model, "fp16", scale)
        return copies(gradients_of(model, lambda: model(**batch).loss * 2.0**-14))

    unscaled, scaled, more = gradients(1.0), gradients(2.0**20), gradients(2.0**22)
    zeros = [sum((g == 0).sum().item() for g in grads) for grads in (unscaled, scaled)]
    assert zeros[0] > 2 * zeros[1] + 1000
    assert_true(scaled, more, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_that_autocast_leaves_alone_get_true_gradients(dtype: torch.dtype) -> None:
    weight, other = nn.Parameter(torch.ones(2, 2, dtype=dtype)), nn.Parameter(torch.ones(1))
    model = Using(lambda m, x: torch.matmul(x, m.weight), weight=weight, other=other)
    model, optimizer = hf_mp.prepare(model, SGD(model.parameters(), lr=0.5), "compute=fp16,loss_scale=1024")
    y = model(torch.ones(1, 2, dtype=dtype))
    assert y.dtype is dtype
    y.real.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(2, 2, dtype=dtype))
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_a_model_may_write_into_the_containers_that_it_is_given() -> None:
    def use(m: Any, batch: dict[str, Any], seen: list[int]) -> Any:
        seen.append(1)
        batch["hidden"] = m.layer(batch["x"])
        return ()

    model = MixedPrecision("fp16").attach(Using(use, layer=nn.Linear(8, 8)))
    batch, seen = defaultdict(list, x=torch.randn(2, 8)), list[int]()
    assert model(batch, seen) == ()
    assert seen == [1] and "hidden" in batch


# Steps


def test_what_the_runtime_counts_goes_through_a_state(run: Any) -> None:
    (run.loss() * float("inf")).backward()
    run.optimizer.zero_grad()  # a backward that was thrown away does not count
    for factor in (0.0, float("inf"), 1.0):
        take_step(run.loss() * factor, run.optimizer, clip=1e-6)
        if factor == 0.0:
            assert "headroom" not in run.runtime.stats.log_entries()
    state, other = run.runtime.state_dict(), MixedPrecision("fp16")
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert (other.stats.steps, other.stats.skipped_steps) == (3, 1)
    run.loss().backward()
    largest = max(p.grad.abs().max().item() for p in run.model.parameters())
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-6)
    run.optimizer.step()
    assert run.runtime.scaler.state.level < 2 * largest  # that before clipping


def test_a_closure_runs_once_and_its_loss_comes_back(run: Any) -> None:
    calls = []

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        calls.append(run.loss())
        calls[-1].backward()
        return calls[-1]

    before = weights(run.model)
    assert run.optimizer.step(closure) is calls[0] and len(calls) == 1
    assert not same(before, run.model.parameters())


@pytest.mark.parametrize("scheduler", [False, True], ids=["bare", "scheduler"])
def test_torchs_scaler_in_front_of_a_guarded_optimizer_is_refused(run: Any, scheduler: bool) -> None:
    if scheduler:
        torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(run.loss()).backward()
    with pytest.raises(RuntimeError, match=r"a torch.amp.GradScaler steps"):
        scaler.step(run.optimizer)


@pytest.mark.parametrize("freezes_first", [False, True])
def test_training_without_a_guard_is_warned_of_once(gpt2: GPT2LMHeadModel, batch: Batch, freezes_first: bool) -> None:
    next(gpt2.parameters()).requires_grad_(not freezes_first)
    MixedPrecision("fp16").attach(gpt2)
    optimizer = SGD(gpt2.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"an optimizer that was not attached updates.*attach_optimizer") as caught:
        for _ in range(4):
            take_step(gpt2(**batch).loss, optimizer)
    (told,) = [warning for warning in caught if "was not attached" in str(warning.message)]
    assert "/hf_mp/" not in told.filename and "/torch/" not in told.filename  # but at the line of the loop


def test_a_perturbation_between_two_backwards_is_not_taken_for_an_optimizer(
    gpt2: GPT2LMHeadModel, batch: Batch
) -> None:
    """Sharpness-aware minimization (arXiv 2010.01412, algorithm 1) moves the weights for its second backward."""
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    optimizer = SGD(gpt2.parameters(), lr=0.1)
    runtime.attach_optimizer(optimizer)
    with pytest.warns(UserWarning, match="were written between two backwards") as caught:
        for _ in range(3):
            gpt2(**batch).loss.backward()
            perturbations = [0.01 * parameter.grad for parameter in gpt2.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(gpt2.parameters()), perturbations)
            optimizer.zero_grad()
            loss = gpt2(**batch).loss
            loss.backward()
            with torch.no_grad():
                torch._foreach_sub_(list(gpt2.parameters()), perturbations)
            optimizer.step()
            optimizer.zero_grad()
    assert len([one for one in caught if "no optimizer stepped" in str(one.message)]) == 1
    assert not [one for one in caught if "was not attached" in str(one.message)]


@pytest.mark.parametrize("runs_first", [False, True])
@pytest.mark.parametrize("part", ["", "transformer.ln_f"])
def test_masters_that_were_cast_to_16_bits_are_told_of(
    gpt2: GPT2LMHeadModel, batch: Batch, runs_first: bool, part: str
) -> None:
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    if runs_first:
        gpt2(**batch)
    gpt2.get_submodule(part).half()
    with pytest.warns(UserWarning, match=r"were cast to 16 bits.*FP32 again, and rounded.*hf_mp.detach") as caught:
        gpt2(**batch)
        gpt2(**batch)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {parameter.dtype for parameter in gpt2.parameters()} == {torch.float32}
    runtime.detach()
    gpt2.half()
    with warnings.catch_warnings(action="error"):
        runtime.attach(gpt2)(**batch)
        gpt2.transformer.h[0].requires_grad_(False)
        gpt2(**batch)
        gpt2.transformer.h[0].half().requires_grad_(True)  # it was no master when it was cast
        gpt2(**batch)


# Outside step(), a working copy is its master rounded to nearest; outside writes are honoured.


@torch.no_grad()
def write(model: nn.Module, how: Callable[[nn.Parameter], Any] = lambda p: p.mul_(1.5)) -> None:
    for parameter in model.parameters():
        how(parameter)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": write,
    "data": lambda m: write(m, lambda p: p.data.add_(0.25)),
    "an element": lambda m: m.get_parameter("transformer.h.0.mlp.c_fc.weight").data.__setitem__((3, 5), 17.0),
    "data =": lambda m: write(m, lambda p: setattr(p, "data", torch.randn_like(p))),
    "load_state_dict": lambda m: m.load_state_dict({key: value + 1 for key, value in m.state_dict().items()}),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_weight_written_from_outside_is_honoured(run: Any, batch: Batch, way: str) -> None:
    take_step(run.loss(), run.optimizer)
    assert_copies_are_rounded_masters(run.runtime)
    before = run.loss().item()
    WRITES[way](run.model)
    fresh = copy.deepcopy(run.model)  # has made no working copies yet
    assert before != run.loss().item() == fresh(**batch).loss.item()
    assert_copies_are_rounded_masters(run.runtime)


# Attaching, detaching, copies


def test_fp32_changes_nothing(gpt2: GPT2LMHeadModel) -> None:
    before, optimizer = set(gpt2.__dict__), SGD(gpt2.parameters())
    assert hf_mp.prepare(gpt2, optimizer, "fp32") == (gpt2, optimizer)
    assert set(gpt2.__dict__) == before and "step" not in optimizer.__dict__
    assert all(type(p) is nn.Parameter for p in gpt2.parameters())
    assert optimizer.step_was_skipped is False  # type: ignore[attr-defined]


def test_attach_again_after_detach(run: Any) -> None:
    torch.optim.lr_scheduler.LinearLR(run.optimizer)
    loss = run.loss()
    run.runtime.detach()
    before = weights(run.model)
    run.optimizer.step()
    assert run.runtime.stats.steps == 0 and same(before, run.model.parameters())
    run.runtime.attach(run.model)
    assert torch.equal(run.loss(), loss)


def test_an_exception_in_forward_leaves_nothing_behind(run: Any, batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"cannot specify both input_ids and inputs_embeds|exactly one of input_ids"):
        run.model(input_ids=batch["input_ids"], inputs_embeds=torch.ones(4, 32, 64))
    assert active_autocast() is None
    assert torch.randn(2, 2).matmul(torch.randn(2, 2)).dtype is torch.float32
    assert run.loss().isfinite()


def test_a_pickled_model_is_an_ordinary_model(run: Any, batch: Batch) -> None:
    run.loss()
    loaded = pickle.loads(pickle.dumps(run.model))
    assert all(type(p) is nn.Parameter for p in loaded.parameters())
    assert not isinstance(loaded.forward, AttachedForward)
    buffer = io.BytesIO()
    torch.save(run.model.state_dict(), buffer)
    buffer.seek(0)
    assert set(torch.load(buffer, weights_only=True)) == set(loaded.state_dict())
    write(loaded)
    assert not torch.equal(loaded(**batch).logits, run.model(**batch).logits)


# State and bad input


def test_a_state_of_another_loss_scaling_warns_and_starts_anew() -> None:
    fp16 = MixedPrecision("fp16")
    before = fp16.scaler.state
    with pytest.warns(UserWarning, match="starts anew: loss_scale was none"):
        fp16.load_state_dict(MixedPrecision("bf16").state_dict())
    assert fp16.scaler.state == before


def test_a_loss_scaler_without_effect_is_told() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="loss_scaler has no effect"):
        hf_mp.prepare(model, torch.optim.SGD(model.parameters()), "fp32", loss_scaler=StaticLossScaler(8.0))


BAD: dict[str, tuple[Callable[[GPT2LMHeadModel], Any], type[Exception], str]] = {
    "TorchScript": (
        lambda m: MixedPrecision("fp16").attach(torch.jit.script(nn.Linear(2, 2))), ValueError,
        r"^RecursiveScriptModule is a TorchScript module",
    ),
    "a part in TorchScript": (
        lambda m: MixedPrecision("fp16").attach(nn.Sequential(torch.jit.script(nn.Linear(2, 2)))), ValueError,
        r"^0 is a TorchScript module",
    ),
    "no floats": (
        lambda m: MixedPrecision("fp16").attach(Using(print, ids=nn.Parameter(torch.ones(3).long(), False))),
        ValueError,
        "has no floating parameters, so there is nothing to train",
    ),
    "optimizer first": (
        lambda m: MixedPrecision("fp16").attach_optimizer(SGD(m.parameters())), ValueError,
        "attach a model before its optimizer",
    ),
    "LBFGS": (
        lambda m: hf_mp.prepare(m, torch.optim.LBFGS(m.parameters())), ValueError,
        "LBFGS calls its closure several times in a step",
    ),
    "DataParallel": (
        lambda m: MixedPrecision("fp16").attach(nn.DataParallel(m)), ValueError, "use DistributedDataParallel"
    ),
    "preset": (lambda m: MixedPrecision("fp8"), ValueError, "precision='fp8' is not known: use one of fp32, fp16"),
    "rule": (
        lambda m: MixedPrecision("fp16", rules={"head": "fp32"}).attach(m), ValueError,
        "rule 'head' matches no module of GPT2LMHeadModel; close to it are 'lm_head'",
    ),
    "order": (
        lambda m: hf_mp.prepare(SGD(m.parameters()), m), TypeError, "not SGD and GPT2LMHeadModel"  # type: ignore[type-var]
    ),
    "several optimizers": (
        lambda m: hf_mp.prepare(m, [SGD(m.parameters())]), TypeError,  # type: ignore[type-var]
        "not GPT2LMHeadModel and list. Without an optimizer, or with several: MixedPrecision",
    ),
    "a misspelt precision, whatever else is wrong": (
        lambda m: hf_mp.prepare(m, None, precision="fp16_laen"), ValueError,  # type: ignore[arg-type]
        r"precision='fp16_laen' is not known: .*Did you mean 'fp16-lean'\?",
    ),
    "nothing to train": (
        lambda m: hf_mp.prepare(m.requires_grad_(False), SGD(m.parameters())), ValueError,
        r"GPT2LMHeadModel has no trainable parameter .*: unfreeze some before, or attach .* without an optimizer",
    ),
    "several optimizers of an attached model": (
        lambda m: attached(nn.Linear(2, 2)).attach_optimizer([SGD(m.parameters())]), TypeError,  # type: ignore[type-var]
        "attach_optimizer takes one torch optimizer, not list: call it once for each",
    ),
    "another's optimizer": (
        lambda m: hf_mp.prepare(m, SGD(nn.Linear(2, 2).parameters())), ValueError,
        "no parameter of this SGD belongs to the attached GPT2LMHeadModel",
    ),
    "a second model": (
        lambda m: attached(nn.Linear(2, 2)).attach(m), ValueError, r"has a model already: detach\(\) it"
    ),
    "a state of another version": (
        lambda m: MixedPrecision("fp16").load_state_dict({"version": 7}), ValueError,
        "not a mixed precision state of version 1: version=7",
    ),
    "a state of something else": (
        lambda m: MixedPrecision("fp16").load_state_dict({"scale": 2.0, 0.5: 1}), ValueError,  # type: ignore[dict-item]
        r"version=None, keys \[0\.5, 'scale'\]",
    ),
    "a state of another loss scaler": (
        lambda m: MixedPrecision("fp16").load_state_dict(
            MixedPrecision("fp16", loss_scaler=DynamicLossScaler()).state_dict()
        ), ValueError,
        r"neither one of a 'headroom' loss scaler.*kind='dynamic'",
    ),
    "no state": (
        lambda m: MixedPrecision("fp16").load_state_dict([1]), TypeError,  # type: ignore[arg-type]
        "a mixed precision state is a mapping, not a list",
    ),
    "no state of a loss scaler": (
        lambda m: DynamicLossScaler().load_state_dict([1]), TypeError,  # type: ignore[arg-type]
        "the state of a loss scaler is a mapping, not a list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_models_orders_and_states_are_refused(gpt2: GPT2LMHeadModel, case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call(gpt2)
    assert "forward" not in vars(gpt2)


class TestMeasuring:
    """Where the Trainer clips, the norm is measured when the backward ends."""

    def test_the_norm_is_that_of_all_gradients_until_one_changes(self, run: Any) -> None:
        check, parameters = run.runtime.check, list(run.model.parameters())
        check.measures_norm = True
        assert check.norm(parameters) is None
        run.loss().backward()
        run.loss().backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert torch.equal(check.norm(parameters), norm)
        assert check.norm(list(run.model.transformer.h.parameters())) is None
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        assert check.norm(parameters) is None
        run.model.zero_grad()
        run.loss().backward()
        assert check.norm(parameters) is not None
        run.model.transformer.wte.weight.grad = None
        assert check.norm(parameters) is None


def test_logits_beside_a_loss_are_cast_when_they_are_read(
    run: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_output, "DEFERRED_ELEMENTS", 1)
    outputs = run.model(**batch)
    assert isinstance(outputs.logits, deferred_output.DeferredOutput) and type(outputs.loss) is Tensor
    alone = run.model(input_ids=batch["input_ids"]).logits
    assert type(alone) is Tensor and torch.equal(outputs.logits, alone)
    _, logits = run.model(**batch, return_dict=False)[:2]
    assert isinstance(logits, deferred_output.DeferredOutput) and torch.equal(logits, alone)
    with torch.no_grad():
        assert type(run.model(**batch).logits) is Tensor
    unread = run.model(**batch)
    unread.loss.backward()
    assert torch.equal(unread.logits, alone)


# Gradients that come to no good


@pytest.mark.parametrize("measures_norm", [False, True])
def test_a_gradient_too_large_to_be_squared_is_an_overflow(
    gpt2: GPT2LMHeadModel, batch: Batch, measures_norm: bool
) -> None:
    runtime = MixedPrecision("bf16", loss_scaler=StaticLossScaler(1.0, max_consecutive_skips=2))
    runtime.check.measures_norm = measures_norm
    optimizer = runtime.attach_optimizer(AdamW(runtime.attach(gpt2).parameters(), lr=0.1))
    (gpt2(**batch).loss * 1e25).backward()
    assert all(parameter.grad.isfinite().all() for parameter in gpt2.parameters() if parameter.grad is not None)
    optimizer.step()
    assert runtime.step_was_skipped and not optimizer.state
    gpt2.zero_grad()
    take_step(gpt2(**batch).loss, optimizer)
    assert not runtime.step_was_skipped and runtime.stats.headroom is None
    take_step(gpt2(**batch).loss * 1e25, optimizer)
    (gpt2(**batch).loss * 1e25).backward()
    with pytest.raises(LossScaleError, match=r"not finite: transformer\.wte\.weight \(.*e\+2\d squared\)"):
        optimizer.step()


class WithLoss:
    """A model whose forward gives the loss, its optimizer and the scales of its steps."""

    def __init__(self, precision: str = "fp16", **settings: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.model: Any = Using(lambda model, x: {"loss": model.net(x).float().square().mean()}, net=net)
        optimizer = SGD(self.model.parameters(), lr=0.01)
        self.optimizer: Any = hf_mp.prepare(self.model, optimizer, precision, **settings)[1]
        self.runtime = self.model.forward.runtime
        self.scaler = self.runtime.scaler

    def backward(self, seed: int, *, times: float = 1.0, loss_times: float = 1.0) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        (self.model(x * times)["loss"] * loss_times).backward()

    def step(self) -> bool:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.optimizer.step_was_skipped


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "fp16-lean"}, {"precision": "fp16-lean", "free_gradients": "backward"}],
    ids=["fp16", "lean", "in backward"],
)
@pytest.mark.parametrize("times", [float("nan"), 1e30], ids=["NaN in the batch", "a forward out of range"])
@pytest.mark.parametrize("clean_steps", [0, 3])
def test_a_loss_of_nan_leaves_the_scale_that_follows_the_gradients(
    settings: dict[str, str], times: float, clean_steps: int
) -> None:
    """And what it has learned: training goes on as without that batch, which may be one of several."""
    with_it, without = WithLoss(**settings), WithLoss(**settings)
    for seed in range(clean_steps):
        for one in (with_it, without):
            one.backward(seed)
            assert not one.step()
    for parts in ((times,), (times, 1.0), (1.0, times)) if "free_gradients" not in settings else ((times,),) * 3:
        before = with_it.scaler.get_scale()
        for part in parts:
            with_it.backward(7, times=part)
        assert with_it.step() and with_it.scaler.get_scale() == before
    for seed in range(10, 14):
        for one in (with_it, without):
            one.backward(seed)
            assert not one.step()
        assert with_it.scaler.get_scale() == without.scaler.get_scale() > 1.0
    assert same(weights(with_it.model), weights(without.model))
    assert replace(with_it.scaler.state, steps=clean_steps + 4) == without.scaler.state
    # The skips are counted, also by who resumes.
    assert with_it.runtime.stats.skipped_steps == 3
    resumed = WithLoss(**settings)
    resumed.runtime.load_state_dict(json.loads(json.dumps(with_it.runtime.state_dict())))
    assert resumed.runtime.stats.skipped_steps == 3 and resumed.scaler.state == with_it.scaler.state


def test_an_overflow_of_a_finite_loss_lowers_the_scale() -> None:
    """Also after a backward of NaN whose gradients were thrown away, or went nowhere."""
    loop = WithLoss()
    loop.backward(0)
    assert not loop.step()
    loop.backward(1, times=float("nan"))
    loop.optimizer.zero_grad()
    x = torch.full((4, 8), float("nan"), requires_grad=True)
    torch.autograd.grad(loop.model(x)["loss"], x)
    loop.backward(1, loss_times=1e12)
    assert loop.step() and loop.scaler.get_scale() == 1.0


def test_losses_of_nan_end_the_training_at_the_scale_that_they_found() -> None:
    loop = WithLoss(loss_scaler=hf_mp.HeadroomLossScaler(max_consecutive_skips=3))
    with pytest.raises(LossScaleError, match=r"3 optimizer .* as is the loss, which no scale changes \(not finite: "):
        for seed in range(4):
            loop.backward(seed, times=float("nan"))
            loop.step()
    assert loop.scaler.get_scale() == 1024.0

"""Optimizers that an attached model was never given to, and writes that leave no trace."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

import hf_mp
from hf_mp.step import unattached
from hf_mp.weights.fused_adamw import can_skip_on_device


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_refused_and_changes_nothing(precision: str, kind: type[torch.optim.Optimizer]) -> None:
    model = hf_mp.MixedPrecision(precision).attach(nn.Linear(8, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"this \w+ was not attached, and would round its updates to the 16 bits .* attach_optimizer"
    ):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_so_it_is_for_a_copy_that_outlives_its_model() -> None:
    model, _ = _prepared()
    copied = copy.deepcopy(model)
    del model
    copied(torch.ones(4, 8)).sum().backward()  # a copy is FP32 until it is trained
    with pytest.raises(RuntimeError, match="this SGD was not attached, and would"):
        torch.optim.SGD(copied.parameters(), lr=0.1).step()


def test_an_optimizer_around_the_wrapper_steps_it() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: None = None) -> None:
            self.inner.step()

    model, optimizer = _prepared()
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(4, 8)).sum().backward()
    Around(optimizer).step()
    assert not torch.equal(model.state_dict()["weight"], before["weight"])


def test_other_models_step_as_before_and_a_detached_one_as_any() -> None:
    runtime = hf_mp.MixedPrecision("bf16-lean")
    model = runtime.attach(nn.Linear(8, 2))
    other = nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    other(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    assert can_skip_on_device(optimizer, None)  # a fused step with a hook of anybody else's is not replaced
    runtime.detach()
    model(torch.ones(4, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 2)
    return hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-lean")


# In the default layout


INF = float("inf")
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> Tensor:
    return (model(X) - 1).square().mean()


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


class ByNumpy(torch.optim.Optimizer):
    """As kernels of other libraries, which write memory that they are given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.detach().numpy()[...] -= 0.1 * parameter.grad.numpy()


def train(model: nn.Module, optimizers: list[Any], steps: int = 6) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return parameters[:2], parameters[2:]


by_default_layout = pytest.mark.parametrize("precision", ["fp16", "bf16"])
WARNED = r"an optimizer that was not attached updates the weights.*Call attach_optimizer\(optimizer\)"


def told(caught: Any) -> list[str]:
    """The files of the warnings."""
    return [one.filename for one in caught if "was not attached" in str(one.message)]


class TestDefaultLayout:
    @by_default_layout
    @pytest.mark.parametrize("make", [fused, foreach, ByNumpy])
    def test_what_it_writes_is_read_and_it_is_warned_of_once(self, make: Any, precision: str) -> None:
        reference, model = network(), network()
        expected = train(reference, [make(reference.parameters())])
        hf_mp.MixedPrecision(precision).attach(model)
        with pytest.warns(UserWarning, match=WARNED) as caught:
            losses = train(model, [make(model.parameters())])
        assert losses == pytest.approx(expected, rel=0.05) and losses[-1] < 0.8 * losses[0]
        assert told(caught) == [__file__]

    @by_default_layout
    @pytest.mark.parametrize("first", [0, 1])
    def test_so_is_what_the_second_of_two_writes(self, first: int, precision: str) -> None:
        reference, model = network(), network()
        expected = train(reference, [fused(part) for part in split(reference)])
        runtime = hf_mp.MixedPrecision(precision)
        runtime.attach(model)
        optimizers = [fused(part) for part in split(model)]
        runtime.attach_optimizer(optimizers[first])
        with pytest.warns(UserWarning, match=WARNED) as caught:
            losses = train(model, optimizers)
        assert losses == pytest.approx(expected, rel=0.05) and told(caught) == [__file__]
        assert runtime.stats.steps == 6

    @pytest.mark.parametrize("precision", ["fp16", "bf16", "bf16-lean"])
    def test_so_is_what_another_one_writes_in_the_place_of_the_attached_one(self, precision: str) -> None:
        reference, model = network(), network()
        expected = train(reference, [fused(reference.parameters())])
        runtime = hf_mp.MixedPrecision(precision)
        runtime.attach(model)
        runtime.attach_optimizer(fused(model.parameters()))
        with pytest.warns(UserWarning, match=WARNED) as caught:
            losses = train(model, [fused(model.parameters())])
        assert losses == pytest.approx(expected, rel=0.05) and told(caught) == [__file__]

    @by_default_layout
    def test_two_models_that_share_a_part_read_what_either_optimizer_writes(self, precision: str) -> None:
        """Each optimizer is attached to one of the models; the shared part belongs to the first one."""

        def make() -> tuple[list[nn.Module], list[list[nn.Parameter]]]:
            torch.manual_seed(0)
            trunk, heads = nn.Linear(8, 8), [nn.Linear(8, 1), nn.Linear(8, 1)]
            parameters = [[*trunk.parameters(), *heads[0].parameters()], list(heads[1].parameters())]
            return [nn.Sequential(trunk, nn.Tanh(), head) for head in heads], parameters

        def losses(models: list[nn.Module], optimizers: list[Any]) -> list[float]:
            found = []
            for _ in range(6):
                for model, optimizer in zip(models, optimizers, strict=True):
                    loss = loss_of(model)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(loss.item())
            return found

        models, parameters = make()
        expected = losses(models, [fused(part) for part in parameters])
        models, parameters = make()
        optimizers = [fused(part) for part in parameters]
        with warnings.catch_warnings(action="error"):
            for model, optimizer in zip(models, optimizers, strict=True):
                hf_mp.prepare(model, optimizer, precision)
            assert losses(models, optimizers) == pytest.approx(expected, rel=0.05)

    @by_default_layout
    def test_both_of_two_models_read_what_is_written_through_data(self, precision: str) -> None:
        trunk = nn.Linear(8, 8)
        models = [nn.Sequential(trunk, nn.Linear(8, 1)) for _ in range(2)]
        for model in models:
            hf_mp.MixedPrecision(precision).attach(model)
            model(X)
        trunk.weight.data.fill_(0.5)
        for model in models:
            fresh = copy.deepcopy(model)
            assert torch.equal(model(X), fresh(X))

    @by_default_layout
    def test_a_graph_that_saved_the_copies_before_such_a_step_is_differentiated(self, precision: str) -> None:
        """As under torch: ``fused=True`` raises no version counter, and a GAN may rely on it."""
        model = network()
        hf_mp.MixedPrecision(precision).attach(model)
        first, second = loss_of(model), loss_of(model)
        first.backward()
        with pytest.warns(UserWarning, match=WARNED):
            fused(model.parameters()).step()
        second.backward()

    def test_an_optimizer_of_other_weights_is_none_of_it(self) -> None:
        model, other = network(), network()
        hf_mp.MixedPrecision("fp16").attach(model)
        with warnings.catch_warnings(action="error"):
            train(other, [fused(other.parameters())])
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            fused(model.parameters()).step()

    @by_default_layout
    def test_one_around_the_attached_one_that_accumulates_is_no_other_one(self, precision: str) -> None:
        class Accumulating(torch.optim.Optimizer):
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                super().__init__(inner.param_groups, {})
                self.inner, self.calls = inner, 0

            def step(self, closure: Any = None) -> None:
                self.calls += 1
                if self.calls % 2 == 0:
                    self.inner.step()
                    self.inner.zero_grad()

            def zero_grad(self, set_to_none: bool = True) -> None:
                pass

        model = network()
        model, optimizer = hf_mp.prepare(model, fused(model.parameters()), precision)  # type: ignore[assignment]
        with warnings.catch_warnings(action="error"):
            losses = train(model, [Accumulating(optimizer)])
        assert losses[0] == losses[1] > losses[2] == losses[3]

    def test_a_compiled_step_is_noted_too(self) -> None:
        model = network()
        runtime = hf_mp.MixedPrecision("bf16")
        runtime.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        loss_of(model).backward()
        with pytest.warns(UserWarning, match=WARNED):
            step()
        before = loss_of(model)
        assert torch.equal(before, loss_of(copy.deepcopy(model)))

    def test_the_hook_is_there_from_the_first_attached_model_to_the_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hook = unattached._StepHook()  # other tests leave models attached
        for module in ("runtime", "mixed_precision"):
            monkeypatch.setattr(f"hf_mp.step.{module}.STEP_HOOK", hook)
        hooks = optimizer_module._global_optimizer_post_hooks
        before, found = len(hooks), []
        models = [hf_mp.MixedPrecision(precision).attach(network()) for precision in ("fp16", "bf16-lean")]
        for model in models:
            found.append(len(hooks) - before)
            hf_mp.detach(model)
        assert [*found, len(hooks) - before] == [1, 1, 0]
        models = [hf_mp.MixedPrecision("fp16").attach(network())]
        assert len(hooks) == before + 1
        models.clear()
        gc.collect()  # torch may be iterating over its hooks, so this one stays
        fused([nn.Parameter(torch.ones(2))]).step()
        hf_mp.MixedPrecision("fp16").detach()
        assert len(hooks) == before


# Writes that nothing shows


SILENT: dict[str, Callable[[Tensor], Any]] = {
    "NumPy": lambda weight: weight.detach().numpy().__setitem__(..., 0.5),
    "DLPack": lambda weight: torch.from_dlpack(weight.detach()).fill_(0.5),
    "storage": lambda weight: torch.tensor([], dtype=weight.dtype).set_(weight.untyped_storage()).fill_(0.5),
}
SEEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "NumPy of .data": lambda weight: weight.data.numpy().__setitem__(..., 0.5),
    "DLPack of .data": lambda weight: torch.from_dlpack(weight.data).fill_(0.5),
    "set_": lambda weight: weight.set_(torch.full_like(weight, 0.5)),
}


class TestRefresh:
    @by_default_layout
    @pytest.mark.parametrize("name", SILENT)
    def test_it_reads_what_was_written_without_a_trace(self, name: str, precision: str) -> None:
        model = network()
        runtime = hf_mp.MixedPrecision(precision)
        runtime.attach(model)
        runtime.refresh()  # nothing is there yet
        before = loss_of(model)
        SILENT[name](model[0].weight)
        assert torch.equal(loss_of(model), before)
        runtime.refresh()
        after = loss_of(model)
        assert torch.equal(after, loss_of(copy.deepcopy(model))) and not torch.equal(after, before)

    @by_default_layout
    @pytest.mark.parametrize("name", SEEN)
    def test_what_leaves_a_trace_needs_none(self, name: str, precision: str) -> None:
        model = hf_mp.MixedPrecision(precision).attach(network())
        before = loss_of(model)
        with torch.no_grad():
            SEEN[name](model[0].weight)  # type: ignore[index]
        assert torch.equal(loss_of(model), loss_of(copy.deepcopy(model))) and not torch.equal(loss_of(model), before)

    @by_default_layout
    def test_set_on_data_changes_no_weight_as_in_torch(self, precision: str) -> None:
        model = hf_mp.MixedPrecision(precision).attach(network())
        before = loss_of(model)
        model[0].weight.data.set_(torch.zeros(8, 8))  # type: ignore[index]
        assert torch.equal(loss_of(model), before)

    @by_default_layout
    def test_a_graph_is_spoilt_only_where_something_was_written(self, precision: str) -> None:
        model = network()
        runtime = hf_mp.MixedPrecision(precision)
        loss = loss_of(runtime.attach(model))
        runtime.refresh()
        loss.backward()

    @pytest.mark.parametrize("name", SILENT)
    def test_a_master_takes_it_over(self, name: str) -> None:
        for refreshes in (False, True):
            model = nn.Linear(8, 8, bias=False).half()
            optimizer = hf_mp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            SILENT[name](model.weight)
            if refreshes:
                optimizer.refresh()
            optimizer.step()
            assert torch.equal(model.weight, torch.full_like(model.weight, 0.5)) is refreshes
            assert torch.equal(optimizer.master(model.weight), torch.full((8, 8), 0.5)) is refreshes

    def test_a_master_keeps_the_bits_of_what_was_not_written(self) -> None:
        model = nn.Linear(8, 8, bias=False).half()
        optimizer = hf_mp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=1e-5))
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        before = optimizer.master(model.weight).clone()
        model.weight.detach().numpy()[0] = 0.5
        optimizer.refresh()
        after = optimizer.master(model.weight)
        assert torch.equal(after[1:], before[1:]) and torch.equal(after[0], torch.full((8,), 0.5))
        assert not torch.equal(after, model.weight.float())

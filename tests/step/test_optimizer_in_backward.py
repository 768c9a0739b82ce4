import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Using
from torch import Tensor, nn
from trainer_runs import arguments, tiny_gpt2, token_rows
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp
from hf_mp.weights.split_parameter import gradient_and_factor, master_value

SETTINGS: dict[str, Any] = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "use_cache": False}
CONFIG = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0, **SETTINGS
)
PRECISIONS = ["fp16-lean", "bf16-lean"]


class Run:
    """A tied GPT-2 with dropout, which trains on one batch."""

    def __init__(self, precision: str = "fp16-lean", kind: Any = torch.optim.AdamW, **settings: Any) -> None:
        torch.manual_seed(0)
        self.ids = torch.randint(0, 64, (2, 16))
        self.model = GPT2LMHeadModel(CONFIG).train()
        self.runtime = hf_mp.MixedPrecision(precision, **settings)
        self.runtime.attach(self.model)
        self.optimizer = self.runtime.attach_optimizer(kind(self.model.parameters(), lr=0.01))
        self.norms: list[float] = []

    def backward(self) -> Tensor:
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def train(self, steps: int = 3, clip_to: float | None = None) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            self.backward()
            if clip_to is not None:
                self.norms.append(self.optimizer.clip_grad_norm_(clip_to).item())
            self.optimizer.step()
            if (norm := self.runtime.grad_norm) is not None:
                self.norms.append(norm.item())
            self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        """All that a step may change, bit for bit."""
        parameters = list(self.model.parameters())
        kept = [value for p in parameters for value in self.optimizer.state.get(p, {}).values()]
        return [t.detach().clone() for t in (*parameters, *map(master_value, parameters), *kept)]


def check_same(found: Run, expected: Run) -> None:
    ours, theirs = found.state(), expected.state()
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


class TestSameAsFreeingInTheStep:
    @pytest.mark.parametrize(
        ("precision", "kind"),
        [
            ("bf16-lean", torch.optim.AdamW),
            ("fp16-lean", functools.partial(torch.optim.AdamW, fused=True)),
            ("fp16-lean", torch.optim.SGD),
        ],
        ids=["AdamW", "fused AdamW", "SGD"],
    )
    def test_without_clipping(self, kind: Any, precision: str) -> None:
        found, expected = Run(precision, kind, free_gradients="backward"), Run(precision, kind)
        before = found.state()
        found.train()
        expected.train()
        check_same(found, expected)
        assert not all(map(torch.equal, before, found.state()))
        assert found.runtime.stats == expected.runtime.stats

    # Tied weights in FP16: one gradient is an FP32 sum, the others have a factor of their own.
    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=["AdamW", "SGD"])
    @pytest.mark.parametrize(
        ("precision", "max_norm"),
        [("fp16-lean", 0.05), ("fp16-lean", 0.01), ("bf16-lean", 0.05), ("fp16-lean", 1e3), ("bf16-lean", torch.inf)],
    )
    def test_clipped_by_the_norm_of_this_step(self, max_norm: float, precision: str, kind: Any) -> None:
        found = Run(precision, kind, free_gradients="backward", max_grad_norm=max_norm)
        expected = Run(precision, kind)
        found.train()
        expected.train(clip_to=max_norm)
        assert found.norms == expected.norms and len(found.norms) == 3
        check_same(found, expected)
        # at 0.05 it does clip
        assert (found.norms[0] > max_norm) == (max_norm <= 0.05)

    def test_checkpointed_blocks(self) -> None:
        runs = [Run(free_gradients=when) for when in ("backward", "step")]
        for run in runs:
            run.model.gradient_checkpointing_enable({"use_reentrant": False})
            run.train()
        check_same(*runs)

    def test_a_loss_from_outside_of_the_model(self) -> None:
        runs = [Run(free_gradients=when) for when in ("backward", "step")]
        for run in runs:
            torch.manual_seed(0)
            logits = run.model(input_ids=run.ids).logits
            nn.functional.cross_entropy(logits.flatten(0, 1), run.ids.flatten()).backward()
            run.optimizer.step()
        check_same(*runs)

    def test_the_scheduler_and_hooks_see_one_step(self) -> None:
        run = Run(free_gradients="backward")
        calls: list[int] = []
        run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
        for _ in range(2):
            run.backward()
            run.optimizer.step()
            scheduler.step()
        assert len(calls) == 2
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 4)


class TestMemory:
    @pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}], ids=["not clipped", "clipped"])
    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_no_gradient_outlives_its_update(self, precision: str, settings: dict[str, Any]) -> None:
        run = Run(precision, free_gradients="backward", **settings)
        run.train(1)
        alive: list[int] = []
        first = next(iter(run.model.transformer.h[0].parameters()))

        def count(*_: Any) -> None:
            alive.append(sum(gradient_and_factor(p)[0] is not None for p in run.model.parameters()))

        handle = torch.autograd.graph.get_gradient_edge(first).node.register_hook(count)
        run.backward()
        handle.remove()
        # the first block's norm is nearly the last in backward; the tied embedding still waits for its second gradient
        assert alive and max(alive) <= 2
        assert all(gradient_and_factor(p)[0] is None for p in run.model.parameters())

    def test_nothing_keeps_the_graph(self) -> None:
        run = Run(free_gradients="backward")
        run.train(1)
        loss = run.model(input_ids=run.ids, labels=run.ids).loss
        graph = weakref.ref(loss.grad_fn)
        del loss
        gc.collect()
        assert graph() is None


class TestOverflow:
    @pytest.mark.parametrize("precision, settings", [
        ("fp16-lean", {}), ("fp16-lean", {"max_grad_norm": 1.0}), ("bf16-lean", {"max_grad_norm": torch.inf}),
    ])  # fmt: skip
    def test_late_in_backward_changes_nothing(self, precision: str, settings: dict[str, Any]) -> None:
        run = Run(precision, free_gradients="backward", **settings)
        run.train(2)
        before, scale = run.state(), run.runtime.scaler.get_scale()
        # the embeddings' gradients are the last ones of all
        handle = run.model.transformer.drop.register_forward_hook(
            lambda m, a, out: out.register_hook(lambda g: g * torch.inf) and None
        )
        run.backward()
        run.optimizer.step()
        handle.remove()
        assert run.optimizer.step_was_skipped
        assert all(map(torch.equal, before, run.state()))
        assert run.runtime.scaler.get_scale() < scale or precision == "bf16-lean"
        run.optimizer.zero_grad()
        run.train(1)
        assert not run.optimizer.step_was_skipped
        assert not all(map(torch.equal, before, run.state()))

    def test_in_one_pass_a_loss_of_nan_changes_nothing(self) -> None:
        run = Run("bf16-lean", free_gradients="backward")
        run.train(1)
        before = run.state()
        handle = run.model.lm_head.register_forward_hook(lambda m, a, out: out * torch.nan)
        run.backward()
        run.optimizer.step()
        handle.remove()
        assert run.optimizer.step_was_skipped
        assert all(map(torch.equal, before, run.state()))

    def test_in_one_pass_what_comes_later_is_an_error(self) -> None:
        run = Run("bf16-lean", free_gradients="backward")
        run.train(1)
        run.model.transformer.drop.register_forward_hook(
            lambda m, a, out: out.register_hook(lambda g: g * torch.inf) and None
        )
        with pytest.raises(RuntimeError, match="parameters are updated already"):
            run.backward()


class TestRefused:
    def test_a_second_backward(self) -> None:
        run = Run(free_gradients="backward")
        run.backward()
        with pytest.raises(RuntimeError, match="To accumulate gradients, use"):
            run.backward()

    def test_two_outputs_where_they_are_measured(self) -> None:
        run = Run(free_gradients="backward")
        before = run.state()
        outputs = run.model(input_ids=run.ids, labels=run.ids)
        with pytest.raises(RuntimeError, match="through several outputs"):
            (outputs.loss + outputs.logits.float().square().mean()).backward()
        assert all(map(torch.equal, before, run.state()))

    def test_two_outputs_in_one_pass_work(self) -> None:
        runs = [Run("bf16-lean", free_gradients=when) for when in ("backward", "step")]
        for run in runs:
            torch.manual_seed(0)
            outputs = run.model(input_ids=run.ids, labels=run.ids)
            (outputs.loss + outputs.logits.float().square().mean()).backward()
            run.optimizer.step()
        check_same(*runs)

    def test_reentrant_checkpointing(self) -> None:
        run = Run(free_gradients="backward")
        run.model.gradient_checkpointing_enable({"use_reentrant": True})
        run.train(2)  # blocks have parameters of their own: each is given its gradient once

    def test_a_parameter_with_gradients_at_two_times(self) -> None:
        def twice(m: Any, x: Tensor) -> Tensor:
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(m.inner, x, use_reentrant=True)
            return x.square().mean()

        model = Using(twice, inner=nn.Linear(4, 4))
        runtime = hf_mp.MixedPrecision("fp16-lean", free_gradients="backward")
        runtime.attach(model)
        runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = [master_value(p).clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            model(torch.ones(2, 4, requires_grad=True)).backward()
        assert all(map(torch.equal, before, map(master_value, model.parameters())))

    def test_second_derivatives(self) -> None:
        run = Run(free_gradients="backward")
        with pytest.raises(RuntimeError, match="create_graph=True needs"):
            run.model(input_ids=run.ids, labels=run.ids).loss.backward(create_graph=True)

    @pytest.mark.parametrize("settings, message", [
        ({"policy": "fp16", "free_gradients": "backward"}, "needs a lean layout"),
        ({"policy": "fp16-lean", "free_gradients": "early"}, "use 'step' or 'backward'"),
        ({"policy": "fp16", "max_grad_norm": -1.0}, "must be positive"),
        ({"policy": "fp16-lean", "free_gradients": "backward", "max_grad_norm": 0.0}, "must be positive"),
    ])  # fmt: skip
    def test_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            hf_mp.MixedPrecision(**settings)

    def test_a_second_optimizer(self) -> None:
        run = Run(free_gradients="backward")
        with pytest.raises(ValueError, match="works with one optimizer"):
            run.runtime.attach_optimizer(torch.optim.SGD(run.model.parameters(), lr=0.1))

    def test_an_optimizer_that_is_not_known(self) -> None:
        class Whole(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        with pytest.raises(ValueError, match=r"does not know whether Whole allows that: .*optim='adamw_torch'"):
            Run(kind=Whole, free_gradients="backward")


def test_gradients_of_other_losses_wait_for_the_step() -> None:
    run = Run(free_gradients="backward", kind=torch.optim.SGD)
    parameter = run.model.transformer.wpe.weight
    before = master_value(parameter).clone()
    parameter.float().sum().backward()
    assert parameter.grad is not None
    run.optimizer.step()
    assert torch.allclose(master_value(parameter), before - 0.01)


def test_autograd_grad_is_left_alone() -> None:
    run = Run(free_gradients="backward")
    before = run.state()
    loss = run.model(input_ids=run.ids, labels=run.ids).loss
    torch.autograd.grad(loss, list(run.model.parameters()))
    assert all(map(torch.equal, before, run.state()))


def test_detached_the_model_is_ordinary() -> None:
    run = Run(free_gradients="backward")
    run.train(1)
    run.runtime.detach()
    before = [p.detach().clone() for p in run.model.parameters()]
    run.backward()
    assert all(map(torch.equal, before, run.model.parameters()))
    assert all(p.grad is not None for p in run.model.parameters())


class TestTrainer:
    def train(self, path: Path, precision: str, **settings: Any) -> hf_mp.MixedPrecisionTrainer:
        args = arguments(path, hf_mp.MixedPrecisionArguments, precision=precision, **settings)
        trainer = hf_mp.MixedPrecisionTrainer(model=tiny_gpt2(), args=args, train_dataset=token_rows())
        trainer.train()
        return trainer

    @pytest.mark.parametrize(("precision", "max_grad_norm"), [("fp16-lean", 0.05), ("bf16-lean", 0.0)])
    def test_trains_as_it_does_with_gradients_kept(self, precision: str, max_grad_norm: float, tmp_path: Path) -> None:
        settings = {"max_grad_norm": max_grad_norm}
        found = self.train(tmp_path, precision, free_gradients="backward", **settings)
        expected = self.train(tmp_path, precision, **settings)
        assert found.mixed_precision is not None and found.mixed_precision.updates_in_backward
        is_measured = max_grad_norm > 0.0
        for ours, theirs in zip(found.state.log_history[:-1], expected.state.log_history[:-1], strict=True):
            if not is_measured:
                theirs.pop("grad_norm")
            assert ours == theirs
        assert ("grad_norm" in found.state.log_history[0]) == is_measured
        assert all(map(torch.equal, found.model.parameters(), expected.model.parameters()))

    def test_accumulation_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2 adds"):
            hf_mp.MixedPrecisionArguments(
                str(tmp_path), precision="fp16-lean", free_gradients="backward", gradient_accumulation_steps=2
            )

"""The first backward of a run is compared at several loss scales: leaks are refused, and training is the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import arguments, make_trainer, poisoned, same, tiny_gpt2, token_rows, weights
from transformers import Trainer
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

import hf_mp.trainer.session as session
from hf_mp import MixedPrecisionArguments, ScaleLeakError, prepare
from hf_mp.trainer.first_backward import check_first_backward

CONTENDERS = ("subclass", "callback")


class FromInside(Trainer):
    """Adds a penalty on a hidden state that was taken by a hook."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen: list[torch.Tensor] = []
        handle = self.model.transformer.h[0].register_forward_hook(
            lambda module, inputs, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        handle.remove()
        return loss + 100.0 * seen[0].float().square().mean()


def trainer_of(
    path: Path, contender: str, base: type[Trainer] = Trainer, precision: str = "fp16", **settings: Any
) -> Any:
    model = settings.pop("model", None) or tiny_gpt2(resid_pdrop=0.1, attn_pdrop=0.1)
    args = arguments(path, MixedPrecisionArguments, **settings)
    args.precision = precision
    return make_trainer(contender, precision, model, args, base, train_dataset=token_rows())


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_leak_is_refused_at_the_first_backward(tmp_path: Path, contender: str, precision: str) -> None:
    if contender == "callback" and precision == "fp16-lean":
        pytest.skip("a callback has no lean layout")
    trainer = trainer_of(tmp_path, contender, FromInside, precision)
    before = weights(trainer.model)
    with pytest.raises(ScaleLeakError, match=r"gradients change with the loss scale.*transformer\.wte\.weight"):
        trainer.train()
    tolerance = 0.0 if precision == "fp16" else 2.0**-20  # splitting a weight in FP16 drops its last bits
    for weight, start in zip(weights(trainer.model), before, strict=True):
        torch.testing.assert_close(weight, start, rtol=tolerance, atol=tolerance)
    assert "backward" not in vars(trainer.accelerator)


@pytest.mark.parametrize("contender", CONTENDERS)
def test_the_check_can_be_switched_off(tmp_path: Path, contender: str) -> None:
    trainer = trainer_of(tmp_path, contender, FromInside, check_gradients=False)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("settings", [
    {},
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"precision": "fp16-lean"},
    {"precision": "fp16-lean", "free_gradients": "backward"},
    {"base": poisoned(Trainer, (0, 2))},
], ids=["plain", "accumulation", "checkpoints", "reentrant", "lean", "in backward", "poisoned"])  # fmt: skip
@pytest.mark.parametrize("contender", CONTENDERS)
def test_training_is_the_same_bit_for_bit(
    tmp_path: Path, contender: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, so that random numbers count."""
    if contender == "callback" and "precision" in settings:
        pytest.skip("a callback has no lean layout")
    ran = []
    check = session.check_first_backward
    monkeypatch.setattr(session, "check_first_backward", lambda *given: ran.append(given) or check(*given))
    ends = []
    for checks in (True, False):
        trainer = trainer_of(tmp_path, contender, check_gradients=checks, **settings)
        trainer.train()
        ends.append((weights(trainer.model), torch.get_rng_state()))
        assert "backward" not in vars(trainer.accelerator)
    assert len(ran) == 1
    assert same(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_resumed_run_is_checked_and_is_the_same(tmp_path: Path, contender: str) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    straight = trainer_of(tmp_path, contender, **settings)
    straight.train()
    resumed = trainer_of(tmp_path, contender, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(weights(straight.model), weights(resumed.model))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_where_nothing_is_scaled_nothing_is_compared(tmp_path: Path, precision: str) -> None:
    trainer = trainer_of(tmp_path, "subclass", FromInside, precision)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("why", ["compiled", "processes"])
def test_where_it_cannot_be_compared_the_reason_is_told(tmp_path: Path, why: str) -> None:
    model = tiny_gpt2()
    prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    args = arguments(tmp_path)
    if why == "compiled":
        model.transformer.h[0].compile(backend="eager")
    logger = logging.get_logger("hf_mp.trainer.first_backward")
    accelerator = SimpleNamespace(backward=torch.Tensor.backward)
    with CaptureLogger(logger) as captured, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "level", logging.INFO)
        if why == "processes":
            patch.setattr(type(args), "world_size", 2)
        check_first_backward(model.forward.runtime, args, accelerator)()
    assert accelerator.backward is torch.Tensor.backward
    reason = {"compiled": "a compiled backward frees", "processes": "each backward would be reduced"}[why]
    assert captured.out.count(f"not compared at several loss scales: {reason}") == 1

"""The first backward of a run is compared at several loss scales: leaks are refused, and training is the same."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import arguments, make_trainer, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainerCallback

from hf_mp import MixedPrecisionArguments, ScaleLeakError, prepare
from hf_mp.trainer.first_backward import replace_first_backward


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


@pytest.mark.parametrize(
    ("contender", "precision"), [("subclass", "fp16"), ("subclass", "fp16-lean"), ("callback", "fp16")]
)
def test_a_leak_is_refused_at_the_first_backward(tmp_path: Path, contender: str, precision: str) -> None:
    trainer = trainer_of(tmp_path, contender, FromInside, precision)
    before = weights(trainer.model)
    with pytest.raises(ScaleLeakError, match=r"gradients change with the loss scale.*transformer\.wte\.weight"):
        trainer.train()
    tolerance = 0.0 if precision == "fp16" else 2.0**-20  # splitting a weight in FP16 drops its last bits
    for weight, start in zip(weights(trainer.model), before, strict=True):
        torch.testing.assert_close(weight, start, rtol=tolerance, atol=tolerance)
    assert "backward" not in vars(trainer.accelerator)


@pytest.mark.parametrize(
    ("contender", "precision", "settings"),
    [
        ("subclass", "fp16", {"check_gradients": False}),
        ("callback", "fp16", {"check_gradients": False}),
        ("subclass", "bf16", {}),
        ("subclass", "fp32", {}),
    ],
)
def test_nothing_is_compared_where_that_is_asked_or_nothing_is_scaled(
    tmp_path: Path, contender: str, precision: str, settings: dict[str, Any]
) -> None:
    trainer = trainer_of(tmp_path, contender, FromInside, precision, **settings)
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("why", ["compiled", "processes"])
def test_where_it_cannot_be_compared_the_backward_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    model = tiny_gpt2()
    prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    args = arguments(tmp_path)
    if why == "compiled":
        model.transformer.h[0].compile(backend="eager")
    else:
        monkeypatch.setattr(type(args), "world_size", 2)
    accelerator = SimpleNamespace(backward=torch.Tensor.backward)
    restore = replace_first_backward(model.forward.runtime, args, accelerator)
    assert accelerator.backward is torch.Tensor.backward
    restore()
    assert accelerator.backward is torch.Tensor.backward


def test_the_check_of_a_run_that_failed_before_its_first_backward_is_not_kept(tmp_path: Path) -> None:
    model = tiny_gpt2()
    kind = type("Accelerator", (), {"backward": lambda self, loss, **kwargs: loss.backward(**kwargs)})
    accelerator = kind()
    prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        replace_first_backward(model.forward.runtime, arguments(tmp_path), accelerator)
    first = accelerator.backward
    ids = torch.arange(8)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    assert first is not accelerator.backward and "backward" not in vars(accelerator)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_others_have_put_in_the_place_of_backward_stays(tmp_path: Path, when: str) -> None:
    trainer, ran = trainer_of(tmp_path, "subclass", max_steps=3), []

    class Wraps(TrainerCallback):
        def wrap(self, *args: Any, **kwargs: Any) -> None:
            own = trainer.accelerator.backward

            @functools.wraps(own)
            def timed(loss: torch.Tensor, **kwargs: Any) -> None:
                ran.append(trainer.state.global_step)
                own(loss, **kwargs)

            trainer.accelerator.backward = timed

    if when == "before":
        Wraps().wrap()
    else:
        Wraps.on_train_begin = Wraps.wrap
        trainer.add_callback(Wraps())
    trainer.train()
    assert sorted(set(ran)) == [0, 1, 2] and ran.count(1) == ran.count(2) == 1

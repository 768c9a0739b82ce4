"""``MixedPrecisionArguments`` in a Trainer that is not ours: what would train in FP32 without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import arguments, callback_of, make_trainer, same, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainerCallback

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer

pytestmark = pytest.mark.usefixtures("without_first_check")


def make(folder: Path, base: type[Trainer] = Trainer, precision: str = "fp16", **named: Any) -> Trainer:
    args = arguments(folder, MixedPrecisionArguments, precision=precision)
    named = {"train_dataset": token_rows(), "eval_dataset": token_rows(4), **named}
    return base(**{"model": tiny_gpt2(), "args": args, **named})


def given_optimizers(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
@pytest.mark.parametrize("given", ["model", "model_init", "optimizers", "evaluated"])
def test_the_stock_trainer_refuses_to_train_in_fp32(tmp_path: Path, precision: str, given: str) -> None:
    model = tiny_gpt2()
    before = weights(model)
    named: dict[str, Any] = {"model": model}
    if given == "model_init":
        named = {"model": None, "model_init": lambda: model}
    elif given == "optimizers":
        named["optimizers"] = given_optimizers(model)
    trainer = make(tmp_path, precision=precision, **named)
    if given == "evaluated":
        trainer.evaluate()
    message = (
        rf"^Trainer does not read precision='{precision}', and would train in FP32: use MixedPrecisionTrainer, or "
        r"give it callbacks=\[hf_mp.MixedPrecisionCallback\(\)\]"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            trainer.train()
    assert same(before, weights(model)) and list(tmp_path.glob("checkpoint-*")) == []
    assert trainer.evaluate()["eval_loss"] > 0


def test_evaluation_alone_and_fp32_are_left_alone(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer.evaluate()["eval_loss"] > 0 and len(trainer.predict(token_rows(4)).predictions) == 4
    for args in (trainer.args, torch.load(saved(trainer, tmp_path), weights_only=False)):
        assert args.device == torch.device("cpu") and args.to_dict()["precision"] == "fp16"
    trainer = make(tmp_path, precision="fp32")
    trainer.train()
    assert trainer.state.global_step == 4


def saved(trainer: Trainer, folder: Path) -> Path:
    trainer.save_model(str(folder))
    return folder / "training_args.bin"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_same_arguments_train_where_they_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = make(tmp_path, MixedPrecisionTrainer, model=tiny_gpt2(dtype))
    ours.train()
    with pytest.raises(ValueError, match="does not read precision"):
        make(tmp_path, args=ours.args).train()
    other = make(tmp_path, args=ours.args, model=tiny_gpt2(dtype), callbacks=[MixedPrecisionCallback()])
    late = make(tmp_path, args=ours.args, model=tiny_gpt2(dtype))
    late.add_callback(MixedPrecisionCallback)  # the class will do
    for trainer in (other, late):
        trainer.train()
        assert callback_of(trainer).mixed_precision is not None and same(weights(ours.model), weights(trainer.model))


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end"])
def test_a_callback_that_comes_when_training_has_begun_is_refused(tmp_path: Path, event: str) -> None:
    class Adds(TrainerCallback):
        pass

    def add(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and added not in trainer.callback_handler.callbacks:
            trainer.add_callback(added)

    setattr(Adds, event, add)
    added = MixedPrecisionCallback("fp16")
    trainer = make_trainer(
        "stock", "", tiny_gpt2(), arguments(tmp_path), train_dataset=token_rows(), callbacks=[Adds()]
    )
    with pytest.raises(ValueError, match=r"added after step 2 of a training that had begun without it: .*before train"):
        trainer.train()
    trainer.remove_callback(Adds)
    trainer.train()  # from its start, it trains in FP16
    assert added.mixed_precision is not None and added.mixed_precision.stats.steps == 4


def test_the_callback_takes_the_options(tmp_path: Path) -> None:
    options = {"fp32_head": True, "exact_generation": True}
    callback = MixedPrecisionCallback("bf16", **options)
    trainer = Trainer(tiny_gpt2(), arguments(tmp_path), train_dataset=token_rows(), callbacks=[callback])
    session = callback_of(trainer).session
    assert session is not None
    assert str(session.settings.policy) == "bf16,fp32_head=true,exact_generation=true"
    args = arguments(tmp_path, MixedPrecisionArguments, **options)
    assert str(args.precision_policy) == "fp16,fp32_head=true,exact_generation=true"
    for name in ("fp32_head", "exact_generation"):  # what the callback was given is above the arguments
        off = MixedPrecisionCallback(**{name: False})
        Trainer(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[off])
        assert off.session is not None and not getattr(off.session.settings.policy, name)
        assert sum(getattr(off.session.settings.policy, other) for other in ("fp32_head", "exact_generation")) == 1
        off.detach()
    callback.detach()

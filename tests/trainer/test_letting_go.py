"""After a training the model is an ordinary one: for evaluation, for another Trainer, for a stock one, for a loop."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from trainer_runs import arguments, callback_of, make_trainer, poisoned, same, tiny_gpt2, token_rows, weights
from transformers import Trainer, TrainerCallback

from hf_mp import memory_footprint

pytestmark = pytest.mark.usefixtures("without_first_check")

PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
CONTENDERS = ("subclass", "callback")


def trainer_of(model: nn.Module, path: Path, contender: str = "subclass", precision: str = "fp16", **named: Any) -> Any:
    settings = {"optim": "adamw_torch", "learning_rate": 1e-2, **named.pop("settings", {})}
    args = arguments(path / contender, **settings)
    base = named.pop("base", Trainer)
    return make_trainer(contender, precision, model, args, base, train_dataset=token_rows(), **named)


def assert_plain(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in vars(module) and "save_pretrained" not in vars(module)
        assert not module._forward_hooks and not module._state_dict_hooks
    assert {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, torch.float32)}


@contextmanager
def products(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Notes in which dtypes the last product of the model runs."""
    seen: set[torch.dtype] = set()
    handle = model.get_output_embeddings().register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    yield seen
    handle.remove()


class Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def assert_evaluates_in_autocast(trainer: Any, call: str) -> None:
    """And leaves an ordinary model, whose weights are as before."""
    model, start = trainer.model, weights(trainer.model)
    with products(model) as seen:
        getattr(trainer, call)(token_rows(4))
    assert same(start, weights(model)) and seen == {trainer.precision_policy.compute}
    with products(model) as seen:
        model(**{name: value[None] for name, value in token_rows(2)[0].items()})
    assert seen == {torch.float32}  # called by hand


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [*zip(PRECISIONS, [torch.float32, torch.float16, torch.float16, torch.float32], strict=True)],
    ids=str,
)
def test_a_training_lets_go(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    model, call = tiny_gpt2(dtype), "predict" if precision == "bf16" else "evaluate"
    gc.collect()  # what earlier tests have left attached, so that train(), which collects, does not let go of it
    replaced = AcceleratedOptimizer.__dict__["step_was_skipped"]
    trainer = trainer_of(model, tmp_path, precision=precision, settings={"lr_scheduler_type": "constant"})
    before = weights(model)
    if dtype is torch.float32:
        assert_evaluates_in_autocast(trainer, call)
    trainer.train()
    assert_plain(model)
    assert not same(before, weights(model)) and trainer.mixed_precision.stats.steps == 4
    assert AcceleratedOptimizer.__dict__["step_was_skipped"] is replaced
    assert_evaluates_in_autocast(trainer, call)
    # A second training begins with the moments of the first.
    assert trainer.optimizer.state_dict()["state"][0]["step"] == 4
    trainer.train()
    state = trainer.optimizer.state_dict()["state"]
    assert state[0]["step"] == 8 and {moment["exp_avg"].dtype for moment in state.values()} == {torch.float32}
    assert_plain(model)
    # Nothing else holds the optimizer.
    inner = trainer.optimizer.optimizer
    references = [weakref.ref(thing) for thing in (inner, next(iter(inner.state.values()))["exp_avg"])]
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer.accelerator.free_memory()
    del inner, state
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize(("contender", "precision"), [("callback", "fp16"), ("subclass", "bf16-lean")])
def test_a_training_that_was_interrupted_can_be_started_again(tmp_path: Path, contender: str, precision: str) -> None:
    model = tiny_gpt2()
    interrupt = Interrupt()
    trainer = trainer_of(model, tmp_path, contender, precision, callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    if contender == "subclass":
        assert_plain(model)
    trainer.remove_callback(interrupt)
    trainer.train()  # attaches it again
    assert_plain(model)
    assert (callback_of(trainer) if contender == "callback" else trainer).mixed_precision.stats.steps == 6


# Evaluation


def test_evaluation_within_and_after_training_agree(tmp_path: Path) -> None:
    model = tiny_gpt2(torch.float16)
    settings = {"eval_strategy": "steps", "eval_steps": 4}
    trainer = trainer_of(model, tmp_path, settings=settings, eval_dataset=token_rows(8))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    within = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert within == [trainer.evaluate()["eval_loss"]]
    masters = tiny_gpt2(torch.float16).float()
    assert trainer_of(masters, tmp_path).evaluate(token_rows(8))["eval_loss"] == before


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_evaluation_makes_no_masters(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    """At most a 16-bit copy of FP32 weights; 16-bit weights of products stay as they are."""
    model = tiny_gpt2(dtype, n_embd=64, tie_word_embeddings=False)
    trainer = trainer_of(model, tmp_path, precision=precision)
    own_bytes = memory_footprint(model).total_bytes
    largest: list[int] = []

    class Watch(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gc.collect()
            tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
            found = {id(t): t for t in tensors if t.is_floating_point()}
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found.values()}
            largest.append(sum(storages.values()))

    trainer.add_callback(Watch())
    trainer.evaluate(token_rows(4))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    stock = trainer_of(model, tmp_path, "stock")
    stock.add_callback(Watch())
    stock.evaluate(token_rows(4))
    extra = largest[0] - largest[1]
    embeddings = sum(e.weight.nbytes for e in (model.transformer.wte, model.transformer.wpe))
    assert extra <= 0.55 * own_bytes if dtype is torch.float32 else extra <= embeddings + 0.1 * own_bytes


# Others on the same model


@pytest.mark.parametrize(
    ("first", "second", "first_trains"),
    [
        ("subclass", "callback", True),
        ("callback", "subclass", True),
        ("callback", "callback", False),
        ("subclass", "subclass", False),
    ],
)
def test_another_trainer_on_the_same_model(tmp_path: Path, first: str, second: str, first_trains: bool) -> None:
    model, short = tiny_gpt2(), {"max_steps": 2}
    older = trainer_of(model, tmp_path / "a", first, settings=short)
    if first_trains:
        older.train()
    start = weights(model)
    newer = trainer_of(model, tmp_path / "b", second, settings=short)
    newer.train()
    assert_plain(model)
    alone = tiny_gpt2()
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), start, strict=True):
            parameter.copy_(value)
    trainer_of(alone, tmp_path / "c", second, settings=short).train()
    assert same(weights(model), weights(alone))


@pytest.mark.parametrize("precision", ["fp16", "bf16-lean"])
def test_a_stock_trainer_afterwards_is_plain_fp32(tmp_path: Path, precision: str) -> None:
    model, short = tiny_gpt2(), {"max_steps": 2}
    trainer_of(model, tmp_path, precision=precision, settings=short).train()
    copied = copy.deepcopy(model)
    ends = []
    for each in (model, copied):
        trainer_of(each, tmp_path, "stock", settings=short).train()
        ends.append(weights(each))
    assert same(*ends)
    with products(model) as seen:
        trainer_of(model, tmp_path, "stock", settings=short).train()
    assert seen == {torch.float32}


# Skipped steps, as others are told of them


@pytest.mark.parametrize(
    ("contender", "precision"), [("subclass", "fp16"), ("subclass", "fp16-lean"), ("callback", "fp16")]
)
def test_users_callbacks_know_of_a_skipped_step_at_once(tmp_path: Path, contender: str, precision: str) -> None:
    told: list[bool] = []

    class Ema(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            assert isinstance(optimizer, AcceleratedOptimizer)
            told.append(optimizer.step_was_skipped)

    trainer = trainer_of(tiny_gpt2(), tmp_path, contender, precision, base=poisoned(Trainer, (1, 2)), callbacks=[Ema()])
    trainer.train()
    assert told == [False, True, True, False]


@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_last_skipped_step_does_not_freeze_the_next_training(tmp_path: Path, contender: str) -> None:
    base = poisoned(Trainer, (3,))
    trainer = trainer_of(tiny_gpt2(), tmp_path, contender, base=base, settings={"learning_rate": 1e-2})
    trainer.train()
    assert trainer.state.log_history[-2]["skipped_steps"] == 1
    if contender == "callback":
        callback = callback_of(trainer)
        callback.detach()
        trainer.remove_callback(callback)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(set(rates)) == 4

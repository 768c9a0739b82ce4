"""Saving, resuming and loading again, with the stock Trainer, our subclass in its place and our callback added."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_runs import (
    CLOCK,
    arguments,
    callback_of,
    history,
    logged,
    make_trainer,
    poisoned,
    same,
    tiny_gpt2,
    token_rows,
    weights,
)
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import hf_mp.trainer.session
from hf_mp import MixedPrecisionArguments
from hf_mp.trainer.checkpoints.manifest import MANIFEST_NAME
from hf_mp.trainer.session import STATE_NAME

OURS = ("subclass", "callback")
LEAN = ("fp16-lean", "bf16-lean")  # by the subclass
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "optim": "adamw_torch", "learning_rate": 1e-2}
BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


def make(contender: str, directory: Path, precision: str = "fp16", base: type[Trainer] = Trainer, **settings: Any):
    """A Trainer whose dropout needs the state of the random generators; a lean layout is a contender too."""
    named = {name: settings.pop(name) for name in ("callbacks", "eval_dataset", "cls", "model") if name in settings}
    args = arguments(directory / contender, named.pop("cls", TrainingArguments), **{**SAVING, **settings})
    model = tiny_gpt2(resid_pdrop=0.1) if (model := named.pop("model", None)) is None else model
    contender, precision = ("subclass", contender) if contender in LEAN else (contender, precision)
    return make_trainer(contender, precision, model, args, base, train_dataset=token_rows(), **named)


def checkpoint(trainer: Trainer, step: int) -> Path:
    return Path(str(trainer.args.output_dir), f"checkpoint-{step}")


def scaler_state(trainer: Trainer) -> dict[str, Any]:
    runtime = getattr(trainer, "mixed_precision", None) or callback_of(trainer).mixed_precision
    assert runtime is not None
    return runtime.state_dict()


@pytest.mark.parametrize("contender", ["stock", *OURS, *LEAN])
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"optim": "adamw_bnb_8bit"}], ids=str)
def test_resuming_is_the_training_that_was_not_interrupted(tmp_path: Path, contender: str, settings: Any) -> None:
    trainers = [make(contender, tmp_path / name, base=poisoned(Trainer, (1,)), **settings) for name in "ab"]
    straight, resumed = trainers
    if contender == "stock":  # it would not survive the overflow
        straight, resumed = (make(contender, tmp_path / name, **settings) for name in "ab")
    straight.train()
    resumed.train(resume_from_checkpoint=str(checkpoint(straight, 4)))
    assert same(weights(straight.model), weights(resumed.model))
    assert history(straight)[:-1] == history(resumed)[:-1]  # the last entry sums up one run
    assert straight.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    if contender != "stock":
        assert scaler_state(straight) == scaler_state(resumed)
        skipped = scaler_state(straight)["loss_scaler"]["skipped_steps"]
        assert logged(resumed, "skipped_steps")[-1] == skipped
        assert skipped == 1 or contender == "bf16-lean"  # which holds 1e30


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_resuming_with_a_larger_max_steps_follows_its_schedule(tmp_path: Path, schedule: str) -> None:
    first = make("subclass", tmp_path / "first", max_steps=2, lr_scheduler_type=schedule)
    first.train()
    straight, longer = (make("subclass", tmp_path / name, max_steps=4, lr_scheduler_type=schedule) for name in "ab")
    straight.train()
    longer.train(resume_from_checkpoint=str(checkpoint(first, 2)))
    assert longer.state.global_step == 4
    assert same(weights(longer.model), weights(straight.model)) is (schedule == "constant")


@pytest.mark.outside
@pytest.mark.parametrize("skipped", [(), (0,), (2,), (5,), (1, 2), (0, 3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("accumulation", [1, 2, 3, 6])
@pytest.mark.parametrize("scale", ["headroom", "dynamic", "none"])
@pytest.mark.parametrize("layout", ["fp32", "fp16"])
def test_resuming_at_each_step(
    tmp_path: Path, layout: str, scale: str, accumulation: int, skipped: tuple[int, ...]
) -> None:
    """Bit for bit, by both adapters, also where rows do not fill the last update of an epoch."""
    precision = f"params={layout},compute=fp16,loss_scale={scale}"
    settings = {"gradient_accumulation_steps": accumulation, "save_steps": 1, "base": poisoned(Trainer, skipped)}
    ends = []
    for contender in OURS if layout == "fp32" else ("subclass",):
        straight = make(contender, tmp_path / "straight", precision, **settings)
        straight.train_dataset = token_rows(22, 8)
        straight.train()
        for step in range(1, 6):
            resumed = make(contender, tmp_path / str(step), precision, **settings)
            resumed.train_dataset = straight.train_dataset
            resumed.train(resume_from_checkpoint=str(checkpoint(straight, step)))
            assert same(weights(straight.model), weights(resumed.model)), f"resumed at {step}"
            logs = [history(trainer, CLOCK | {"headroom"}) for trainer in (straight, resumed)]  # of its own steps
            assert logs[0][:-1] == logs[1][:-1]
        ends.append(weights(straight.model))
    assert same(ends[0], ends[-1])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_checkpoint_has_the_files_of_the_stock_trainer(tmp_path: Path, precision: str) -> None:
    files, states = {}, {}
    for contender in ("stock", *OURS):
        trainer = make(contender, tmp_path, precision, max_steps=2)
        trainer.train()
        files[contender] = {path.name for path in checkpoint(trainer, 2).iterdir()}
        states[contender] = json.loads((checkpoint(trainer, 2) / "trainer_state.json").read_text())
    ours = {STATE_NAME, MANIFEST_NAME} if precision == "fp16" else set()
    assert files["callback"] == files["stock"] | ours
    assert files["subclass"] == files["stock"] | ours | {MANIFEST_NAME}
    assert states["callback"].keys() == states["stock"].keys()


@pytest.mark.parametrize("contender", ["stock", *OURS, "fp16-lean"])
def test_the_best_model_is_loaded_and_few_checkpoints_are_kept(tmp_path: Path, contender: str) -> None:
    # The loss falls and greater_is_better=True: the first evaluation stays the best.
    settings = {**BEST, "metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
    trainer = make(contender, tmp_path, **settings, max_steps=8, callbacks=callbacks, eval_dataset=token_rows(8))
    trainer.train()
    assert trainer.state.global_step == 6 and trainer.state.best_global_step == 2
    assert [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")] == ["checkpoint-2"]
    best, *_, last = logged(trainer, "eval_loss")
    assert best > last
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-3)
    assert all(parameter.dtype is torch.float32 for parameter in trainer.model.parameters())
    saved = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert same(weights(trainer.model), weights(saved))


@pytest.mark.parametrize(("precision", "greater_is_better"), [("fp16", False), ("fp16-lean", True)])
def test_the_best_checkpoint_stays_where_evaluations_are_rarer_than_saves(
    tmp_path: Path, precision: str, greater_is_better: bool
) -> None:
    """It was saved before it was known to be the best: the Trainer finds it next to the one that it saves later."""
    settings = {"eval_strategy": "epoch", "save_steps": 1, "save_total_limit": 2, "max_steps": 12}
    settings |= {"metric_for_best_model": "loss", "greater_is_better": greater_is_better}
    ends = {}
    for contender in ("stock", "subclass") if precision == "fp16-lean" else ("stock", *OURS):
        trainer = make(contender, tmp_path, precision, **settings, eval_dataset=token_rows(8))
        trainer.train_dataset = token_rows(16)  # an epoch has four steps
        trainer.args.load_best_model_at_end = True  # refused when arguments are made: the best may not be saved
        trainer.train()
        best = trainer.state.best_model_checkpoint
        kept = sorted(path.name for path in Path(trainer.args.output_dir).iterdir())
        in_state = json.loads((checkpoint(trainer, 12) / "trainer_state.json").read_text())["best_model_checkpoint"]
        assert best == in_state
        place = 0 if greater_is_better else 1  # the last is the lowest, and was saved before it was evaluated
        assert trainer.evaluate()["eval_loss"] == pytest.approx(logged(trainer, "eval_loss")[place], rel=1e-3)
        ends[contender] = Path(best).name, trainer.state.best_global_step, kept
    expected = ("checkpoint-4", 4) if greater_is_better else ("checkpoint-8", 12)
    assert ends["stock"][:2] == expected and set(map(str, ends.values())) == {str(ends["stock"])}


@pytest.mark.parametrize(("before", "after"), [OURS, OURS[::-1]], ids=["callback last", "subclass last"])
def test_subclass_and_callback_resume_from_each_other(tmp_path: Path, before: str, after: str) -> None:
    trainer = poisoned(Trainer, (1,))
    straight = make(after, tmp_path / "straight", base=trainer)
    straight.train()
    begun = make(before, tmp_path / "begun", base=trainer)
    begun.train()
    source = str(checkpoint(begun, 4))
    # A callback learns of a checkpoint through the arguments alone, and reads the subclass's file there.
    resumed = make(after, tmp_path / "resumed", base=trainer, resume_from_checkpoint=source)
    resumed.train(resume_from_checkpoint=source)
    assert same(weights(straight.model), weights(resumed.model))
    assert scaler_state(straight) == scaler_state(resumed)


ANEW = "; the loss scale starts anew: loss_scale was {} in the saved run, and is {} here$"
CHANGES = {
    ("subclass fp16", "subclass bf16"): ANEW.format("headroom", "none"),
    ("subclass fp16", "subclass fp16-lean"): "$",
    ("subclass bf16-lean", "callback fp16"): ANEW.format("none", "headroom"),
    ("subclass fp16", "subclass fp32"): ANEW.format("headroom", "none"),
    ("callback bf16", "callback fp32"): "$",
    ("subclass fp16", "callback fp16"): None,
}


@pytest.mark.parametrize(("saved", "resumed"), CHANGES)
def test_one_line_says_what_another_precision_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, resumed: str
) -> None:
    (before, was), (after, now) = saved.split(), resumed.split()
    begun = make(before, tmp_path / "a", was, max_steps=2)
    begun.train()
    messages: list[str] = []
    monkeypatch.setattr(hf_mp.trainer.session.logger, "warning", messages.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        make(after, tmp_path / "b", now, max_steps=3).train(resume_from_checkpoint=str(checkpoint(begun, 2)))
    messages += [str(each.message) for each in warned if issubclass(each.category, UserWarning)]
    told = [message for message in messages if "precision" in message or "loss scale" in message]
    if (change := CHANGES[saved, resumed]) is None:
        assert told == []
        return
    (message,) = told
    taken_over = "the FP32 weights and the optimizer's state go on as they were saved"
    assert re.search(f"saved in precision {was}, resumed in {now}: {taken_over}{change}", message)


LAYOUTS = [("fp16-lean", "subclass"), ("subclass", "fp16-lean"), ("callback", "stock"), ("bf16-lean", "stock")]


@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS)
def test_a_run_goes_on_in_another_layout_and_in_the_stock_trainer(tmp_path: Path, saved: str, loaded: str) -> None:
    first, second = make(saved, tmp_path / "a"), make(loaded, tmp_path / "b")
    first.train()
    second.train(resume_from_checkpoint=str(checkpoint(first, 4)))
    assert logged(second, "loss") == pytest.approx(logged(first, "loss"), rel=1e-2 if "bf16" in saved else 1e-3)
    assert logged(second, "loss")[:4] == logged(first, "loss")[:4]
    assert all(parameter.dtype is torch.float32 for parameter in second.model.parameters())


@pytest.mark.parametrize("contender", ["subclass", "fp16-lean"])
def test_a_checkpoint_of_a_run_with_torchs_scaler_is_taken_over(tmp_path: Path, contender: str) -> None:
    plain = make("stock", tmp_path / "plain", max_steps=2)
    plain.train()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=3)
    torch.save(scaler.state_dict(), checkpoint(plain, 2) / "scaler.pt")  # what fp16=True adds on a GPU
    settings = {"cls": MixedPrecisionArguments, "loss_scale": "dynamic", "max_steps": 3, "learning_rate": 0.0}
    ours = make(contender, tmp_path, **settings)
    ours.train(resume_from_checkpoint=str(checkpoint(plain, 2)))
    assert {**ours.mixed_precision.scaler.state_dict(), "scale": 2.0**9, "growth_interval": 3} == (
        ours.mixed_precision.scaler.state_dict()
    )
    assert ours.mixed_precision.stats.loss_scale_first == 2.0**9 and ours.state.global_step == 3
    state = ours.optimizer.state_dict()["state"][0]
    assert state["step"] == 3 and state["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("contender", ["callback", "bf16-lean"])
def test_saved_models_are_ordinary_fp32_models(tmp_path: Path, contender: str) -> None:
    trainer = make(contender, tmp_path, max_steps=3, save_strategy="no")
    trainer.train()
    trainer.save_model()
    expected = weights(trainer.model)
    assert not any(torch.equal(value, value.half().float()) for value in expected if value.dim() > 1)
    trainer.model.save_pretrained(tmp_path / "by hand")
    for path in (Path(trainer.args.output_dir), tmp_path / "by hand"):
        assert json.loads((path / "config.json").read_text())["dtype"] == "float32"
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert loaded.dtype is torch.float32 and same(weights(loaded), expected)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    fresh = tiny_gpt2()
    fresh.load_state_dict(trainer.model.state_dict())
    assert same(weights(fresh), expected)


@pytest.mark.parametrize("contender", ["subclass", "fp16-lean"])
def test_a_model_stored_in_fp16_trains(tmp_path: Path, contender: str) -> None:
    tiny_gpt2(torch.float16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype is torch.float16
    trainer = make(contender, tmp_path, model=model, save_strategy="no", max_steps=10, eval_dataset=token_rows(8))
    trainer.train()
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0] - 0.1
    moments = trainer.optimizer.state_dict()["state"][0]
    assert moments["exp_avg"].dtype is moments["exp_avg_sq"].dtype is torch.float32


@pytest.mark.parametrize("contender", ["callback", "fp16-lean"])
def test_a_skipped_step_is_invisible_to_weights_and_lr_scheduler(tmp_path: Path, contender: str) -> None:
    seen: list[tuple[list[Tensor], float]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tensors = [copy.deepcopy(value) for value in kwargs["model"].state_dict().values()]
            for moments in kwargs["optimizer"].state_dict()["state"].values():
                tensors += [copy.deepcopy(value) for value in moments.values()]
            seen.append((tensors, kwargs["lr_scheduler"].get_last_lr()[0]))

    trainer = make(contender, tmp_path, base=poisoned(Trainer, (3,)), save_strategy="no", callbacks=[Watch()])
    trainer.train()
    assert same(seen[2][0], seen[3][0]) and seen[2][1] == seen[3][1]
    assert not same(seen[3][0], seen[4][0]) and seen[3][1] > seen[4][1]
    assert logged(trainer, "skipped_steps")[3:5] == [1, 1]


def test_resuming_the_last_checkpoint_of_the_subclass(tmp_path: Path) -> None:
    begun = make("subclass", tmp_path / "run", base=poisoned(Trainer, (1,)), max_steps=4)
    begun.train()
    resumed = make("callback", tmp_path / "run", output_dir=begun.args.output_dir)
    resumed.train(resume_from_checkpoint=True)
    assert scaler_state(resumed)["loss_scaler"]["skipped_steps"] == 1
    assert resumed.state.global_step == 6


@pytest.mark.parametrize("contender", OURS)
def test_a_checkpoint_of_the_stock_trainer_resumes_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contender: str
) -> None:
    stock = make("stock", tmp_path, max_steps=2)
    stock.train()
    unscaled = make(contender, tmp_path / "fp32", "fp32")
    unscaled.train(resume_from_checkpoint=str(checkpoint(stock, 2)))
    messages: list[str] = []
    monkeypatch.setattr(hf_mp.trainer.session.logger, "warning", messages.append)
    resumed = make(contender, tmp_path)
    resumed.train(resume_from_checkpoint=str(checkpoint(stock, 2)))
    assert any("has no mixed_precision.json: the loss scale starts anew" in message for message in messages)
    again = make(contender, tmp_path / "again")
    again.train(resume_from_checkpoint=str(checkpoint(resumed, 4)))
    assert same(weights(resumed.model), weights(again.model))


@pytest.mark.parametrize("contender", OURS)
def test_a_broken_state_is_named(tmp_path: Path, contender: str) -> None:
    begun = make(contender, tmp_path / "a", max_steps=2)
    begun.train()
    path = checkpoint(begun, 2) / STATE_NAME
    path.write_text(path.read_text().replace('"level"', '"x"'))
    (path.parent / MANIFEST_NAME).unlink()
    with pytest.raises(ValueError, match=r"the loss scale of .*mixed_precision.json does not fit this run: this state"):
        make(contender, tmp_path / "b").train(resume_from_checkpoint=str(path.parent))


def test_only_the_model_is_saved(tmp_path: Path) -> None:
    trainer = make("callback", tmp_path, max_steps=2, save_only_model=True)
    trainer.train()
    assert not (checkpoint(trainer, 2) / STATE_NAME).exists()


# Several runs of one Trainer


def make_with_model_init(contender: str, directory: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    args = arguments(directory / contender, **{**SAVING, "save_strategy": "no", **settings})
    named = {"model_init": lambda: tiny_gpt2(dtype, resid_pdrop=0.1), "train_dataset": token_rows()}
    return make_trainer(contender, "fp16", None, args, **named)


@pytest.mark.parametrize("contender", ["stock", *OURS])
def test_the_runs_of_a_search_do_not_know_of_each_other(tmp_path: Path, contender: str) -> None:
    """As ``hyperparameter_search`` does it: ``train()`` again and again, with other arguments."""
    trainer = make_with_model_init(contender, tmp_path)
    ends = {}
    for learning_rate in (1e-2, 5e-2):
        trainer.args.learning_rate = learning_rate
        trainer.train()
        ends[learning_rate] = weights(trainer.model)
        fresh = make_with_model_init(contender, tmp_path / str(learning_rate), learning_rate=learning_rate)
        fresh.train()
        assert same(ends[learning_rate], weights(fresh.model))
        if contender == "callback":
            assert scaler_state(trainer) == scaler_state(fresh)
    assert not same(ends[1e-2], ends[5e-2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_model_init_gives_subclass_and_callback_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    ends = []
    for contender in OURS:
        trainer = make_with_model_init(contender, tmp_path, dtype)
        trainer.train()
        ends.append(weights(trainer.model))
        assert all(parameter.dtype is torch.float32 for parameter in trainer.model.parameters())
    assert same(*ends)


def test_resuming_into_an_fp16_model_of_model_init_is_refused(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "max_steps": 2}
    begun = make_with_model_init("callback", tmp_path / "a", torch.float16, **settings)
    begun.train()
    again = make_with_model_init("callback", tmp_path / "b", torch.float16)
    with pytest.raises(ValueError, match=r"torch.float16 after.*rounded its FP32 weights.*dtype=torch.float32"):
        again.train(resume_from_checkpoint=str(checkpoint(begun, 2)))
    fine = make_with_model_init("callback", tmp_path / "c")
    fine.train(resume_from_checkpoint=str(checkpoint(begun, 2)))


def test_the_subclass_resumes_into_an_fp16_model_of_model_init(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps"}
    straight = make_with_model_init("subclass", tmp_path / "a", torch.float16, **settings)
    straight.train()
    resumed = make_with_model_init("subclass", tmp_path / "b", torch.float16, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint(straight, 4)))
    assert same(weights(straight.model), weights(resumed.model))


class Pushing(Trainer):
    """Pushes checkpoints to a folder in the place of the hub."""

    def init_hf_repo(self, token: str | None = None) -> None:
        self.pushed: list[set[str]] = []

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.pushed.append({path.name for path in Path(checkpoint_folder).iterdir()})

    def _finish_current_push(self) -> None:
        pass


def test_what_is_pushed_to_the_hub_resumes(tmp_path: Path) -> None:
    trainer = make("callback", tmp_path, base=Pushing, max_steps=4, push_to_hub=True, hub_strategy="checkpoint")
    trainer.train()
    assert len(trainer.pushed) == 2 and all(files >= {"model.safetensors", STATE_NAME} for files in trainer.pushed)


class OutOfMemoryOnce(Trainer):
    """Fails in its third step, as a batch does that is too large."""

    failed = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("kind", ["a second train()", "auto_find_batch_size"])
def test_training_that_begins_again_goes_on_with_the_same_scale(tmp_path: Path, kind: str) -> None:
    ends = []
    for contender in OURS:
        if kind == "auto_find_batch_size":
            settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 8}
            trainer = make(contender, tmp_path, base=OutOfMemoryOnce, save_strategy="no", **settings)
            steps = 8  # two with the batch that is too large
        else:
            trainer, steps = make(contender, tmp_path, save_strategy="no"), 12
            trainer.train()
            trainer.args.learning_rate = 1e-3
        trainer.train()
        assert trainer._train_batch_size < 8 and trainer.state.global_step == 6
        ends.append((weights(trainer.model), history(trainer)))
        assert scaler_state(trainer)["loss_scaler"]["steps"] == steps
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]

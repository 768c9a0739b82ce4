"""The callback: when it attaches and lets go, what it logs, what it refuses. Features are in tests/conformance/."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from trainer_runs import (
    OURS,
    arguments,
    logged,
    make_trainer,
    same,
    tiny_gpt2,
    token_rows,
    weights,
)
from transformers import Trainer, TrainerCallback

import hf_mp.trainer.callback
from hf_mp import (
    CheckpointError,
    MixedPrecisionArguments,
    MixedPrecisionCallback,
    MixedPrecisionTrainer,
    PrecisionPolicy,
    prepare,
)
from hf_mp.step.forward import AttachedForward
from hf_mp.trainer.find_trainer import extend_method


def trainer_with(
    callback: MixedPrecisionCallback, path: Path, model: nn.Module | None = None, *others: Any, **settings: Any
) -> Trainer:
    model = tiny_gpt2() if model is None else model
    return Trainer(model, arguments(path, **settings), train_dataset=token_rows(), callbacks=[*others, callback])


def is_plain(model: nn.Module) -> bool:
    """Whether nothing of ours is on the model, and all of it is FP32."""
    ours = any("forward" in module.__dict__ for module in model.modules())
    return not ours and {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, torch.float32)}


class Watch(TrainerCallback):
    """Notes the logs that it is given, and how often it was begun."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.begun = 0

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        self.begun += 1

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


# Attaching and letting go


def test_the_model_is_plain_after_training_or_stays_attached(tmp_path: Path) -> None:
    for keep in (False, True):
        callback = MixedPrecisionCallback("fp16", keep_attached=keep)
        trainer = trainer_with(callback, tmp_path)
        trainer.train()
        assert is_plain(trainer.model) is not keep
        assert "step" not in trainer.optimizer.optimizer.__dict__ or keep
        assert callback.mixed_precision is not None and callback.mixed_precision.stats.steps == 4
        callback.detach()
        assert is_plain(trainer.model)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint with a flipped bit, next to a whole one."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer_with(MixedPrecisionCallback("fp16"), tmp_path, **settings).train()
    weights_file = tmp_path / "checkpoint-2" / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-3] ^= 1
    weights_file.write_bytes(content)
    return tmp_path / "checkpoint-2"


DAMAGED = r"checkpoint-2: model\.safetensors is not .*\n.*newest whole checkpoint in .* is checkpoint-4"


def test_a_damaged_checkpoint_is_not_trained_on(damaged: Path) -> None:
    trainer = trainer_with(MixedPrecisionCallback("fp16"), damaged.parent)
    before = weights(trainer.model)
    with pytest.raises(CheckpointError, match=DAMAGED):
        trainer.train(resume_from_checkpoint=str(damaged))
    assert same(before, weights(trainer.model))
    trainer.train(resume_from_checkpoint=str(damaged.with_name("checkpoint-4")))


def test_a_damaged_checkpoint_that_the_trainer_found_itself_or_before_is_not_trained_on(damaged: Path) -> None:
    class Own(Trainer):
        def train(self) -> Any:  # type: ignore[override]
            return super().train(resume_from_checkpoint=str(damaged))

    callback = MixedPrecisionCallback("fp16")
    with pytest.raises(CheckpointError, match=DAMAGED):
        Own(tiny_gpt2(), arguments(damaged.parent), train_dataset=token_rows(), callbacks=[callback]).train()
    trainer = Trainer(tiny_gpt2(), arguments(damaged.parent), train_dataset=token_rows())
    trainer.add_callback(MixedPrecisionCallback("fp16"))
    with pytest.raises(CheckpointError, match=DAMAGED):
        trainer.train(resume_from_checkpoint=str(damaged))


def lower_precision_products(trainer: Trainer, call: str) -> bool:
    """Whether a product inside the model runs in FP16 while ``trainer`` evaluates, predicts or generates."""
    dtypes = set()
    head = trainer.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda *arguments: dtypes.add(arguments[-1].dtype))
    rows = token_rows(4)
    if call == "generate":
        trainer.model.generate(rows[0]["input_ids"][None], max_new_tokens=2, do_sample=False, pad_token_id=0)
    else:
        getattr(trainer, call)(rows)
    handle.remove()
    (dtype,) = dtypes
    return dtype is torch.float16


def test_evaluation_uses_autocast_while_attached(tmp_path: Path) -> None:
    callback = MixedPrecisionCallback("fp16", keep_attached=True)
    trainer = trainer_with(callback, tmp_path)
    calls = ("evaluate", "predict", "generate")
    assert all([lower_precision_products(trainer, call) for call in calls])  # before training, too
    trainer.train()
    assert all([lower_precision_products(trainer, call) for call in calls])
    callback.detach()
    assert not any([lower_precision_products(trainer, call) for call in calls])
    callback.keep_attached = False
    trainer.train()
    assert not any([lower_precision_products(trainer, call) for call in calls])


def test_a_forward_that_a_library_puts_over_ours(tmp_path: Path) -> None:
    """TRL keeps the forward that it finds, ours, and calls it from its own."""
    callback = MixedPrecisionCallback("fp16")
    trainer = trainer_with(callback, tmp_path)
    found = trainer.model.forward
    assert isinstance(found, AttachedForward)

    def over(self: nn.Module, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return found(input_ids=input_ids, labels=labels, **kwargs)

    trainer.model.forward = over.__get__(trainer.model)
    trainer.train()
    reference = trainer_with(MixedPrecisionCallback("fp16"), tmp_path)
    reference.train()
    assert same(weights(trainer.model), weights(reference.model))
    assert not lower_precision_products(trainer, "evaluate")  # let go, though the library still calls it
    assert trainer.model.forward.__func__ is over


# Logs


def test_the_entries_are_in_the_history_and_reach_callbacks_on_both_sides(tmp_path: Path) -> None:
    before, after = Watch(), Watch()
    callback = MixedPrecisionCallback("fp16")
    callbacks = [before, callback, after]
    trainer = Trainer(tiny_gpt2(), arguments(tmp_path), train_dataset=token_rows(), callbacks=callbacks)
    # It moves to the front while each of them is begun.
    assert trainer.callback_handler.callbacks[0] is callback and before.begun == after.begun == 1
    trainer.train()
    trainer.evaluate(token_rows(4))
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(training) == 4 and all(set(entry) >= OURS for entry in training)
    assert [{key: entry[key] for key in OURS} for entry in training] == [
        {key: log[key] for key in OURS} for log in before.logs[:4]
    ]
    assert before.logs == after.logs
    assert not any(OURS & set(entry) for entry in trainer.state.log_history if "loss" not in entry)


def test_a_loss_of_zero_in_the_log_is_explained_on_the_page_about_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_gpt2()
    model.lm_head.weight.data.mul_(1e6)
    trainer_with(MixedPrecisionCallback("fp16"), tmp_path, model=model, max_steps=2).train()
    logged_line = "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '"
    said = "".join(capsys.readouterr())
    assert logged_line in said and "'skipped_steps': 2" in said
    page = Path(hf_mp.__file__).parent.parent / "docs" / "overflow.md"
    assert logged_line in page.read_text()


def test_the_scale_is_readable_where_the_trainer_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = MixedPrecisionCallback("params=fp32,compute=fp16,loss_scale=16384")
    trainer = trainer_with(callback, tmp_path, max_steps=1)
    trainer.train()
    assert "'loss_scale': 16384," in "".join(capsys.readouterr())
    assert logged(trainer, "loss_scale") == [16384]


# Settings


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_settings_of_the_scaler_the_tables_and_the_rules(tmp_path: Path, contender: str) -> None:
    precision, scaling = "params=fp32,compute=fp16,loss_scale=dynamic", {"init_scale": 64.0, "growth_interval": 2}
    settings: dict[str, Any] = {"tables": "cpu", "rules": {"lm_head": "fp32"}}
    if contender == "callback":
        ours: Any = MixedPrecisionCallback(precision, loss_scaler_settings=scaling, **settings)
        trainer = trainer_with(ours, tmp_path)
    else:
        args = arguments(tmp_path, MixedPrecisionArguments, precision=precision, loss_scaler_settings=scaling)
        trainer = ours = MixedPrecisionTrainer(tiny_gpt2(), args, train_dataset=token_rows(), **settings)
    assert not lower_precision_products(trainer, "evaluate")
    trainer.train()
    assert logged(trainer, "loss_scale") == [64.0, 128.0, 128.0, 256.0]
    assert ours.mixed_precision.autocast.tables == "cpu"


def test_what_the_arguments_of_the_trainer_say_is_used(tmp_path: Path) -> None:
    args = arguments(tmp_path, MixedPrecisionArguments, precision="bf16", loss_scale="512")
    for precision, expected in (([], torch.bfloat16), (["fp16"], torch.float16)):
        callback = MixedPrecisionCallback(*precision)
        Trainer(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[callback])
        assert callback.mixed_precision is not None
        assert callback.mixed_precision.policy == PrecisionPolicy(compute=expected, loss_scale=512.0)
    args = arguments(tmp_path, MixedPrecisionArguments, loss_scaler_settings={"init_scale": 32.0})
    callback = MixedPrecisionCallback()
    Trainer(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[callback])
    assert callback.mixed_precision is not None and callback.mixed_precision.scaler.get_scale() == 32.0


def test_the_settings_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trainer_and_loops.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^```python\n(?:from [^\n]*\n+)*(MixedPrecisionCallback.*?)```", page, re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 2
    for block in blocks:
        assert isinstance(eval(block), MixedPrecisionCallback)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, r"precision='fp8' is not known"),
        ({"precision": "fp16-lean"}, r"'fp16-lean' keeps the FP32 masters.*the Trainer owns it.*'fp16'"),
        ({"precision": "bf16-lean"}, r"MixedPrecisionCallback\('bf16'\), or MixedPrecisionTrainer with .*'bf16-lean'"),
    ],
    ids=["unknown", "fp16-lean", "bf16-lean"],
)  # fmt: skip
def test_what_is_refused_when_the_callback_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecisionCallback(**settings)


@pytest.mark.parametrize("kind", [MixedPrecisionCallback, MixedPrecisionTrainer])
def test_no_precision_is_refused_with_those_that_there_are(kind: Any) -> None:
    with pytest.raises(TypeError, match="not NoneType: use one of fp32, fp16"):
        kind(precision=None)


def test_options_that_it_has_not() -> None:
    with pytest.raises(
        TypeError, match=r"handle_preemption is no option .*has check_gradients.*MixedPrecisionTrainer has more"
    ):
        MixedPrecisionCallback("fp16", handle_preemption=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16": True}, r"bf16=True switches accelerate's mixed precision on.*pass bf16=False"),
        ({"fp16_full_eval": True}, r"fp16_full_eval=True casts the FP32 masters away"),
        ({"optim": "lomo"}, r"optim='lomo' updates inside backward"),
    ],
    ids=["bf16", "full eval", "lomo"],
)
def test_what_is_refused_when_the_trainer_is_made(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    model = tiny_gpt2()
    with pytest.raises(ValueError, match=message):
        trainer_with(MixedPrecisionCallback("fp16"), tmp_path, model, **settings)
    assert is_plain(model)


def test_settings_of_a_scaler_that_the_precision_has_not(tmp_path: Path) -> None:
    message = r"loss_scaler_settings \(init_scale\) have no effect: precision='bf16' has no loss scale"
    model, callback = tiny_gpt2(), MixedPrecisionCallback("bf16", loss_scaler_settings={"init_scale": 4})
    with pytest.raises(ValueError, match=message):
        trainer_with(callback, tmp_path, model)
    assert is_plain(model)


@pytest.mark.parametrize(
    ("base", "first", "added", "message"),
    [
        (Trainer, [MixedPrecisionCallback("fp32")], MixedPrecisionCallback("fp32"), "more than one .*: leave one"),
        (Trainer, [MixedPrecisionCallback("fp16")], MixedPrecisionCallback("fp16"), "more than one .*: leave one"),
        (MixedPrecisionTrainer, [], MixedPrecisionCallback, "is in mixed precision already, remove the callback"),
        (MixedPrecisionTrainer, [], MixedPrecisionCallback("fp16"), "mixed precision already, remove the callback"),
    ],
    ids=["two of fp32", "two of fp16", "our own, class", "our own, instance"],
)
def test_a_second_adapter_is_refused(tmp_path: Path, base: Any, first: list[Any], added: Any, message: str) -> None:
    args = arguments(tmp_path / "run", MixedPrecisionArguments)
    with pytest.raises(ValueError, match=message):
        base(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=[*first, added])
    trainer = base(tiny_gpt2(), args, train_dataset=token_rows(), callbacks=copy.deepcopy(first))
    trainer.add_callback(added)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_model_that_is_attached_by_hand_is_refused(tmp_path: Path) -> None:
    model = tiny_gpt2()
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"attached to a MixedPrecision already"):
        trainer_with(MixedPrecisionCallback("fp16"), tmp_path, model)
    hf_mp.detach(model)
    trainer = trainer_with(MixedPrecisionCallback("fp16"), tmp_path, model)
    copied = copy.deepcopy(model)  # of one that a Trainer attached
    with pytest.raises(ValueError, match=r"call hf_mp\.detach\(model\) first"):
        trainer_with(MixedPrecisionCallback("fp16"), tmp_path, copied)
    trainer_with(MixedPrecisionCallback("fp16"), tmp_path, hf_mp.detach(copied)).train()
    trainer.train()
    assert all(map(torch.equal, model.parameters(), copied.parameters()))


def test_a_trainer_that_hands_no_optimizer_to_its_callbacks(tmp_path: Path) -> None:
    trainer = Trainer(tiny_gpt2(), arguments(tmp_path), train_dataset=token_rows())
    for precision in ("fp32", "fp16"):
        callback = MixedPrecisionCallback(precision)
        if precision == "fp32":
            callback.on_train_begin(trainer.args, trainer.state, trainer.control)
            continue
        with pytest.raises(ValueError, match=r"does not hand its model and its optimizer.*use hf_mp.prepare"):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def prepared_by_accelerate() -> nn.Module:
    return Accelerator(cpu=True, mixed_precision="bf16").prepare(tiny_gpt2())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(nn.Linear(2, 2)), "OptimizedModule hides the forward .*torch_compile=True"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "hides the forward of the model inside it"),
        (prepared_by_accelerate, r"as a Trainer with fp16=True does.*keep_fp32_wrapper=False\)"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "use DistributedDataParallel"),
        (nn.ReLU, "has no floating parameters"),
    ],
    ids=["compiled", "traced", "prepared", "DataParallel", "no parameters"],
)  # fmt: skip
def test_models_that_hide_their_forward(tmp_path: Path, make: Any, message: str) -> None:
    try:
        model = make()
        callback = MixedPrecisionCallback("fp16")
        args = arguments(tmp_path)
        with pytest.raises(ValueError, match=message):
            callback.on_init_end(args, None, None, model=model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_the_way_out_for_a_model_that_accelerate_prepared(tmp_path: Path) -> None:
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.unwrap_model(accelerator.prepare(tiny_gpt2()), keep_fp32_wrapper=False)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    trainer = trainer_with(MixedPrecisionCallback("fp16"), tmp_path, model)
    trainer.train()
    reference = trainer_with(MixedPrecisionCallback("fp16"), tmp_path)
    reference.train()
    assert same(weights(trainer.model), weights(reference.model))


def test_a_frozen_model_can_be_evaluated(tmp_path: Path) -> None:
    trainer = trainer_with(MixedPrecisionCallback("fp16"), tmp_path, tiny_gpt2(torch.float16).requires_grad_(False))
    assert trainer.evaluate(token_rows(4))["eval_loss"] > 0


class TimesTenMillion(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 1e7


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_loss_that_needs_a_scale_below_1_trains(contender: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=30, logging_steps=1)
    trainer = make_trainer(contender, "fp16", tiny_gpt2(), args, TimesTenMillion, train_dataset=token_rows())
    before = weights(trainer.model)
    trainer.train()
    skipped = logged(trainer, "skipped_steps")
    assert logged(trainer, "loss_scale")[-1] < 1 and skipped[-1] == skipped[9] < 5
    assert not any(map(torch.equal, before, weights(trainer.model)))


def test_two_functions_extend_one_method_and_each_once() -> None:
    class Plain:
        def load(self) -> list[str]:
            return ["own"]

    def first(own: Any) -> list[str]:
        return ["first", *own()]

    def second(before: str, own: Any) -> list[str]:
        return [before, *own()]

    plain: Any = Plain()
    for _ in range(2):  # as at each train()
        extend_method(plain, "load", first)
        extend_method(plain, "load", functools.partial(second, "second"))
    assert plain.load() == ["second", "first", "own"] and Plain().load() == ["own"]

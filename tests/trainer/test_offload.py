"""``offload`` through the Trainer: the same training, the same checkpoints, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import arguments, history, make_trainer, same, tiny_gpt2, token_rows, weights
from transformers import HfArgumentParser, TrainerCallback

import hf_mp
from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer
from hf_mp.weights import master_weight_optimizer
from hf_mp.weights.offload import transfers
from hf_mp.weights.offload.optimizer import OffloadedOptimizer
from hf_mp.weights.split_parameter import gradient_and_factor

pytestmark = pytest.mark.usefixtures("without_first_check")

OFFLOADS = ("optimizer", "all")
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
TRAINING = {"optim": "adamw_torch_fused", "learning_rate": 1e-2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "WINDOW_BYTES", 2**14)
    monkeypatch.setattr(master_weight_optimizer, "_BUCKET_ELEMENTS", 2000)


def make(folder: Path, precision: str, offload: str | None, callbacks: Any = (), **settings: Any) -> Any:
    args = arguments(folder, MixedPrecisionArguments, **{**TRAINING, **SAVING, **settings}, offload=offload,
        precision=precision)  # fmt: skip
    named = {"train_dataset": token_rows(), "eval_dataset": token_rows(4), "callbacks": list(callbacks)}
    return make_trainer("subclass", precision, tiny_gpt2(resid_pdrop=0.1), args, **named)


@functools.cache
def trained(precision: str, offload: str | None, folder: Path, **settings: Any) -> Any:
    trainer = make(folder / f"{precision} {offload} {settings}", precision, offload, **settings)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def state_of(trainer: Any) -> list[torch.Tensor]:
    states = trainer.optimizer.state_dict()["state"]
    return [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_a_run_is_that_of_the_preset_without_offload(precision: str, offload: str, folder: Path) -> None:
    plain, run = trained(precision, None, folder), trained(precision, offload, folder)
    assert same(weights(run.model), weights(plain.model)) and history(run) == history(plain)
    assert same(state_of(run), state_of(plain)) and not same(weights(run.model), weights(tiny_gpt2()))
    assert isinstance(run.optimizer.optimizer, OffloadedOptimizer)
    assert all(type(p) is torch.nn.Parameter for p in run.model.parameters())


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
@pytest.mark.parametrize(
    ("first", "second"), [("all", "all"), ("optimizer", None), (None, "all"), ("all", "optimizer")]
)
def test_a_run_resumes_bit_for_bit_with_and_without_offload(
    precision: str, first: str | None, second: str | None, folder: Path, tmp_path: Path
) -> None:
    begun, straight = trained(precision, first, folder), trained(precision, None, folder)
    resumed = make(tmp_path, precision, second)
    resumed.train(resume_from_checkpoint=str(Path(begun.args.output_dir, "checkpoint-2")))
    assert same(weights(resumed.model), weights(straight.model)) and same(state_of(resumed), state_of(straight))
    assert resumed.mixed_precision.scaler.state == straight.mixed_precision.scaler.state
    if precision == "bf16-lean":
        loaded = tiny_gpt2().from_pretrained(Path(begun.args.output_dir, "checkpoint-6"))
        assert loaded.dtype is torch.float32 and same(weights(loaded), weights(straight.model))


def test_resuming_leaves_the_model_attached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP32 it need not fit the device."""
    begun, resumed = trained("bf16-lean", "all", folder), make(tmp_path, "bf16-lean", "all")
    calls: list[int] = []
    detach = resumed.session.detach
    monkeypatch.setattr(resumed.session, "detach", lambda: calls.append(resumed.state.global_step) or detach())
    resumed.train(resume_from_checkpoint=str(Path(begun.args.output_dir, "checkpoint-4")))
    assert calls == [6]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True}
    runs = []
    for offload in (None, "all"):
        runs.append(make(tmp_path / str(offload), "bf16-lean", offload, **best))
        runs[-1].train()
        assert runs[-1].evaluate()["eval_loss"] > 0
    assert same(*[weights(trainer.model) for trainer in runs]) and history(runs[0]) == history(runs[1])
    last = Path(runs[1].args.output_dir, "checkpoint-6")
    assert runs[1].state.best_model_checkpoint != str(last)
    assert not same(weights(runs[1].model), weights(tiny_gpt2().from_pretrained(last)))
    assert runs[1].session.contract == runs[0].session.contract


def test_moments_of_8_bits_and_settings_of_single_weights(tmp_path: Path) -> None:
    """The Trainer has embeddings keep FP32 moments."""
    pytest.importorskip("bitsandbytes")
    ends = []
    for offload in (None, "all"):
        args = {"optim": "adamw_bnb_8bit", "learning_rate": 1e-3, "save_strategy": "no", "max_steps": 3}
        trainer = make(tmp_path / str(offload), "bf16-lean", offload, **args)
        trainer.model = trainer.model_wrapped = tiny_gpt2(n_embd=64)
        trainer.train()
        ends.append((weights(trainer.model), state_of(trainer)))
    assert same(ends[0][0], ends[1][0])
    for one, other in zip(ends[0][1], ends[1][1], strict=True):
        tensors = [value if isinstance(value, dict) else {"": value} for value in (one, other)]
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(tensors[1][k])) for k, v in tensors[0].items())
    states = trainer.optimizer.optimizer.optimizer.state
    assert states[trainer.model.transformer.h[0].mlp.c_fc.weight]["state1"].dtype is torch.uint8
    assert states[trainer.model.transformer.wte.weight]["state1"].dtype is torch.float32


def test_an_adapter_resumes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ends = []
    for offload in (None, "all"):
        runs = [make(tmp_path / f"{offload} {number}", "bf16-lean", offload) for number in range(2)]
        for trainer in runs:
            torch.manual_seed(1)
            config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
            trainer.model = trainer.model_wrapped = peft.get_peft_model(tiny_gpt2(), config)
        runs[0].train()
        runs[1].train(resume_from_checkpoint=str(tmp_path / f"{offload} 0" / "checkpoint-2"))
        ends += [weights(trainer.model) for trainer in runs]
    assert same(ends[0], ends[1]) and same(ends[0], ends[2]) and same(ends[0], ends[3])


def test_a_second_training_uses_the_optimizer_again(tmp_path: Path) -> None:
    ends = []
    for offload in (None, "all"):
        trainer = make(tmp_path / str(offload), "bf16-lean", offload, save_strategy="no", max_steps=2)
        trainer.train()
        trainer.train()
        ends.append(weights(trainer.model))
    assert same(*ends)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_healing_and_histograms(tmp_path: Path, offload: str) -> None:
    """What reads gradients, takes a step again and puts weights back."""

    class Overflow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.lm_head.weight.data.mul_(3000.0 if state.global_step == 1 else 1.0)

    ends = []
    for where in (None, offload):
        settings = {"on_overflow": "heal", "histogram_steps": 1, "save_strategy": "no", "max_steps": 3}
        trainer = make(tmp_path / str(where), "fp16-lean", where, [Overflow()], **settings)
        trainer.train()
        ends.append(trainer)
    assert same(*[weights(trainer.model) for trainer in ends]) and history(ends[0]) == history(ends[1])
    log = [Path(trainer.args.output_dir, "precision_log.jsonl").read_text() for trainer in ends]
    assert log[0].count('"magnitudes"') == log[1].count('"magnitudes"') > 0


def test_gradients_that_are_compared_at_several_scales_come_back() -> None:
    model = tiny_gpt2()
    hf_mp.MixedPrecision("fp16-lean", offload="all").attach(model)
    ids = torch.stack([row["input_ids"] for row in token_rows(2)])
    batch = {"input_ids": ids, "labels": ids}
    model(**batch).loss.backward()
    found = []
    for is_checked in (False, True):
        if is_checked:
            assert all(parameter.place.held is not None for parameter in model.parameters())  # type: ignore[union-attr]
            hf_mp.check_gradients(model, batch)
        found.append([gradient_and_factor(parameter)[0] for parameter in model.parameters()])
    assert same(*found)  # type: ignore[arg-type]


# Options


def test_the_option_is_read_from_a_command_line_and_a_keyword(tmp_path: Path) -> None:
    line = ["--output_dir", str(tmp_path), "--precision", "bf16-lean", "--offload", "all", "--use_cpu"]
    (args,) = HfArgumentParser(MixedPrecisionArguments).parse_args_into_dataclasses(line)
    assert args.offload == "all"
    trainer = MixedPrecisionTrainer(model=tiny_gpt2(), args=args, train_dataset=token_rows())
    assert trainer.mixed_precision.offload == "all"
    trainer = MixedPrecisionTrainer(model=tiny_gpt2(), args=args, train_dataset=token_rows(), offload="optimizer")
    assert trainer.mixed_precision.offload == "optimizer"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload": "host"}, r"offload='host' is not known: use 'optimizer' or 'all'"),
        ({"offload": "all", "precision": "bf16"}, r"needs a lean layout.*use 'fp16-lean' or 'bf16-lean'"),
        ({"offload": "all", "free_gradients": "backward"}, r"free_gradients='backward' updates each parameter"),
    ],
)
def test_arguments_that_do_not_go_together(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, MixedPrecisionArguments, **{"precision": "bf16-lean", **settings})


def test_fsdp_and_the_callback_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path, MixedPrecisionArguments, precision="bf16-lean", offload="all")
    with pytest.raises(ValueError, match=r"keeps the FP32 masters in the optimizer"):
        MixedPrecisionTrainer.__mro__[3]  # the stock Trainer is below ours
        from transformers import Trainer

        Trainer(model=tiny_gpt2(), args=args, train_dataset=token_rows(), callbacks=[MixedPrecisionCallback()])
    with pytest.raises(
        TypeError, match=r"offload is no option of MixedPrecisionCallback.*MixedPrecisionTrainer has more"
    ):
        MixedPrecisionCallback("bf16", offload="all")
    monkeypatch.setattr("hf_mp.trainer.settings.fsdp_version", lambda args: 2)
    with pytest.raises(ValueError, match=r"offload='all' needs whole weights on each process.*use DDP"):
        MixedPrecisionTrainer(model=tiny_gpt2(), args=args, train_dataset=token_rows())


def test_an_optimizer_that_cannot_be_streamed_ends_the_training_before_it_begins(tmp_path: Path) -> None:
    class Unknown(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    trainer = make(tmp_path, "bf16-lean", "optimizer")
    trainer.optimizer_cls_and_kwargs = Unknown, {"lr": 0.1}
    with pytest.raises(ValueError, match=r"offload steps a few parameters at a time.*whether Unknown allows that"):
        trainer.train()
    assert all(type(p) is torch.nn.Parameter for p in trainer.model.parameters())

"""The Trainer subclass alone: refusals before anything is written, and what callbacks and libraries do to it.

What it does as the callback does is in test_callback.py, and each feature in tests/conformance/.
"""

from __future__ import annotations

import functools
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import Tensor, nn
from trainer_runs import make_trainer, quick_arguments, token_rows
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS
from transformers.training_args import OptimizerNames

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer, PrecisionPolicy
from hf_mp.step import gradients
from hf_mp.trainer.checks import fsdp_version
from hf_mp.trainer.find_trainer import check_regional_compile

Rows = list[dict[str, Tensor]]


@pytest.fixture
def rows() -> Rows:
    return token_rows(64)


def arguments(path: Path, cls: type[TrainingArguments] = MixedPrecisionArguments, **settings: Any) -> Any:
    return quick_arguments(path / "run", cls, **{"max_steps": 8, "learning_rate": 1e-3, **settings})


def model_of(config: GPT2Config) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])  # of 0 the Trainer logs the norm alone
def test_the_gradients_are_read_once_when_the_backward_has_ended(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, max_grad_norm: float
) -> None:
    args = arguments(tmp_path, precision="bf16", max_grad_norm=max_grad_norm)
    trainer = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows)
    with (
        patch.object(gradients, "largest_magnitude_and_norm", wraps=gradients.largest_magnitude_and_norm) as measure,
        patch.object(gradients, "largest_magnitude", wraps=gradients.largest_magnitude) as read_again,
    ):
        trainer.train()
    assert (measure.call_count, read_again.call_count) == (trainer.state.global_step, 0)


def test_without_a_version_fsdp_is_of_the_version_that_transformers_takes(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), fsdp="full_shard", use_cpu=True, report_to=[])
    assert fsdp_version(args) == args.fsdp_plugin_args["fsdp_version"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_a_callback_writes_after_clipping_is_seen(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str
) -> None:
    class Spoils(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.transformer.wte.weight.grad.data.fill_(torch.nan)

    args = arguments(tmp_path, precision=precision, max_steps=2)
    trainer = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows, callbacks=[Spoils()])
    trainer.train()
    assert trainer.mixed_precision.stats.skipped_steps == 2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_people_override_log_without_start_time(tmp_path: Path, gpt2_config: GPT2Config, rows: Rows) -> None:
    class Quiet(MixedPrecisionTrainer):
        def log(self, logs: dict[str, float]) -> None:  # type: ignore[override]
            super().log(logs)

    Quiet(model_of(gpt2_config), arguments(tmp_path), train_dataset=rows).log({"loss": 1.0})


# Arguments and refusals


def test_arguments_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    parser = HfArgumentParser(MixedPrecisionArguments)
    (args,) = parser.parse_args_into_dataclasses(
        [
            *("--output_dir", str(tmp_path), "--precision", "fp16", "--loss_scale", "dynamic"),
            *("--loss_scaler_settings", '{"init_scale": 1024, "growth_interval": 7}'),
        ]
    )
    assert args.precision_policy == PrecisionPolicy(loss_scale="dynamic")
    assert args.loss_scaler_settings == {"init_scale": 1024, "growth_interval": 7}
    path = tmp_path / "args.yaml"
    path.write_text(f"output_dir: {tmp_path}\nprecision: bf16\nmax_steps: 3\n")
    (args,) = parser.parse_yaml_file(str(path))
    assert str(args.precision_policy) == "bf16" and args.max_steps == 3
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": str(tmp_path), "loss_scale": "1024", "loss_scaler_settings": None}))
    (args,) = parser.parse_json_file(str(path))
    assert args.precision_policy.loss_scale == 1024.0
    assert MixedPrecisionArguments(**{**args.to_dict(), "output_dir": str(tmp_path)}).loss_scale == "1024"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True}, r"fp16=True switches accelerate's mixed precision on.*say precision='fp16'"),
        ({"bf16": True}, r"bf16=True switches accelerate's mixed precision on"),
        ({"bf16": True, "precision": "fp32"}, r"precision='fp32' hf_mp's"),
        ({"precision": "fp8"}, r"precision='fp8' is not known: use one of fp32, fp16"),
        ({"loss_scale": "often"}, r"loss_scale='often' is not known: use 'headroom', 'dynamic', 'none' or a positive"),
        ({"loss_scale": "-1"}, r"loss_scale='-1' must be a positive, finite number"),
        ({"loss_scaler_settings": {"speed": 1}}, r"has no setting speed: it has .*headroom"),
        (
            {"precision": "bf16", "loss_scaler_settings": {"init_scale": 4, "max_consecutive_skips": 9}},
            r"loss_scaler_settings \(init_scale\) have no effect: precision='bf16' has no loss scale\. Leave them out",
        ),
        ({"fp16_full_eval": True}, r"casts the FP32 masters away"),
        ({"optim": "lomo"}, r"optim='lomo' updates inside backward"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, r"FSDP version 1 joins weights.*fsdp_config=.'version': 2"),
        ({"optim": "galore_adamw_layerwise"}, r"updates inside backward.*: use optim='adamw_torch'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecisionTrainer(model_of(gpt2_config), arguments(tmp_path, **settings), train_dataset=rows)
    assert not (tmp_path / "run").exists()


def test_the_environment_of_accelerate_is_refused(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    message = "ACCELERATE_MIXED_PRECISION='bf16' in the environment.*unset it"
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path)
    plain = arguments(tmp_path, TrainingArguments)
    with pytest.raises(ValueError, match=message):
        MixedPrecisionTrainer(model_of(gpt2_config), plain, precision="fp16", train_dataset=rows)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # as `accelerate launch --use_fsdp` sets it, whose default is version 1
        ("ACCELERATE_USE_FSDP", "FSDP version 1 joins weights.*FSDP2.*--fsdp_version 2"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed .* remove ACCELERATE_USE_DEEPSPEED from"),
    ],
)
def test_what_a_launcher_starts_is_refused(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    args = arguments(tmp_path, TrainingArguments)
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=message):
        MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows)


def test_a_model_without_floating_parameters_is_refused(tmp_path: Path, rows: Rows) -> None:
    model = nn.Module()
    model.register_parameter("ids", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))
    trainer = MixedPrecisionTrainer(model, arguments(tmp_path), train_dataset=rows)
    with pytest.raises(ValueError, match="Module has no floating parameters"):
        trainer.train()


@pytest.mark.parametrize("contender", ["subclass", "callback"])
def test_a_model_without_a_trainable_parameter_is_evaluated_and_not_trained(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, contender: str
) -> None:
    model = model_of(gpt2_config).requires_grad_(False)
    args = arguments(tmp_path, TrainingArguments)
    trainer = make_trainer(contender, "fp16", model, args, train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no trainable parameter .*: unfreeze some before"):
        trainer.train()


def test_plain_training_arguments_and_the_precision_keyword(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows
) -> None:
    args = arguments(tmp_path, TrainingArguments, max_steps=2)
    for given, expected in (
        ({}, "fp16"),
        ({"precision": "bf16"}, "bf16"),
        ({"precision": PrecisionPolicy.parse("bf16")}, "bf16"),
    ):
        trainer = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows, **given)
        assert str(trainer.precision_policy) == expected


def test_fsdp2_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments(tmp_path, fsdp=True, fsdp_config={"version": 2})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    arguments(tmp_path)


def test_bitsandbytes_is_refused_where_fsdp_shards(tmp_path: Path) -> None:
    refused = set()
    for optim in OptimizerNames:
        try:
            arguments(tmp_path, precision="bf16-lean", optim=optim, fsdp=True, fsdp_config={"version": 2})
        except ValueError as error:
            if re.match(r"optim='.*' of bitsandbytes .* are DTensors: use .*torch', or DDP$", str(error)):
                refused.add(optim)
    assert refused == {*_BITSANDBYTES_OPTIMIZERS, "galore_adamw_8bit"}


@pytest.mark.parametrize(
    ("fsdp", "backend", "regional", "has_blocks", "is_refused"),
    [(True, "inductor", False, True, True), (True, "inductor", True, False, True),
     (True, "inductor", True, True, False), (True, "no", False, True, False), (False, "inductor", False, True, False)],
)  # fmt: skip
def test_a_sharded_model_is_compiled_by_blocks_alone(
    fsdp: bool, backend: str, regional: bool, has_blocks: bool, is_refused: bool
) -> None:
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) if has_blocks else nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(
        is_fsdp_enabled=fsdp,
        accelerator=SimpleNamespace(state=SimpleNamespace(dynamo_plugin=plugin)),
        model=nn.Sequential(blocks),
    )
    said = r"compiles all of Sequential.*set ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true.*or use DDP"
    with pytest.raises(ValueError, match=said) if is_refused else nullcontext():
        check_regional_compile(trainer)


@pytest.mark.parametrize("route", ["arguments", "subclass", "callback", "callback fp32"])
def test_processes_that_each_would_train_alone_are_refused(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """As ``torchrun --nproc_per_node 2`` starts them on a CPU without ``use_cpu=True``."""
    if torch.cuda.is_available():
        pytest.skip("accelerate joins processes on GPUs")
    monkeypatch.setenv("WORLD_SIZE", "2")
    plain = arguments(tmp_path, TrainingArguments, use_cpu=False)
    named: dict[str, Any] = {"model": model_of(gpt2_config), "train_dataset": rows}
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 in the environment .*train alone.*use_cpu=True"):
        if route == "arguments":
            arguments(tmp_path, use_cpu=False)
        elif route == "subclass":
            MixedPrecisionTrainer(**named, args=plain)
        else:
            precision = "fp32" if route == "callback fp32" else "fp16"
            Trainer(**named, args=plain, callbacks=[MixedPrecisionCallback(precision)])


def test_a_forward_that_a_library_set_later_runs_in_the_region(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows
) -> None:
    trainer = MixedPrecisionTrainer(model_of(gpt2_config), arguments(tmp_path, max_steps=2), train_dataset=rows)
    calls: list[torch.dtype] = []
    own = type(trainer.model).forward

    @functools.wraps(own)  # the Trainer reads the names of the arguments
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype)
        return own(self, *args, **kwargs)

    trainer.model.forward = forward.__get__(trainer.model)  # as Liger's kernels do
    trainer.train()
    assert calls == [torch.float16] * 2

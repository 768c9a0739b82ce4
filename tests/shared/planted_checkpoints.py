"""Checkpoints with a planted risk, and clean ones, by the writers of five origins."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tiny import take_step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.optim import SGD, AdamW, Optimizer
from trainer_runs import quick_arguments, tiny_gpt2, token_rows
from transformers import GPT2LMHeadModel, Trainer

import hf_mp

RATE = 1e-5
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# Trainers


def stock(
    path: Path, dtype: str = "fp32", steps: int = 2, optimizer: Callable[..., Optimizer] = AdamW, **settings: Any
):
    """The checkpoint of a stock Trainer."""
    return train(Trainer, tiny_gpt2(NARROW[dtype]), path, steps, optimizer, **settings)


def train(kind: Any, model: nn.Module, path: Path, steps: int = 2, optimizer: Any = AdamW, **settings: Any) -> Path:
    args = quick_arguments(
        path, max_steps=steps, save_strategy="steps", save_steps=steps, learning_rate=RATE, **settings
    )
    trained = [one for one in model.parameters() if one.requires_grad]
    made = optimizer(trained, lr=RATE)
    trainer = kind(model=model, args=args, train_dataset=token_rows(), optimizers=(made, None))
    trainer.train()
    return path / f"checkpoint-{steps}"


def trl(path: Path, dtype: str = "bf16", lora: Any = None) -> Path:
    """The checkpoint of TRL's SFTTrainer."""
    from trl_runs import load_default, save_tiny_qwen, trl_trainer

    model = load_default("sft", save_tiny_qwen(path / "model")).to(NARROW[dtype])
    trainer = trl_trainer(
        "sft", "stock", "", model, path, peft_config=lora,
        max_steps=2, save_strategy="steps", save_steps=2, learning_rate=RATE,
    )  # fmt: skip
    if lora is not None and dtype != "fp32":
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.to(NARROW[dtype])
    trainer.train()
    return path / "stock" / "checkpoint-2"


def lora() -> Any:
    return pytest.importorskip("peft").LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def ours(path: Path, precision: str = "bf16", **settings: Any) -> Path:
    """The checkpoint of MixedPrecisionTrainer."""
    args = quick_arguments(
        path, hf_mp.MixedPrecisionArguments, precision=precision, max_steps=2, save_strategy="steps", save_steps=2,
        learning_rate=RATE, check_gradients=False, **settings,
    )  # fmt: skip
    hf_mp.MixedPrecisionTrainer(model=tiny_gpt2(torch.bfloat16), args=args, train_dataset=token_rows()).train()
    return path / "checkpoint-2"


def cast_weights(checkpoint: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """Write the weights anew, changed."""
    file = checkpoint / "model.safetensors"
    save_file({name: change(one).contiguous() for name, one in load_file(file).items()}, file, {"format": "pt"})
    return checkpoint


def change_state(checkpoint: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """Write the optimizer's state anew, changed."""
    file = checkpoint / "optimizer.pt"
    saved = torch.load(file, weights_only=True)
    for entry in saved["state"].values():
        entry.update({key: change(key, one) for key, one in entry.items() if isinstance(one, Tensor)})
    torch.save(saved, file)
    return checkpoint


# A loop


def trained(dtype: str = "fp32", optimizer: Any = AdamW, steps: int = 2) -> tuple[GPT2LMHeadModel, Any]:
    """A model of two steps and its optimizer."""
    model = tiny_gpt2(NARROW[dtype])
    made = optimizer(model.parameters(), lr=RATE)
    ids = torch.arange(32).reshape(2, 16)
    for _ in range(steps):
        take_step(model(input_ids=ids, labels=ids).loss, made)
    return model, made


def one_file(path: Path) -> Path:
    model, optimizer = trained("bf16")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, path / "ckpt.pt")
    return path


def masters_in_state(path: Path, change: Callable[[Tensor], Tensor] = lambda one: one) -> Path:
    """Weights of BF16 and a MasterWeightOptimizer's state, as torch.save and safetensors write them."""
    model, optimizer = trained("bf16", lambda one, lr: hf_mp.MasterWeightOptimizer(AdamW(one, lr=lr)))
    model.save_pretrained(path)
    state = optimizer.state_dict()
    state["masters"] = {key: change(one) for key, one in state["masters"].items()}
    torch.save(state, path / "optimizer.pt")
    return path


def dcp_of(path: Path, dtype: str = "fp32", weights: str | None = None, change: Any = lambda key, one: one) -> Path:
    """As accelerate's FSDP2 saves: a folder of shards for the model, and one for the optimizer."""
    model, optimizer = trained(dtype)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for entry in state["state"].values():
        entry.update({key: change(key, one) for key, one in entry.items()})
    dcp.save({"optimizer": state}, checkpoint_id=path / "optimizer_0")
    model.to(NARROW[weights or dtype])
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path / "pytorch_model_fsdp_0")
    return path


# DeepSpeed, by the layout that its zero_to_fp32.py reads


# A class of DeepSpeed's that no other program has: when the files are read, its module is gone.
DEEPSPEED: Any = types.ModuleType("deepspeed_that_is_not_there")
DEEPSPEED.ZeroStageEnum = type("ZeroStageEnum", (), {"__module__": DEEPSPEED.__name__})


def deepspeed(
    path: Path,
    stage: int = 2,
    ranks: int = 2,
    masters: Callable[[Tensor], Tensor] = lambda one: one,
    moments: Callable[[str, Tensor], Tensor] = lambda key, one: one,
    has_masters: bool = True,
) -> Path:
    """``global_step2`` of a ZeRO training in BF16."""
    model, optimizer = trained("fp32")
    names = dict(model.named_parameters())
    working = {name: one.detach().bfloat16() for name, one in model.state_dict().items()}
    folder = path / "global_step2"
    folder.mkdir(parents=True)
    (path / "latest").write_text("global_step2")
    about = {"ds_version": "0.18.0", "buffer_names": []}
    if stage == 3:
        save_file(
            {name: one.clone() for name, one in working.items() if name != "lm_head.weight"}, path / "model.safetensors"
        )
    for rank in range(ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save({"module": {} if stage == 3 else working, **about}, folder / name)
    flats = {
        "masters": [masters(one.detach()) for one in names.values()],
        **{key: [optimizer.state[one][key] for one in names.values()] for key in ("exp_avg", "exp_avg_sq")},
    }
    of_ranks = {key: (cut_each if stage == 3 else cut_whole)(ones, ranks) for key, ones in flats.items()}
    for rank in range(ranks):
        state = {key: moments(key, of_ranks[key][rank]) for key in ("exp_avg", "exp_avg_sq")}
        inner = {"state": {0: state}, "param_groups": [{"lr": RATE, "betas": (0.9, 0.999), "params": [0]}]}
        held = [of_ranks["masters"][rank]] if has_masters else []
        if stage == 3:
            saved: dict[str, Any] = {"fp32_flat_groups": held, "optimizer_state_dict": inner}
        else:
            saved = {"single_partition_of_fp32_groups": held, "base_optimizer_state": inner}
        saved |= {"zero_stage": DEEPSPEED.ZeroStageEnum(), "partition_count": ranks}
        with mock.patch.dict(sys.modules, {DEEPSPEED.__name__: DEEPSPEED}):
            torch.save({"optimizer_state_dict": saved}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def cut_whole(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    flat = torch.cat([one.reshape(-1) for one in tensors])
    flat = nn.functional.pad(flat, (0, -len(flat) % ranks))
    return [one.clone() for one in flat.chunk(ranks)]


def cut_each(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    parts = [cut_whole([one], ranks) for one in tensors]
    return [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]


# Cases


to_bf16 = Tensor.bfloat16


def through_bf16(one: Tensor) -> Tensor:
    return one.bfloat16().float()


def seconds_to_bf16(key: str, one: Any) -> Any:
    return one.bfloat16() if key == "exp_avg_sq" else one


def moments_to_fp16(key: str, one: Any) -> Any:
    return one.half() if key.startswith("exp_avg") else one


Case = tuple[Callable[[Path], Path], set[str]]
NONE, STUCK, ROUNDED = "no masters", "stuck second moments", "rounded weights"
FP16, APART = "fp16 moments", "masters disagree"


def loop(path: Path, precision: str = "bf16") -> Path:
    """The checkpoint of hf_mp.save_checkpoint."""
    model, optimizer = trained("bf16", steps=0)
    attached, own = hf_mp.prepare(model, optimizer, precision)
    ids = torch.arange(32).reshape(2, 16)
    for _ in range(2):
        take_step(attached(input_ids=ids, labels=ids).loss, own)
    hf_mp.save_checkpoint(path / "checkpoint-2", attached, own, 2)
    return path / "checkpoint-2"


def model_folder(path: Path, dtype: str) -> Path:
    tiny_gpt2(NARROW[dtype]).save_pretrained(path)
    return path


def kahan(path: Path) -> Path:
    """BF16 weights and FP32 moments with sums of what rounding took, as optimi's AdamW saves them."""
    model, optimizer = trained("bf16")
    for state in optimizer.state.values():
        state.update({key: one.float() for key, one in state.items() if key.startswith("exp_avg")})
        state["kahan_comp"] = torch.zeros_like(state["exp_avg"], dtype=torch.bfloat16)
    model.save_pretrained(path)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    return path


PLANTED: Mapping[str, Case] = {
    "a model in bf16": (lambda path: model_folder(path, "bf16"), {NONE}),
    "stock: a model in bf16": (lambda path: stock(path, "bf16"), {NONE, STUCK}),
    "stock: a model in fp16": (lambda path: stock(path, "fp16", optimizer=partial(AdamW, eps=1e-4)), {NONE, FP16}),
    "stock: sgd over bf16": (lambda path: stock(path, "bf16", optimizer=SGD), {NONE}),
    "stock: 8-bit adamw over bf16": (
        lambda path: stock(path, "bf16", optimizer=pytest.importorskip("bitsandbytes").optim.AdamW8bit),
        {NONE},
    ),
    "stock: bf16 weights of an fp32 training": (lambda path: cast_weights(stock(path), to_bf16), {ROUNDED}),
    "stock: fp32 weights that were rounded": (
        lambda path: cast_weights(stock(path), through_bf16),
        {ROUNDED},
    ),
    "stock: moments cast to fp16": (lambda path: change_state(stock(path), moments_to_fp16), {FP16}),
    "trl: sft of a model in bf16": (lambda path: trl(path), {NONE, STUCK}),
    "trl: adapters in bf16": (lambda path: trl(path, lora=lora()), {NONE, STUCK}),
    "trl: second moments cast to bf16": (lambda path: change_state(trl(path, "fp32"), seconds_to_bf16), {STUCK}),
    "a loop: one file of torch.save": (lambda path: one_file(path), {NONE, STUCK}),
    "fsdp2: shards in bf16": (lambda path: dcp_of(path, "bf16"), {NONE, STUCK}),
    "fsdp2: bf16 shards of an fp32 training": (lambda path: dcp_of(path, weights="bf16"), {ROUNDED}),
    "fsdp2: fp16 moments": (lambda path: dcp_of(path, change=moments_to_fp16), {FP16}),
    "fsdp2: bf16 second moments": (lambda path: dcp_of(path, change=seconds_to_bf16), {STUCK}),
    "deepspeed: bf16 second moments": (lambda path: deepspeed(path, moments=seconds_to_bf16), {STUCK}),
    "deepspeed: masters left out": (lambda path: deepspeed(path, has_masters=False), {ROUNDED}),
    "ours: weights rounded afterwards": (lambda path: cast_weights(ours(path), to_bf16), {ROUNDED}),
    "ours: second moments cast to bf16": (lambda path: change_state(ours(path), seconds_to_bf16), {STUCK}),
    "ours: masters of another step": (lambda path: masters_in_state(path, lambda one: one * 2), {APART}),
}

CLEAN: Mapping[str, Callable[[Path], Path]] = {
    "stock: fp32": lambda path: stock(path),
    "stock: autocast in bf16": lambda path: stock(path, bf16=True),
    "stock: bf16 with kahan sums": lambda path: kahan(path),
    "a model in fp32": lambda path: model_folder(path, "fp32"),
    "trl: adapters in fp32": lambda path: trl(path, "fp32", lora()),
    "fsdp2: fp32 shards": lambda path: dcp_of(path),
    "deepspeed: zero-2": lambda path: deepspeed(path),
    "deepspeed: masters of another step, which are not compared": lambda path: deepspeed(
        path, masters=lambda one: one * 2
    ),
    "deepspeed: zero-3 of three ranks": lambda path: deepspeed(path, 3, 3),
    "ours: bf16": lambda path: ours(path),
    "ours: fp16-lean": lambda path: ours(path, "fp16-lean"),
    "ours: a loop's shards": lambda path: loop(path),
    "ours: a lean loop's shards": lambda path: loop(path, "bf16-lean"),
    "ours: masters in the optimizer": lambda path: masters_in_state(path),
}

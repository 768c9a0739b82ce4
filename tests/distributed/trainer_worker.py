"""Runs on each of several processes: ``MixedPrecisionTrainer`` with DDP and with accelerate's FSDP2.

Usage: torchrun (or accelerate launch) ... trainer_worker.py FOLDER [CASE ...]; writes FOLDER/rankN.pt.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from loop_worker import tiny_gpt2
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer
from hf_mp.trainer.session import STATE_NAME

logging.set_verbosity_error()
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
GLOBAL_BATCH = 4


def rows(count: int = 256, uneven: bool = False) -> list[dict[str, Tensor]]:
    """Token ids by a rule that can be learned; where ``uneven``, every second row has labels for a quarter only."""
    start = torch.randint(0, 101, (count, 1), generator=torch.Generator().manual_seed(5))
    ids = (start + 3 * torch.arange(16)) % 101
    labels = ids.clone()
    if uneven:
        labels[::2, 4:] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


class Log(TrainerCallback):
    """What each step saw, on every process."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.losses: list[float] = []
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.learning_rates: list[float] = []
        self.grad_norms: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        runtime = self.trainer.mixed_precision
        self.skipped.append(runtime.step_was_skipped)
        self.scales.append(runtime.stats.loss_scale)
        self.learning_rates.append(self.trainer.lr_scheduler.get_last_lr()[0])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.grad_norms.append(float(logs["grad_norm"]))


class Planting(MixedPrecisionTrainer):
    """Multiplies the loss of rank 1 by inf in one forward."""

    forwards = 0
    overflow_at: int | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.forwards += 1
        hit = self.model.training and self.args.process_index == 1 and self.forwards - 1 == self.overflow_at
        return loss * math.inf if hit else loss


def trainer(
    folder: Path, *, overflow_at: int | None = None, uneven: bool = False, width: int = 32, **settings: Any
) -> Any:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "precision": "fp16",
        "max_steps": 8,
        "per_device_train_batch_size": GLOBAL_BATCH // PROCESSES,
        "per_device_eval_batch_size": GLOBAL_BATCH // PROCESSES,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = MixedPrecisionArguments(**{**defaults, **settings})
    log = Log()
    data = {"train_dataset": rows(uneven=uneven), "eval_dataset": rows(8)}
    made = Planting(tiny_gpt2(width=width), args, callbacks=[log], **data)
    made.overflow_at, log.trainer = overflow_at, made
    return made, log


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def run(folder: Path, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    made, log = trainer(folder, **settings)
    made.train(resume_from_checkpoint=resume)
    return {
        "loss": log.losses,
        "skipped": log.skipped,
        "scale": log.scales,
        "learning_rate": log.learning_rates,
        "grad_norm": log.grad_norms,
        "weights": {name: whole(p.detach()) for name, p in made.model.named_parameters()},
        "momentum": [whole(s["momentum_buffer"]) for s in made.optimizer.state_dict()["state"].values() if s]
        if settings.get("optim_args")
        else [],
        "eight_bit_states": sum(
            isinstance(value, Tensor) and value.dtype is torch.uint8
            for state in made.optimizer.state.values()
            for value in state.values()
        ),
        "wrapper": type(made.model_wrapped).__name__,
        "evaluation": made.evaluate()["eval_loss"],
    }


def resumed(folder: Path, **settings: Any) -> dict[str, Any]:
    """Eight steps at once, and four steps, a checkpoint, four more in a new Trainer; a step overflows before it."""
    settings = {"optim_args": "momentum=0.5", "lr_scheduler_type": "linear", **settings}
    at_once = run(folder, overflow_at=2, save_strategy="steps", save_steps=4, **settings)
    checkpoint = folder / "checkpoint-4"
    after = run(folder / "again", str(checkpoint), **settings)
    return {
        "at_once": at_once,
        "after": after,
        "files": sorted(path.name for path in checkpoint.iterdir()),
        "state": json.loads((checkpoint / STATE_NAME).read_text()),
    }


# Cases: DDP, or one process


def twenty_steps(folder: Path) -> dict[str, Any]:
    return run(folder, max_steps=20)


def overflow(folder: Path) -> dict[str, Any]:
    return run(folder, overflow_at=3, lr_scheduler_type="linear")


def accumulation(folder: Path) -> dict[str, Any]:
    """Uneven numbers of tokens: the Trainer divides by those of all processes and micro-batches."""
    return run(folder, uneven=True, gradient_accumulation_steps=2, per_device_train_batch_size=2 // PROCESSES)


def resume(folder: Path) -> dict[str, Any]:
    return resumed(folder)


def resume_from_two(folder: Path) -> dict[str, Any]:
    """On one process, from the checkpoint that two processes wrote."""
    made = Path(os.environ["CHECKPOINT"])
    return run(folder, str(made), optim_args="momentum=0.5", lr_scheduler_type="linear")


def recipe(folder: Path) -> dict[str, Any]:
    """The recipe's own run with one global batch; 16 blocks a process do not divide what it evaluates on."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    import finetune_gpt2

    folder.mkdir(exist_ok=True)
    text = folder / f"{os.environ.get('RANK', '0')}.txt"
    text.write_text("\n\n".join(topics[name] for name in ("assert", "for", "if", "while", "with", "pass", "return")))
    settings = {
        "train_file": text, "vocab_size": 300, "context": 32, "width": 32, "layers": 1, "heads": 2, "max_steps": 6,
        "warmup_steps": 1, "learning_rate": 5e-3, "per_device_train_batch_size": GLOBAL_BATCH // PROCESSES,
        "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "output_dir": folder / "run",
    }  # fmt: skip
    finetune_gpt2.main([f"--{name}={value}" for name, value in settings.items()])
    return json.loads((folder / "run" / "summary.json").read_text()) if text.stem == "0" else {}


# Cases: FSDP2


def _fsdp(**settings: Any) -> dict[str, Any]:
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], **settings}
    return {"fsdp": True, "fsdp_config": config}


def fsdp_twenty_steps(folder: Path) -> dict[str, Any]:
    return run(folder, max_steps=20, **_fsdp())


def fsdp_overflow(folder: Path) -> dict[str, Any]:
    return run(folder, overflow_at=3, lr_scheduler_type="linear", **_fsdp())


def fsdp_accumulation(folder: Path) -> dict[str, Any]:
    settings = {"uneven": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2 // PROCESSES}
    return run(folder, **settings, **_fsdp())


def fsdp_resume_full(folder: Path) -> dict[str, Any]:
    return resumed(folder, **_fsdp(state_dict_type="FULL_STATE_DICT"))


def fsdp_resume_sharded(folder: Path) -> dict[str, Any]:
    return resumed(folder, **_fsdp(state_dict_type="SHARDED_STATE_DICT"))


def fsdp_checkpointing(folder: Path) -> dict[str, Any]:
    return {
        "of_fsdp": run(folder, **_fsdp(activation_checkpointing=True)),
        "of_model": run(folder, gradient_checkpointing=True, **_fsdp()),
        "without": run(folder, **_fsdp()),
        "ram_efficient": run(folder, **_fsdp(cpu_ram_efficient_loading=True)),
    }


def evaluated_before(folder: Path) -> dict[str, Any]:
    made, log = trainer(folder, max_steps=20)
    made.evaluate()
    made.train()
    return {"loss": log.losses, "grad_norm": log.grad_norms, "wrapper": type(made.model_wrapped).__name__}


def callback_evaluated_before(folder: Path) -> dict[str, Any]:
    """The stock Trainer with our callback: evaluate() and predict(), then train()."""
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=0.1, optim="sgd", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    found = {}
    for name in ("evaluated", "plain", "refused"):
        callback, data = MixedPrecisionCallback(), {"train_dataset": rows(), "eval_dataset": rows(8)}
        made = Trainer(tiny_gpt2(), args, callbacks=[callback], **data)
        if name == "evaluated":
            made.evaluate()
            made.predict(rows(8))
        try:
            if name == "refused":
                made.evaluation_loop(made.get_eval_dataloader(), "evaluation")
            made.train()
            found[name] = {key: whole(p.detach()) for key, p in made.model.named_parameters()}
        except ValueError as error:
            found[name] = str(error)
        finally:
            callback.detach()
    return found


def refused(folder: Path) -> dict[str, str]:
    """Another mixed precision, and a mesh that does not fit: said by each rank, before the first step."""

    large = ParallelismConfig(dp_shard_size=4)
    cases = {
        "fp16": lambda: trainer(folder, fp16=True),
        "launched": lambda: trainer(folder),
        "too large": lambda: trainer(folder, parallelism_config=large, **_fsdp())[0].train(),
    }
    said = {}
    for name, case in cases.items():
        if name == "launched":  # as `accelerate launch` has it, of its configuration's mixed_precision: fp16
            os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
        try:
            case()
            said[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        finally:
            os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
            AcceleratorState._reset_state()
    return said


def mixed_layouts(folder: Path) -> str:
    try:
        trainer(folder, precision=("fp16", "fp16-lean")[dist.get_rank()])[0].train()
    except ValueError as error:
        return str(error)
    return "nothing"


def lean(folder: Path) -> dict[str, Any]:
    return resumed(folder, precision="fp16-lean", save_in_background=True)


def eight_bits(folder: Path) -> dict[str, Any]:
    """bitsandbytes' 8-bit AdamW: in each layout, and a lean one that goes on from a checkpoint."""
    settings = {"optim": "adamw_8bit", "optim_args": None, "learning_rate": 1e-3, "width": 64}
    found = {precision: run(folder, precision=precision, **settings) for precision in ("fp16", "fp16-lean")}
    return {**found, "resumed": resumed(folder / "resumed", precision="fp16-lean", **settings)}


def fsdp_eight_bits(folder: Path) -> dict[str, Any]:
    settings = {"precision": "fp16-lean", "optim": "adamw_8bit", "learning_rate": 1e-3, "width": 64, **_fsdp()}
    return {"log": run(folder, **settings), "resumed": resumed(folder / "resumed", **{**settings, "optim_args": None})}


def fsdp_compiled(folder: Path) -> dict[str, Any]:
    """``torch_compile=True``, with which accelerate compiles each block."""
    settings = {
        "torch_compile": True,
        "torch_compile_backend": "aot_eager",
        "max_steps": 4,
        "overflow_at": 2,
    }
    found = {}
    try:
        for precision in ("fp16", "fp16-lean"):
            torch._dynamo.reset()
            counters.clear()
            found[precision] = run(folder, precision=precision, **settings, **_fsdp())
            found[precision]["compiled_frames"] = counters["frames"]["ok"]
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
            del os.environ[name]
    return found


def fsdp_lean(folder: Path) -> dict[str, Any]:
    """Twenty steps; the model that is saved in between, in FP32."""
    made, log = trainer(folder, precision="fp16-lean", max_steps=20, save_steps=20, save_strategy="steps",
                        save_only_model=True, **_fsdp(state_dict_type="FULL_STATE_DICT"))  # fmt: skip
    made.train()
    weights = {name: whole(p.detach()) for name, p in made.model.named_parameters()}
    saved = load_file(folder / "checkpoint-20" / "model.safetensors")
    return {"loss": log.losses, "scale": log.scales, "weights": weights, "saved": saved}


def fsdp_lean_resume(folder: Path) -> dict[str, Any]:
    sharded = _fsdp(state_dict_type="SHARDED_STATE_DICT")
    found = resumed(folder, precision="fp16-lean", save_in_background=True, **sharded)
    lean = folder / "checkpoint-4"
    plain = run(folder / "plain", str(lean), optim_args="momentum=0.5", lr_scheduler_type="linear", **sharded)
    return {**found, "in_fp16": plain["loss"]}


def fsdp_lean_resume_full(folder: Path) -> dict[str, Any]:
    return resumed(folder, precision="fp16-lean", **_fsdp(state_dict_type="FULL_STATE_DICT"))


def fsdp_lean_from_fp16(folder: Path) -> str:
    try:
        run(folder, str(folder.parent / "fsdp_resume_sharded" / "checkpoint-4"), precision="fp16-lean",
            **_fsdp(state_dict_type="SHARDED_STATE_DICT"))  # fmt: skip
    except ValueError as error:
        return str(error)
    return "nothing"


def fsdp_saved_model(folder: Path) -> dict[str, Any]:
    made, _ = trainer(folder, **_fsdp())
    made.train()
    made.save_model(str(folder / "model"))
    dist.barrier()
    loaded = GPT2LMHeadModel.from_pretrained(folder / "model")
    return {
        "trained": {name: whole(p.detach()) for name, p in made.model.named_parameters()},
        "loaded": dict(loaded.named_parameters()),
    }


ONE_PROCESS = [twenty_steps, accumulation, resume_from_two, recipe, eight_bits]
TWO_PROCESSES = [
    twenty_steps, overflow, accumulation, resume, lean, mixed_layouts, evaluated_before, callback_evaluated_before,
    recipe, eight_bits,
    fsdp_twenty_steps, fsdp_overflow, fsdp_accumulation,
    fsdp_resume_full, fsdp_resume_sharded, fsdp_checkpointing, fsdp_saved_model, fsdp_lean, fsdp_lean_resume,
    fsdp_lean_resume_full, fsdp_lean_from_fp16, fsdp_eight_bits, refused,
]  # fmt: skip

WHERE_NAMED = [fsdp_compiled]


def allow_fsdp_on_cpu() -> None:
    """accelerate uses FSDP on accelerators only, and DDP on CPUs without a word; let it use its FSDP2 here too."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = plugin

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


def main(folder: str, *names: str) -> None:
    allow_fsdp_on_cpu()
    results, rank = {}, int(os.environ.get("RANK", "0"))
    for case in [*(TWO_PROCESSES if PROCESSES > 1 else ONE_PROCESS), *WHERE_NAMED]:
        if case.__name__ in names or not (names or case in WHERE_NAMED):
            results[case.__name__] = case(Path(folder, case.__name__))
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

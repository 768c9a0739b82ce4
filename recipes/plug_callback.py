"""An ordinary Trainer script, run without and with the mixed precision callback, and compared.

    python recipes/plug_callback.py                        # both runs, and a table of what changed
    python recipes/plug_callback.py --precision fp16       # the script alone, with the callback
    python recipes/plug_callback.py --precision none       # the script alone, as it was before
    python recipes/plug_callback.py --train_file my.txt --model_name_or_path gpt2 --max_steps 200

The lines that plugging in took end in ``# hf_mp``. All ``TrainingArguments`` work.
"""

from __future__ import annotations

import hf_mp.trainer  # noqa: F401  # isort: skip  before transformers: it imports bitsandbytes without a remark

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from _report import in_mib, peak_memory, quiet_libraries
from _text import file_text, make_blocks, python_text, train_tokenizer
from hf_mp import MixedPrecisionCallback  # hf_mp

DEFAULTS = {
    "output_dir": "outputs/plug_callback",
    "max_steps": 60,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "learning_rate": 2e-3,
    "warmup_steps": 10,
    "logging_steps": 10,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class Script:
    """What to train, and on what."""

    precision: str | None = field(
        default=None,
        metadata={"help": "fp16 or bf16: with the callback; none: without. Default: none, then fp16."},
    )
    model_name_or_path: str | None = field(default=None, metadata={"help": "Default: a small GPT-2, from scratch."})
    train_file: str | None = field(default=None, metadata={"help": "Default: the documentation of this Python."})
    context: int = field(default=256, metadata={"help": "Tokens in one example."})
    width: int = field(default=256, metadata={"help": "Small GPT-2: width of its layers."})
    layers: int = field(default=3, metadata={"help": "Small GPT-2: number of its layers."})
    vocab_size: int = field(default=1024, metadata={"help": "Small GPT-2: tokens of its byte-level BPE."})

    def __post_init__(self) -> None:
        if self.precision not in (None, "none"):
            MixedPrecisionCallback(self.precision)  # refuse what it would refuse after minutes


@dataclass(frozen=True)
class Run:
    """What one run measured; written to ``summary.json`` in its output directory."""

    precision: str
    eval_loss: float
    seconds_per_step: float
    peak_memory_mib: float | None
    skipped_steps: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = HfArgumentParser(cast(Any, [Script, TrainingArguments]))
    parser.set_defaults(**DEFAULTS)
    try:
        script, args = parser.parse_args_into_dataclasses(arguments)
    except ValueError as error:
        parser.error(str(error))
    if script.precision is None:
        compare(arguments, Path(args.output_dir))
    else:
        train(script, args)


# The script, as it was but for a few lines


def train(script: Script, args: TrainingArguments) -> None:
    quiet_libraries()
    set_seed(args.seed)
    text = python_text() if script.train_file is None else file_text(script.train_file)
    model, tokenizer = load(script, text["train"]["text"])
    # GPT-2 does not say so itself; the Trainer then divides by one token a block too many.
    model.loss_type = model.loss_type or "ForCausalLM"
    blocks = make_blocks(text, tokenizer, script.context)

    callbacks: list[TrainerCallback] = []
    if script.precision != "none":  # hf_mp
        callbacks.append(MixedPrecisionCallback(str(script.precision)))  # hf_mp

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=blocks.train,
        eval_dataset=blocks.validation,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )
    metrics = trainer.train().metrics
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    skipped = [entry["skipped_steps"] for entry in trainer.state.log_history if "skipped_steps" in entry]
    run = Run(
        precision=str(script.precision),
        eval_loss=eval_loss,
        seconds_per_step=metrics["train_runtime"] / trainer.state.global_step,
        peak_memory_mib=peak_memory()["mib"],
        skipped_steps=int(skipped[-1]) if skipped else None,
    )
    summary_path(Path(str(args.output_dir))).write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")


def load(script: Script, texts: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if script.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path, dtype="float32")
        return model, AutoTokenizer.from_pretrained(script.model_name_or_path)
    tokenizer = train_tokenizer(texts, script.vocab_size)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=script.context,
        n_embd=script.width,
        n_layer=script.layers,
        n_head=4,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


# Before and after


def compare(arguments: Sequence[str], output_dir: Path) -> None:
    """Run the script twice, each time in a process of its own: the peak of memory is one of the whole process."""
    console = Console(highlight=False)
    runs = []
    for name, precision in (("before", "none"), ("after", "fp16")):
        console.print(f"{name}: --precision {precision}")
        place = output_dir / name
        command = [sys.executable, __file__, *arguments, "--precision", precision, "--output_dir", str(place)]
        subprocess.run(command, check=True)
        runs.append(Run(**json.loads(summary_path(place).read_text(encoding="utf-8"))))
    console.print(difference(*runs))


def summary_path(output_dir: Path) -> Path:
    return output_dir / "summary.json"


def difference(before: Run, after: Run) -> Table:
    table = Table(title="What plugging in changed", title_justify="left")
    for column in ("", "before", f"after ({after.precision})", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    loss = (f"{before.eval_loss:.4f}", f"{after.eval_loss:.4f}", f"{after.eval_loss - before.eval_loss:+z.4f}")
    seconds = (before.seconds_per_step, after.seconds_per_step)
    memory = (before.peak_memory_mib, after.peak_memory_mib)
    table.add_row("evaluation loss", *loss)
    table.add_row("seconds a step", *(f"{value:.3f}" for value in seconds), f"{seconds[1] / seconds[0]:.2f} times")
    change = "" if None in memory else f"{cast(float, memory[1]) - cast(float, memory[0]):+,.0f} MiB"
    table.add_row(f"peak memory, {peak_memory()['of']}", *(in_mib(value) for value in memory), change)
    table.add_row("skipped steps", "", str(after.skipped_steps), "")
    return table


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)

"""Fine-tune GPT-2 in mixed precision, from a text file to a table of results.

    python recipes/finetune_gpt2.py                             # no download: a small GPT-2 on this Python's own docs
    python recipes/finetune_gpt2.py --precision fp32            # the same run in the stock Trainer
    python recipes/finetune_gpt2.py --model_name_or_path gpt2 --train_file my.txt
    python recipes/finetune_gpt2.py --model_name_or_path gpt2 --dataset_name wikitext \\
        --dataset_config_name wikitext-2-raw-v1

All arguments of ``TrainingArguments`` and ``MixedPrecisionArguments`` work as well as those of :class:`Recipe`.
"""

from __future__ import annotations

import hf_mp.trainer  # noqa: F401  # isort: skip  before transformers: it imports bitsandbytes without a remark

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    GPT2Config,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from _report import (
    log_line,
    loss_scale_of_run,
    measure_footprints,
    peak_memory,
    quiet_libraries,
    summary_table,
    write_text,
)
from _text import (
    Blocks,
    file_text,
    hub_text,
    make_blocks,
    perplexity,
    python_text,
    train_tokenizer,
)
from hf_mp import MixedPrecisionArguments, MixedPrecisionTrainer
from hf_mp.environment.libraries import first_line
from hf_mp.memory.models import ask_hub

DTYPES = ("auto", "float32", "float16", "bfloat16")

# What this recipe changes in TrainingArguments; the user's own flags win over it.
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/finetune_gpt2",
    "logging_steps": 10,
    "disable_tqdm": False,
    "include_num_input_tokens_seen": True,
}
# Further ones for the small model, which trains when there is no --model_name_or_path.
SMALL_MODEL_DEFAULTS: dict[str, Any] = {
    "max_steps": 400,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 60,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "save_strategy": "no",
    "ddp_find_unused_parameters": False,  # there are none: DDP need not look for them in each step
}


@dataclass(frozen=True)
class Recipe:
    """What to train, and on what; how to train is in ``MixedPrecisionArguments``."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model on the Hub, or directory. Default: a small GPT-2, from scratch."}
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer on the Hub, or directory. Default: the model's own."}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Load the model as float32, float16, bfloat16, or auto (as it is stored).",
            "aliases": ["--torch_dtype"],
        },
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset on the Hub, or directory. Default: the documentation of this Python."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    text_column: str = field(default="text", metadata={"help": "Column of --dataset_name that has the text."})
    train_file: str | None = field(default=None, metadata={"help": "UTF-8 text file to train on."})
    validation_file: str | None = field(
        default=None, metadata={"help": "UTF-8 text file to evaluate on. Default: the last tenth of --train_file."}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "Tokens in one example. Default: the model's context, at most 1024."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Write into an --output_dir that holds files already."}
    )
    prompt: str | None = field(
        default=None,
        metadata={
            "help": "Beginning of a text that the trained model writes. Default: 'The' with --model_name_or_path."
        },
    )
    vocab_size: int = field(default=1024, metadata={"help": "Small GPT-2: tokens in its byte-level BPE vocabulary."})
    context: int = field(default=256, metadata={"help": "Small GPT-2: context length, in tokens."})
    width: int = field(default=256, metadata={"help": "Small GPT-2: width of its layers."})
    layers: int = field(default=3, metadata={"help": "Small GPT-2: number of its layers."})
    heads: int = field(default=4, metadata={"help": "Small GPT-2: attention heads of a layer."})

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} is not known: use one of {', '.join(DTYPES)}")
        if self.dataset_name and self.train_file:
            raise ValueError("--dataset_name and --train_file are both given: train on one of them")
        if self.validation_file and not self.train_file:
            raise ValueError("--validation_file needs --train_file: a dataset brings its own split")

    @property
    def model_name(self) -> str:
        return self.model_name_or_path or f"small GPT-2 ({self.layers} layers of width {self.width})"


def main(arguments: Sequence[str] | None = None) -> None:
    with errors_in_one_line():
        recipe, args = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        checkpoint = checkpoint_to_resume(args)
        output_dir = Path(str(args.output_dir))
        check_output_dir(output_dir, overwrite=recipe.overwrite_output_dir or checkpoint is not None)
        quiet_libraries()
        text = load_text(recipe, args.seed)
        tokenizer = load_tokenizer(recipe, text["train"])
        model = load_model(recipe, args, len(tokenizer))
        blocks = make_blocks(text, tokenizer, choose_block_size(recipe, model))
        trainer = make_trainer(model, args, tokenizer, blocks)

    console = Console(quiet=not trainer.is_world_process_zero(), highlight=False)
    console.print(f"{recipe.model_name}: {model.num_parameters():,} parameters, precision {args.precision}")
    console.print(f"{blocks}")
    console.print("Evaluating before training")
    loss_before = trainer.evaluate()["eval_loss"]
    console.print("Training")
    seconds, tokens = train(trainer, checkpoint)
    peak = peak_memory()
    console.print("Evaluating after training")
    loss_after = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    if trainer.is_world_process_zero():
        summary = {
            "model": recipe.model_name,
            "parameters": model.num_parameters(),
            "device": str(args.device),
            "precision": args.precision,
            "steps": trainer.state.global_step,
            "skipped_steps": 0 if trainer.mixed_precision is None else trainer.mixed_precision.stats.skipped_steps,
            "loss_scale": loss_scale_of_run(trainer),
            "eval_loss_before": loss_before,
            "eval_loss_after": loss_after,
            "perplexity_before": perplexity(loss_before),
            "perplexity_after": perplexity(loss_after),
            "unigram_perplexity": blocks.unigram_perplexity,
            "train_seconds": seconds,
            "train_tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "peak_memory": peak,
            "footprints": measure_footprints(output_dir),
        }
        (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        console.print(summary_table(summary))
        console.print(f"The model is in {output_dir}.", soft_wrap=True)
        # The small GPT-2 has read too little to write a sentence.
        if prompt := recipe.prompt or (recipe.model_name_or_path and "The"):
            console.print(Text(f"It writes:\n\n{write_text(output_dir, prompt, args.seed)}"))


# Arguments


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the program with the message of a ValueError and exit code 2: a traceback would bury the way out."""
    try:
        yield
    except ValueError as error:
        print(f"{Path(__file__).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error


def parse_arguments(arguments: Sequence[str]) -> tuple[Recipe, MixedPrecisionArguments]:
    """Read the command line.

    Raises:
        ValueError: for what is not known or does not fit together.
    """
    parser = HfArgumentParser(
        cast(Any, [Recipe, MixedPrecisionArguments]),
        prog=Path(__file__).name,
        usage="%(prog)s [--name value ...]   (--help lists every name)",
        allow_abbrev=False,
    )
    parser.set_defaults(**defaults(arguments))
    recipe, args = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    if recipe.dtype in ("float16", "bfloat16") and not args.precision_policy.is_mixed:
        raise ValueError(
            f"--dtype {recipe.dtype} with --precision {args.precision} trains without FP32 master weights: say "
            "--precision fp16, or --dtype float32"
        )
    return recipe, args


def defaults(flags: Sequence[str]) -> dict[str, Any]:
    """This recipe's own defaults, unless the user gives others."""
    given = {flag.split("=")[0].lstrip("-").replace("-", "_") for flag in flags if flag.startswith("--")}
    if "model_name_or_path" in given:
        return DEFAULTS
    # max_steps would overrule the epochs.
    small = {name: value for name, value in SMALL_MODEL_DEFAULTS.items() if name != "max_steps"}
    return {**DEFAULTS, **(small if "num_train_epochs" in given else SMALL_MODEL_DEFAULTS)}


def checkpoint_to_resume(args: MixedPrecisionArguments) -> str | bool | None:
    """What ``--resume_from_checkpoint`` means to the Trainer: a directory, or True for this run's newest."""
    wanted = str(args.resume_from_checkpoint or "false")
    return {"true": True, "false": None}.get(wanted.lower(), wanted)


def check_output_dir(path: Path, *, overwrite: bool) -> None:
    """Raise a ValueError where a run would be written over another one."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output_dir {path} is a file: name a directory")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise ValueError(
            f"--output_dir {path} holds another run: name another directory, add --overwrite_output_dir, or go on with "
            "that run by --resume_from_checkpoint true"
        )


# Text and model


def load_text(recipe: Recipe, seed: int) -> DatasetDict:
    if recipe.dataset_name is not None:
        return hub_text(recipe.dataset_name, recipe.dataset_config_name, recipe.text_column, seed)
    if recipe.train_file is not None:
        return file_text(recipe.train_file, recipe.validation_file)
    return python_text()


def load_tokenizer(recipe: Recipe, train: Dataset) -> PreTrainedTokenizerBase:
    """The model's tokenizer; for the small model, one that is trained on ``train``."""
    name = recipe.tokenizer_name or recipe.model_name_or_path
    if name is None:
        return train_tokenizer(train["text"], recipe.vocab_size)
    tokenizer = from_directory_or_hub(AutoTokenizer, name)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what AutoTokenizer makes of a directory without its files
        raise ValueError(
            f"{name} holds no tokenizer: save one there with tokenizer.save_pretrained, or name one by --tokenizer_name"
        )
    return tokenizer


def load_model(recipe: Recipe, args: MixedPrecisionArguments, vocab_size: int) -> PreTrainedModel:
    """Raises ValueError if the model cannot be had, or has no embeddings for all tokens."""
    set_seed(args.seed)
    if recipe.model_name_or_path is None:
        return small_gpt2(recipe, vocab_size)
    # The stock Trainer would train a model that is stored in FP16 without FP32 weights.
    stored_is_fine = recipe.dtype != "auto" or args.precision_policy.is_mixed
    dtype = recipe.dtype if stored_is_fine else "float32"
    model = from_directory_or_hub(AutoModelForCausalLM, recipe.model_name_or_path, dtype=dtype)
    embeddings = model.get_input_embeddings().num_embeddings
    if vocab_size > embeddings:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, {recipe.model_name_or_path} has embeddings for {embeddings}: name "
            "the tokenizer that it was trained with by --tokenizer_name"
        )
    return model


def small_gpt2(recipe: Recipe, vocab_size: int) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=recipe.context,
        n_embd=recipe.width,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        # GPT-2's 0.02 suits a width of 768 and more; a narrow model starts to learn sooner from larger weights.
        initializer_range=0.05,
        # In less than one epoch nothing is seen twice: there is nothing to regularize.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def from_directory_or_hub(kind: Any, name: str, **settings: Any) -> Any:
    """``kind.from_pretrained``, from the cache alone where there is no network.

    Raises:
        ValueError: if ``name`` is neither a directory, nor to be had from the Hub, nor in the cache.
    """
    hub_error = None if Path(name).is_dir() else ask_hub(name)
    try:
        return kind.from_pretrained(name, local_files_only=hub_error is not None, **settings)
    except (OSError, ValueError) as error:
        if hub_error is None:
            raise ValueError(f"{name} cannot be loaded: {first_line(error)}") from error
        raise ValueError(
            f"{name} is not a directory, not in the cache, and the Hub does not give it ({first_line(hub_error)}). "
            "Ways out: --model_name_or_path with a directory, or with a model that is in the cache, or no "
            "--model_name_or_path at all for the built-in small model"
        ) from error


def choose_block_size(recipe: Recipe, model: PreTrainedModel) -> int:
    context = getattr(model.config, "max_position_embeddings", None) or 1024
    if recipe.block_size is None:
        return min(context, 1024)
    if not 2 <= recipe.block_size <= context:
        raise ValueError(f"--block_size {recipe.block_size} must be from 2 to {context}, the context of the model")
    return recipe.block_size


# Training


class TokenCount(TrainerCallback):
    """Tokens that this process trained on, without those of the run that it resumed."""

    tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = state.num_input_tokens_seen

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.tokens = int(state.num_input_tokens_seen - self._before)


class LogLine(TrainerCallback):
    """Each log of the Trainer as one short line."""

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        line = log_line(state.global_step, kwargs["logs"])
        if line and state.is_world_process_zero:
            tqdm.write(line)  # above a bar


class NamedBars(ProgressCallback):
    """Transformers' progress bars with names; they leave when they are full."""

    # Made here: a bar is drawn as soon as it is made.
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.training_bar, self.current_step = self._bar("training", state.max_steps, state), 0

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        if self.prediction_bar is None:
            self.prediction_bar = self._bar("evaluating", len(eval_dataloader), state)
        super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass  # LogLine's

    @staticmethod
    def _bar(name: str, total: int, state: TrainerState) -> tqdm[Any]:
        return tqdm(total=total, desc=name, leave=False, dynamic_ncols=True, disable=not state.is_world_process_zero)


def block_losses(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """The loss of each block of an evaluation; one by one, as all logits in FP32 may not fit into memory."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    rows = zip(logits, labels, strict=True)
    return torch.stack([functional.cross_entropy(row[:-1].float(), label[1:]) for row, label in rows])


def mean_block_loss(evaluated: EvalPrediction) -> dict[str, float]:
    """The loss in the place of the Trainer's own, a mean over batches.

    Several processes fill their last batches up with blocks from the beginning, which are in the means of those batches
    and are taken out of the losses of blocks.
    """
    return {"loss": float(np.mean(np.hstack(list(evaluated.predictions))))}


def make_trainer(
    model: PreTrainedModel, args: MixedPrecisionArguments, tokenizer: PreTrainedTokenizerBase, blocks: Blocks
) -> MixedPrecisionTrainer:
    # GPT-2 does not say so itself; the Trainer then divides by one token a block too many and shows too low a loss.
    model.loss_type = model.loss_type or "ForCausalLM"
    trainer = MixedPrecisionTrainer(
        model=model,
        args=args,
        train_dataset=blocks.train,
        eval_dataset=blocks.validation,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        preprocess_logits_for_metrics=block_losses,
        compute_metrics=None if args.batch_eval_metrics else mean_block_loss,
    )
    trainer.remove_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
    trainer.add_callback(LogLine)
    if not args.disable_tqdm:
        trainer.add_callback(NamedBars)
    return trainer


def train(trainer: MixedPrecisionTrainer, checkpoint: str | bool | None) -> tuple[float, int]:
    """Train; returns the seconds that it took and the tokens."""
    count = TokenCount()
    trainer.add_callback(count)
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    return metrics["train_runtime"], count.tokens


if __name__ == "__main__":
    main()

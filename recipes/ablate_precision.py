"""What is each technique of mixed precision worth? One fine-tuning, repeated with one technique left out at a time.

    python recipes/ablate_precision.py                                 # everything; minutes on a CPU
    python recipes/ablate_precision.py --scale small --seeds 2         # seconds: to see that it runs
    python recipes/ablate_precision.py --variants fp32 fp16 fp16-no-masters

A small GPT-2 learns English from the docstrings of this Python's library, once, in FP32. Then it is fine-tuned on the
language reference (``help()``'s topics) in every precision: the same weights to start from, the same batches in the
same order, one step of each in turns. Micikevicius et al. 2017 (arXiv 1710.03740) say what to expect: without loss
scaling small gradients become zero in FP16 (section 3.2), and without FP32 master weights an update below half the
spacing of FP16 numbers around its weight does nothing (section 3.1). A fine-tuning has just such updates: with AdamW
one is about as large as the learning rate, and the spacing around a weight of 0.1 is 6e-5.

The table shows what came out, whatever it is.
"""

from __future__ import annotations

import hf_mp.trainer  # isort: skip  before transformers: it imports bitsandbytes without a remark

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from datasets import Dataset, DatasetDict
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, set_seed
from transformers.pytorch_utils import Conv1D

import hf_mp
from _ablation import FineTuning, Shares, ablation_table, mean_shares, seed_spread, summarize
from _options import check_training, parse_options, save_numbers
from _text import make_blocks, python_documents, train_tokenizer, without_repetition

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Scale:
    """How large the model and its trainings are."""

    vocab_size: int = 4096
    context: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4
    batch: int = 32
    pretraining_steps: int = 400
    pretraining_rate: float = 2e-3
    steps: int = 120
    measure_every: int = 20
    documents: int | None = None  # to read of each text; None reads all


SCALES = {
    "full": Scale(),
    "medium": Scale(width=64, heads=2, pretraining_steps=200, steps=40),
    "small": Scale(
        vocab_size=300, context=32, width=32, layers=1, heads=2, batch=8, pretraining_steps=60, steps=12,
        measure_every=4, documents=60,
    ),
}  # fmt: skip


# The variants: each takes the pretrained model and gives a training of it


@dataclass
class Training:
    """A model on its way, with what its step needs.

    Attributes:
        model, optimizer: to train.
        dtype: the narrowest in which gradients travel.
        scaler: has the loss scale; None where nothing is scaled.
        autocast: for the explicit style, in which the loop enters autocast and calls the scaler; None where the model
            does so by itself.
    """

    model: PreTrainedModel
    optimizer: Optimizer
    dtype: torch.dtype
    scaler: Any = None
    autocast: Any = None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def backward(self, batch: Batch) -> Tensor:
        """The loss of the batch; the gradients are then unscaled."""
        if self.autocast is None:
            loss = self.model(**batch).loss
            loss.backward()
        else:
            with self.autocast:
                loss = self.model(**batch).loss
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
        return cast(Tensor, loss.detach())

    def update(self) -> None:
        if self.autocast is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def adamw(model: PreTrainedModel, rate: float) -> Optimizer:
    return AdamW(model.parameters(), lr=rate, weight_decay=0.0)


def in_fp32(model: PreTrainedModel, rate: float) -> Training:
    return Training(model, adamw(model, rate), torch.float32)


def in_mixed_precision(model: PreTrainedModel, rate: float, precision: str) -> Training:
    """FP32 masters; with a loss scale, if the precision has one."""
    runtime = hf_mp.MixedPrecision(precision)
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(adamw(model, rate))
    return Training(model, optimizer, runtime.policy.compute, runtime.scaler)


def without_masters(model: PreTrainedModel, rate: float) -> Training:
    """FP16 weights that AdamW updates themselves. Its state is FP32, so that nothing but the weights is at stake."""
    model.half()
    optimizer = adamw(model, rate)
    for weight in model.parameters():
        weight.grad_dtype = torch.float32  # FP16 gradients cannot hold what the loss scale is divided out of
        first, second = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32)
        optimizer.state[weight] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
    return Training(model, optimizer, torch.float16, hf_mp.HeadroomLossScaler(), hf_mp.autocast(torch.float16))


def in_pure_bf16(model: PreTrainedModel, rate: float) -> Training:
    """Weights, gradients and AdamW's state in BF16, as ``model.bfloat16()`` gives them."""
    model.bfloat16()
    return Training(model, adamw(model, rate), torch.bfloat16)


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        start: makes the training, of a model of its own and a learning rate.
        what: how it differs.
    """

    start: Callable[[PreTrainedModel, float], Training]
    what: str


VARIANTS = {
    "fp32": Variant(in_fp32, "everything in FP32"),
    "fp16": Variant(partial(in_mixed_precision, precision="fp16"), "FP16 with everything: masters, loss scale"),
    "fp16-no-scaling": Variant(
        partial(in_mixed_precision, precision="compute=fp16,loss_scale=none"), "FP16 without loss scaling"
    ),
    "fp16-no-masters": Variant(without_masters, "FP16 weights without FP32 masters, loss scale"),
    "bf16-pure": Variant(in_pure_bf16, "BF16 throughout, optimizer state too"),
    "bf16": Variant(partial(in_mixed_precision, precision="bf16"), "BF16 with FP32 masters"),
}


# Text, and the model that all start from


@dataclass(frozen=True)
class Texts:
    """Blocks of tokens: of the library's docstrings, of the language reference, and of its held-out topics."""

    library: Dataset
    reference: Dataset
    held_out: Dataset


def load_texts(scale: Scale) -> Texts:
    documents = list(without_repetition(python_documents()))
    topics = [text for name, text in documents if name.startswith("help topic")][: scale.documents]
    docstrings = [text for name, text in documents if not name.startswith("help topic")][: scale.documents]
    tokenizer = train_tokenizer(docstrings, scale.vocab_size)

    def blocks(train: list[str], held_out: list[str]) -> Any:
        rows = {"train": Dataset.from_dict({"text": train}), "validation": Dataset.from_dict({"text": held_out})}
        return make_blocks(DatasetDict(rows), tokenizer, scale.context)

    library = blocks(docstrings, docstrings[:8])
    reference = blocks([text for n, text in enumerate(topics) if n % 8], topics[::8])
    return Texts(library.train, reference.train, reference.validation)


def batches(blocks: Dataset, scale: Scale, steps: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """So many batches, shuffled by the seed; begins anew, in another order, when all blocks were seen."""
    tokens = torch.tensor(blocks["input_ids"])
    shuffle = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < scale.batch:
            order = torch.cat([order, torch.randperm(len(tokens), generator=shuffle)])
        chosen, order = tokens[order[: scale.batch]].to(device), order[scale.batch :]
        yield {"input_ids": chosen, "labels": chosen}


def pretrain(scale: Scale, library: Dataset, device: torch.device) -> PreTrainedModel:
    """A small GPT-2 that has learned to read docstrings, in FP32, with a learning rate that falls to zero."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=scale.vocab_size,
        n_positions=scale.context,
        n_embd=scale.width,
        n_layer=scale.layers,
        n_head=scale.heads,
        initializer_range=0.05,  # GPT-2's 0.02 suits a width of 768 and more
        resid_pdrop=0.0,  # or the variants would differ in what they drop
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).to(device)
    model.loss_type = "ForCausalLM"
    training = in_fp32(model, scale.pretraining_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizer, scale.pretraining_rate, scale.pretraining_steps, cycle_momentum=False
    )
    steps = scale.pretraining_steps
    for batch in track(batches(library, scale, steps, seed=0, device=device), "pretraining", steps, transient=True):
        training.backward(batch)
        training.update()
        training.optimizer.zero_grad()
        schedule.step()
    return model


# The fine-tunings, and what is measured in them


class Fp32Twin:
    """The model in FP32: it takes the weights of a training over, to say what its gradients and its loss should be."""

    def __init__(self, pretrained: PreTrainedModel) -> None:
        self.model = copy.deepcopy(pretrained)
        self.activation_gradients: list[Tensor] = []
        for module in self.model.modules():
            if isinstance(module, (Conv1D, nn.Linear)):
                module.register_full_backward_hook(self._keep)

    def _keep(self, module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
        self.activation_gradients.append(grad_output[0].flatten())

    @torch.no_grad()
    def _take_weights(self, model: PreTrainedModel) -> None:
        for own, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(theirs)

    def gradients(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Of the linear layers' outputs, in one tensor."""
        self._take_weights(model)
        self.activation_gradients.clear()
        torch.autograd.grad(self.model(**batch).loss, list(self.model.parameters()))
        return torch.cat(self.activation_gradients)

    @torch.no_grad()
    def held_out_loss(self, model: PreTrainedModel, blocks: Tensor) -> float:
        self._take_weights(model)
        parts = blocks.split(32)
        return sum(self.model(input_ids=part, labels=part).loss.item() * len(part) for part in parts) / len(blocks)


def share(parts: Sequence[Tensor], of: Sequence[Tensor]) -> float:
    """Of the elements that are true in ``of``, the share that is true in ``parts`` as well."""
    both = sum(int((part & mask).sum()) for part, mask in zip(parts, of, strict=True))
    return both / max(1, sum(int(mask.sum()) for mask in of))


def update_and_look(training: Training, twin: Fp32Twin, batch: Batch) -> Shares:
    """Apply the update, and tell what the step lost; the gradients are those of ``batch``."""
    weights = list(training.model.parameters())
    activation_gradients = twin.gradients(training.model, batch)
    rounds_to_zero = (activation_gradients * training.loss_scale).to(training.dtype) == 0
    before = [weight.detach().clone() for weight in weights]
    training.update()
    unchanged = [old == new for old, new in zip(before, weights, strict=True)]
    had_update = [training.optimizer.state[weight]["exp_avg"] != 0 for weight in weights]
    return Shares(
        activation_gradients=share([rounds_to_zero], [(activation_gradients != 0) & activation_gradients.isfinite()]),
        updates=share(unchanged, had_update),
    )


class Progress:
    """One variant's fine-tuning while it goes on."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.losses: list[float] = []
        self.shares: list[Shares] = []

    def step(self, batch: Batch, twin: Fp32Twin | None = None) -> None:
        """One step; with a ``twin`` it is looked at."""
        training = self.training
        loss = training.backward(batch)
        if twin is None:
            training.update()
        else:
            self.shares.append(update_and_look(training, twin, batch))
        training.optimizer.zero_grad()
        self.losses.append(loss.item())

    def finish(self, held_out_loss: float) -> FineTuning:
        scaler = self.training.scaler
        skipped = 0 if scaler is None else scaler.state.skipped_steps
        return FineTuning(self.losses, held_out_loss, mean_shares(self.shares), skipped)


@dataclass(frozen=True)
class Task:
    """What all variants train on, and from where."""

    scale: Scale
    texts: Texts
    pretrained: PreTrainedModel
    learning_rate: float
    device: torch.device

    def start(self, name: str) -> Training:
        return VARIANTS[name].start(copy.deepcopy(self.pretrained), self.learning_rate)

    def held_out(self) -> Tensor:
        return torch.tensor(self.texts.held_out["input_ids"]).to(self.device)


def fine_tune(task: Task, names: Sequence[str], seed: int) -> dict[str, FineTuning]:
    """Train the variants on the same batches, one step of each in turns."""
    scale, twin = task.scale, Fp32Twin(task.pretrained)
    progress = {name: Progress(task.start(name)) for name in names}
    order = batches(task.texts.reference, scale, scale.steps, seed, task.device)
    for number, batch in enumerate(track(order, f"seed {seed}", scale.steps, transient=True), start=1):
        for variant in progress.values():
            variant.step(batch, twin if number % scale.measure_every == 0 else None)
    held_out = task.held_out()
    return {name: p.finish(twin.held_out_loss(p.training.model, held_out)) for name, p in progress.items()}


# The program


@dataclass(frozen=True)
class Options:
    """What to run."""

    variants: list[str] = field(
        default_factory=lambda: list(VARIANTS), metadata={"choices": list(VARIANTS), "help": "Default: all of them."}
    )
    seeds: int = field(default=3, metadata={"help": "Orders of the data to train on."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Of the fine-tuning."})
    scale: str = field(default="full", metadata={"choices": list(SCALES), "help": "Of model and training."})
    output_dir: str = field(default="outputs/ablate_precision", metadata={"help": "For the numbers."})

    def __post_init__(self) -> None:
        check_training(self.seeds, self.learning_rate)


def run(options: Options, console: Console) -> dict[str, Any]:
    """Pretrain once, fine-tune every variant under every seed, and print what came of it; all numbers."""
    datasets.disable_progress_bars()
    scale, device = SCALES[options.scale], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = load_texts(scale)
    console.print(f"pretraining in FP32: {scale.pretraining_steps} steps")
    task = Task(scale, texts, pretrain(scale, texts.library, device), options.learning_rate, device)
    loss_before = Fp32Twin(task.pretrained).held_out_loss(task.pretrained, task.held_out())
    runs: dict[str, list[FineTuning]] = {name: [] for name in options.variants}
    for seed in range(options.seeds):
        console.print(f"fine-tuning under seed {seed}: {scale.steps} steps of {', '.join(runs)}")
        for name, found in fine_tune(task, list(runs), seed).items():
            runs[name].append(found)
    rows, spread = summarize(runs, VARIANTS), seed_spread(runs)
    console.print(ablation_table(rows))
    console.print(f"Held-out loss of the pretrained model: {loss_before:.4f}; the seed spread, of FP32's: {spread}")
    return {
        "options": {**asdict(options), **asdict(scale)},
        "loss_before": loss_before,
        "seed_spread": spread,
        "rows": [asdict(row) for row in rows],
        "runs": {name: [asdict(one) for one in of_seeds] for name, of_seeds in runs.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(Options, arguments)
    save_numbers(run(options, Console(highlight=False)), Path(options.output_dir))


if __name__ == "__main__":
    main()

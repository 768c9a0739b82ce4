"""Each feature of the Trainer, with the stock Trainer, our subclass in its place and our callback added.

At ``precision="fp32"`` all three are equal bit for bit. At FP16, subclass and callback are equal bit for bit, and both
follow the stock Trainer in FP32: the weights end close to its own, relative to the way that those went. SGD is the
optimizer, so that a wrong factor on the gradients shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainer_runs import (
    CLOCK,
    OURS,
    VOCABULARY,
    Rows,
    arguments,
    difference,
    history,
    logged,
    make_trainer,
    same,
    tiny_gpt2,
    token_rows,
    uneven_rows,
    weights,
)
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2ForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

FP16_TOLERANCE = 0.02  # of the way that the weights go; a factor of 2 on the gradients gives about 1
LOSS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Feature:
    """What makes a run show one feature."""

    settings: dict[str, Any] = field(default_factory=dict)
    named: Callable[[], dict[str, Any]] = dict
    model: Callable[[], nn.Module] = tiny_gpt2
    rows: Callable[[], Any] = token_rows
    trainer: type[Trainer] = Trainer
    args: type[TrainingArguments] = TrainingArguments
    tolerance: float = FP16_TOLERANCE


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(token_rows())


class FromLogits(Trainer):
    """Computes its loss outside the model, as many people's Trainers do."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        assert outputs.logits.dtype is torch.float32
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class SmallerGradients(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.model.transformer.wte.weight.grad.data.mul_(0.1)
        return loss


class OwnLog(Trainer):
    """Hands the Trainer another dictionary than it was given."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "mine": 1.0}, *args, **kwargs)


class StopAfterThree(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def loss_from_logits(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / (labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch)


def pad(batch: Rows) -> dict[str, Tensor]:
    length = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(batch):
        ids[index, : len(row["input_ids"])] = row["input_ids"]
        mask[index, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def frozen_but_norms() -> nn.Module:
    model = tiny_gpt2().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_()
    return model


def classifier() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 48}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **dropout, num_labels=3, pad_token_id=0, initializer_range=0.1)
    return GPT2ForSequenceClassification(config)


def classified_rows() -> Rows:
    return [{"input_ids": row["input_ids"], "labels": index % 3} for index, row in enumerate(token_rows())]


def translator() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 48, "init_std": 0.1}
    layers = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(BartConfig(**sizes, **layers, **heads, dropout=0.0, attention_dropout=0.0))


EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}


def with_evaluation() -> dict[str, Any]:
    return {"eval_dataset": token_rows(8), "compute_metrics": accuracy}


FEATURES = {
    "plain": Feature(),
    "adamw": Feature(
        {"optim": "adamw_torch", "learning_rate": 1e-2}, tolerance=0.1
    ),  # it divides small gradients by small ones
    "accumulation": Feature({"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1}),
    "clipping": Feature({"max_grad_norm": 0.05, "learning_rate": 2.0}),
    "no clipping": Feature({"max_grad_norm": 0.0, "learning_rate": 0.1}),
    "accumulation and clipping": Feature({"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}),
    "lr schedule": Feature({"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "evaluation": Feature(EVALUATING, with_evaluation),
    "evaluation at start": Feature({**EVALUATING, "eval_on_start": True}, with_evaluation),
    "plateau": Feature({**EVALUATING, "eval_steps": 1, "lr_scheduler_type": "reduce_lr_on_plateau"}, with_evaluation),
    "label smoothing": Feature({"label_smoothing_factor": 0.1}),
    "compute_loss_func": Feature({"gradient_accumulation_steps": 2}, lambda: {"compute_loss_func": loss_from_logits}),
    "compute_loss": Feature(trainer=FromLogits),
    "own log": Feature(trainer=OwnLog),
    "padding": Feature(named=lambda: {"data_collator": pad}, rows=uneven_rows),
    "group by length": Feature(
        {"train_sampling_strategy": "group_by_length"}, lambda: {"data_collator": pad}, rows=uneven_rows
    ),
    "iterable dataset": Feature(rows=Stream),
    "count of tokens": Feature({"include_num_input_tokens_seen": True}),
    "neftune": Feature({"neftune_noise_alpha": 5.0}),
    "dropout": Feature(model=lambda: tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1)),
    "gradient checkpointing": Feature({"gradient_checkpointing": True}),
    "reentrant checkpointing": Feature(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    ),
    "torch_compile, checkpointing": Feature(
        {"torch_compile": True, "torch_compile_backend": "aot_eager", "gradient_checkpointing": True}
    ),
    "gradients written through .data": Feature(trainer=SmallerGradients),
    "auto_find_batch_size": Feature({"auto_find_batch_size": True}),
    "user callbacks": Feature(named=lambda: {"callbacks": [StopAfterThree()]}),
    "frozen weights": Feature(model=frozen_but_norms),
    "untied embeddings": Feature(model=lambda: tiny_gpt2(tie_word_embeddings=False)),
    "sequence classification": Feature(
        {**EVALUATING, "learning_rate": 0.05},
        lambda: {"eval_dataset": classified_rows()[:8], "compute_metrics": accuracy},
        model=classifier,
        rows=classified_rows,
    ),
    "Seq2SeqTrainer": Feature(
        {**EVALUATING, "predict_with_generate": True, "generation_max_length": 6},
        lambda: {"eval_dataset": token_rows(8)},
        model=translator,
        trainer=Seq2SeqTrainer,
        args=Seq2SeqTrainingArguments,
    ),
}


@dataclass(frozen=True)
class Result:
    start: list[Tensor]
    end: list[Tensor]
    log: list[str]
    losses: list[float]
    norms: list[float]
    eval_losses: list[float]
    precise: bool  # whether nothing of ours is left on the model


@cache
def run(name: str, contender: str, precision: str, directory: Path) -> Result:
    feature = FEATURES[name]
    args = arguments(directory / f"{name} {contender} {precision}", feature.args, **feature.settings)
    model = feature.model()
    trainer = make_trainer(
        contender, precision, model, args, feature.trainer, train_dataset=feature.rows(), **feature.named()
    )
    start = weights(trainer.model)
    trainer.train()
    ours_stays = any("forward" in module.__dict__ for module in trainer.model.modules())
    return Result(
        start,
        weights(trainer.model),
        history(trainer, CLOCK | OURS),
        logged(trainer, "loss"),
        logged(trainer, "grad_norm"),
        logged(trainer, "eval_loss"),
        not ours_stays,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


def compiling_is_slow(cases: list[Any]) -> list[Any]:
    """``cases`` of features, of which those that compile are marked ``slow``."""
    slow = pytest.mark.slow
    return [
        pytest.param(*case.values, marks=(*case.marks, *[slow] * ("torch_compile" in case.values[0]))) for case in cases
    ]


@pytest.mark.parametrize(
    ("name", "contender"), compiling_is_slow(covering(FEATURES, ["subclass", "callback"], together=1))
)
def test_at_fp32_all_three_are_equal_bit_for_bit(name: str, contender: str, directory: Path) -> None:
    stock, ours = (run(name, who, "fp32", directory) for who in ("stock", contender))
    assert not same(stock.start, stock.end), "the run does not train"
    assert same(ours.end, stock.end)
    assert ours.log == stock.log


@pytest.mark.parametrize("name", compiling_is_slow(list(map(pytest.param, FEATURES))))
def test_at_fp16_both_follow_the_stock_trainer(name: str, directory: Path) -> None:
    stock = run(name, "stock", "fp32", directory)
    subclass, callback = (run(name, contender, "fp16", directory) for contender in ("subclass", "callback"))
    assert same(subclass.end, callback.end)
    assert subclass.log == callback.log
    assert not same(callback.end, stock.end), "nothing ran in FP16"
    assert difference(callback.end, stock.end, stock.start) < FEATURES[name].tolerance
    assert callback.losses == pytest.approx(stock.losses, rel=LOSS_TOLERANCE)
    assert callback.norms == pytest.approx(stock.norms, rel=0.02)
    assert callback.eval_losses == pytest.approx(stock.eval_losses, rel=LOSS_TOLERANCE)
    assert callback.precise


@pytest.mark.parametrize("contender", ["subclass", "callback"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_sgd_against_a_loop_by_hand(tmp_path: Path, contender: str, precision: str) -> None:
    """Accumulation over two micro-batches and clipping, in plain torch."""
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "train_sampling_strategy": "sequential"}
    args = arguments(tmp_path, lr_scheduler_type="constant", **settings)
    trainer = make_trainer(contender, precision, tiny_gpt2(), args, train_dataset=token_rows())
    trainer.train()

    model = tiny_gpt2().train()
    start, norms = weights(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.stack([row["input_ids"] for row in token_rows()])
    for update in range(4):
        for micro in range(2):
            batch = ids[8 * update + 4 * micro :][:4]
            logits = model(input_ids=batch).logits[:, :-1]
            (nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    # GPT-2 has no loss_type: the Trainer then divides by one token a row more than there are targets.
    tolerance = {"fp32": 1e-5, "fp16": FP16_TOLERANCE, "bf16": 0.1}[precision]
    assert difference(weights(trainer.model), weights(model), start) < tolerance
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=max(tolerance, 1e-4) + 1 / 24)

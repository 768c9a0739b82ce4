"""The gap between training and generation in TRL's GRPO and RLOO, which multiply by the head's weight themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import callback_of, quick_arguments, tiny_gpt2, token_rows
from transformers import TrainerCallback
from trl_runs import KINDS, load_default, named_for, save_tiny_qwen

import hf_mp
from hf_mp.trainer.fused_head import _option_cells

trl = pytest.importorskip("trl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("model"))


def cut(row: dict[str, str], index: int) -> dict[str, str]:
    """Prompts of different lengths, which TRL pads on the left."""
    return {"prompt": " ".join(row["prompt"].split()[: 2 + index % 4])}


class Measured(TrainerCallback):
    """Draws tokens after each step, and compares them with what the fused head gives."""

    def __init__(self) -> None:
        self.gaps: list[hf_mp.LogProbabilityGap] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        ids = torch.randint(2, model.config.vocab_size, (4, 9), generator=torch.Generator().manual_seed(1))
        labels, mask = ids.index_fill(1, torch.arange(4), -100), torch.ones_like(ids)
        mask[0, :2] = 0  # as TRL pads prompts
        batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "fused_lm_head": True}
        self.gaps.append(hf_mp.log_probability_gap(model, batch, temperature=args.temperature))


def run(kind: str, saved: Path, path: Path, **settings: Any) -> Any:
    name = KINDS[kind].trainer
    config = {**KINDS[kind].settings, "bf16": False, "gradient_checkpointing": False, "max_steps": 2}
    config["per_device_train_batch_size"] = 8  # of two prompts
    args = quick_arguments(path, getattr(trl, f"{name}Config"), **{**config, "learning_rate": 1e-3})
    callback, measured = hf_mp.MixedPrecisionCallback("fp16", **settings), Measured()
    torch.manual_seed(7)
    model = load_default(kind, saved)
    named = named_for(kind)
    named["train_dataset"] = named["train_dataset"].map(cut, with_indices=True)
    trainer = getattr(trl, f"{name}Trainer")(model=model, args=args, callbacks=[callback, measured], **named)
    padded: list[bool] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: padded.append(bool((kwargs["attention_mask"][:, 0] == 0).any())), with_kwargs=True
    )
    heads: list[torch.dtype] = []
    multiply = torch.mm

    def mm(*given: Any, **named: Any) -> Any:
        if "out" in named:
            heads.append(named["out"].dtype)
        return multiply(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", mm)
        trainer.train()
    assert any(padded)
    trainer.heads, trainer.gaps = set(heads), measured.gaps
    return trainer


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.exhaustive)])
def test_the_gap_in_training(tmp_path: Path, saved: Path, kind: str) -> None:
    trainer = run(kind, saved, tmp_path)
    assert trainer.heads == {torch.float16}
    assert len(trainer.gaps) == 2
    for gap in trainer.gaps:
        assert 0.0 < gap.mean < 0.01 and abs(gap.beta) < 0.01 and gap.clipped_share == 0.0


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.exhaustive)])
def test_the_fused_head_is_in_fp32_and_exact(tmp_path: Path, saved: Path, kind: str) -> None:
    trainer = run(kind, saved, tmp_path, fp32_head=True, exact_generation=True)
    assert trainer.heads == {torch.float32}  # of the policy and of the reference
    assert max(gap.mean for gap in trainer.gaps) < 1e-6  # of TRL's log-softmax, which goes over the logits in parts
    for model in (trainer.model, trainer.ref_model):
        assert [cell.cell_contents for cell in _option_cells(model)] == [False]
    assert callback_of(trainer).mixed_precision.policy.fp32_head


def test_evaluation_switches_the_head_back(tmp_path: Path) -> None:
    model = tiny_gpt2()
    trl.trainer.utils.add_fused_lm_head(model)
    args = quick_arguments(tmp_path, hf_mp.MixedPrecisionArguments, fp32_head=True, max_steps=1)
    during: list[bool] = []
    hook = model.transformer.register_forward_hook(
        lambda *call: during.extend(bool(cell.cell_contents) for cell in _option_cells(model))
    )
    rows = token_rows(8)
    trainer = hf_mp.MixedPrecisionTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    for run in (trainer.evaluate, trainer.train, trainer.evaluate):
        run()
        assert [cell.cell_contents for cell in _option_cells(model)] == [False]
    hook.remove()
    assert during and all(during)


def test_a_fused_head_without_the_option_is_refused() -> None:
    model = torch.nn.Linear(2, 2)

    def fused(x: torch.Tensor, fused_lm_head: bool = False) -> torch.Tensor:
        return x

    model.forward = fused  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="this version of TRL multiplies"):
        list(_option_cells(model))

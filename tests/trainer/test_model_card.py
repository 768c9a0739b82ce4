"""The model card says how the model was trained; its metadata stays the Trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer
from hf_mp.trainer.model_card import TITLE

pytestmark = pytest.mark.usefixtures("without_first_check")
CARD = {"model_name": "tiny", "license": "mit", "tasks": "text-generation", "dataset": "none"}


def settings(path: Path) -> dict[str, Any]:
    return {"output_dir": str(path), "max_steps": 3, "use_cpu": True, "report_to": [], "save_strategy": "no"}


@pytest.fixture
def data(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: values[0] for name, values in batch.items()}] * 8


def trained_by_subclass(model: GPT2LMHeadModel, data: Any, path: Path) -> Trainer:
    rules = {"lm_head": "fp32", torch.softmax: "fp32"}
    args = MixedPrecisionArguments(**settings(path), precision_report=True)
    trainer = MixedPrecisionTrainer(model=model, args=args, rules=rules, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.evaluate()
    return trainer


def trained_by_callback(model: GPT2LMHeadModel, data: Any, path: Path) -> Trainer:
    callback = MixedPrecisionCallback("bf16")
    args = TrainingArguments(**settings(path))
    trainer = Trainer(model=model, args=args, callbacks=[callback], train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer


def section_of(path: Path) -> list[str]:
    content = ModelCard.load(path / "README.md").content
    assert content.count(TITLE) == 1
    return content.partition(f"{TITLE}\n\n")[2].partition("\n\n### Framework versions")[0].splitlines()


def test_the_subclass_writes_a_section(gpt2: GPT2LMHeadModel, data: Any, tmp_path: Path) -> None:
    trainer = trained_by_subclass(gpt2, data, tmp_path)
    trainer.create_model_card(**CARD)
    text = "\n".join(section_of(tmp_path))
    for words in (
        "- precision: `fp16`, by hf_mp ", "- loss scaling: headroom, at 1024 first", "- skipped steps: 0 of 3",
        "- own rules: `lm_head` in fp32, `softmax` in fp32",
        "| parameters | elements | stored | computed | gradient | reduced | moments | saved |\n| --- |",
        "\n| linear | ",
        "- [precision report](precision_report.html) of the run",
    ):  # fmt: skip
        assert words in text
    assert (tmp_path / "precision_report.html").is_file()


def test_the_callback_writes_one_too_and_again_in_its_place(gpt2: GPT2LMHeadModel, data: Any, tmp_path: Path) -> None:
    trainer = trained_by_callback(gpt2, data, tmp_path)
    for _ in range(2):
        trainer.create_model_card(**CARD)
    assert "- loss scaling: none" in section_of(tmp_path)
    trainer.train()
    trainer.create_model_card(**CARD)
    assert any(line.startswith("- skipped steps: 0 of ") for line in section_of(tmp_path))


def test_healed_places_are_named(gpt2: GPT2LMHeadModel, data: Any, tmp_path: Path) -> None:
    trainer = trained_by_subclass(gpt2, data, tmp_path)
    trainer.mixed_precision.add_rules({"transformer.h.0.mlp.c_fc:addmm": "scaled/16"})
    trainer.create_model_card(**CARD)
    assert '- kept in FP16\'s range by `on_overflow="heal"`: `transformer.h.0.mlp.c_fc:addmm: scaled/16`' in section_of(
        tmp_path
    )


def test_metadata_and_the_rest_are_the_stock_trainers(gpt2: GPT2LMHeadModel, data: Any, tmp_path: Path) -> None:
    trainer = trained_by_subclass(gpt2, data, tmp_path)
    Trainer.create_model_card(trainer, **CARD)
    stock = ModelCard.load(tmp_path / "README.md")
    trainer.create_model_card(**CARD)
    ours = ModelCard.load(tmp_path / "README.md")
    assert "model-index" in stock.data.to_dict()
    assert ours.data.to_dict() == stock.data.to_dict()
    before, _, after = ours.content.partition(TITLE)
    assert before + "### Framework versions" + after.partition("### Framework versions")[2] == stock.content


def test_a_card_of_another_shape_gets_the_section_at_its_end(
    gpt2: GPT2LMHeadModel, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained_by_callback(gpt2, data, tmp_path)
    del vars(trainer)["create_model_card"]
    card = tmp_path / "README.md"
    own = lambda self: card.write_text("---\nlicense: mit\n---\n# Mine\n")  # noqa: E731
    monkeypatch.setattr(Trainer, "create_model_card", own)
    trainer.train()
    trainer.create_model_card()
    assert card.read_text().startswith(f"---\nlicense: mit\n---\n# Mine\n\n{TITLE}\n\n- precision: `bf16`")


def test_fp32_says_nothing_before_it_ran(gpt2: GPT2LMHeadModel, data: Any, tmp_path: Path) -> None:
    args = MixedPrecisionArguments(**settings(tmp_path), precision="fp32")
    trainer = MixedPrecisionTrainer(model=gpt2, args=args, train_dataset=data)
    trainer.create_model_card(**CARD)
    assert TITLE not in (tmp_path / "README.md").read_text()

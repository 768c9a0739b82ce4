"""``on_overflow="heal"`` through both adapters: no step lost, clipping done again, remedies in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from range_models import Gated, batches
from trainer_runs import callback_of, quick_arguments
from transformers import Trainer, TrainingArguments

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer, calibrate

FACTOR = 2.0**18
REMEDIES = {"up:linear": "scaled/256", "down:linear": "scaled/256"}


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    # By SGD: Adam makes a whole step of a gradient that is rounding alone, whichever sign it has.
    given = {"max_steps": 4, "learning_rate": 1e-2, "optim": "sgd", "max_grad_norm": 0.1, "seed": 0}
    return quick_arguments(folder, kind, **{**given, **settings})


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"ids": ids, "labels": ids} for batch in batches(6) for ids in batch["ids"]]


def model() -> Gated:
    torch.manual_seed(0)
    return Gated(factor=FACTOR)


def trainer(folder: Path, kind: str, **settings: Any) -> Trainer:
    if kind == "callback":
        callback = MixedPrecisionCallback("fp16", on_overflow="heal")
        return Trainer(model(), arguments(folder, **settings), train_dataset=rows(), callbacks=[callback])
    args = arguments(folder, MixedPrecisionArguments, on_overflow="heal", precision=kind, **settings)
    return MixedPrecisionTrainer(model(), args, train_dataset=rows())


def runtime_of(one: Trainer) -> Any:
    return (one if isinstance(one, MixedPrecisionTrainer) else callback_of(one)).mixed_precision


@pytest.mark.parametrize("kind", ["fp16", "callback", "fp16-lean"])
def test_no_step_is_lost_and_gradients_are_clipped(kind: str, tmp_path: Path) -> None:
    """All parameters as with FP32: the healed step was clipped like the others."""
    healing = trainer(tmp_path, kind)
    healing.train()
    reference = Trainer(model(), arguments(tmp_path), train_dataset=rows())
    reference.train()
    runtime = runtime_of(healing)
    assert runtime.stats.skipped_steps == 0 and runtime.remedies == REMEDIES
    logs = [entry for entry in healing.state.log_history if "loss" in entry]
    assert [entry["remedies"] for entry in logs] == [2] * 4
    expected = [entry for entry in reference.state.log_history if "loss" in entry]
    for name in ("loss", "grad_norm"):  # of the healed step, the first one, the Trainer has those of its first try
        assert [one[name] for one in logs[1:]] == pytest.approx([one[name] for one in expected[1:]], rel=0.02)
    before = model()
    for (name, one), other in zip(healing.model.named_parameters(), reference.model.parameters(), strict=True):
        start = before.get_parameter(name)
        assert (one - other).norm() <= 0.05 * (other - start).norm(), name
    assert healing.evaluate(rows()[:4])["eval_loss"] < 10.0  # which follows the remedies


@pytest.mark.parametrize("kind", ["fp16", "callback", "fp16-lean"])
def test_the_remedies_are_in_the_checkpoint(kind: str, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", kind, save_strategy="steps", save_steps=2)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert json.loads((checkpoint / "mixed_precision.json").read_text())["remedies"] == REMEDIES
    resumed = trainer(tmp_path / "resumed", kind)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert runtime_of(resumed).remedies == REMEDIES
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_rules_of_a_calibration_make_it_unnecessary(tmp_path: Path) -> None:
    report = calibrate(model(), batches(1))
    rules = json.loads(report.save(tmp_path).read_text())["rules"]
    args = arguments(tmp_path, MixedPrecisionArguments, on_overflow="heal")
    ruled = MixedPrecisionTrainer(model(), args, train_dataset=rows(), rules=rules)
    ruled.train()
    assert ruled.mixed_precision is not None
    assert ruled.mixed_precision.stats.skipped_steps == 0 and not ruled.mixed_precision.remedies


def test_the_report_of_the_run_shows_the_healed_places(tmp_path: Path) -> None:
    healing = trainer(tmp_path, "fp16", precision_report=True)
    healing.train()
    records = [json.loads(line) for line in (tmp_path / "precision_log.jsonl").read_text().split("\n") if line]
    healed = [record["healed"] for record in records if record["record"] == "healed"]
    assert [(place["step"], place["module"], place["op"]) for place in healed] == [
        (1, "up", "linear"),
        (1, "down", "linear"),
    ]
    page = (tmp_path / "precision_report.html").read_text()
    assert "Healed places" in page and "<code>up:linear: scaled/256</code>" in page
    assert "2 places left FP16&#39;s range and were healed." in page

"""``on_overflow="heal"`` through both adapters: no step lost, clipping done again, remedies in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from range_models import Gated, batches
from trainer_runs import callback_of, logged, quick_arguments
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer, calibrate

FACTOR = 2.0**18
REMEDIES = {"up:linear": "scaled/256", "down:linear": "scaled/256"}


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    # By SGD: Adam makes a whole step of a gradient that is rounding alone, whichever sign it has.
    given = {"max_steps": 4, "learning_rate": 1e-2, "optim": "sgd", "max_grad_norm": 0.1, "seed": 0}
    return quick_arguments(folder, kind, **{**given, **settings})


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"ids": ids, "labels": ids} for batch in batches(6) for ids in batch["ids"]]


def model(factor: float = FACTOR, model_class: type[Gated] = Gated) -> Gated:
    torch.manual_seed(0)
    return model_class(factor=factor)


def trainer(folder: Path, kind: str, of: Gated | None = None, **settings: Any) -> Trainer:
    of = model() if of is None else of
    if kind == "callback":
        callback = MixedPrecisionCallback("fp16", on_overflow="heal")
        return Trainer(of, arguments(folder, **settings), train_dataset=rows(), callbacks=[callback])
    args = arguments(folder, MixedPrecisionArguments, on_overflow="heal", precision=kind, **settings)
    return MixedPrecisionTrainer(of, args, train_dataset=rows())


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
    for name in ("loss", "grad_norm"):  # of the healed step, the first one, as well: its first run gave NaN
        assert [one[name] for one in logs] == pytest.approx([one[name] for one in expected], rel=0.02)
    before = model()
    for (name, one), other in zip(healing.model.named_parameters(), reference.model.parameters(), strict=True):
        start = before.get_parameter(name)
        assert (one - other).norm() <= 0.05 * (other - start).norm(), name
    assert healing.evaluate(rows()[:4])["eval_loss"] < 10.0  # which follows the remedies


class CountingItems(Gated):
    """As Transformers' language models: a Trainer changes the loss of such a one in place."""

    accepts_loss_kwargs = True

    def forward(self, ids: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        outputs = super().forward(ids, labels)
        return {**outputs, "loss": outputs["loss"] * labels.numel() / num_items_in_batch}


class LeaveRange(TrainerCallback):
    """From the fourth step on, the second of its entry in the log, values leave FP16's range."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.up.weight.mul_(FACTOR if state.global_step == 3 else 1.0)


@pytest.mark.parametrize("kind", ["fp16", "callback"])
@pytest.mark.parametrize("model_class", [Gated, CountingItems])
@pytest.mark.parametrize("nan_filter", [True, False])
def test_the_log_has_the_loss_of_a_healed_step(
    kind: str, model_class: type[Gated], nan_filter: bool, tmp_path: Path
) -> None:
    """Also in an entry of several steps of several micro-batches, and in the loss of the whole run."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 6}
    settings |= {"logging_steps": 2, "logging_nan_inf_filter": nan_filter, "max_grad_norm": 0, "learning_rate": 1e-6}
    healing = trainer(tmp_path, kind, model(1.0, model_class), **settings)
    reference = Trainer(model(1.0, model_class), arguments(tmp_path, **settings), train_dataset=rows())
    for one in (healing, reference):
        one.add_callback(LeaveRange())
        one.train()
    assert runtime_of(healing).stats.skipped_steps == 0 and "up:linear" in runtime_of(healing).remedies
    for name, count in {"loss": 3, "grad_norm": 3, "train_loss": 1}.items():
        assert logged(healing, name) == pytest.approx(logged(reference, name), rel=0.02)
        assert len(logged(healing, name)) == count


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

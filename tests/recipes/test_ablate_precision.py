"""The ablation at small size, and its parts: the measured shares, the verdicts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import ablate_precision as recipe
from _ablation import FineTuning, Shares, ablation_table, seed_spread, summarize
from ablate_precision import (
    SCALES,
    VARIANTS,
    Task,
    batches,
    load_texts,
    main,
    pretrain,
    update_and_look,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NOTHING_LOST = Shares(0.0, 0.0)


@pytest.fixture(scope="module")
def task() -> Task:
    scale = dataclasses.replace(SCALES["small"], pretraining_steps=20, documents=20)
    texts = load_texts(scale)
    return Task(scale, texts, pretrain(scale, texts.library, CPU), 2e-5, CPU)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("ablation")
    console = Console(width=160, record=True)
    patch = pytest.MonkeyPatch()
    patch.setattr(recipe, "Console", lambda **settings: console)
    try:
        main(["--scale=small", "--seeds=2", f"--output_dir={directory}"])
    finally:
        patch.undo()
    return directory, console.export_text()


def test_the_recipe_runs_all_variants_and_reports(ended):
    directory, text = ended
    found = json.loads((directory / "numbers.json").read_text())
    assert [row["variant"] for row in found["rows"]] == list(VARIANTS)
    for name in VARIANTS:
        assert name in text
        assert [len(run["losses"]) for run in found["runs"][name]] == [SCALES["small"].steps] * 2
    assert "the seed spread" in text


def test_what_the_paper_says_is_seen_at_small_size(ended):
    found = json.loads((ended[0] / "numbers.json").read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    # As shares of what FP32 gains, not of the seed spread, which two seeds hardly show. Measured: 1e-5 and 0.3.
    gain = found["loss_before"] - rows["fp32"]["held_out_loss"]
    assert abs(rows["fp16"]["difference"]) < 0.01 * gain
    assert rows["fp16-no-masters"]["difference"] > 0.1 * gain  # half of its updates are lost
    lost = {name: row["lost"] for name, row in rows.items()}
    assert lost["fp16-no-masters"]["updates"] > 0.3 > 0.01 > lost["fp16"]["updates"]
    assert lost["bf16-pure"]["updates"] > 0.8  # measured: 0.94, and 0.54 without masters in FP16
    assert lost["fp16-no-scaling"]["activation_gradients"] > 2 * lost["fp16"]["activation_gradients"]
    assert lost["fp32"]["activation_gradients"] == lost["bf16"]["activation_gradients"] == 0.0


def test_all_seeds_differ_and_all_variants_get_the_same_batches(task):
    def order(seed):
        return torch.cat([batch["input_ids"] for batch in batches(task.texts.reference, task.scale, 9, seed, CPU)])

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_weights_without_masters_are_fp16_and_their_state_is_fp32(task):
    training = task.start("fp16-no-masters")
    batch = next(iter(batches(task.texts.reference, task.scale, 1, 0, CPU)))
    training.backward(batch)
    training.update()
    weight = next(training.model.parameters())
    state = training.optimizer.state[weight]
    assert (weight.dtype, weight.grad.dtype, state["exp_avg"].dtype) == (torch.float16, torch.float32, torch.float32)


def test_shares_are_of_what_was_planted(task):
    training, twin = task.start("fp32"), recipe.Fp32Twin(task.pretrained)
    batch = next(iter(batches(task.texts.reference, task.scale, 1, 0, CPU)))
    training.backward(batch)
    for weight in training.model.parameters():
        weight.grad.flatten()[::2] = 0.0  # half of them "underflow", and have no update
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0  # and no update of the others changes a weight
    lost = update_and_look(training, twin, batch)
    assert lost.updates == 1.0
    assert lost.activation_gradients == 0.0


def run(loss: float) -> FineTuning:
    return FineTuning([loss] * 3, loss, NOTHING_LOST, 0)


def test_verdicts_compare_with_the_seed_spread():
    runs = {
        "fp32": [run(4.0), run(4.1)],
        "fp16": [run(4.05), run(4.15)],
        "fp16-no-masters": [run(4.2), run(4.4)],
        "bf16": [run(3.8), run(3.9)],
    }
    assert seed_spread(runs) == pytest.approx(0.1)
    rows = summarize(runs, VARIANTS)
    assert [row.verdict for row in rows] == [
        "",
        "within the seed spread",
        "worse, beyond the seed spread",
        "better, beyond the seed spread",
    ]
    assert rows[2].difference == pytest.approx(0.25)


def test_without_fp32_or_with_one_seed_there_is_nothing_to_compare_with():
    (alone,) = summarize({"fp16": [run(4.0), run(4.1)]}, VARIANTS)
    assert (alone.difference, alone.verdict) == (None, "")
    single = {"fp32": [run(4.0)], "fp16": [run(4.1)]}
    assert seed_spread(single) is None and summarize(single, VARIANTS)[1].verdict == ""
    assert ablation_table([alone]).row_count == 1

"""The Trainer on two processes, with DDP and with accelerate's FSDP2: losses, decisions, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import same_by_name

pytestmark = pytest.mark.slow

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], folder: Path) -> Results:
    return launch("trainer_worker.py", folder)


@pytest.fixture(scope="module")
def one(launch: Callable[..., Results], two: Results, folder: Path, tmp_path_factory: Any) -> dict[str, Any]:
    checkpoint = str(folder / "resume" / "checkpoint-4")
    return launch("trainer_worker.py", tmp_path_factory.mktemp("one"), processes=1, CHECKPOINT=checkpoint)[0]


def assert_ranks_agree(two: Results, *path: str) -> dict[str, Any]:
    first, second = two
    for key in path:
        first, second = first[key], second[key]
    for key in ("scale", "skipped", "learning_rate"):
        assert first[key] == second[key], key
    assert same_by_name(first["weights"], second["weights"])
    return first


WRAPPERS = {"": "DistributedDataParallel", "fsdp_": "FSDPGPT2LMHeadModel"}


@pytest.mark.parametrize("kind", ["", "fsdp_"], ids=["ddp", "fsdp"])
def test_losses_are_those_of_one_process(one: dict[str, Any], two: Results, kind: str) -> None:
    log = assert_ranks_agree(two, f"{kind}twenty_steps")
    assert log["wrapper"] == WRAPPERS[kind]
    assert len(log["loss"]) == 20
    assert log["loss"] == pytest.approx(one["twenty_steps"]["loss"], rel=1e-4)
    assert log["evaluation"] == pytest.approx(one["twenty_steps"]["evaluation"], rel=1e-4)
    assert log["loss"][-1] < 0.95 * log["loss"][0]


@pytest.mark.parametrize("kind", ["", "fsdp_"], ids=["ddp", "fsdp"])
def test_an_overflow_on_one_process_skips_the_step_on_both(two: Results, kind: str) -> None:
    log = assert_ranks_agree(two, f"{kind}overflow")
    assert log["skipped"] == [False, False, False, True, False, False, False, False]
    assert log["scale"][3] < log["scale"][2]
    assert log["learning_rate"][3] == log["learning_rate"][2] > log["learning_rate"][4]


@pytest.mark.parametrize("kind", ["", "fsdp_"], ids=["ddp", "fsdp"])
def test_uneven_tokens_in_accumulated_batches_count_once(one: dict[str, Any], two: Results, kind: str) -> None:
    log, alone = assert_ranks_agree(two, f"{kind}accumulation"), one["accumulation"]
    assert log["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert log["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)


def test_the_recipe_evaluates_each_block_once_on_any_number_of_processes(one: dict[str, Any], two: Results) -> None:
    for when in ("before", "after"):
        alone = one["recipe"][f"eval_loss_{when}"]
        assert two[0]["recipe"][f"eval_loss_{when}"] == pytest.approx(alone, abs=1e-4), when


RESUMED = [
    "resume", "lean", "eight_bits_resume", "fsdp_resume_full", "fsdp_resume_sharded", "fsdp_lean_resume",
]  # fmt: skip


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_training_is_bit_for_bit_that_at_once(two: Results, case: str) -> None:
    at_once, after = assert_ranks_agree(two, case, "at_once"), assert_ranks_agree(two, case, "after")
    assert at_once["skipped"][2]  # so that the state restored is not that of a new run
    assert after["loss"] == at_once["loss"][4:]
    for key in ("scale", "skipped", "learning_rate"):
        assert after[key] == at_once[key][4:], key
    assert same_by_name(after["weights"], at_once["weights"])
    assert len(after["momentum"]) > 0 or "eight_bits" in case
    assert all(torch.equal(left, right) for left, right in zip(after["momentum"], at_once["momentum"], strict=True))
    assert after["evaluation"] == at_once["evaluation"]


@pytest.mark.parametrize(
    ("case", "model"),
    [
        ("resume", "model.safetensors"),
        ("fsdp_resume_full", "pytorch_model_fsdp.bin"),
        ("fsdp_resume_sharded", "pytorch_model_fsdp_0"),
    ],
)
def test_a_checkpoint_holds_the_loss_scale_once(two: Results, case: str, model: str) -> None:
    found = two[0][case]
    assert {"mixed_precision.json", model} <= set(found["files"])
    assert found["state"]["loss_scaler"]["skipped_steps"] == 1
    assert found["state"]["loss_scaler"]["scale"] == found["at_once"]["scale"][3]


def test_one_process_resumes_what_two_have_saved(one: dict[str, Any], two: Results) -> None:
    at_once, after = two[0]["resume"]["at_once"], one["resume_from_two"]
    assert after["scale"] == at_once["scale"][4:]
    assert after["loss"] == pytest.approx(at_once["loss"][4:], rel=1e-4)


@pytest.mark.parametrize("case", ["fsdp_checkpointing", "fsdp_of_model", "fsdp_ram_efficient"])
def test_settings_of_fsdp_change_no_bit(two: Results, case: str) -> None:
    log, plain = assert_ranks_agree(two, case), assert_ranks_agree(two, "fsdp_without")
    assert log["loss"] == plain["loss"] and log["scale"] == plain["scale"]


def test_a_model_that_fsdp_trained_is_saved_whole(two: Results) -> None:
    saved = two[0]["fsdp_saved_model"]
    assert same_by_name(saved["trained"], saved["loaded"])


def test_accelerate_launch_with_fsdp_does_the_same(
    launch: Callable[..., Results], two: Results, tmp_path: Path
) -> None:
    launched = launch("trainer_worker.py", tmp_path, "overflow", launcher="fsdp2.yaml")
    log, expected = assert_ranks_agree(launched, "overflow"), two[0]["fsdp_overflow"]
    assert log["wrapper"] == "FSDPGPT2LMHeadModel"
    assert log["loss"] == expected["loss"] and log["scale"] == expected["scale"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_hybrid_shards_of_accelerates_parallelism_config(
    launch: Callable[..., Results], two: Results, tmp_path: Path
) -> None:
    """Two replicas of two shards: one of four ranks plants the overflow, and all skip that step."""
    launched = launch("trainer_worker.py", tmp_path, "overflow", launcher="hsdp.yaml", processes=4)
    log, expected = launched[0]["overflow"], two[0]["fsdp_overflow"]
    assert log["wrapper"] == "FSDPGPT2LMHeadModel"
    for rank in launched:
        assert rank["overflow"]["skipped"] == expected["skipped"] and rank["overflow"]["scale"] == expected["scale"]
    healthy = [step for step, skipped in enumerate(expected["skipped"]) if not skipped]
    assert [log["loss"][step] for step in healthy] == pytest.approx(
        [expected["loss"][step] for step in healthy], rel=1e-4
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_accelerate_compiles_the_blocks_that_fsdp_shards(launch: Callable[..., Results], tmp_path: Path) -> None:
    found = launch("trainer_worker.py", tmp_path, "fsdp_overflow", "fsdp_compiled")
    plain = found[0]["fsdp_overflow"]
    log = assert_ranks_agree(found, "fsdp_compiled")
    assert log["compiled_frames"] > 0
    assert log["skipped"] == [False, False, True, False]
    assert log["loss"][:2] == pytest.approx(plain["loss"][:2], rel=1e-4)


def test_processes_train_together_after_an_evaluation(two: Results) -> None:
    for rank in two:
        found, expected = rank["evaluated_before"], rank["twenty_steps"]
        assert found["wrapper"] == "DistributedDataParallel"
        assert found["loss"] == expected["loss"] and found["grad_norm"] == expected["grad_norm"]


def test_processes_train_together_after_an_evaluation_with_the_callback(two: Results) -> None:
    first, second = (rank["callback_evaluated_before"] for rank in two)
    assert same_by_name(first["evaluated"], second["evaluated"])
    assert same_by_name(first["evaluated"], first["plain"])
    for rank in (first, second):
        assert "each would train alone. If evaluation_loop() ran before train()" in rank["refused"]


@pytest.mark.parametrize("case", ["eight_bits_fp16", "eight_bits_fp16-lean"])
def test_eight_bit_states_train_as_on_one_process(one: dict[str, Any], two: Results, case: str) -> None:
    alone, log = one[case], assert_ranks_agree(two, case)
    assert log["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert 0 < alone["eight_bit_states"] == log["eight_bit_states"]


def test_a_lean_layout_trains_under_fsdp_and_saves_fp32(two: Results) -> None:
    log, plain = two[0]["fsdp_lean"], two[0]["fsdp_twenty_steps"]
    assert log["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    saved = {name: value for name, value in log["saved"].items() if name in log["weights"]}
    assert same_by_name(saved, log["weights"])


@pytest.mark.parametrize("saved", ["fsdp_lean_resume", "fsdp_resume_sharded"])
def test_fp16_and_fp16_lean_resume_each_other_under_fsdp(two: Results, saved: str) -> None:
    after, found = assert_ranks_agree(two, "other_layout", saved), two[0][saved]
    assert {"optimizer_0", "pytorch_model_fsdp_0"} <= set(found["files"])  # accelerate's own
    assert after["loss"] == pytest.approx(found["at_once"]["loss"][4:], rel=1e-4)
    for key in ("scale", "skipped", "learning_rate"):
        assert after[key] == found["at_once"][key][4:], key


def test_what_cannot_train_is_refused_by_each(two: Results) -> None:
    said = "ValueError: ranks that train one model .*: rank 0 has precision=fp16; rank 1 has precision=fp16-lean"
    for rank in two:
        assert re.match(said, rank["mixed_layouts"]["mixed layouts"])

"""Checkpoints of plain loops: saved on some ranks and resumed on others, bit for bit; damaged ones are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

LAYOUTS = ("fp16", "bf16", "fp16-lean")
Results = dict[str, list[dict[str, Any]]]

SHARD = r"shards/shard-00002-model-00001-of-00001\.safetensors"


@pytest.fixture(scope="module")
def two(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Saved on two ranks, and what is damaged or refused there."""
    runs = ("2-save-fsdp-two", "1-load-one-two", "2-load-fsdp-two", "2-damaged-fsdp-damaged", "2-refused-fsdp-refused")
    return launch("checkpoint_worker.py", tmp_path_factory.mktemp("two"), *runs, processes=1)[0]


@pytest.fixture(scope="module")
def layouts(launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    runs = (
        "2-save-ddp-ddp", "2-load-fsdp-ddp", "2-save-fsdp-fsdp", "2-load-fsdp-fsdp", "2-load-ddp-fsdp",
        "4-save-hsdp-hsdp", "1-load-one-hsdp", "4-load-hsdp-fsdp",
    )  # fmt: skip
    return launch("checkpoint_worker.py", tmp_path_factory.mktemp("layouts"), *runs, processes=1, timeout_seconds=280)[
        0
    ]


def assert_same_state(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    left, right = loaded["tensors"], saved["tensors"]
    assert left.keys() == right.keys() and any(name.endswith("exp_avg_sq") for name in left)
    assert [name for name in left if left[name].dtype != right[name].dtype] == []
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert loaded["lr"] == saved["lr"] == [5e-4]


def assert_resumed(results: Results, saved: str, loaded: str, precision: str) -> None:
    before = results[saved][0][precision]
    for rank in results[loaded]:
        assert_same_state(rank[precision]["state"], before["state"])
        assert rank[precision]["state"]["runtime"] == before["state"]["runtime"]
        assert (rank[precision]["step"], rank[precision]["extra"]) == (2, {"epoch": 1.5})
        assert rank[precision]["losses"] == pytest.approx(before["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", LAYOUTS)
def test_one_process_and_two_resume_what_two_have_saved(two: Results, precision: str) -> None:
    assert_resumed(two, "2-save-fsdp-two", "1-load-one-two", precision)
    assert_resumed(two, "2-save-fsdp-two", "2-load-fsdp-two", precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("missing", rf"{SHARD} is missing"),
        ("torn", rf"{SHARD} has \d+ bytes, \d+ were written"),
        ("flipped", rf"{SHARD} is not what was written"),
        ("stranger", r"shards/shard-00009.* is not in the manifest: remove it"),
        ("unfinished", r"hf_mp_manifest\.json is missing: it was never finished"),
    ],
)
def test_a_damaged_shard_is_named_by_all_before_anything_is_loaded(two: Results, damage: str, said: str) -> None:
    for rank in two["2-damaged-fsdp-damaged"]:
        assert re.search(f"(?s)No valid checkpoint found in .*checkpoint-2: {said}.*Resume from another", rank[damage])
        assert rank[f"{damage} newest"] == 1
        assert any(re.search(f"(?s)resuming from .*checkpoint-1; .*{said}", line) for line in rank[f"{damage} warned"])
        assert rank["unchanged"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            "another_model",
            "CheckpointError: these are weights of another model: missing .*model/bias.*, unexpected .*model/transf",
        ),
        (
            "other_groups",
            r"CheckpointError: .*groups of \[16\] parameters, and this one has groups of \[1, 15\], .* the same groups",
        ),
        ("values_that_json_does_not_know", "CheckpointError: extra, .* cannot be written as JSON: .*Tensor"),
        ("nothing_there", "NoCheckpointError: No valid checkpoint found in .*nowhere: .*none yet. Train from"),
        ("no_directory", "CheckpointError: .* could not be saved: rank 0: .*File exists"),
        ("factored_moments", "CheckpointError: .*_var of transformer.* cannot be cut for another number of ranks"),
        ("moments_in_blocks", "CheckpointError: absmax1 of transformer.* cannot be cut for another number of ranks"),
        ("one_rank_has_other_state", "CheckpointError: factor of transformer.wte.weight .* cannot be cut for another"),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_refused_by_all(two: Results, case: str, said: str) -> None:
    for rank in two["2-refused-fsdp-refused"]:
        assert re.match(said, rank[case], flags=re.DOTALL), rank[case]
        assert rank["files"] == "checkpoint-1"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("precision", LAYOUTS)
def test_other_ways_to_spread_a_model_resume_it_too(layouts: Results, precision: str) -> None:
    assert_resumed(layouts, "2-save-ddp-ddp", "2-load-fsdp-ddp", precision)
    assert_resumed(layouts, "2-save-fsdp-fsdp", "2-load-ddp-fsdp", precision)
    assert_resumed(layouts, "4-save-hsdp-hsdp", "1-load-one-hsdp", precision)
    assert_resumed(layouts, "2-save-fsdp-fsdp", "4-load-hsdp-fsdp", precision)
    # On as many ranks: bit for bit.
    for saved, resumed in zip(layouts["2-save-fsdp-fsdp"], layouts["2-load-fsdp-fsdp"], strict=True):
        assert resumed[precision]["losses"] == saved[precision]["losses"]
        assert_same_state(resumed[precision]["end"], saved[precision]["end"])

"""A few of the faults that `make faults` brings by the hundred, each from a seed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from harness import Cases
from hostile import HOSTILE
from soak import MOST_BYTES_A_STEP, slope
from transformers import Trainer

# One of each sort in `make test`; the others take a minute.
QUICK_HOSTILE = {
    "torch.save of a call in optimizer.pt",
    "a plain pickle in rng_state.pth",
    "training arguments that run code",
    "a pipe as optimizer.pt",
    "model.safetensors linked to a file outside",
    "a config nested too deeply",
}


def lost(outcomes: list[Any]) -> list[Any]:
    return [outcome for outcome in outcomes if outcome.lost]


STOCK_LOADER = inspect.getsource(Trainer._load_optimizer_and_scheduler)
two_cpus = pytest.param(3, 2, marks=[pytest.mark.slow, pytest.mark.skipif(
    'device.type != "cpu"' not in STOCK_LOADER, reason="this Transformers resumes no two processes on a CPU: 'cpu:0'"
)])  # fmt: skip


# In the middle of a save, after which the script asks for the newest whole one, or names the last itself.
@pytest.mark.parametrize(("seed", "ranks"), [(0, 1), pytest.param(4, 1, marks=pytest.mark.slow), (8, 1), two_cpus])
def test_a_killed_run_goes_on_bit_for_bit(cases: Cases, seed: int, ranks: int) -> None:
    assert cases.kill(seed, ranks=ranks).lost is None


@pytest.mark.parametrize("seed", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_run_with_its_state_in_host_memory_goes_on_bit_for_bit(offload_cases: Cases, seed: int) -> None:
    assert offload_cases.kill(seed).lost is None


@pytest.mark.parametrize("seed", [4, 8])  # asks before the Trainer is made, and after
def test_a_killed_run_with_the_callback_goes_on_bit_for_bit(callback_cases: Cases, seed: int) -> None:
    assert callback_cases.kill(seed).lost is None


@pytest.mark.parametrize("seed", [2, 4])  # the manifest, the weights
def test_a_damaged_file_is_named_and_the_previous_checkpoint_taken(cases: Cases, seed: int) -> None:
    assert cases.damage(seed).lost is None


def test_a_signal_ends_the_run_in_a_checkpoint(cases: Cases) -> None:
    assert cases.terminate(0).lost is None


@pytest.mark.parametrize(
    ("ranks", "struck", "least"), [(1, 0, 20), (2, 1, 4)], ids=["one process", "the second of two"]
)
def test_a_full_disk_leaves_the_last_whole_checkpoint(cases: Cases, ranks: int, struck: int, least: int) -> None:
    if not cases.strikes_exactly:
        pytest.skip("needs a C compiler on Linux")
    outcomes = cases.full_disk(ranks=ranks, struck=struck)
    assert len(outcomes) > least and lost(outcomes) == []


def test_a_folder_that_vanishes_and_comes_back_costs_no_step(cases: Cases) -> None:
    assert cases.vanished_folder(1).lost is None


@pytest.mark.parametrize("limit", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_a_checkpoint_that_another_run_removes_is_not_trained_on(cases: Cases, limit: int | None) -> None:
    assert cases.rotated(limit).lost is None


@pytest.mark.parametrize("limit", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_with_the_callback_a_checkpoint_that_another_run_removes_is_not_trained_on(
    callback_cases: Cases, limit: int | None
) -> None:
    assert callback_cases.rotated(limit).lost is None


def test_inf_and_nan_reach_no_state_of_two_processes(cases: Cases) -> None:
    outcomes = cases.numeric(48, segments=4, steps=20, ranks=2)  # half of these steps are struck
    assert len(outcomes) == 4 and lost(outcomes) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK_HOSTILE else pytest.mark.slow) for name in HOSTILE]
)
def test_a_hostile_checkpoint_is_refused_in_words(cases: Cases, name: str) -> None:
    assert cases.hostile(name).lost is None


@pytest.mark.parametrize(
    "name", ["a plain pickle in rng_state.pth", "a pipe as optimizer.pt", "an index of shards that is a list"]
)
def test_a_hostile_checkpoint_is_refused_with_the_callback(callback_cases: Cases, name: str) -> None:
    assert callback_cases.hostile(name).lost is None


def test_the_list_of_hostile_checkpoints() -> None:
    assert len(HOSTILE) >= 30 and HOSTILE.keys() >= QUICK_HOSTILE


@pytest.mark.slow
def test_a_short_soak_is_consistent_at_each_check(cases: Cases) -> None:
    measured, outcome = cases.soak(12)
    assert measured["steps"] == measured["checks"] == measured["evaluations"] == 12
    # of so few steps, caches that fill are the growth
    assert outcome.lost is None or "resident memory grows" in outcome.lost


def test_a_soak_would_see_a_tensor_kept_at_each_step() -> None:
    flat = [(step, 10**8 + 4096 * (step % 3)) for step in range(0, 20_000, 250)]
    assert abs(slope(flat)) < MOST_BYTES_A_STEP / 10
    assert slope([(step, memory + 500 * step) for step, memory in flat]) > MOST_BYTES_A_STEP

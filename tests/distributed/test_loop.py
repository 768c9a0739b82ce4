"""Loops of one's own on two processes: DDP and FSDP2 train as one process does, and never disagree about a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loop_worker
import pytest
import torch
from tiny import same_by_name

pytestmark = pytest.mark.slow

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("loop_worker.py", tmp_path_factory.mktemp("two"), processes=2)


def assert_ranks_agree(two: Results, case: str) -> dict[str, Any]:
    """What both processes hold alike: decisions, scales, headroom, losses of the global batch, weights."""
    first, second = (rank[case] for rank in two)
    for key in set(first) & {"scale", "skipped", "headroom", "loss"}:
        assert repr(first[key]) == repr(second[key]), key
    if "weights" in first:
        assert same_by_name(first["weights"], second["weights"])
    return first


# One process overflows


def test_replicas_of_hybrid_sharding_agree(two: Results) -> None:
    log, plain = assert_ranks_agree(two, "fsdp_hybrid"), assert_ranks_agree(two, "ddp")
    assert log["skipped"] == plain["skipped"] == [False, False, False, True, False, False]
    assert log["scale"] == plain["scale"]


def test_headroom_is_that_of_the_process_with_the_largest_gradient(two: Results) -> None:
    first, second = (rank["ddp_headroom_differs"] for rank in two)
    plain, log = first[1.0], first[30.0]
    assert log["scale"] == second[30.0]["scale"] and log["headroom"] == second[30.0]["headroom"]
    # Before they are averaged (and the first micro-batch's never are), rank 1's gradients are 30 times larger.
    assert log["skipped"] == [False] * 4
    assert 2**3 <= plain["scale"][0] / log["scale"][0] <= 2**6
    assert log["headroom"][0] >= 5.0  # the rule's headroom at its start


def test_processes_without_ddp_or_fsdp_never_wait_for_each_other(two: Results) -> None:
    assert [rank["processes_of_their_own"]["steps"] for rank in two] == [3, 1]


def test_gradients_that_a_loop_averages_itself_are_checked_afterwards(two: Results) -> None:
    first, second = (rank["averaged_by_hand"] for rank in two)
    assert first["skipped"] == second["skipped"] == [False] * 3 + [True] + [False] * 2
    assert same_by_name(first["weights"], second["weights"])
    assert all(bool(torch.isfinite(weight).all()) for weight in first["weights"].values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_agree_on_an_overflow_that_two_optimizers_find_in_turn(two: Results, kind: str) -> None:
    first, second = (rank["several_optimizers"][kind] for rank in two)
    assert {key: first[key] for key in ("scale", "skipped", "steps")} == {
        key: second[key] for key in ("scale", "skipped", "steps")
    }
    assert same_by_name(first["weights"], second["weights"]) and first["steps"] == list(range(1, 9))
    assert first["skipped"][4] == [True, False] and first["skipped"][5] == [False, True]
    # The overflow that the second one reports later neither lowers the scale again nor lets it rise.
    assert first["scale"][4:6] == [1.0, 1.0] and min(first["scale"][:4] + first["scale"][6:]) > 2.0**4


def test_uneven_inputs_under_join_do_not_hang(two: Results) -> None:
    assert [rank["ddp_join"]["steps"] for rank in two] == [3, 2]


@pytest.mark.parametrize("kind", ["ddp", "static_graph", "fsdp"])
def test_outputs_that_are_cast_when_read_carry_their_gradients(two: Results, kind: str) -> None:
    for rank in two:
        (deferred, left), (plain, right) = rank["deferred_outputs"][kind]
        assert plain == "Tensor"
        assert deferred == ("Tensor" if kind == "static_graph" else "DeferredOutput")  # there DDP clones it
        assert same_by_name(left, right)


@pytest.mark.parametrize("kind", ["in_ddp", "around_ddp", "in_fsdp"])
def test_compiled_models_agree_as_well(two: Results, kind: str) -> None:
    first, second = (rank["compiled"][kind] for rank in two)
    plain = two[0]["compiled"]["plain"]
    assert first["scale"] == second["scale"] == plain["scale"]
    assert first["skipped"] == second["skipped"] == [False, False, True, False]
    assert first["loss"][:2] == pytest.approx(plain["loss"][:2], rel=1e-3)


def test_a_model_wrapped_before_it_is_prepared_trains_alike(two: Results) -> None:
    log, plain = assert_ranks_agree(two, "ddp_around_prepared_model"), two[0]["ddp"]
    assert log["skipped"] == plain["skipped"] and log["scale"] == plain["scale"]
    assert log["loss"] == pytest.approx(plain["loss"], rel=1e-5, nan_ok=True)


# FSDP2


def test_fsdp_shards_the_masters_and_keeps_no_copies(two: Results) -> None:
    for rank in two:
        assert rank["fsdp"]["kinds"] == ["DTensor", "None"]
        assert rank["fsdp"]["copies"] == 0


def test_a_model_loaded_in_fp16_has_fp32_masters_before_fsdp_shards_it(two: Results) -> None:
    log = assert_ranks_agree(two, "fsdp_of_fp16_model")
    assert log["dtypes"] == ["torch.float32"]
    assert log["loss"] == pytest.approx(two[0]["fsdp"]["loss"], rel=1e-3)


@pytest.mark.parametrize("case", ["fsdp_before_prepare", "fsdp_without_resharding", "False", "True"])
def test_order_resharding_and_checkpointing_change_no_bit(two: Results, case: str) -> None:
    plain = assert_ranks_agree(two, "fsdp")
    for rank in two:
        log = rank[case] if case in rank else rank["fsdp_checkpointing"][case]  # reentrant, or not
        for key in ("loss", "scale", "headroom"):
            assert log[key] == plain[key], key
        assert same_by_name(log["weights"], plain["weights"])


def test_frozen_fp16_parameters_are_sharded_beside_masters(two: Results) -> None:
    log, alone = assert_ranks_agree(two, "fsdp_of_frozen_fp16"), loop_worker.fsdp_of_frozen_fp16()
    assert log["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_weights_are_current_when_fsdp_shards_a_module_around_the_model(two: Results) -> None:
    log = assert_ranks_agree(two, "fsdp_outside_of_model")
    assert log["loss"] == pytest.approx(two[0]["fsdp"]["loss"], rel=1e-5)


def test_gradients_of_autograd_functions_are_unscaled_under_fsdp(two: Results) -> None:
    for rank in two:
        case = rank["fsdp_custom_function"]
        for name, expected in case["expected"].items():
            torch.testing.assert_close(case["found"][name], expected, rtol=0.02, atol=0.01)


def test_autograd_saves_no_rounded_weights_under_fsdp(two: Results) -> None:
    for rank in two:
        case = rank["fsdp_saves_no_copies"]
        without, with_copies = case["alive"]
        assert without == 0 and with_copies >= 8  # four products in each of two blocks
        assert same_by_name(*case["gradients"])


def test_detach_leaves_a_plain_sharded_model(two: Results) -> None:
    for rank in two:
        case = rank["fsdp_detach"]
        assert case["forwards"] == [] and not case["guarded"]
        assert torch.equal(case["sharded"], case["plain"])

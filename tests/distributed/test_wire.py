"""What travels between processes; lean layouts with DDP, and with FSDP2, whose shards are FP32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import wire_worker
from tiny import same_by_name
from transformers import AutoModelForCausalLM
from wire_worker import IN_16_BITS, PRECISIONS

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return {case.__name__: case() for case in wire_worker.ONE_PROCESS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], folder: Path) -> Results:
    return launch("wire_worker.py", folder, processes=2)


def assert_trains_alike(losses: list[float], expected: list[float], way: str) -> None:
    assert len(losses) == 8 and expected[-1] < 0.95 * expected[0]  # it learns, so that equal losses say something
    # FSDP2's shards are FP32: norms read FP32 weights, and ties are rounded to even, as a lean layout does not.
    is_other_layout = way.endswith("bf16-lean") and "ddp" not in way
    assert losses == pytest.approx(expected, rel=3e-4 if is_other_layout else 1e-4)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", [*PRECISIONS, IN_16_BITS])
def test_two_processes_train_as_one(one: dict[str, Any], two: Results, wrap: str, precision: str) -> None:
    for rank in two:
        expected = one["one"]["fp16" if precision == IN_16_BITS else precision]
        assert_trains_alike(rank["losses"][f"{wrap} {precision}"], expected, f"{wrap} {precision}")


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_synced", [True, False])
def test_gradients_of_micro_batches_are_true_and_fp32(
    one: dict[str, Any], two: Results, wrap: str, precision: str, is_synced: bool
) -> None:
    expected, expected_norm = one["one_gradients"][precision]
    for rank in two:
        found, norm, dtypes = rank["gradients"][f"{wrap} {precision} {is_synced}"]
        assert dtypes == {"torch.float32"}
        assert norm == pytest.approx(expected_norm, rel=5e-3)
        for name, gradient in expected.items():
            error = (found[name] - gradient).norm() / gradient.norm()
            assert error < (0.03 if precision.startswith("bf16") else 0.005), name


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("kind", ["bucket_view", "static_graph", "unused"])
def test_settings_of_ddp_change_no_bit(two: Results, kind: str, precision: str) -> None:
    for rank in two:
        cases = rank["ddp_options"]
        plain, other = cases.get(f"{precision} none_{kind}", cases[f"{precision} none"]), cases[f"{precision} {kind}"]
        assert other["skipped"] == plain["skipped"] == [False, True, False, False]
        for key in ("loss", "scale", "headroom"):
            assert repr(other[key]) == repr(plain[key]), key
        assert same_by_name(other["weights"], plain["weights"])


@pytest.mark.parametrize("name", ["ddp", "fsdp", "later"])
def test_masters_keep_all_their_bits(two: Results, name: str) -> None:
    for rank in two:
        case, start = rank["masters_survive"][name], rank["masters_survive"]["start"]
        assert all(value.dtype is torch.float32 for value in case["kept"].values())
        assert same_by_name(case["kept"], start)
        assert not same_by_name(case["moved"], start)
        assert same_by_name(case["loaded"], case["moved"])
        trained = {key: value for key, value in case["moved"].items() if key in case["plain"]}
        assert same_by_name(case["plain"], trained)
        assert math.isfinite(case["ran"])


def test_masters_are_those_of_the_first_rank(two: Results) -> None:
    for rank in two:
        assert same_by_name(rank["first_rank"]["masters"], rank["first_rank"]["first"])


def test_a_branch_of_a_micro_batch_that_is_not_synchronized(two: Results) -> None:
    for rank in two:
        for lean, expected in zip(rank["branch"]["fp16-lean"], rank["branch"]["fp16"], strict=True):
            torch.testing.assert_close(lean, expected, rtol=2**-9, atol=1e-4)  # of sums in 16 bits


def test_an_overflow_of_one_process_is_skipped_by_all(two: Results) -> None:
    assert len(two[0]["overflows"]) == 5
    for name, first in two[0]["overflows"].items():
        second = two[1]["overflows"][name]
        for case in (first, second):
            assert case["skipped"] == [True], name
            assert same_by_name(case["before"], case["after"]), name
            assert case["rest"]["skipped"] == [False] * 3, name
        assert first["rest"]["scale"] == second["rest"]["scale"], name
        assert same_by_name(first["rest"]["weights"], second["rest"]["weights"]), name


# torch 2.15 gathers objects, as the settings of the ranks, by the collective that gathers tensors.
SETTINGS_BYTES = 0 if int(torch.__version__.split(".")[1]) < 15 else 1024


def gathered(rank: dict[str, Any], name: str) -> float:
    return rank["received"][name]["_allgather_base_"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fsdp_gathers_16_bits(two: Results, precision: str) -> None:
    for rank in two:
        found, of_torch = gathered(rank, f"fsdp {precision}"), gathered(rank, "torch bf16")
        assert gathered(rank, "torch") == 2 * of_torch
        # Norms and biases travel in FP32, so that FP32 ops read their masters: 0.4% of this model.
        assert of_torch <= found <= 1.005 * of_torch


def test_gradients_are_reduced_in_16_bits_where_wanted(two: Results) -> None:
    for rank in two:
        bytes_of = rank["received"]
        assert bytes_of["fsdp fp16"]["_reduce_scatter_base_"] == bytes_of["torch"]["_reduce_scatter_base_"]
        for precision in ("fp16-lean", "bf16-lean", IN_16_BITS):
            fsdp, ddp = bytes_of[f"fsdp {precision}"], bytes_of[f"ddp {precision}"]
            assert fsdp["alltoall_base_"] <= 0.5001 * bytes_of["torch"]["_reduce_scatter_base_"]
            assert "_reduce_scatter_base_" not in fsdp
            sent = ddp["alltoall_base_"] + ddp["_allgather_base_"]
            assert sent <= 0.5001 * bytes_of["ddp fp16"]["allreduce_"] + SETTINGS_BYTES


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("settings_differ", "ValueError: ranks .*: rank 0 has precision=fp16, .*scale=256.0.*; rank 1 .*scale=512.0"),
        (
            "layouts_differ",
            "ValueError: ranks .*: rank 0 has precision=fp16, .*; rank 1 has precision=bf16, .* Give all",
        ),
        ("patience_differs", "ValueError: ranks .*: rank 0 has .*patience=100.*; rank 1 has .*patience=101"),
        ("lean_after_ddp", "ValueError: precision='fp16-lean' stores weights in 16 bits.*attach to the model first"),
        ("lean_with_a_hook", "ValueError: fp16_compress_hook .*leave register_comm_hook out"),
        ("default_with_a_hook", "ValueError: fp16_compress_hook rounds .* become 0: leave .*'fp16,reduce=fp16'"),
        ("lean_of_a_hooked_weight", "ValueError: .*shape .32,. has a hook.*use 'fp16', or remove the hook"),
        (
            "lean_of_16_bit_shards",
            "ValueError: .* is torch.bfloat16 and fully_shard holds it already.*before fully_shard",
        ),
        (
            "attached_inside_of_ddp",
            "ValueError: DistributedDataParallel was made for parameters of float, .* c10::Half now, so",
        ),
        (
            "halved_inside_of_ddp",
            "ValueError: DistributedDataParallel was made for .* c10::Half, .*attach mixed precision first",
        ),
        ("sharded_in_fp16", "ValueError: .* is torch.float16 and fully_shard holds it already.*before fully_shard"),
        ("policy_of_fsdp", "ValueError: fully_shard.mp_policy=.*of FSDP's own.*leave mp_policy out"),
        ("policy_of_fsdp_later", "ValueError: fully_shard.mp_policy=.*of FSDP's own.*leave mp_policy out"),
        ("fsdp1", "ValueError: FSDP1 .FullyShardedDataParallel.*use FSDP2"),
        ("fsdp1_later", "ValueError: FSDP1 .FullyShardedDataParallel.*use FSDP2"),
        ("ddp_in_fp16", "ValueError: .* is torch.float16 and DistributedDataParallel holds it already"),
        ("optimizer_before_fsdp", "ValueError: no parameter of this SGD belongs to .*, after fully_shard, which puts"),
        ("lean_without_optimizer", "ValueError: .*must know before the first forward.*call attach_optimizer earlier"),
        ("lean_in_backward", "ValueError: free_gradients='backward' .*leave it out, or use"),
        ("eight_bits_of_dtensors", "ValueError: AdamW8bit of bitsandbytes .*DTensors: use torch's optimizers"),
    ],
)
def test_what_cannot_work_is_refused_by_all(two: Results, case: str, said: str) -> None:
    for rank in two:
        assert re.match(said, rank["refusals"][case], flags=re.DOTALL), rank["refusals"][case]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_working_copies_are_handed_over_whole(two: Results, folder: Path, wrap: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder / wrap, dtype=torch.float16)
    for rank in two:
        found = rank["handed_over"][wrap]
        for name, parameter in loaded.named_parameters():
            assert parameter.dtype is torch.float16
            assert torch.equal(found["copies"][name], found["masters"][name].half())
            assert torch.equal(parameter, found["copies"][name])

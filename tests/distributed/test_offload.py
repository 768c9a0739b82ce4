"""Lean presets with host memory on two processes, each with its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from tiny import same_by_name

pytestmark = pytest.mark.slow
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("offload_worker.py", tmp_path_factory.mktemp("two"), processes=2)


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert repr(found[0]) == repr(expected[0])  # norms, which may be NaN, and skipped steps
    assert same_by_name(found[1], expected[1])


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("precision", ["bf16-lean", "fp16-lean"])
def test_training_under_ddp_is_that_without_offload(two: Results, precision: str, name: str, offload: str) -> None:
    for rank in two:
        found = {where: rank["trained"][f"{precision} {name} {where}"] for where in (None, offload)}
        if precision == "fp16-lean":  # BF16 has so large gradients
            assert found[None][0][1::2] == [False, True, False, False]
        assert_same(found[offload], found[None])
    assert same_by_name(*[rank["trained"][f"{precision} {name} {offload}"][1] for rank in two])


@pytest.mark.parametrize("offload", ["optimizer", "all"])
@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
def test_options_of_ddp(two: Results, option: str, offload: str) -> None:
    for rank in two:
        assert_same(rank["options"][f"{option} {offload}"], rank["options"][f"{option} None"])


def test_gradients_are_in_host_memory_once_they_are_reduced(two: Results) -> None:
    for rank in two:
        assert rank["slabs"]["held"] == rank["slabs"]["parameters"] > 10


@pytest.mark.parametrize("offload", [None, "optimizer", "all"])
def test_a_checkpoint_of_both_ranks_goes_on_in_each_mode(two: Results, offload: str | None) -> None:
    for rank in two:
        assert_same(rank["saved"][str(offload)], rank["saved"]["straight"])


@pytest.mark.parametrize("case", ["optimizer", "all", "attached to shards"])
def test_fsdp2_is_refused_by_all(two: Results, case: str) -> None:
    for rank in two:
        said = r"ValueError: offload='\w+' needs whole weights, and this model is sharded .*: leave offload out"
        assert re.match(said, rank["refusals"][case]), rank["refusals"][case]

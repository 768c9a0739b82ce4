"""Models that Transformers shards as it loads them (``DistributedConfig``), on two processes: nobody wraps them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny import same_by_name
from transformers.distributed import DistributedConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "dp_replicate_size" not in DistributedConfig.__dataclass_fields__, reason="Transformers is too old"
    ),
]

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], folder: Path) -> Results:
    return launch("distributed_config_worker.py", folder)


@pytest.fixture(scope="module")
def one(launch: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launch("distributed_config_worker.py", tmp_path_factory.mktemp("one"), processes=1)[0]["trainings"]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp16-lean", "callback", "replicas", "lora"])
def test_two_processes_train_as_one(one: dict[str, Any], two: Results, name: str) -> None:
    expected = one[name]
    assert len(expected["loss"]) == 5 and expected["loss"][-1] < expected["loss"][0]
    for rank in two:
        found = rank["trainings"][name]
        assert not found["wrapped"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["norm"] == pytest.approx(expected["norm"], rel=5e-3)
    assert same_by_name(*(rank["trainings"][name]["weights"] for rank in two))


@pytest.mark.parametrize("name", ["fp16", "fp16-lean", "lora"])
def test_an_overflow_on_one_process_is_skipped_by_both(two: Results, name: str) -> None:
    first, second = (rank["overflows"][name] for rank in two)
    assert first["skipped"] == second["skipped"] == 1
    assert same_by_name(first["weights"], second["weights"])


def test_a_loop_of_ones_own_resumes(two: Results) -> None:
    for rank in two:
        assert rank["loop"]["resumed"] == rank["loop"]["at once"][2:]


def test_what_is_saved_is_whole(folder: Path, two: Results) -> None:
    saved = load_file(folder / "fp16" / "checkpoint-5" / "model.safetensors")
    assert same_by_name(saved, two[0]["trainings"]["fp16"]["weights"])


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("own precision", "ValueError: .*a mixed precision of FSDP's own: .*DistributedConfig.*fsdp_mixed_precision"),
        ("own precision, callback", "ValueError: .*a mixed precision of FSDP's own: .*fsdp_mixed_precision"),
        ("in 16 bits", r"ValueError: model.* is torch.bfloat16 .*load it in FP32 \(dtype=torch.float32\)"),
    ],
)
def test_what_cannot_work_is_refused_by_all(two: Results, case: str, said: str) -> None:
    for rank in two:
        assert re.match(said, rank["refusals"][case], flags=re.DOTALL), rank["refusals"][case]

"""Mixtures of experts on two processes: FSDP2, tensor parallel and expert parallel as Transformers makes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from mixtures import KINDS, ROUTERS, make, token_ids
from torch import Tensor
from transformers.distributed import DistributedConfig

if not hasattr(DistributedConfig, "efsdp_size"):
    pytest.skip("this Transformers has another expert parallelism", allow_module_level=True)
import experts_worker

pytestmark = pytest.mark.slow
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(launch: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("experts_worker.py", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def in_fp32() -> dict[str, dict[str, Tensor]]:
    """Gradients of one process without mixed precision."""
    found, ids = {}, token_ids(4)
    for kind in KINDS:
        model = make(kind)
        model(input_ids=ids, labels=ids).loss.backward()
        found[kind] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found


@pytest.mark.parametrize(("kind", "way"), experts_worker.WAYS)
def test_gradients_are_those_of_one_process(
    two: Results, in_fp32: dict[str, dict[str, Tensor]], kind: str, way: str
) -> None:
    for rank in two:
        found = rank["gradients"][f"{kind}, {way}"]
        assert found.keys() == in_fp32[kind].keys()
        for name, expected in in_fp32[kind].items():
            assert (found[name] - expected).norm() < 0.01 * expected.norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_routers_read_fp32_weights_where_others_travel_in_16_bits(two: Results, kind: str) -> None:
    for rank in two:
        of_routers, of_attention = rank["routers"][f"{kind} {ROUTERS[kind]}"], rank["routers"][f"{kind} *.o_proj"]
        assert of_routers and all(of_routers)
        assert of_attention and not any(of_attention)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("with_fsdp", "ValueError: .*experts.gate_up_proj is placed as .*expert parallelism work alone.* FSDP2 alone"),
        ("lean", "ValueError: precision='fp16-lean' needs whole weights.*this model is tensor parallel: use 'fp16'"),
    ],
)
def test_what_cannot_work_is_refused(two: Results, case: str, said: str) -> None:
    for rank in two:
        assert re.match(said, rank["refusals"][case], flags=re.DOTALL), rank["refusals"][case]

"""The plan of one rank against real ranks: what they send, and the peak of their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from plan_worker import NODE_SIZE, PRESETS, config

from hf_mp import estimate_training_memory
from hf_mp.memory.parallel import Collective


def sent_bytes(collectives: Iterable[Collective]) -> dict[tuple[str, int, str, bool], int]:
    """What each kind of collective sends, but for the agreement on one number, and what DDP tells of its buckets."""
    return {
        (one.name, one.ranks, one.dtype, one.within_node): one.sent_bytes
        for one in collectives
        if one.sent_bytes > 1024
    }


def compare(counted: list[dict[Any, Any]], name: str, *, peak: float = 0.05) -> None:
    parallel: Any
    parallel, _, kind = name.partition(":")
    for preset in PRESETS[parallel]:
        planned = estimate_training_memory(
            config(kind), preset, device="cpu", ranks=len(counted), parallel=parallel, node_size=NODE_SIZE
        )
        for rank in counted:
            found = rank[name][preset]
            assert sent_bytes(planned.communication) == sent_bytes(found["collectives"])
            assert planned.peak_bytes == pytest.approx(found["peak_bytes"], rel=peak)


# Started by torchrun: in a fork, more is counted of a tensor parallel model than a process of its own holds.
@pytest.mark.slow
def test_two_ranks(launch: Callable[..., Any], tmp_path: Path) -> None:
    counted = launch("plan_worker.py", tmp_path, "fsdp2", "ddp", "tp:llama", launcher="torchrun")
    compare(counted, "fsdp2")
    compare(counted, "ddp")
    compare(counted, "tp:llama", peak=0.01)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_four_ranks(launch: Callable[..., Any], tmp_path: Path) -> None:
    counted = launch("plan_worker.py", tmp_path, "fsdp2", "hsdp", "ddp", processes=4, launcher="torchrun")
    for parallel in ("fsdp2", "hsdp", "ddp"):
        compare(counted, parallel)

"""What the project wants to reach, next to what it has reached and what nobody can go below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from _markdown import table
from _speed_regions import BARE, FLOOR
from _stored import Stored, StoredResults


class _Goal(NamedTuple):
    what: str
    most: float
    reached: float
    floor: float | None = None


def goals(results: StoredResults) -> str:
    """A row of each goal: the most that a ratio may be, what was reached, its floor where one was measured."""
    found = [*_host(results), *_architectures(results), *_compiled(results), *_lean(results), *_generation(results)]
    rows = [
        [
            goal.what,
            f"{goal.most:.2f}",
            f"**{goal.reached:.2f}**" if goal.reached <= goal.most else f"{goal.reached:.2f}",
            "" if goal.floor is None else f"{goal.floor:.2f}",
        ]
        for goal in found
    ]
    return table(("ratio of times", "at most", "reached", "floor"), rows)


def _host(results: StoredResults) -> Iterator[_Goal]:
    contenders = results("bench_host")["contenders"]

    def ratio(name: str) -> float:
        return contenders[name]["step"]["ratio_to_torch_autocast"].number

    floor = ratio(FLOOR)
    for name, most in (("bf16", 1.1), ("bf16, loss scaled", 1.1), ("bf16-lean", 1.25)):
        yield _Goal(
            f"[the host's part of a step](#the-hosts-time), `{name}` / `torch.amp`", most, ratio(f"hf_mp {name}"), floor
        )


def _architectures(results: StoredResults) -> Iterator[_Goal]:
    sizes = {"small batches": "bench_architectures_kept", "large batches": "bench_architectures_kept_4"}
    for size, name in sizes.items():
        stored = results(name)
        medians, models = stored["medians"], [row for _, row in stored["architectures"].parts()]
        where = f"[many kinds of models](#every-kind-of-model), {size}"
        bf16, floor, fp16 = (
            (medians[ratio].number, max(row[ratio].number for row in models))
            for ratio in ("bf16_to_torch_autocast", "bf16_floor_to_torch_autocast", "fp16_to_fp32")
        )
        yield _Goal(f"{where}: median of `bf16` / `torch.autocast`", 0.9, bf16[0], floor[0])
        yield _Goal(f"{where}: the largest of them", 1.0, bf16[1], floor[1])
        yield _Goal(f"{where}: median of `fp16` / FP32", 0.85, fp16[0])
        yield _Goal(f"{where}: the largest of them", 0.95, fp16[1])


def _compiled(results: StoredResults) -> Iterator[_Goal]:
    for name, row in results("bench_compiled")["models"].parts():
        floor = row["bf16_floor_to_torch_autocast"].number
        yield _Goal(
            f"[compiled](#compiled) {name}, `bf16` / `torch.autocast`",
            0.95,
            row["bf16_to_torch_autocast"].number,
            floor,
        )
        yield _Goal(f"compiled {name}, `fp16` / FP32", 0.85, row["fp16_to_fp32"].number)


def _lean(results: StoredResults) -> Iterator[_Goal]:
    step, update = results("bench_step")["contenders"], results("bench_update")["contenders"]

    def ratio(stored: Stored, ours: str, peer: str) -> float:
        return stored[f"hf_mp {ours}"]["median_seconds"].number / stored[peer]["median_seconds"].number

    yield _Goal(
        "[a step of GPT-2](#a-training-step), `bf16-lean` / `torch.autocast`",
        0.8,
        ratio(step, "bf16-lean", "torch.autocast bf16"),
    )
    yield _Goal("a step of GPT-2, `fp16-lean` / FP32", 0.75, ratio(step, "fp16-lean", "fp32"))
    of_update = (("bf16-lean", "torch.amp bf16", 0.6), ("fp16-lean", "torch.amp", 0.6),
                 ("fp16-lean + AdamW8bit", "torch.amp + AdamW8bit", 0.9))  # fmt: skip
    for ours, peer, most in of_update:
        yield _Goal(f"[its update](#the-update), `{ours}` / `{peer}`", most, ratio(update, ours, peer))


def _generation(results: StoredResults) -> Iterator[_Goal]:
    for name, row in results("bench_generate")["cases"].parts():
        floor = row[BARE]["ratio_to_floor"].number if BARE in row else None
        yield _Goal(
            f"[a token](#generation) of {name}, `bf16` / BF16 throughout",
            1.05,
            row["hf_mp bf16"]["ratio_to_floor"].number,
            floor,
        )

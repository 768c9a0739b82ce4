"""What the project wants to reach, next to what it has reached; and what nobody can go below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from _markdown import paragraph, table
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
        where = f"[many kinds of models](benchmarks.md#every-kind-of-model), {size}"
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
            f"[compiled](benchmarks.md#compiled) {name}, `bf16` / `torch.autocast`",
            0.95,
            row["bf16_to_torch_autocast"].number,
            floor,
        )
        yield _Goal(f"compiled {name}, `fp16` / FP32", 0.85, row["fp16_to_fp32"].number)


def _lean(results: StoredResults) -> Iterator[_Goal]:
    step, update = results("bench_step")["contenders"], results("bench_update")["contenders"]

    def ratio(stored: Stored, ours: str, peer: str) -> float:
        return stored[ours]["median_seconds"].number / stored[peer]["median_seconds"].number

    yield _Goal(
        "[a step of GPT-2](benchmarks.md#a-training-step), `bf16-lean` / `torch.autocast`",
        0.8,
        ratio(step, "hf_mp bf16-lean", "torch.autocast bf16"),
    )
    yield _Goal("a step of GPT-2, `fp16-lean` / FP32", 0.75, ratio(step, "hf_mp fp16-lean", "fp32"))
    of_update = (("hf_mp bf16-lean", "torch.amp bf16", 0.6), ("hf_mp fp16-lean", "torch.amp", 0.6),
                 ("hf_mp fp16-lean + AdamW8bit", "torch.amp + AdamW8bit", 0.9))  # fmt: skip
    for ours, peer, most in of_update:
        yield _Goal(
            f"[its update](benchmarks.md#the-update), `{ours.removeprefix('hf_mp ')}` / `{peer}`",
            most,
            ratio(update, ours, peer),
        )


def _generation(results: StoredResults) -> Iterator[_Goal]:
    for name, row in results("bench_generate")["cases"].parts():
        floor = row[BARE]["ratio_to_floor"].number if BARE in row else None
        yield _Goal(
            f"[a token](benchmarks.md#generation) of {name}, `bf16` / BF16 throughout",
            1.05,
            row["hf_mp bf16"]["ratio_to_floor"].number,
            floor,
        )


def floors(results: StoredResults) -> str:
    """How far steps, updates, losses and models are from the least that they can take."""
    return "\n\n".join([_step_floors(results), _part_floors(results), _model_floors(results)])


def _step_floors(results: StoredResults) -> str:
    rows = [
        [name, f"{row['ratio_to_floor'].number:.2f}", f"{100 * row['flops_utilisation'].number:.0f}%"]
        for stored in ("bench_step", "bench_step_compiled")
        for name, row in results(stored)["contenders"].parts()
        if stored == "bench_step" or name.endswith("compiled")
    ]
    text = paragraph(
        "The floor of [a step of GPT-2](benchmarks.md#a-training-step) is its matrix products at the best rate that "
        "this machine reached in that dtype, and the bytes of its update at the bandwidth of a copy; utilisation is "
        "the products at that rate over the step:"
    )
    return f"{text}\n\n{table(('a step', 'times its floor', 'utilisation'), rows)}"


def _part_floors(results: StoredResults) -> str:
    update, loss, autocast = results("bench_update"), results("bench_loss"), results("bench_autocast")
    found = [
        *((f"update, {name}", row) for name, row in update["contenders"].parts()),
        *((f"loss, {name}", row) for name, row in loss["contenders"].parts()),
        *((f"forward and backward, {name}", row) for name, row in autocast["forward_backward"].parts()),
        *((f"generation, {name}", row) for name, row in autocast["generation"].parts()),
    ]
    rows = [[name, f"{row['ratio_to_floor'].number:.2f}"] for name, row in found if "ratio_to_floor" in row]
    text = paragraph(
        "That of [the update](benchmarks.md#the-update) reads gradients twice, reads and writes masters and moments, "
        "and writes working copies; that of [the loss](benchmarks.md#the-loss-of-a-language-model) reads the logits "
        "twice and writes their gradient; that of [forward and backward](benchmarks.md#autocast) is the matrix "
        "products; that of generation reads the weights for each token:"
    )
    return f"{text}\n\n{table(('', 'times its floor'), rows)}"


def _model_floors(results: StoredResults) -> str:
    small, large = (
        results(name)["architectures"] for name in ("bench_architectures_kept", "bench_architectures_kept_4")
    )
    field = "bf16_floor_to_torch_autocast"
    rows = [[f"{name}", f"{row[field].number:.2f}", f"{large[name][field].number:.2f}"] for name, row in small.parts()]
    rows += [
        [f"{name}, compiled", f"{row[field].number:.2f}", ""]
        for name, row in results("bench_compiled")["models"].parts()
    ]
    text = paragraph(
        "That of [many kinds of models](benchmarks.md#every-kind-of-model) and of [compiled](benchmarks.md#compiled) "
        "ones is a model that is BF16 throughout, its optimizer's state too, over `torch.autocast` in BF16:"
    )
    return f"{text}\n\n{table(('floor / `torch.autocast`', 'small batches', 'large batches'), rows)}"

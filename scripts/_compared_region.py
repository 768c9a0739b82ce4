"""What hf_mp takes of the time and memory of what a person uses without it, as the first table of the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from _markdown import ratio, table
from _speed_regions import PEER
from _stored import StoredResults


def compared(results: StoredResults) -> str:
    """A row of each comparison: what is compared, and ours over theirs."""
    rows = [*_gpt2(results), *_models(results), *_parts(results)]
    return table(("", "you use", "you would use", "ours / yours"), rows)


def _gpt2(results: StoredResults) -> Iterator[list[str]]:
    step, memory = results("bench_step")["contenders"], results("bench_step_memory")["contenders"]
    pairs = (("Trainer bf16=True", "bf16"), ("Trainer bf16=True", "bf16-lean"), ("fp32", "fp16"))
    labels = {"Trainer bf16=True": "`bf16=True`", "fp32": "FP32"}
    for peer, preset in pairs:
        found = ratio(step[f"hf_mp {preset}"], step[peer])
        yield ["time of [a step of GPT-2](#a-training-step)", labels[peer], f"`{preset}`", found]
    for peer, preset in pairs:
        found = ratio(memory[f"hf_mp {preset}"], memory[peer], "peak_bytes")
        yield ["[peak memory](#peak-memory-of-gpt-2-124m) of GPT-2 124M", labels[peer], f"`{preset}`", found]


def _models(results: StoredResults) -> Iterator[list[str]]:
    ratios = (("bf16_to_torch_autocast", "`torch.autocast`", "`bf16`"), ("fp16_to_fp32", "FP32", "`fp16`"))
    sizes = {"small": "bench_architectures_kept", "large": "bench_architectures_kept_4"}
    for size, name in sizes.items():
        models = [row for _, row in results(name)["architectures"].parts()]
        what = f"time of a step of [{len(models)} kinds of models](#every-kind-of-model), {size} batches"
        for field, yours, ours in ratios:
            yield [what, yours, ours, _spread([row[field].number for row in models])]
    compiled = [row for _, row in results("bench_compiled")["models"].parts()]
    for field, yours, ours in ratios:
        what = f"time of a [compiled](#compiled) step of {len(compiled)} models"
        yield [what, f"{yours}, compiled", f"{ours}, compiled", _spread([row[field].number for row in compiled])]


def _parts(results: StoredResults) -> Iterator[list[str]]:
    update, loss = results("bench_update")["contenders"], results("bench_loss")["contenders"]
    yours = "GradScaler, clipping, fused AdamW, casts"
    for preset in ("fp16", "fp16-lean"):
        found = ratio(update[f"hf_mp {preset}"], update["torch.amp"])
        yield ["time of [the update](#the-update)", yours, f"`{preset}`", found]
    yield ["time of [the loss](#the-loss-of-a-language-model)", "torch's, BF16", "`bf16`", ratio(
        loss["hf_mp bf16"], loss["torch bf16"]
    )]  # fmt: skip
    tokens = [row["hf_mp bf16"] for _, row in results("bench_generate")["cases"].parts() if "hf_mp bf16" in row]
    known = [row["ratio_to_torch_autocast"].number for row in tokens if "ratio_to_torch_autocast" in row]
    yield ["time of [a token](#generation) of `generate()`", "`torch.autocast`", "`bf16`", _spread(known)]
    host = results("bench_host")["contenders"]
    contenders = (
        ("torch.autocast bf16", "`torch.autocast`", "hf_mp bf16", "`bf16`"),
        (PEER, "`torch.autocast`, GradScaler", "hf_mp bf16, loss scaled", "`bf16` with a loss scale"),
    )
    for peer, yours, mine, ours in contenders:
        found = ratio(host[mine]["step"], host[peer]["step"], "ratio_to_torch_autocast")
        what = "time of [the host](goals.md#the-hosts-time) in a step with next to no arithmetic"
        yield [what, yours, ours, found]


def _spread(ratios: Sequence[float]) -> str:
    """The median, and the smallest and largest."""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

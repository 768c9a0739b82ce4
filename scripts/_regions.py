"""What stored results say, as Markdown: one function for each region of the README and the pages of docs/."""

from __future__ import annotations

import math
from collections.abc import Callable

from _ablation_region import lost_updates, techniques
from _compared_region import compared
from _docs_regions import checkpoint_cost, faults, footprints, llama_7b, scaler_traces, training_memory
from _goals_region import floors, goals
from _markdown import GIB, MIB, hardware, otherwise, paragraph, ratio, script, table, timing, torch_version, workload
from _rl_regions import grpo, small_updates
from _scaling_regions import communication, scaling, sharded_host, ways_to_spread
from _speed_regions import (
    architectures,
    compiled_models,
    compiled_parts,
    default_memory,
    experts,
    generation,
    host,
    host_apart,
    host_parts,
    peaks,
    profiles,
    routing,
)
from _stored import Stored, StoredResults
from hf_mp.policy import mixed_presets

Region = Callable[[StoredResults], str]


def machine(results: StoredResults) -> str:
    """The machine, versions and date of most tables."""
    stored = results("bench_step")
    versions = stored.root["versions"]
    return paragraph(
        f"{hardware(stored)}, {torch_version(stored)}, Transformers "
        f"{versions['transformers'].text}, {stored.root['date'].text[:10]}. Each table is one run with the contenders "
        "in turns; each time is a median ± the interquartile range."
    )


def step_rows(stored: Stored) -> list[list[str]]:
    """A row for each contender of a ``bench_step`` result."""
    rows = []
    for name, row in stored["contenders"].parts():
        rows.append(
            [
                name,
                timing(row, 3 if row["median_seconds"].number < 0.1 else 2),
                f"{row['ratio_to_fp32'].number:.2f}" if "ratio_to_fp32" in row else "",
                f"{row['tokens_per_second'].number:,.0f}",
                f"{row['peak_bytes'].number / MIB:,.0f}" if "peak_bytes" in row else "",
            ]
        )
    return rows


STEP_HEADER = ("", "seconds", "times FP32", "tokens/s", "peak, MiB")


def step(results: StoredResults) -> str:
    """One training step, and what ours is of torch's."""
    stored = results("bench_step")
    contenders = stored["contenders"]
    pairs = [
        f"{ratio(contenders[f'hf_mp {preset}'], contenders[peer])} for {preset}"
        for preset in mixed_presets()
        if (peer := f"torch.autocast {preset.partition('-')[0]}") in contenders
    ]
    return "\n\n".join(
        [
            paragraph(
                f"One training step (forward, backward, clipping, AdamW) of {workload(stored)} "
                f"({script('bench_step')}). The peak counts all tensors, model and optimizer included. Loops take "
                "turns of two steps, of which the second is timed, and the Trainer comes after them:"
            ),
            table(STEP_HEADER, step_rows(stored)),
            paragraph(f"Our step over that of `torch.autocast` in the same dtype: {', '.join(pairs)}."),
            paragraph("In the picture, a line is the least that such a step can take ([floors](goals.md#floors)):"),
            "![a training step: seconds, floor, peak memory](../scripts/results/bench_step.png)",
        ]
    )


def compiled(results: StoredResults) -> str:
    """Steps under ``torch.compile``."""
    stored = results("bench_step_compiled")
    return "\n\n".join(
        [
            paragraph(f"The same with `torch.compile`, {workload(stored)}{otherwise(stored, results)}:"),
            table(STEP_HEADER[:-1], [row[:-1] for row in step_rows(stored)]),
        ]
    )


def step_memory(results: StoredResults) -> str:
    """Peaks of a step of GPT-2 124M."""
    stored = results("bench_step_memory")
    peer = "torch.autocast bf16"
    rows = [
        [name, f"{row['peak_bytes'].number / MIB:,.0f}", ratio(row, stored["contenders"][peer], "peak_bytes")]
        for name, row in stored["contenders"].parts()
    ]
    return "\n\n".join(
        [
            paragraph(f"Peak memory of all tensors of a training of {workload(stored)}:"),
            table(("", "peak, MiB", f"times {peer}"), rows),
        ]
    )


def update(results: StoredResults) -> str:
    """The update phase."""
    stored = results("bench_update")
    rows = [
        [
            name,
            timing(row, 3),
            f"{row['ratio_to_torch'].number:.2f}",
        ]
        for name, row in stored["contenders"].parts()
    ]
    return "\n\n".join(
        [
            paragraph(
                f"The update of {stored['parameters'].number / 1e6:.0f}M parameters, from the gradients after backward "
                "to refreshed working copies, compared with GradScaler (in FP16), `clip_grad_norm_`, fused AdamW and "
                f"casting the weights; and each with bitsandbytes' AdamW8bit ({script('bench_update')}):"
            ),
            table(("", "seconds", "times torch's"), rows),
        ]
    )


def loss(results: StoredResults) -> str:
    """The language-model loss."""
    stored = results("bench_loss")
    rows = [
        [
            name,
            timing(row, 3),
            f"{row['ratio_to_torch'].number:.2f}",
            f"{row['peak_bytes'].number / MIB:,.0f}",
            f"{row['peak_ratio_to_torch'].number:.2f}",
        ]
        for name, row in stored["contenders"].parts()
    ]
    return "\n\n".join(
        [
            paragraph(
                f"The loss of {stored['rows'].number:.0f} rows of a vocabulary of {stored['vocab'].number:.0f}, "
                f"forward and backward from 16-bit logits ({script('bench_loss')}"
                f"{otherwise(stored, results)}):"
            ),
            table(("", "seconds", "times torch", "peak, MiB", "times torch"), rows),
        ]
    )


def autocast(results: StoredResults) -> str:
    """What autocast costs."""
    stored = results("bench_autocast")
    labels = {
        "torch.autocast": "`torch.autocast`, entered once around it",
        "accelerate's (Trainer bf16=True)": "the Trainer's `bf16=True`, which enters it for each forward",
        "hf_mp": "hf_mp, which casts weights once per update",
        "hf_mp, cpu tables": "hf_mp with torch's tables for CPUs",
        "the whole model in 16 bits": "the whole model in 16 bits",
    }
    trained, generated, casts = (
        stored["forward_backward"],
        stored["generation"],
        stored["weight_casts_per_forward"],
    )
    rows = [
        [
            label,
            f"{trained[name]['ratio_to_torch_autocast'].number:.2f}",
            f"{casts[name]['casts'].number:.0f}",
            f"{generated[name]['ratio_to_torch_autocast'].number:.2f}",
        ]
        for name, label in labels.items()
    ]
    calls = stored["added_to_a_call"]
    contexts = ("hf_mp", "a mode that does nothing", "torch.autocast", "hf_mp, enabled=False")
    added = [
        [case, *[f"{found[name]['median_microseconds'].number:z.1f}" for name in contexts]]
        for case, found in calls.parts()
    ]
    return "\n\n".join(
        [
            paragraph(
                f"{stored['dtype'].text.upper()}, {workload(stored)}, and {stored['generated_tokens'].number:.0f} "
                f"tokens generated with {stored['generation_layers'].number:.0f} layers, as multiples of "
                f"`torch.autocast`'s time ({script('bench_autocast')}):"
            ),
            table(("", "forward and backward", "casts of weights in a forward", "generation"), rows),
            paragraph(
                f"Casting all weights of the trained model takes "
                f"{1e3 * stored['cast_all_weights']['median_seconds'].number:.1f} ms, at the bandwidth of a copy "
                f"{1e3 * stored['floor_seconds']['cast_all_weights'].number:.1f} ms. Microseconds that are added to a "
                "call; a torch function mode that does nothing is the floor of an autocast in Python, and 16-bit "
                "softmax, norms and losses are cast:"
            ),
            table(("call", *contexts), added),
        ]
    )


def callback(results: StoredResults) -> str:
    """The callback compared with the Trainer subclass."""
    stored = results("bench_callback")
    found = stored["contenders"]["callback"]["ratio_to_subclass"].number
    rounds = stored["callback_over_subclass_per_round"]
    return paragraph(
        f"The callback's step takes {found:.2f} times the subclass's; round by round "
        f"{rounds['median'].number:.2f} ± {rounds['spread'].number:.2f} ({script('bench_callback')}"
        f"{otherwise(stored, results)})."
    )


def precisions(results: StoredResults) -> str:
    """The recipe in every precision, and with a model of GPT-2's width where that was trained as well."""
    models = {"compare_precisions": "the recipe's model", "compare_precisions_768": "4 layers of width 768"}
    runs = {label: results(name) for name, label in models.items() if name == "compare_precisions" or name in results}
    rows = [[name] for name in max((list(run.value) for run in runs.values()), key=len)]
    header = [""]
    for label, run in runs.items():
        fp32 = run["fp32"]
        header += [f"{label}, {fp32['steps'].value[-1]:.0f} steps", "skipped"]
        for cells in rows:
            if cells[0] not in run:
                cells += ["", ""]
                continue
            found = run[cells[0]]
            off = found["eval_loss"].number / fp32["eval_loss"].number - 1
            cells.append(f"{found['eval_loss'].number:.4f} ({100 * off:+z.3f}%)")
            cells.append(f"{found['skipped_steps'].number:.0f}" if "skipped_steps" in found else "")
    return "\n\n".join(
        [
            paragraph(
                f"Evaluation loss of the recipe ({script('compare_precisions')}"
                f"{otherwise(results('compare_precisions'), results)}) with one seed and one order of "
                "the data, and how far it is off FP32's; torch.autocast is the stock Trainer's `bf16=True`:"
            ),
            table(header, rows),
            "![training losses of the runs](../scripts/results/compare_precisions.png)",
        ]
    )


def scalers(results: StoredResults) -> str:
    """The recipe under each loss scaler."""
    stored = results("compare_scalers")
    labels = {
        "headroom": "`HeadroomLossScaler`",
        "dynamic": "`DynamicLossScaler`, torch's defaults",
        "static": "`StaticLossScaler(128)`",
        "dynamic, growth_interval=100": "`DynamicLossScaler(growth_interval=100)`",
    }
    rows = []
    for name, label in labels.items():
        run = stored[name]
        first, last, low, high = (
            f"{run[f'{which}_scale'].number:,.0f}" for which in ("first", "last", "smallest", "largest")
        )
        scale = f"{first} throughout" if low == high else f"{first} to {last} ({low} to {high})"
        rows.append([label, f"{run['skipped_steps'].number:.0f}", scale, f"{run['final_eval_loss'].number:.4f}"])
    return "\n\n".join(
        [
            paragraph(
                f"{stored['headroom']['steps'].number:,.0f} steps of the recipe under each loss scaler "
                f"(`{stored.root['command'].text}`{otherwise(stored, results)}). torch's defaults try a "
                "larger scale every 2000 steps, so that fewer do not show it; the last row tries every 100:"
            ),
            table(("", "steps skipped", "loss scale, first to last (smallest to largest)", "evaluation loss"), rows),
            "![loss scales of the runs](../scripts/results/compare_scalers.png)",
        ]
    )


def loops(results: StoredResults) -> str:
    """The network of the tutorials."""
    stored = results("compare_loops")
    fp32, fp16 = stored["mlp"]["fp32"], stored["mlp"]["fp16"]
    losses = list(zip(fp32["losses"].value, fp16["losses"].value, strict=True))
    largest = max(abs(mixed / full - 1) for full, mixed in losses)
    return paragraph(
        "A network of 784-8192-10 on 8192 handwritten digits, SGD, constant loss scale 128 "
        f"({script('compare_loops')}{otherwise(stored, results)}): the losses of its {len(losses)} steps "
        f"in FP16 are within {100 * largest:.4f}% of FP32's, its tensors peak at "
        f"{fp32['peak_bytes'].number / MIB:.1f} MiB in FP32 and {fp16['peak_bytes'].number / MIB:.1f} in FP16 "
        f"({ratio(fp16, fp32, 'peak_bytes')}), a step takes {ratio(fp16, fp32, 'step_seconds')} times as long."
    )


def headline(results: StoredResults) -> str:
    """How fast, and how close to FP32, in one sentence."""
    steps, trained = results("bench_step"), results("compare_precisions_768")
    fp32_loss = trained["fp32"]["eval_loss"].number
    off = max(abs(row["eval_loss"].number / fp32_loss - 1) for name, row in trained.parts() if name.startswith("hf_mp"))
    share = {name: f"{row['ratio_to_fp32'].number:.2f}" for name, row in steps["contenders"].parts()}
    return paragraph(
        f"On a CPU, a step of GPT-2 in `bf16` takes {share['hf_mp bf16']} of FP32's time (`torch.autocast`: "
        f"{share['torch.autocast bf16']}), and fine-tuning ends within {math.ceil(1e4 * off) / 100:.2f}% of FP32's "
        "loss ([figures](#figures); [models where it is slower](docs/benchmarks.md#compared-with-what-you-use)). **No "
        "figure here is from a GPU yet**: the Triton kernels check themselves before they are used."
    )


def overview(results: StoredResults) -> str:
    """The README's table: time and memory of a step, and what the precision does to the loss."""
    steps, memory, trained = (results(name) for name in ("bench_step", "bench_step_memory", "compare_precisions_768"))
    fp32_loss = trained["fp32"]["eval_loss"].number
    rows = []
    for name, row in steps["contenders"].parts():
        if name.startswith("Trainer"):
            continue
        peak = f"{memory['contenders'][name]['peak_bytes'].number / GIB:.2f}" if name in memory["contenders"] else ""
        off = f"{100 * (trained[name]['eval_loss'].number / fp32_loss - 1):+z.3f}%" if name in trained else ""
        rows.append([name, timing(row), f"{row['ratio_to_fp32'].number:.2f}", peak, off])
    return "\n\n".join(
        [
            paragraph(
                f"A training step of {workload(steps)}; the peak memory of all tensors for {workload(memory)}; and "
                f"the evaluation loss after {trained['fp32']['steps'].value[-1]:.0f} steps of fine-tuning "
                f"({hardware(steps)}, {torch_version(steps)}, {steps.root['date'].text[:10]}; losses "
                f"{trained.root['date'].text[:10]}{otherwise(trained, results)}):"
            ),
            table(("", "seconds", "times FP32", "peak, GiB", "evaluation loss against FP32's"), rows),
        ]
    )


NOT_MEASURED = "not measured"
GPU_FOLDER = "h200"


def gpu(results: StoredResults) -> str:
    """Ours over others' on a GPU, where it was measured."""
    stored = results.inside(GPU_FOLDER)
    sizes = {"GPT-2 124M": "gpt2", "GPT-2 774M": "gpt2_large"}
    if not stored.directory.is_dir():
        return "GPU: not measured on a GPU yet."
    trainer, ours = "Trainer fp16=True", "MixedPrecisionTrainer fp16"
    # label, result, ours, theirs, field; theirs None: the field is a ratio already
    lines: list[tuple[str, str, str, str | None, str]] = [
        ("`fp16` step / Trainer `fp16=True`", "bench_step", ours, trainer, "median_seconds"),
        ("`fp16-lean` step", "bench_step", f"{ours}-lean", trainer, "median_seconds"),
    ]
    lines += [
        (f"{label}, both compiled", f"{result}_compiled", f"{mine} compiled", f"{theirs} compiled", field)
        for label, result, mine, theirs, field in lines
    ]
    lines += [
        ("`fp16` peak memory / Trainer `fp16=True`", "bench_step", ours, trainer, "peak_bytes"),
        ("`fp16-lean` peak memory", "bench_step", f"{ours}-lean", trainer, "peak_bytes"),
        ("update / GradScaler, clip, fused AdamW, cast", "bench_update", "hf_mp fp16", "torch.amp", "median_seconds"),
        ("lean update / the same", "bench_update", "hf_mp fp16-lean", "torch.amp", "median_seconds"),
        ("lean update / FlashAdamW", "bench_update", "hf_mp fp16-lean", "FlashAdamW", "median_seconds"),
        ("update / its bandwidth floor", "bench_update", "hf_mp fp16", None, "ratio_to_floor"),
        ("our autocast / torch.autocast, all else equal", "bench_step", "hf_mp.autocast fp16", "torch.autocast fp16",
         "median_seconds"),
    ]  # fmt: skip
    rows = [
        [label, *(_gpu_cell(stored, f"{result}_{size}", mine, theirs, field) for size in sizes.values())]
        for label, result, mine, theirs, field in lines
    ]
    first = next((stored(name) for name in ("bench_step_gpt2", "bench_update_gpt2") if name in stored), None)
    where = "a GPU" if first is None else first.root["device"]["GPU 0"].text
    versions = (
        "" if first is None else f", torch {first.root['versions']['torch'].text}, {first.root['date'].text[:10]}"
    )
    about = "" if first is None or "workload" not in first else f" {workload(first)};"
    return "\n\n".join(
        [
            paragraph(
                f"{where}{versions} ([`scripts/run_on_gpu.py`](../scripts/run_on_gpu.py)).{about} ours over theirs:"
            ),
            table(("", *sizes), rows),
        ]
    )


def _gpu_cell(results: StoredResults, name: str, ours: str, theirs: str | None, field: str) -> str:
    """A ratio; what a run on a borrowed machine had no time for is said to be missing."""
    if name not in results:
        return NOT_MEASURED
    contenders = results(name)["contenders"]
    if ours not in contenders or (theirs is not None and theirs not in contenders):
        return NOT_MEASURED
    return (
        f"{contenders[ours][field].number:.2f}"
        if theirs is None
        else ratio(contenders[ours], contenders[theirs], field)
    )


REGIONS: dict[str, Region] = {
    "lost updates": lost_updates,
    "headline": headline,
    "overview": overview,
    "machine": machine,
    "step": step,
    "compiled": compiled,
    "compiled models": compiled_models,
    "generation": generation,
    "step memory": step_memory,
    "update": update,
    "loss": loss,
    "precisions": precisions,
    "scalers": scalers,
    "techniques": techniques,
    "loops": loops,
    "autocast": autocast,
    "callback": callback,
    "gpu": gpu,
    "footprints": footprints,
    "training memory": training_memory,
    "llama 7b": llama_7b,
    "scaler traces": scaler_traces,
    "faults": faults,
    "checkpoint cost": checkpoint_cost,
    "host": host,
    "host parts": host_parts,
    "host apart": host_apart,
    "architectures": architectures,
    "experts": experts,
    "routing": routing,
    "compiled parts": compiled_parts,
    "default memory": default_memory,
    "peaks": peaks,
    "compared": compared,
    "goals": goals,
    "floors": floors,
    "profiles": profiles,
    "scaling": scaling,
    "ways to spread": ways_to_spread,
    "communication": communication,
    "sharded host": sharded_host,
    "small updates": small_updates,
    "grpo": grpo,
}

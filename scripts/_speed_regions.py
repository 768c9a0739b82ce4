"""What stored results say of the host's time, and of other kinds of models."""

from __future__ import annotations

from _markdown import hardware, paragraph, script, table, torch_version
from _stored import Stored, StoredResults

PEER = "torch.autocast bf16, GradScaler"
FLOOR = f"{PEER}, bare function mode"
BARE = "BF16 throughout, bare function mode"
_PARTS = ("forward", "backward", "clipping", "update", "step")
_COUNTS = {
    "python_calls": "Python calls",
    "python_nodes": "nodes in Python",
    "kernels": "kernels",
    "host_reads": "reads",
}


def _where(stored: Stored) -> str:
    return f"{hardware(stored)}, {torch_version(stored)}"


def _ratio(stored: Stored, name: str) -> str:
    """One of the ratios, with its spread where that was stored, or nothing where it was not measured."""
    if name not in stored:
        return ""
    spread = f" ± {stored[f'{name}_spread'].number:.2f}" if f"{name}_spread" in stored else ""
    return f"{stored[name].number:.2f}{spread}"


def _fp16_product(stored: Stored) -> str:
    products = stored["product_seconds"]
    if "fp16" not in products:
        return "This CPU has no FP16 products: ours are FP32's, of what was rounded to FP16"
    return f"An FP16 product alone takes {products['fp16'].number / products['fp32'].number:.2f} of FP32's time here"


def host_parts(results: StoredResults) -> str:
    """The host's time of a step by part, over torch.autocast's with GradScaler, and what a step counts."""
    stored = results("bench_host")
    workload, counts = stored["workload"], stored["counts"]
    rows = []
    for name, parts in stored["contenders"].parts():
        ratios = [f"{parts[part]['ratio_to_torch_autocast'].number:.2f}" for part in _PARTS]
        call = 1e6 * parts["forward"]["seconds_per_torch_call"].number
        parameter = 1e6 * parts["step"]["seconds_per_parameter"].number
        costs = ["", ""] if name == "fp32" else [f"{call:.1f}", f"{parameter:.0f}"]
        rows.append([name, *ratios, *costs, *(f"{counts[name][count].number:,.0f}" for count in _COUNTS)])
    text = paragraph(
        f"GPT-2 of {workload['layers'].number:.0f} layers of width {workload['width'].number:.0f}, "
        f"{workload['tokens'].number:.0f} tokens, one thread: kernels take next to no time, and what is left is the "
        f"host's ({script('bench_host')}; {_where(stored)}). Times are multiples of `{PEER}`; microseconds are those "
        "above FP32, of a torch call in the forward and of a parameter in the rest of the step. The floor of an "
        "autocast that is written in Python is torch's own with a function mode that does nothing, "
        f"{stored['contenders'][FLOOR]['step']['ratio_to_torch_autocast'].number:.2f}:"
    )
    header = ("", *_PARTS, "µs a call", "µs a parameter", *_COUNTS.values())
    return f"{text}\n\n{table(header, rows)}"


def host_apart(results: StoredResults) -> str:
    """What a step of ours costs the host in parts that torch.amp's has not, in shares of torch.amp's step."""
    stored = results("bench_host")
    whole = stored["contenders"][PEER]["step"]["median_seconds"].number
    parts = [name for name, _ in stored["apart"].parts()[0][1].parts()]
    rows = [[name, *(f"{found[part].number / whole:.3f}" for part in parts)] for name, found in stored["apart"].parts()]
    return table(("share of a step of torch.amp", *parts), rows)


def architectures(results: StoredResults) -> str:
    """A step of many kinds of models at two batch sizes: bf16 over torch.autocast, fp16 over FP32."""
    few, many = results("bench_architectures_kept"), results("bench_architectures_kept_4")
    settings = " ".join(word for word in few.root["command"].text.split() if word.startswith("MALLOC_"))
    text = paragraph(
        f"A training step of small models of many kinds ({script('bench_architectures')}; {_where(few)}), with small "
        f"batches (two sequences of 128 tokens, four images) and with {many['times'].number:.0f} times as much. "
        f"{_fp16_product(few)}. The C library keeps the memory that a step frees (`{settings}`):"
    )
    first, _, last = _RATIO_COLUMNS
    header = ("", first, last, f"{many['times'].number:.0f} times: {first}", last)
    return f"{text}\n\n{table(header, _side_by_side(few, many, (_RATIOS[0], _RATIOS[2])))}"


_RATIOS = ("bf16_to_torch_autocast", "bf16_floor_to_torch_autocast", "fp16_to_fp32")
_RATIO_COLUMNS = ("`bf16` / `torch.autocast`", "floor", "`fp16` / FP32")


def _side_by_side(few: Stored, many: Stored, ratios: tuple[str, ...]) -> list[list[str]]:
    """A row of each architecture, and their medians: with small batches, then with large ones."""
    left, right = ([*one["architectures"].parts(), ("median", one["medians"])] for one in (few, many))
    return [
        [name, *(_ratio(one, ratio) for one in (row, other) for ratio in ratios)]
        for (name, row), (_, other) in zip(left, right, strict=True)
    ]


def experts(results: StoredResults) -> str:
    """A step of mixtures of experts, over grouped and batched products under torch.autocast."""
    stored = results("bench_experts")
    ratios = (
        "bf16_to_torch_autocast",
        "bf16_floor_to_torch_autocast",
        "bf16_to_batched_torch_autocast",
        "fp16_to_fp32",
    )
    peaks = ("bf16_peak_to_torch_autocast", "fp16_peak_to_fp32")
    rows = [
        [name, *(_ratio(row, one) for one in ratios), *(f"{row[one].number:.2f}" for one in peaks)]
        for name, row in stored["architectures"].parts()
    ]
    text = paragraph(
        f"A training step of two layers and 2 x 128 tokens ({script('bench_architectures')} with `--mixtures`; "
        f"{_where(stored)}). {_fp16_product(stored)}. The floor is the model in BF16 throughout:"
    )
    header = (
        "", "`bf16` / `torch.autocast`", "floor", "`bf16` / `torch.autocast` with `batched_mm`", "`fp16` / FP32",
        "peak: `bf16` / `torch.autocast`", "`fp16` / FP32",
    )  # fmt: skip
    return f"{text}\n\n{table(header, rows)}"


def routing(results: StoredResults) -> str:
    """Shares of tokens that get the experts that FP64 chooses, by the router's dtype: the worst of three scales."""
    stored = results("compare_routing")
    columns = [(dtype, way) for dtype in ("fp16", "bf16") for way in ("16 bits", "16 bits, FP32 result")]
    columns.append(("bf16", "FP32"))
    header = ["router", "FP16", "FP16, FP32 result", "BF16", "BF16, FP32 result", "FP32"]
    rows = [
        [name, *[f"{min(row[way].number for _, row in found[dtype].parts()):.2%}" for dtype, way in columns]]
        for name, found in stored["routers"].parts()
    ]
    text = paragraph(
        f"Of {stored['tokens'].number:.0f} tokens, those that get the experts that FP64 chooses; the fewest of three "
        f"scales of logits ({script('compare_routing')}):"
    )
    return f"{text}\n\n{table(header, rows)}"


def default_memory(results: StoredResults) -> str:
    """The medians where the C library gives freed memory back, as it does by itself."""
    by_size = {
        "small batches": ("bench_architectures", "bench_architectures_kept"),
        "large batches": ("bench_architectures_4", "bench_architectures_kept_4"),
    }
    rows = [
        [size, *(f"{results(name)['medians'][ratio].number:.2f}" for name in names for ratio in _RATIOS)]
        for size, names in by_size.items()
    ]
    header = ("median of all", *_RATIO_COLUMNS, *(f"kept: {column}" for column in _RATIO_COLUMNS))
    return table(header, rows)


def peaks(results: StoredResults) -> str:
    """The most bytes of tensors at once in two training steps, over the peers'."""
    few, many = results("bench_architectures_kept"), results("bench_architectures_kept_4")
    ratios = ("bf16_peak_to_torch_autocast", "fp16_peak_to_fp32")
    columns = ("`bf16` / `torch.autocast`", "`fp16` / FP32")
    header = ("peak of all tensors", *columns, *(f"large batches: {column}" for column in columns))
    return table(header, _side_by_side(few, many, ratios))


def profiles(results: StoredResults) -> str:
    """The ops in which steps of ours and of torch.autocast differ most."""
    stored = results("profile_architectures")
    names = ("torch.autocast bf16", "hf_mp bf16", "whole bf16")
    rows = []
    for model, row in stored["architectures"].parts():
        totals = row["total_milliseconds"]
        rows.append([model, "all", *(f"{totals[name].number:.1f}" for name in names)])
        for op, found in row["largest_differences"].parts()[:3]:
            rows.append(["", f"`{op}`", *(f"{found[name].number:.1f}" for name in names)])
    text = paragraph(
        f"Milliseconds inside ops, in a step of the larger batches, and the three in which ours and `torch.autocast` "
        f"differ most ({script('profile_architectures')}; {_where(stored)}):"
    )
    return f"{text}\n\n{table(('', 'op', '`torch.autocast`', '`bf16`', 'floor'), rows)}"


def compiled_models(results: StoredResults) -> str:
    """Compiled steps of several models over compiled peers, and what was compiled."""
    stored = results("bench_compiled")
    ratios = ("bf16_to_torch_autocast", "fp16_to_fp32")
    counts = ("graphs", "recompilations")
    rows = [
        [
            name,
            *(_ratio(row, r) for r in ratios),
            *(f"{row['counts'][c].number:.0f}" for c in counts),
        ]
        for name, row in stored["models"].parts()
    ]
    steps = stored["counted_steps"].number
    text = paragraph(
        f"A training step, both sides compiled ({script('bench_compiled')}; {_where(stored)}). "
        f"{_fp16_product(stored)}. Recompilations are those of {steps:.0f} steps in FP16 while the loss scale changes:"
    )
    header = ("", "`bf16` / `torch.autocast`", "`fp16` / FP32", *counts)
    return f"{text}\n\n{table(header, rows)}"


def compiled_parts(results: StoredResults) -> str:
    """Where a compiled step of ours, of torch.autocast and of the floor spends its time."""
    models = results("bench_compiled")["models"].parts()
    names = ("torch.autocast bf16", "hf_mp bf16", "whole bf16")
    parts = [part for part, _ in models[0][1]["parts"][names[0]].parts()]
    rows = [
        [model, part, *(f"{1e3 * row['parts'][name][part].number:.1f}" for name in names)]
        for model, row in models
        for part in parts
    ]
    return table(("milliseconds, compiled", "", "`torch.autocast`", "`bf16`", "floor"), rows)


def generation(results: StoredResults) -> str:
    """A token of generate(), over torch.autocast's time and over that of a model in BF16 throughout."""
    stored = results("bench_generate")
    ours = ("hf_mp bf16", "hf_mp fp16")
    rows = []
    for name, row in stored["cases"].parts():
        peer, floor = "ratio_to_torch_autocast", "ratio_to_floor"
        found = [_ratio(row[one], ratio) if one in row else "" for one in ours for ratio in (peer, floor)]
        rows.append([name, *found])
    text = paragraph(
        f"`generate()` of {stored['tokens'].number:.0f} tokens one after the other, {stored['layers'].number:.0f} "
        f"layers of width {stored['width'].number:.0f} ({script('bench_generate')}; {_where(stored)}): the time of a "
        "token over that of `torch.autocast` in BF16 entered once around it, and over that of a model that is BF16 "
        "throughout. Under `torch.autocast`, Llama fails with a static cache:"
    )
    columns = ("`bf16` / `torch.autocast`", "/ BF16", "`fp16` / `torch.autocast`", "/ BF16")
    return f"{text}\n\n{table(('', *columns), rows)}"


def host(results: StoredResults) -> str:
    """What a step costs the host: by a look at each call, by slots, by slots with shared borders, and now."""
    kinds = {
        "bench_host_before": "a look at each call's arguments",
        "bench_host_single_borders": "slots, a border for each weight",
        "bench_host_slots": "slots, small weights in groups of 16",
        "bench_host": "now",
    }
    ours = ("hf_mp bf16", "hf_mp fp16", "hf_mp fp16-lean")

    def ratio(name: str, who: str) -> float:
        found = results(name)["contenders"]
        ours, theirs = (found[contender]["step"]["median_seconds"].number for contender in (who, PEER))
        return float(ours / theirs)

    def machine(name: str) -> str:
        device = results(name).root["device"]
        return f"{device['CPU'].text}, FP16 products {device['FP16 products on the CPU'].text}"

    rows = [[label, *(f"{ratio(name, who):.2f}" for who in ours), machine(name)] for name, label in kinds.items()]
    return table(("way to the parameters", *(f"`{who.removeprefix('hf_mp ')}`" for who in ours), "CPU"), rows)

import io
import json
import os
import re
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import MixtralConfig
from typer.testing import CliRunner

from hf_mp import cli
from hf_mp.memory.precisions import PRECISIONS, SHOWN_PRESETS, TRAINING_PRESETS
from hf_mp.memory.report import as_json, gather_report
from hf_mp.memory.tables import in_columns, loaded_figures, render, training_figures

pytestmark = pytest.mark.slow

STEP = {"batch_size": 2, "seq_len": 16}


def run(*arguments):
    return CliRunner().invoke(cli.app, ["memory", *map(str, arguments)])


def shown(report, width):
    console = Console(width=width, file=io.StringIO())
    console.print(render(report, width))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny GPT-2 in a directory."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("tiny")
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, n_positions=32, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def report(saved):
    return gather_report(str(saved), gpu_bytes=2**20, presets=("fp32", "fp16"), device="cpu", **STEP)


def test_rows_are_the_data_in_words(report):
    assert list(report.footprints) == list(PRECISIONS)
    size = report.footprints["fp32"].total_bytes
    kinds = {"parameters": size, "buffers": 0, "quantization state": 0}
    assert dict(loaded_figures(report.footprints["fp32"])) == {
        "total": size, **kinds, "Transformers counts": size, "in fp32": size,
    }  # fmt: skip
    unquantized = [row for row in report.footprints["int8"].rows if row.dtype == "float16" and not row.shared_with]
    in_16_bits = sum(row.counted_bytes for row in unquantized)
    assert dict(loaded_figures(report.footprints["int8"]))["in fp16"] == in_16_bits
    assert in_columns({"a": [("x", "1"), ("y", "2")], "b": [("y", "3"), ("z", "4")]}) == [
        ("x", "1", ""), ("y", "2", "3"), ("z", "", "4"),
    ]  # fmt: skip


def test_a_row_has_one_unit_and_one_of_0_alone_is_left_out():
    columns = {
        "a": [("peak", 3 * 2**29), ("buffers", 0), ("ids", 512)],
        "b": [("peak", 2**20), ("buffers", 0), ("ids", 0)],
    }
    assert in_columns(columns) == [("peak, GiB", "1.50", "0.00"), ("ids, B", "512", "0")]


def test_the_table_of_a_gpu_has_room_for_five_presets(saved):
    found = gather_report(str(saved), gpu_bytes=2**22, presets=SHOWN_PRESETS, **STEP)
    assert "bf16" in found.training
    table = shown(found, 80).partition("The peak of a training step")[2]
    assert table.count("\n\u2500") == 1
    assert not re.search(r"^\D+( +0)+$", table, re.MULTILINE)


@pytest.mark.parametrize("preset", ["fp32", "fp16"])
def test_the_peak_stands_beside_what_fits(report, preset):
    row = report.training[preset]
    words, largest = dict(training_figures(row)), row.largest_batch
    assert words["peak"] == row.estimate.peak_bytes
    assert words["in 1.00 MiB"] == ("fits" if row.estimate.peak_bytes <= 2**20 else "does not fit")
    assert largest.next_peak_bytes > 2**20
    assert largest.batch_size == 0 or largest.peak_bytes <= 2**20


def test_where_nothing_fits_the_ways_that_do_are_named(saved):
    found = gather_report(str(saved), gpu_bytes=300 * 2**10, presets=("fp32",), **STEP)
    assert found.training["fp32"].estimate.peak_bytes > 300 * 2**10 and found.ways
    assert all(way.peak_bytes <= 300 * 2**10 for way in found.ways)
    told = " ".join(shown(found, 80).split())
    assert (
        f"None of these fits. This would: {'--gradient-checkpointing ' * found.ways[0].gradient_checkpointing}--b"
        in told
    )
    assert as_json(found)["would_fit"][0]["precision"] == found.ways[0].precision
    too_small = gather_report(str(saved), gpu_bytes=2**10, presets=("fp32",), **STEP)
    assert "Nothing fits, nor does the leanest way that was tried, --gradient-ch" in " ".join(
        shown(too_small, 200).split()
    )
    assert as_json(too_small)["would_fit"] == []


def test_json_holds_every_byte_with_units_and_versions(report):
    values = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert values["units"] == "bytes"
    assert {"torch", "transformers", "hf_mp", "bitsandbytes"} <= set(values["versions"])
    for precision, footprint in report.footprints.items():
        stored = values["loaded"][precision]
        assert stored["total_bytes"] == footprint.total_bytes == sum(t["counted_bytes"] for t in stored["tensors"])
        assert stored["get_memory_footprint_bytes"] == footprint.transformers_bytes
    step = values["training"]["fp16"]["estimate"]
    assert step["peak_bytes"] == sum(step["bytes_by_category"].values())
    assert step["settings"]["batch_size"] == 2
    assert step["by_phase"][step["peak_phase"]] == step["bytes_by_category"]


def test_a_missing_package_leaves_the_rest(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = gather_report(str(saved))
    assert list(found.footprints) == ["fp32", "fp16", "bf16"]
    assert set(found.unavailable) == {"int8", "nf4", "fp4"}
    assert "bitsandbytes" in found.unavailable["int8"]


# The command


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_table_is_wider_than_the_screen_and_no_word_is_broken(report, width):
    training = dict.fromkeys(TRAINING_PRESETS, report.training["fp32"])
    text = shown(replace(report, training=training), width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    words = set(text.replace(",", " ").split())
    for label in (*(preset.label for preset in TRAINING_PRESETS.values()), "quantization state", "Transformers counts"):
        assert set(label.replace(",", " ").split()) <= words
    assert "backward" in words


def test_large_sizes_are_in_gib_and_experts_that_stay_in_16_bits_are_named():
    found = gather_report(MixtralConfig())
    assert dict(loaded_figures(found.footprints["fp32"]))["total"] == 4 * found.parameters + 512
    text = " ".join(shown(found, 80).split())
    assert "total, GiB 173.98 86.99 86.99" in text
    assert re.search(r"in fp16, GiB 86\.99 \S+ 84\.49 84\.49 ", text)
    assert "NF4: 99% of these bytes stay in 16 bits" in text
    assert "model.layers.*.mlp.experts.gate_up_proj" in text


def test_gpt2_without_weights_and_network(monkeypatch):
    monkeypatch.setattr("hf_mp.memory.models.ask_hub", lambda name: pytest.fail("the Hub was asked"))
    values = json.loads(run("gpt2", "--json").stdout)
    assert values["training"] == {}
    mib = {name: round(found["get_memory_footprint_bytes"] / 2**20, 2) for name, found in values["loaded"].items()}
    assert mib == {"fp32": 474.70, "fp16": 237.35, "bf16": 237.35, "int8": 156.35, "nf4": 115.85, "fp4": 115.85}


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["no-such/model"],
            "neither a directory .*no network.*gpt2, gpt2-medium, gpt2-large, gpt2-xl",
        ),
        (["gpt2", "--gpu", "big"], "'big' is not a size of memory: write a number and KiB, MiB, GiB"),
        (["gpt2", "--train", "--seq-len", "2000"], "longer than the 1024 positions"),
        (["gpt2", "--train", "--batch-size", "0"], "batch_size=0 is not possible"),
        (["gpt2", "--precision", "fp4"], "'fp4' is not known for training"),
        (["gpt2", "--train", "--optimizer", "x"], "optimizer='x' cannot be made"),
        (["gpt2", "--train", "--device", "tpu"], "device='tpu' cannot be predicted for"),
    ],
    ids=["name", "no size", "seq_len", "batch", "precision", "optimizer", "device"],
)
def test_bad_input_ends_in_one_line_and_nothing_is_written(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_mp.memory.models.ask_hub", lambda name: ConnectionError("no network"))
    result = run(*flags)
    assert result.exit_code == 2
    assert re.search(message, result.output.replace("\n", " "))
    assert "Traceback" not in result.output
    assert os.listdir(tmp_path) == []

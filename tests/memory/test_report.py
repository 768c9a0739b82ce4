import io
import json
import os
import re
import sys
import warnings
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import GPT2Config, MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from hf_mp import cli
from hf_mp.memory.folding import kept_sentences
from hf_mp.memory.models import load
from hf_mp.memory.precisions import PRECISIONS, TRAINING_PRESETS
from hf_mp.memory.report import as_json, gather_report
from hf_mp.memory.sizes import readable
from hf_mp.memory.tables import (
    LOADED_HEADER,
    TRAINING_HEADER,
    fit_rows,
    loaded_rows,
    measured_rows,
    parameter_rows,
    render,
    training_rows,
)

pytestmark = pytest.mark.slow

STEP = {"batch_size": 2, "seq_len": 16}


def run(*arguments):
    return CliRunner().invoke(cli.app, ["memory", *map(str, arguments)])


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
    return gather_report(
        str(saved), train=True, measure=True, gpu_bytes=2**20, presets=("fp32", "fp16"), device="cpu", **STEP
    )


def test_a_report_says_what_was_counted(saved, report):
    planned = gather_report(str(saved), config_only=True)
    assert list(planned.footprints) == list(report.footprints) == list(PRECISIONS)
    assert (planned.counted_from, report.counted_from) == ("configuration", "loaded weights")


def test_rows_are_the_data_in_words(report):
    fp32, *_, int8, nf4, fp4 = loaded_rows(report.footprints)
    size = readable(report.footprints["fp32"].total_bytes)
    assert fp32 == ("FP32", size, size, "0 B", "0 B", size, "")
    unquantized = [row for row in report.footprints["int8"].rows if row.dtype == "float16" and not row.shared_with]
    assert int8[-1] == readable(sum(row.counted_bytes for row in unquantized))
    assert (int8[0], nf4[0], fp4[0]) == ("INT8", "NF4", "FP4")
    rows = {row[0]: row for row in parameter_rows(report.footprints)}
    assert rows["transformer.h.0 - h.1.attn.c_attn.weight"][1:] == (
        "32x96", "cpu", "float32", "float16", "bfloat16", "int8", "uint8", "uint8",
    )  # fmt: skip
    assert rows["transformer.wte.weight"][6] == "float16"
    trained = training_rows(report.training)
    assert [row[0] for row in trained] == ["FP32", "hf_mp fp16"]
    assert all(len(row) == len(trained[0]) for row in trained)


def test_predicted_stands_beside_measured(report):
    for row, words in zip(report.training.values(), measured_rows(report.training), strict=True):
        assert row.estimate.peak_bytes == pytest.approx(row.measurement.peak_bytes, rel=0.03)
        assert words[3] in ("+0.00%", "-0.00%") or abs(float(words[3].rstrip("%"))) < 3


def test_what_fits_in_the_gpu(report):
    for row, words in zip(report.training.values(), fit_rows(report.training), strict=True):
        assert words[1] == ("fits" if row.estimate.peak_bytes <= 2**20 else "does not fit")
        largest = row.largest_batch
        assert largest.next_peak_bytes > 2**20
        assert largest.batch_size == 0 or largest.peak_bytes <= 2**20


def test_json_holds_every_byte_with_units_and_versions(report):
    values = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert values["units"] == "bytes"
    assert {"torch", "transformers", "hf_mp", "bitsandbytes"} <= set(values["versions"])
    for precision, footprint in report.footprints.items():
        stored = values["loaded"][precision]
        assert stored["total_bytes"] == footprint.total_bytes == sum(t["counted_bytes"] for t in stored["tensors"])
        explained = sum(stored["differences"].values())
        assert stored["get_memory_footprint_bytes"] + explained == stored["total_bytes"]
        assert stored["modules"]["total_bytes"] == footprint.total_bytes
    step = values["training"]["fp16"]["estimate"]
    assert step["peak_bytes"] == sum(step["bytes_by_category"].values())
    assert step["settings"]["batch_size"] == 2
    assert max(sum(m["bytes_by_category"].values()) for m in step["timeline"]) == step["peak_bytes"]
    assert values["training"]["fp32"]["measurement"]["measured"] is True


def test_a_missing_package_leaves_the_rest(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = gather_report(str(saved), config_only=True)
    assert list(found.footprints) == ["fp32", "fp16", "bf16"]
    assert set(found.unavailable) == {"int8", "nf4", "fp4"}
    assert "bitsandbytes" in found.unavailable["int8"]


# The command


def test_the_command_prints_tables(saved):
    result = run(saved, "--train", "--batch-size", 2, "--seq-len", 16, "--precision", "fp16", "--gpu", "1GiB")
    assert result.exit_code == 0, result.output
    for words in ("Loaded", "INT8", "transformer.h.0 - h.1.ln_1.weight", "One training step on a GPU", "In 1.00 GiB"):
        assert words in result.stdout
    assert "not measured on a GPU yet" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "hf-mp memory: taking a training step in hf_mp fp16 (1 of 1) ...\n" in result.stderr


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_table_is_wider_than_the_screen_and_no_word_is_broken(report, width):
    training = dict.fromkeys(TRAINING_PRESETS, report.training["fp32"])
    console = Console(width=width, file=io.StringIO())
    console.print(render(replace(report, training=training), width))
    text = console.file.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    words = set(text.replace("\n", " ").split())
    for labels in (*(preset.label for preset in TRAINING_PRESETS.values()), *TRAINING_HEADER[1:], *LOADED_HEADER):
        assert set(labels.split()) <= words
    assert "backward" in words and (width < 80 or "transformer.ln_f.weight" in words)


def test_the_name_of_a_parameter_is_broken_at_its_dots():
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=101, n_positions=32)
    console = Console(width=60, file=io.StringIO())
    console.print(render(gather_report(config, config_only=True), 60))
    names = re.sub(r" +(fp32 .*)?\n", "\n", console.file.getvalue())
    assert "\ntransformer.h.0.\n  attn.c_attn.\n  weight\n" in names


def test_large_sizes_are_in_gib_and_experts_that_stay_in_16_bits_are_named():
    found = gather_report(MixtralConfig(), config_only=True, precisions=("fp32", "nf4"))
    assert loaded_rows(found.footprints)[0][1] == "173.98 GiB"
    assert loaded_rows(found.footprints)[1][-1] == "84.49 GiB"
    (sentence,) = kept_sentences(found.footprints)
    assert sentence.startswith("NF4: 99% of these bytes stay in float16")
    assert "model.layers.0 - layers.31.mlp.experts.gate_up_proj" in sentence


def test_loading_such_a_model_says_it_too(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(num_hidden_layers=1, vocab_size=128, **sizes)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"NF4: \d+% of these bytes stay in float16.*experts.gate_up_proj"):
        load(tmp_path, "nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(tmp_path, "FP16")


def test_a_directory_without_weights_is_told_the_way_out(tmp_path):
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 2
    assert re.search(r"cannot be loaded: .*without its weights \(`hf-mp memory ... --config-only`\)", result.output)


def test_gpt2_without_weights(monkeypatch):
    monkeypatch.setattr("hf_mp.memory.models.ask_hub", lambda name: pytest.fail("the Hub was asked"))
    values = json.loads(run("gpt2", "--config-only", "--json").stdout)
    assert values["training"] == {}
    mib = {name: round(found["get_memory_footprint_bytes"] / 2**20, 2) for name, found in values["loaded"].items()}
    assert mib == {"fp32": 474.70, "fp16": 237.35, "bf16": 237.35, "int8": 156.35, "nf4": 115.85, "fp4": 115.85}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["no-such/model", "--config-only"], "cannot be loaded: no network.*gpt2, gpt2-medium, gpt2-large, gpt2-xl"),
        (["gpt2", "--gpu", "24GB"], "'24GB' is not a size of memory: write a number and KiB, MiB, GiB"),
        (["gpt2", "--gpu", "big"], "'big' is not a size of memory"),
        (["gpt2", "--config-only", "--train", "--seq-len", "2000"], "longer than the 1024 positions"),
        (["gpt2", "--config-only", "--train", "--batch-size", "0"], "batch_size=0 is not possible"),
        (["gpt2", "--config-only", "--precision", "fp4"], "'fp4' is not known for training"),
        (["gpt2", "--config-only", "--train", "--optimizer", "x"], "optimizer='x' cannot be made"),
        (["gpt2", "--config-only", "--train", "--device", "tpu"], "device='tpu' cannot be estimated"),
        (["gpt2", "--json", "--html", "x.html"], "--json and --html are both given"),
        (["gpt2", "--html", "no/such/directory/x.html"], "there is no directory no/such/directory"),
        (["gpt2", "--html", "."], "is a directory: name a file"),
    ],
    ids=["name", "decimal", "no size", "seq_len", "batch", "precision", "optimizer", "device", "both", "parent", "dir"],
)
def test_bad_input_ends_in_one_line_and_nothing_is_written(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_mp.memory.models.ask_hub", lambda name: ConnectionError("no network"))
    result = run(*flags)
    assert result.exit_code == 2
    assert re.search(message, result.output.replace("\n", " "))
    assert "Traceback" not in result.output
    assert os.listdir(tmp_path) == []

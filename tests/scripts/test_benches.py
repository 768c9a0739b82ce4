"""The benchmarks at tiny sizes: what they store is what the tables are made from."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import GPT2Config, MixtralConfig

import bench
from _contenders import COMPILED, PARTS
from _tables import Regions
from benches import architectures, autocast, compiled, expert_training, generate, memory_command, memory_gpu, update
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS

TINY_MIXTRAL = dict(
    vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32,
)  # fmt: skip
STEPS = "fp32,torch.autocast bf16,Trainer fp16=True,hf_mp fp16,hf_mp fp16-lean,hf_mp bf16,hf_mp bf16-lean"


@pytest.fixture
def shape(tiny_model) -> dict:
    return {**tiny_model, "batch": 2, "seq": 16}


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark and gives what it stores."""

    def run(what: str, name: str | None = None, **options) -> dict:
        name = name or f"bench_{what}"
        bench.command(what)(name=name, output_dir=tmp_path, **options)
        return json.loads((tmp_path / f"{name}.json").read_text())["result"]

    return run


def test_the_command_has_the_options_of_its_benchmark_and_those_of_all(tmp_path, capsys):
    options = ["--rows", "4", "--vocab", "20", "--rounds", "1", "--name", "x", "--output-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        bench.main(["loss", *options])
    assert ended.value.code == 0
    assert json.loads((tmp_path / "x.json").read_text())["result"]["vocab"] == 20
    shown = capsys.readouterr().out
    assert "hf_mp bf16" in shown and "ratio_to_torch" in shown and "stored in x.json" in shown
    with pytest.raises(SystemExit, match="'moon' is not known"):
        bench.main(["moon"])


def test_what_is_yielded_is_stored_at_once(monkeypatch, tmp_path):
    def measure(rounds: int = 3):
        yield {"rounds": rounds}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "import_module", lambda name: SimpleNamespace(measure=measure, NAME="some_name"))
    with pytest.raises(KeyboardInterrupt):
        bench.command("something")(rounds=7, output_dir=tmp_path)
    assert json.loads((tmp_path / "some_name.json").read_text())["result"] == {"rounds": 7}


def test_a_step_is_stored_with_ratios_floors_and_peaks(shape, quick_rates, run, tmp_path, capsys):
    result = run("step", **shape, rounds=2, warmup=1, contenders=STEPS, device="cpu")
    assert result["left_out"] == {"Trainer fp16=True": "on a CPU, fp16=True trains in FP32"}
    assert "not here: Trainer fp16=True" in capsys.readouterr().out
    assert result["workload"]["tokens"] == 32
    rows, rates = result["contenders"], result["matmul_flops_per_second"]
    assert list(rows) == [name for name in STEPS.split(",") if name != "Trainer fp16=True"]
    for name, row in rows.items():
        dtype = name.partition("-lean")[0].split()[-1]
        assert row["rounds"] == 2 and row["ratio_to_fp32"] > 0
        assert row["tokens_per_second"] == 32 / row["median_seconds"]
        products = result["workload"]["flops"] / rates[dtype]
        assert row["flops_utilisation"] == pytest.approx(products / row["median_seconds"])
        assert products < row["floor_seconds"]
        assert row["peak_bytes"] > 0

    # the tables of the README are made from it
    regions = Regions(tmp_path)
    text = regions("step")
    ours, theirs = (rows[name]["median_seconds"] for name in ("hf_mp bf16", "torch.autocast bf16"))
    assert all(f"| {name} | " in text for name in rows)
    assert ours / theirs < 0.1 or f"{ours / theirs:.2f} for bf16" in text
    assert "GPT-2 with 1 layers of width 32" in text
    assert "torch" in regions("machine")


def test_memory_is_measured_without_rounds(shape, quick_rates, run, tmp_path):
    contenders = "torch.autocast bf16,hf_mp bf16"
    rows = run("step", "bench_step_memory", **shape, rounds=0, contenders=contenders, device="cpu")["contenders"]
    assert all(row["peak_bytes"] and "median_seconds" not in row for row in rows.values())
    assert "| torch.autocast bf16 | 1 | 1.00 |" in Regions(tmp_path)("step memory")


def test_an_update_is_stored_with_its_floor(tiny_model, quick_rates, run, tmp_path):
    result = run("update", **tiny_model, rounds=2, device="cpu")
    rows = result["contenders"]
    assert list(rows) == [name for name in update.CONTENDERS if name != "FlashAdamW"]
    assert list(result["left_out"]) == ["FlashAdamW"]
    copied = result["copy_bytes_per_second"]
    assert rows["hf_mp fp16"]["floor_seconds"] == 34 * result["parameters"] / copied
    assert rows["hf_mp fp16-lean + AdamW8bit"]["floor_seconds"] == 16 * result["parameters"] / copied
    for name, row in rows.items():
        in_bf16 = "torch.amp bf16" if "bf16" in name else "torch.amp"
        peer = rows["torch.amp + AdamW8bit" if name.endswith("AdamW8bit") else in_bf16]
        assert row["ratio_to_torch"] == row["median_seconds"] / peer["median_seconds"]


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16-lean"])
def test_the_update_that_is_timed_updates(precision, tiny_model, monkeypatch):
    workload = update.Workload(**tiny_model, batch=1, seq=1)
    model = workload.model()
    monkeypatch.setattr(update.Workload, "model", lambda self: model)
    before = model.transformer.wte.weight.detach().clone()
    step = update.our_step(workload, precision, update.fused_adamw)
    for _ in range(10):
        step()
    assert not before.equal(model.transformer.wte.weight.detach().float())


def test_an_optimizer_that_is_not_installed_is_left_out(tiny_model, quick_rates, run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    result = run("update", **tiny_model, rounds=1, contenders="torch.amp, torch.amp + AdamW8bit", device="cpu")
    assert list(result["contenders"]) == ["torch.amp"]
    assert result["left_out"]["torch.amp + AdamW8bit"] == "bitsandbytes is not installed"


def test_a_loss_is_stored_with_its_floor(quick_rates, run, tmp_path):
    result = run("loss", rows=64, vocab=5000, rounds=2, device="cpu")
    assert result["floor_bytes"] == 2 * 64 * 5000
    assert result["floor_seconds"] == 6 * 64 * 5000 / result["copy_bytes_per_second"]
    rows = result["contenders"]
    assert list(rows) == ["torch fp16", "hf_mp fp16", "torch bf16", "hf_mp bf16"]
    assert all(row["peak_bytes"] >= result["floor_bytes"] for row in rows.values())
    # FP32 logits, their log-softmax and their gradient are in torch's peak
    assert rows["torch fp16"]["peak_bytes"] > 4 * result["floor_bytes"]


def test_autocast_is_stored_with_calls_casts_and_floors(shape, quick_rates, run, tmp_path):
    result = run("autocast", **shape, calls=50, rounds=1, device="cpu")
    casts = {name: row["casts"] for name, row in result["weight_casts_per_forward"].items()}
    # four products with bias in a block, and the output layer
    assert casts[autocast.PEER] == casts[autocast.PER_FORWARD] == 4 * 2 + 1
    assert casts[autocast.OURS] == casts[autocast.WHOLE] == 0
    assert set(result["floor_seconds"]) == {"forward_backward", "cast_all_weights"}
    assert result["forward_backward"][autocast.PEER]["ratio_to_torch_autocast"] == 1.0
    assert all(row["ratio_to_floor"] > 0 for row in result["forward_backward"].values())


# Kinds of models


def tiny(**settings) -> architectures.Architecture:
    settings = {**architectures._GPT2, **settings, "n_layer": 1, "n_embd": 16, "n_head": 2}
    return architectures.Architecture(
        architectures.made("GPT2", "LMHeadModel", **settings), lambda: architectures.language(1, 8)
    )


def test_ratios_peaks_and_the_floor_of_an_architecture(monkeypatch, run):
    monkeypatch.setattr(architectures, "ARCHITECTURES", {"tiny": tiny()})
    result = run("architectures", rounds=2, times=3, device="cpu")
    row = result["architectures"]["tiny"]
    seconds = {name: timing["median_seconds"] for name, timing in row["contenders"].items()}
    peer, peaks = seconds["torch.autocast bf16"], row["peak_bytes"]
    assert all(peaks[name] > 14 * 8192 * 16 for name in ("hf_mp bf16", "torch.autocast bf16"))  # bytes a weight
    assert result["medians"] == {
        "bf16_to_torch_autocast": seconds["hf_mp bf16"] / peer,
        "bf16_floor_to_torch_autocast": seconds["whole bf16"] / peer,
        "fp16_to_fp32": seconds["hf_mp fp16"] / seconds["fp32"],
        "bf16_peak_to_torch_autocast": peaks["hf_mp bf16"] / peaks["torch.autocast bf16"],
        "fp16_peak_to_fp32": peaks["hf_mp fp16"] / peaks["fp32"],
    }
    assert row["bf16_to_torch_autocast_spread"] > 0 and result["times"] == 3
    assert tiny().batch(3)["input_ids"].shape == (3, 8)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("architectures", {"only": "Nothing"}, "'Nothing' is the beginning of none of Llama"),
        ("compiled", {"only": "Nothing"}, "'Nothing' is the beginning of none of GPT-2"),
        ("generate", {"only": "BERT"}, "BERT is not known: use some of GPT-2, batch 1"),
        ("update", {"contenders": "adam"}, r"\['adam'\] are not known: use some of torch.amp, hf_mp fp16"),
    ],
)
def test_a_name_that_is_not_known(what, options, message, run, monkeypatch):
    monkeypatch.setattr(compiled, "allow_recompilations", lambda: None)
    with pytest.raises(typer.BadParameter, match=message):
        run(what, device="cpu", **options)


@pytest.mark.exhaustive
def test_graphs_and_ratios_of_compiled_steps(monkeypatch, run):
    eager = functools.partial(architectures.make_step, backend="eager")
    monkeypatch.setattr(compiled, "allow_recompilations", lambda: None)
    monkeypatch.setattr(compiled, "MODELS", {"tiny": tiny(**compiled._GPT2)})
    monkeypatch.setattr(compiled, "make_step", lambda *args, **settings: eager(*args, **settings))
    monkeypatch.setattr(compiled, "COUNTED_STEPS", 8)
    row = run("compiled", rounds=2, device="cpu")["models"]["tiny"]
    mine, peer = (row["contenders"][f"{name}{COMPILED}"]["median_seconds"] for name in ("hf_mp bf16", compiled.PEER))
    assert row["bf16_to_torch_autocast"] == mine / peer
    parts = row["parts"]["hf_mp bf16"]
    assert set(parts) == set(PARTS) and 0 < sum(parts.values()) < 2 * mine
    # one graph, and none is compiled again when the loss scale changes
    assert row["counts"]["graphs"] == 1 and row["counts"]["recompilations"] == 0 and row["counts"]["scales"] > 2


def test_generation_is_stored_with_its_ratios(run):
    sizes = {"layers": 1, "width": 128, "vocab": 64, "tokens": 3, "rounds": 1}
    stored = run("generate", **sizes, only="GPT-2, batch 1; Llama, batch 1, static cache")["cases"]
    assert stored["GPT-2, batch 1"].keys() == set(generate.CONTENDERS)
    assert stored["GPT-2, batch 1"][generate.WHOLE]["ratio_to_floor"] == 1.0
    assert "ratio_to_torch_autocast" not in stored["Llama, batch 1, static cache"][generate.WHOLE]


@pytest.mark.parametrize(("kind", "limit"), [("GPT-2", 690), ("Llama", 800)])
def test_a_layer_costs_no_more_calls_for_a_token(kind, limit, monkeypatch):
    """Above those of a model that is BF16 throughout."""
    monkeypatch.setitem(CPU_PRODUCTS, torch.bfloat16, True)

    def calls(contender: str, layers: int) -> float:
        model = generate.make_model(kind, layers, 128, 64, "cpu")
        call = generate.make_call(model, contender, generate.Case(kind, 1), 8, "cpu")
        return generate.python_calls(call, 8)

    ours, whole = (calls(contender, 3) - calls(contender, 2) for contender in ("hf_mp bf16", generate.WHOLE))
    assert ours - whole <= limit


# Contracts, and experts


def test_the_contract_of_a_stock_training_loses_updates_and_ours_does_not(run):
    result = run("contracts", "show_contracts", layers=1, width=32, rounds=1, gibibytes=1)
    stock, ours = result["contracts"].values()
    assert stock["risks"][0] == "no masters" and stock["lost_share"] > 0.5
    assert ours["risks"] == [] and ours["lost_share"] < 0.01
    assert {row[2] for row in stock["rows"]} == {"bf16"} and {row[2] for row in ours["rows"]} == {"fp32"}
    assert 0 < result["seconds_to_take"]["1,000 tensors"] < 1.0 and 0 < result["checked"]["seconds"] < 5.0


@pytest.mark.slow
def test_a_model_saved_in_bf16_learns_with_ours_as_if_loaded_in_fp32(run):
    result = run("loading", "compare_loading", scale="small", steps=8, learning_rate=1e-4, evaluations=2)
    rows = list(result["contenders"].values())
    assert all(row["steps"] == [0, 4, 8] for row in rows) and result["workload"]["steps"] == 8
    fp32, stock, stock_autocast, callback, lean = rows
    for ours in (callback, lean):
        assert ours["unmoved"] < 0.1 < 0.5 < min(stock["unmoved"], stock_autocast["unmoved"])
        assert ours["eval_losses"][-1] == pytest.approx(fp32["eval_losses"][-1], rel=1e-3)


def test_mixtures_of_experts_are_trained_in_each_way(run, monkeypatch):
    monkeypatch.setattr(expert_training, "ProcessPoolExecutor", ThreadPoolExecutor)  # a process takes seconds to start
    row = run("expert_training", steps=3, seeds=1, kinds=["Olmoe"], workers=1)["kinds"]["Olmoe"]
    assert list(row["losses"]) == ["FP32", *row["off"]] and len(row["off"]) == 5
    assert row["losses"]["FP32"] == [row["fp32"]] and all(off < 0.02 for off in row["off"].values())


@pytest.mark.slow
def test_the_memory_command_is_timed(run, monkeypatch):
    tiny = MixtralConfig(**TINY_MIXTRAL, architectures=["MixtralForCausalLM"])
    monkeypatch.setattr(memory_command, "COMMANDS", {"tiny": ("tiny", tiny, "--train --precision fp16")})
    (command,) = run("memory_command", only="tiny", rounds=1)["commands"]
    assert command["model"] == "tiny" and command["cpu_seconds"] > 0.5  # imports alone take that
    monkeypatch.setattr(memory_command, "COMMANDS", {"tiny": ("tiny", tiny, "--train --precision moon")})
    with pytest.raises(CalledProcessError):
        run("memory_command", only="tiny", rounds=1)


def test_what_an_allocator_counts_needs_one(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU, or a driver for one"):
        run("memory_gpu")


def test_what_forward_keeps_is_counted(run, tmp_path):
    GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=5000, n_positions=16).save_pretrained(tmp_path / "tiny")
    rows = run("activations", model=str(tmp_path / "tiny"), batch_size=4, seq_len=16)["contenders"]
    stock, chunks, ours = (
        rows[name] for name in ("Trainer fp16=True", "Trainer fp16=True, loss in chunks", "hf_mp fp16")
    )
    logits = 4 * 15 * 5000
    assert stock["kept_bytes"] - chunks["kept_bytes"] > 2 * logits  # nor are they whole in 16 bits
    assert stock["kept_bytes"] - ours["kept_bytes"] > 2 * logits  # in FP32
    assert set(ours["kept_bytes_by_op"]) and ours["peak_bytes"] < stock["peak_bytes"]
    assert rows["Trainer fp16=True, GELU in one op"]["kept_bytes"] < stock["kept_bytes"]


@pytest.mark.gpu
def test_a_gpu_counts_what_is_predicted(run, tmp_path):
    result = run("memory_gpu", models="gpt2")
    assert [row["precision"] for row in result["rows"]] == list(memory_gpu.PRESETS)
    assert all(abs(row["difference"]) < 0.01 and row["workspace_bytes"] > 0 for row in result["rows"])
    assert "| `fp16-lean` | " in Regions(tmp_path)("gpu memory")

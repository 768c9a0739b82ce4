"""The benchmarks at tiny sizes: what they store is what the tables are made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

import bench_autocast
import bench_callback
import bench_loss
import bench_step
import bench_update
from _plots import digest, draw_steps, drawn_from
from _tables import Regions

STEPS = "fp32,torch.autocast bf16,Trainer fp16=True,hf_mp fp16,hf_mp fp16-lean,hf_mp bf16,hf_mp bf16-lean"
FEW_STEPS = "fp32,torch.autocast bf16,hf_mp bf16"


@pytest.fixture
def shape(tiny_model) -> dict:
    return {**tiny_model, "batch": 2, "seq": 16}


def stored(directory: Path, name: str) -> dict:
    return json.loads((directory / f"{name}.json").read_text())["result"]


def test_a_step_is_stored_with_ratios_floors_and_peaks(shape, quick_rates, tmp_path, capsys):
    bench_step.main(**shape, rounds=2, warmup=1, contenders=STEPS, device="cpu", output_dir=tmp_path)
    result = stored(tmp_path, "bench_step")
    assert result["left_out"] == {"Trainer fp16=True": "on a CPU, fp16=True trains in FP32"}
    assert "not here: Trainer fp16=True" in capsys.readouterr().out
    assert result["workload"]["tokens"] == 32
    rows, rates = result["contenders"], result["matmul_flops_per_second"]
    assert list(rows) == [name for name in STEPS.split(",") if name != "Trainer fp16=True"]
    for name, row in rows.items():
        dtype = name.partition("-lean")[0].split()[-1]
        assert row["rounds"] == 2
        assert row["ratio_to_fp32"] == row["median_seconds"] / rows["fp32"]["median_seconds"]
        assert row["tokens_per_second"] == 32 / row["median_seconds"]
        products = result["workload"]["flops"] / rates[dtype]
        assert row["flops_utilisation"] == pytest.approx(products / row["median_seconds"])
        assert products < row["floor_seconds"]
        assert row["ratio_to_floor"] == row["median_seconds"] / row["floor_seconds"]
        assert row["peak_bytes"] > 0

    # the tables and the picture of the README are made from it
    regions = Regions(tmp_path)
    text = regions("step")
    ours, theirs = (rows[name]["median_seconds"] for name in ("hf_mp bf16", "torch.autocast bf16"))
    assert all(f"| {name} | " in text for name in rows)
    assert ours / theirs < 0.1 or f"{ours / theirs:.2f} for bf16" in text
    assert "GPT-2 with 1 layers of width 32" in text
    assert "torch" in regions("machine")
    draw_steps(result, tmp_path / "step.png")
    assert drawn_from(tmp_path / "step.png") == digest(result)


def test_memory_is_measured_without_rounds(shape, quick_rates, tmp_path):
    contenders = "torch.autocast bf16,hf_mp bf16"
    bench_step.main(
        **shape, rounds=0, contenders=contenders, device="cpu", name="bench_step_memory", output_dir=tmp_path
    )
    rows = stored(tmp_path, "bench_step_memory")["contenders"]
    assert all(row["peak_bytes"] and "median_seconds" not in row for row in rows.values())
    assert "| torch.autocast bf16 | 1 | 1.00 |" in Regions(tmp_path)("step memory")


def test_compiled_steps_make_a_table_without_peaks(shape, quick_rates, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.compile", lambda model: model)
    common = {**shape, "rounds": 1, "warmup": 1, "device": "cpu", "peak": False, "output_dir": tmp_path}
    bench_step.main(**common, contenders=FEW_STEPS)
    bench_step.main(**common, contenders=FEW_STEPS, compile=True, name="bench_step_compiled")
    rows = stored(tmp_path, "bench_step_compiled")["contenders"]
    assert list(rows) == [*FEW_STEPS.split(","), *(f"{name} compiled" for name in FEW_STEPS.split(","))]
    text = Regions(tmp_path)("compiled")
    assert "hf_mp bf16 compiled" in text and "peak" not in text


def test_torch_in_fp16_is_timed_on_request_alone(shape, quick_rates, tmp_path, monkeypatch):
    monkeypatch.setattr("_contenders.runs_natively", lambda dtype, device: False)
    common = {**shape, "rounds": 1, "device": "cpu", "peak": False, "output_dir": tmp_path}
    contenders = "fp32,torch.autocast fp16,hf_mp fp16"
    bench_step.main(**common, contenders=contenders)
    assert list(stored(tmp_path, "bench_step")["left_out"]) == ["torch.autocast fp16"]
    bench_step.main(**common, contenders=contenders, torch_fp16_rounds=1)
    result = stored(tmp_path, "bench_step")
    assert not result["left_out"]
    assert result["contenders"]["torch.autocast fp16"]["rounds"] == 1


def test_an_update_is_stored_with_its_floor(tiny_model, quick_rates, tmp_path):
    bench_update.main(**tiny_model, rounds=2, device="cpu", output_dir=tmp_path)
    result = stored(tmp_path, "bench_update")
    rows = result["contenders"]
    assert list(rows) == [name for name in bench_update.CONTENDERS if name != "FlashAdamW"]
    assert result["left_out"] == {"FlashAdamW": "runs on a GPU alone"}
    assert rows["hf_mp fp16"]["floor_bytes_per_parameter"] == 34
    assert rows["hf_mp fp16-lean + AdamW8bit"]["floor_bytes_per_parameter"] == 16
    for name, row in rows.items():
        in_bf16 = "torch.amp bf16" if "bf16" in name else "torch.amp"
        peer = rows["torch.amp + AdamW8bit" if name.endswith("AdamW8bit") else in_bf16]
        assert row["ratio_to_torch"] == row["median_seconds"] / peer["median_seconds"]
        moved = row["floor_bytes_per_parameter"] * result["parameters"]
        assert row["floor_seconds"] == moved / result["copy_bytes_per_second"]
    assert "| torch.amp + AdamW8bit |" in Regions(tmp_path)("update")


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16-lean"])
def test_the_update_that_is_timed_updates(precision, tiny_model, monkeypatch):
    workload = bench_update.Workload(**tiny_model, batch=1, seq=1)
    model = workload.model()
    monkeypatch.setattr(bench_update.Workload, "model", lambda self: model)
    before = model.transformer.wte.weight.detach().clone()
    step = bench_update.our_step(workload, precision, bench_update.fused_adamw)
    for _ in range(10):
        step()
    assert not before.equal(model.transformer.wte.weight.detach().float())


def test_an_optimizer_that_is_not_installed_is_left_out(tiny_model, quick_rates, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    bench_update.main(
        **tiny_model, rounds=1, contenders="torch.amp, torch.amp + AdamW8bit", device="cpu", output_dir=tmp_path
    )
    result = stored(tmp_path, "bench_update")
    assert list(result["contenders"]) == ["torch.amp"]
    assert result["left_out"]["torch.amp + AdamW8bit"].startswith("bitsandbytes cannot be imported")


def test_an_unknown_update_is_refused(tiny_model):
    with pytest.raises(typer.BadParameter, match=r"\['adam'\] are not known: use some of torch.amp, hf_mp fp16"):
        bench_update.main(**tiny_model, contenders="adam")


def test_a_loss_is_stored_with_its_floor(quick_rates, tmp_path):
    bench_loss.main(rows=64, vocab=5000, rounds=2, device="cpu", output_dir=tmp_path)
    result = stored(tmp_path, "bench_loss")
    assert result["floor_bytes"] == 2 * 64 * 5000
    assert result["floor_seconds"] == 6 * 64 * 5000 / result["copy_bytes_per_second"]
    rows = result["contenders"]
    assert list(rows) == ["torch fp16", "hf_mp fp16", "torch bf16", "hf_mp bf16"]
    assert all(row["peak_ratio_to_floor"] >= 1 for row in rows.values())
    # FP32 logits, their log-softmax and their gradient are in torch's peak
    assert rows["torch fp16"]["peak_ratio_to_floor"] > 4
    assert "| hf_mp bf16 |" in Regions(tmp_path)("loss")


def test_autocast_is_stored_with_calls_casts_and_floors(shape, quick_rates, tmp_path):
    bench_autocast.main(**shape, tokens=2, calls=50, rounds=1, device="cpu", output_dir=tmp_path)
    result = stored(tmp_path, "bench_autocast")
    casts = {name: row["casts"] for name, row in result["weight_casts_per_forward"].items()}
    # four products with bias in a block, and the output layer
    assert casts[bench_autocast.PEER] == casts[bench_autocast.PER_FORWARD] == 4 * 2 + 1
    assert casts[bench_autocast.OURS] == casts[bench_autocast.WHOLE] == 0
    assert set(result["floor_seconds"]) == {"forward_backward", "generation", "cast_all_weights"}
    for part in ("forward_backward", "generation"):
        assert result[part][bench_autocast.PEER]["ratio_to_torch_autocast"] == 1.0
        assert all(row["ratio_to_floor"] > 0 for row in result[part].values())
    assert "a mode that does nothing" in Regions(tmp_path)("autocast")


def test_the_callback_is_stored_beside_the_subclass(shape, tmp_path):
    bench_callback.main(**shape, rounds=1, output_dir=tmp_path)
    assert stored(tmp_path, "bench_callback")["contenders"]["subclass"]["ratio_to_subclass"] == 1.0
    assert "round by round" in Regions(tmp_path)("callback")

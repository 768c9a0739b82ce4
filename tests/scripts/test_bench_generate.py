"""What generation costs, in calls that do not depend on the machine, and that the script stores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

import bench_generate
from bench_generate import WHOLE, Case
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS


def test_the_ratios_are_stored(tmp_path: Path) -> None:
    sizes = {"layers": 1, "width": 128, "vocab": 64, "tokens": 3, "rounds": 1}
    bench_generate.main(**sizes, only="Llama, batch 1; Llama, batch 1, static cache", output_dir=tmp_path)
    stored = json.loads((tmp_path / "bench_generate.json").read_text())["result"]["cases"]
    assert stored["Llama, batch 1"].keys() == set(bench_generate.CONTENDERS)
    assert stored["Llama, batch 1"][WHOLE]["ratio_to_floor"] == 1.0
    assert "ratio_to_torch_autocast" not in stored["Llama, batch 1, static cache"][WHOLE]


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="BERT is not known: use some of GPT-2, batch 1"):
        bench_generate.main(only="BERT", output_dir=tmp_path)


@pytest.mark.parametrize(("kind", "limit"), [("GPT-2", 680), ("Llama", 800)])
def test_a_layer_costs_no_more_calls_for_a_token(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above those of a model that is BF16 throughout."""
    monkeypatch.setitem(CPU_PRODUCTS, torch.bfloat16, True)

    def calls(contender: str, layers: int) -> float:
        model = bench_generate.make_model(kind, layers, 128, 64, "cpu")
        return bench_generate.python_calls(bench_generate.make_call(model, contender, Case(kind, 1), 8, "cpu"), 8)

    ours, whole = (calls(contender, 3) - calls(contender, 2) for contender in ("hf_mp bf16", WHOLE))
    assert ours - whole <= limit

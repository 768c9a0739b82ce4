"""Dtypes, casts and copies of steps on fake tensors of a GPU, against what is stored and against ``torch.autocast``.

`make test-gpu-shapes` runs them on CUDA's fake tensors, of a GPU that is fake as well; elsewhere those of the meta
device stand for them.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from gpu_shapes import COSTS, MODELS, PEERS, PRESETS, STORED, counts_of

from fake_gpu import is_loaded

DEVICE = torch.device("cuda" if is_loaded() else "meta")
IS_CUDA = DEVICE.type == "cuda"
PHASES = ("forward", "backward", "step")
_MOVES = ("casts", "copies")
stored: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(STORED.read_text(encoding="utf-8"))
by_model = pytest.mark.parametrize("model", MODELS)


def dtypes(counts: dict[str, int]) -> dict[str, int]:
    """By kind and dtype; where the meta device stands for CUDA, torch writes a product with one term otherwise."""
    left_out = COSTS if IS_CUDA else (*COSTS, "products in fp32")
    return {name: count for name, count in counts.items() if name not in left_out}


@pytest.fixture
def counted(model: str, precision: str) -> dict[str, dict[str, int]]:
    return counts_of(model, precision, DEVICE)


@pytest.mark.parametrize(
    ("model", "precision"),
    product(MODELS, (*PRESETS, *PEERS)) if IS_CUDA else covering(MODELS, ["fp16", "bf16-lean"], together=1),
)
def test_a_step_computes_in_the_stored_dtypes_and_casts_no_more(model: str, precision: str, counted: Any) -> None:
    expected = stored[model][precision]
    for phase in PHASES:
        found, wanted = dtypes(counted[phase]), dtypes(expected[phase])
        # torch has no autocast for meta that rotary tables of Transformers 5.17 could switch off for their product.
        products = "products in " + precision.removesuffix("-lean")
        if not IS_CUDA and products in wanted:
            wanted[products] = min(found[products], wanted[products] + 1)
            assert found[products] >= expected[phase][products], phase
        assert found == wanted, phase
        if IS_CUDA:
            assert all(counted[phase].get(cost, 0) <= expected[phase].get(cost, 0) for cost in COSTS), phase
        # A weight on the meta device has no working copy: accelerate may load it when its module is called.
        elif "lean" in precision:  # where no kernel runs, a copy into an FP32 tensor may be a cast that makes it
            ours, theirs = (sum(counts[phase].get(cost, 0) for cost in _MOVES) for counts in (counted, expected))
            assert ours <= theirs * 1.1, phase


@by_model
@pytest.mark.parametrize("precision", PRESETS)
def test_products_and_norms_are_those_of_torchs_autocast(model: str, precision: str) -> None:
    name = precision.removesuffix("-lean")
    ours, theirs = stored[model][precision], stored[model][f"torch.autocast {name}"]
    for phase in ("forward", "backward"):
        assert ours[phase][f"products in {name}"] >= theirs[phase][f"products in {name}"]
        for kind in ("norms in fp32", f"norms in {name}", "softmaxes in fp32", f"softmaxes in {name}"):
            assert ours[phase].get(kind) == theirs[phase].get(kind)
        assert f"losses in {name}" not in ours[phase]  # torch's gives a logarithm of softmax the dtype of its logits
    assert ours["forward"].get("casts", 0) <= theirs["forward"]["casts"] + 1

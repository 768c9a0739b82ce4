"""What a report says, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from hf_mp import OverflowReport
from hf_mp.diagnostics.values import TensorRange

REPORT = OverflowReport(
    step=7,
    micro_batch=2,
    micro_batches=3,
    rank=1,
    phase="forward",
    module="h.0.mlp",
    op="linear",
    inputs=(TensorRange("input 0", "float16", (2, 4), 2.0, 0.5, 0, 0),),
    outputs=(TensorRange("output 0", "float16", (2, 8), 60000.0, 1.0, 3, 0),),
    nonfinite_gradients=tuple(f"h.{number}.weight" for number in range(7)),
    loss_scale=1024.0,
    smaller_scale_helps=False,
    finite_in_fp32=True,
    finite_in_bf16=True,
)


def test_the_text_names_place_culprit_ranges_and_way_out() -> None:
    assert str(REPORT).splitlines() == [
        "Step 7 (micro-batch 2 of 3, rank 1) was skipped at loss scale 1024. The first inf or NaN was produced by "
        "'linear' in module 'h.0.mlp', in the forward pass.",
        "  in:  input 0 (float16, 2×4): magnitudes 0.5 to 2",
        "  out: output 0 (float16, 2×8): magnitudes 1 to 60000, 3 inf",
        "  spoiled gradients: h.0.weight, h.1.weight, h.2.weight, h.3.weight, h.4.weight and 2 more",
        "  No smaller loss scale helps. In FP32 the same micro-batch is finite. Pass "
        "rules={'h.0.mlp': 'fp32'}, or train in bf16.",
    ]


def test_a_report_comes_back_from_json() -> None:
    assert OverflowReport.from_dict(json.loads(json.dumps(asdict(REPORT), allow_nan=False))) == REPORT


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"smaller_scale_helps": True, "largest_finite_scale": 64.0}, "is finite, up to 64, and the scaler"),
        ({"finite_in_fp32": False}, "not finite either: the cause is the model or its data"),
        ({"phase": "input", "tensor": "x", "finite_in_fp32": None}, "The batch contains inf or NaN: 'x'"),
        ({"phase": "weight", "tensor": "w", "finite_in_fp32": None}, "'w' is not finite in FP16"),
        ({"phase": "loss outside of the model", "tensor": "logits", "finite_in_fp32": None}, "division by zero"),
        ({"phase": "not found", "notes": ("why",)}, "did not find the origin"),
        ({"module": ""}, "the model itself"),
    ],
    ids=["scale", "model", "input", "weight", "loss", "not-found", "root"],
)
def test_each_cause_has_words_of_its_own(changes: dict[str, object], expected: str) -> None:
    assert expected in str(replace(REPORT, **changes))  # type: ignore[arg-type]

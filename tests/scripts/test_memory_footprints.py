import pytest
from transformers import GPT2Config

import memory_footprints

pytestmark = pytest.mark.slow

MIB = {
    "fp32": (486.70, 474.70),
    "fp16": (249.35, 237.35),
    "bf16": (249.35, 237.35),
    "int8": (168.35, 156.35),
    "nf4": (127.85, 115.85),
    "fp4": (127.85, 115.85),
}


def test_the_quoted_figures_come_out_of_real_loads(tmp_path):
    rows = memory_footprints.measure(tmp_path, GPT2Config())
    assert {row["precision"]: (row["with_masks_mib"], row["mib"]) for row in rows} == MIB
    assert [row["quantization_state_bytes"] for row in rows] == [0, 0, 0, 331_776, 5_311_488, 5_311_488]

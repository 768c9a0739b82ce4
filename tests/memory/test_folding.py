from torch import nn

from hf_mp.memory.folding import fold_parameters
from hf_mp.memory.footprint import memory_footprint


def test_equal_layers_are_one_line(gpt2):
    rows = fold_parameters(memory_footprint(gpt2).rows)
    assert [row.name for row in rows][:4] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0 - h.1.ln_1.weight",
        "transformer.h.0 - h.1.ln_1.bias",
    ]
    assert (rows[2].tensor_bytes, rows[2].dtype, rows[2].device, rows[2].shape) == (2 * 64 * 4, "float32", "cpu", (64,))
    assert sum(row.tensor_bytes for row in rows) == gpt2.get_memory_footprint()


def test_layers_that_differ_are_not_folded():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(2, 2).half()])
    names = {row.name: row.dtype for row in fold_parameters(memory_footprint(model).rows)}
    assert names == {
        "0 - 1.weight": "float32",
        "0 - 1.bias": "float32",
        "2.weight": "float32",
        "2.bias": "float32",
        "3.weight": "float16",
        "3.bias": "float16",
    }


def test_a_gap_in_the_numbers_is_kept():
    model = nn.ModuleDict({"0": nn.Linear(1, 1), "2": nn.Linear(1, 1), "3": nn.Linear(1, 1)})
    weights = [row.name for row in fold_parameters(memory_footprint(model).rows) if row.name.endswith("weight")]
    assert weights == ["0.weight", "2 - 3.weight"]


def test_tied_weights_have_one_line(gpt2):
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    assert not any("lm_head" in row.name for row in fold_parameters(memory_footprint(gpt2).rows))

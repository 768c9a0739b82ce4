import pytest
import torch
from transformers import GPT2Config

import activation_errors

CONFIG = GPT2Config(
    n_layer=2, n_embd=64, n_head=2, vocab_size=100, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    use_cache=False, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def test_compact_tables_cost_a_rounding_where_they_store_and_nothing_in_a_model() -> None:
    rows = activation_errors.gather(CONFIG)
    assert {row["precision"] for row in rows} == {"fp16", "bf16"}
    for row in rows:
        rounding = torch.finfo(activation_errors.PRECISIONS[row["precision"]]).eps / 2
        if row["of"].startswith("GPT-2"):
            assert 0.0 < row["compact"] <= 1.05 * row["cuda"]
        elif row["of"].endswith("output"):
            assert row["compact"] <= rounding
        else:  # an output that is rounded, and the gradient computed from it, which is rounded again
            assert row["compact"] <= 2 * rounding


def test_an_error_is_relative_and_seen() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert activation_errors.relative_error(exact + torch.tensor([0.0, 0.5]), exact) == pytest.approx(0.1)
    assert activation_errors.relative_error(exact.float(), exact) == 0.0

"""Liger's kernels, which set a forward of their own when training starts, under our callback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_runs import VOCABULARY, arguments, callback_of, logged, make_trainer, token_rows
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("liger_kernel", reason="Liger's kernels are not installed: pip install liger-kernel")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=48, use_cache=False, **sizes))


@pytest.mark.gpu
def test_liger_kernels_follow_the_model_without_them(tmp_path: Path) -> None:
    runs = []
    for liger in (False, True):
        args = arguments(tmp_path / str(liger), use_liger_kernel=liger, use_cpu=False)
        runs.append(make_trainer("callback", "fp16", tiny_llama(), args, train_dataset=token_rows()))
        runs[-1].train()
    assert callback_of(runs[1]).mixed_precision.stats.skipped_steps == 0
    assert logged(runs[1], "loss") == pytest.approx(logged(runs[0], "loss"), rel=5e-3)

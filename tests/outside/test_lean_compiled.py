"""The lean layouts with torch.compile, on models that make tensors beside their embeddings (positions, masks)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from trainer_runs import arguments, logged, make_trainer, token_rows
from transformers import LlamaConfig, MistralConfig, Qwen2Config
from transformers.models.auto import AutoModelForCausalLM

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 32,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision", "backend"),
    [
        (LlamaConfig, "fp16-lean", "eager"),
        *(
            pytest.param(*case, marks=pytest.mark.outside)
            for case in itertools.product(
                [LlamaConfig, Qwen2Config, MistralConfig],
                ["fp16-lean", "bf16-lean", "fp16"],
                ["eager", "aot_eager", "inductor"],
            )
        ),
    ],
)
def test_each_model_trains_compiled_as_uncompiled(tmp_path: Path, config: type, precision: str, backend: str) -> None:
    runs = []
    for settings in ({}, {"torch_compile": True, "torch_compile_backend": backend}):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(**TINY))
        args = arguments(tmp_path, max_steps=2, learning_rate=0.1, **settings)
        runs.append(make_trainer("subclass", precision, model, args, train_dataset=token_rows(8, 8)))
        runs[-1].train()
    for key in ("loss", "grad_norm"):
        assert logged(runs[1], key) == pytest.approx(logged(runs[0], key), rel=1e-3)
    assert logged(runs[1], "skipped_steps") == [0, 0]

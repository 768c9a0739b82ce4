"""The lean layouts with torch.compile, on models that make tensors beside their embeddings (positions, masks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import arguments, logged, make_trainer, token_rows
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config
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


def model_of(config: type) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**TINY))


def compiled_and_not(path: Path, precision: str, config: type, backend: str) -> list[Any]:
    runs = []
    for compiles in (False, True):
        settings = {"torch_compile": True, "torch_compile_backend": backend} if compiles else {}
        args = arguments(path, max_steps=2, learning_rate=0.1, **settings)
        runs.append(make_trainer("subclass", precision, model_of(config), args, train_dataset=token_rows(8, 8)))
        runs[-1].train()
    return runs


def assert_trains_as_uncompiled(runs: list[Any]) -> None:
    for key in ("loss", "grad_norm"):
        assert logged(runs[1], key) == pytest.approx(logged(runs[0], key), rel=1e-3)
    assert logged(runs[1], "skipped_steps") == [0, 0]


def test_llama_compiled(tmp_path: Path) -> None:
    assert_trains_as_uncompiled(compiled_and_not(tmp_path, "fp16-lean", LlamaConfig, "eager"))


@pytest.mark.outside
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean", "fp16"])
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, MistralConfig])
def test_each_model_compiled(tmp_path: Path, config: type, precision: str, backend: str) -> None:
    assert_trains_as_uncompiled(compiled_and_not(tmp_path, precision, config, backend))

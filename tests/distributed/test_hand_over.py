"""Working copies of a model on two processes: whole on each, saved once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.exhaustive


def test_sharded_and_replicated_models_are_handed_over_whole(launch: Callable[..., Any], tmp_path: Path) -> None:
    ranks = launch("hand_over_worker.py", tmp_path)
    for case in ("fsdp", "ddp"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / case)
        for rank in ranks:
            found = rank[case]
            assert case == "ddp" or found["is_there"]  # when it returns, on every process
            for name, parameter in loaded.named_parameters():
                assert parameter.dtype is torch.float16
                assert torch.equal(found["copies"][name], found["masters"][name].half())
                assert torch.equal(parameter, found["copies"][name])

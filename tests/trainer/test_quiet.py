"""On the console stands what is ours to say, and what the stock Trainer says that helps."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hf_mp.environment.libraries import quiet_bitsandbytes

TRAINING = """
import hf_mp
from hf_mp import MixedPrecisionArguments, MixedPrecisionTrainer
import torch
from transformers import GPT2Config, GPT2LMHeadModel

sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
ids = torch.randint(0, 64, (16,))
args = MixedPrecisionArguments("out", max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True)
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
MixedPrecisionTrainer(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
"""


def test_bitsandbytes_is_quiet_while_it_is_imported_alone() -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = logger.isEnabledFor(logging.WARNING)
    with pytest.raises(ImportError, match="broken"), quiet_bitsandbytes():
        assert not logger.isEnabledFor(logging.WARNING) and logger.isEnabledFor(logging.ERROR)
        raise ImportError("broken")
    assert logger.isEnabledFor(logging.WARNING) == before


@pytest.mark.exhaustive
def test_a_training_says_nothing_that_is_of_no_use(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], cwd=tmp_path, capture_output=True, text=True, check=True)
    for words in ("gemm_4bit_forward", "pin_memory", "loss_type"):
        assert words not in done.stdout + done.stderr
    assert "train_loss" in done.stdout

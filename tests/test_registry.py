"""A new loss scaler is one entry of RULES, a new precision is one entry of PRESETS: everything else asks them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

# What a program writes that brings its own rule and preset; the checks of a test follow it.
ENTRIES = """
from dataclasses import dataclass

import torch

from hf_mp.policy import PRESETS, PrecisionPolicy
from hf_mp.scaling.rules import ScaleRule, check_scale, register, remembered, setting

@register
@dataclass(frozen=True)
class Toy(ScaleRule):
    name, summary = "toy", "a toy"
    scale: float = remembered(256.0, check_scale)
    fallen: float = setting(2.0)

    def adjust(self, report):
        return self.with_step_counted(report, scale=self.fallen if report.overflow else self.scale)

PRESETS["fp16-toy"] = PrecisionPolicy(params=torch.float16, loss_scale="toy")
"""


def run(checks: str) -> str:
    """Both entries and the checks in a fresh process, from whose imports on they are there; what it prints."""
    command = [sys.executable, "-c", ENTRIES + checks]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said() -> str:
    return run("""
from transformers import GPT2Config, HfArgumentParser
from hf_mp import MixedPrecisionArguments, estimate_training_memory
from hf_mp.memory.precisions import TRAINING_PRESETS
from hf_mp.scaling.scalers import LossScaler, make_loss_scaler
from hf_mp.scaling.rules import StepReport

def error(call, *args, **settings):
    try:
        call(*args, **settings)
    except ValueError as error:
        print(error)

print("parsed", PrecisionPolicy.parse("fp16-toy"), PrecisionPolicy.parse("params=fp32,compute=fp16,loss_scale=toy"))
error(PrecisionPolicy.parse, "fp17")
error(PrecisionPolicy.parse, "params=fp32,loss_scale=other")
error(make_loss_scaler, "toy", growth_interval=3)
scaler = make_loss_scaler("toy", scale=64.0, fallen=4.0)
print(type(scaler) is LossScaler, scaler.get_scale(), scaler.kind)
scaler.update_scale(StepReport(True))
print("after an overflow", scaler.get_scale())
loaded = make_loss_scaler("toy")
loaded.load_state_dict(scaler.state_dict())
print("loaded", loaded.get_scale())
print("preset of memory", TRAINING_PRESETS["fp16-toy"].label)
error(estimate_training_memory, "gpt2", precision="fp17")
config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
toy, lean = (estimate_training_memory(config, precision=p, batch_size=1, seq_len=8) for p in ("fp16-toy", "fp16-lean"))
print("estimated", toy.peak_bytes == lean.peak_bytes)
print(MixedPrecisionArguments("out", precision="fp16-toy", use_cpu=True).precision_policy)
print(HfArgumentParser(MixedPrecisionArguments).format_help())
""")


def test_policies_and_their_errors_know_both(said: str) -> None:
    assert "parsed fp16-toy params=fp32,compute=fp16,loss_scale=toy" in said
    assert "precision='fp17' is not known: use one of fp32, fp16, bf16, fp16-lean, bf16-lean, fp16-toy" in said
    assert "loss_scale='other' is not known: use 'headroom', 'dynamic', 'toy', 'none' or a positive number" in said


def test_a_scaler_of_the_rule_is_made_adjusts_and_is_loaded(said: str) -> None:
    assert (
        "the 'toy' loss scaler has no setting growth_interval: it has enabled, fallen, max_consecutive_skips, scale"
        in said
    )
    assert "True 64.0 toy\nafter an overflow 4.0\nloaded 4.0" in said


def test_memory_knows_the_preset(said: str) -> None:
    assert "preset of memory hf_mp fp16-toy" in said and "estimated True" in said
    assert re.search(r"precision='fp17' is not known for training: use one of .*fp16-toy", said)


def test_the_help_of_the_arguments_lists_both(said: str) -> None:
    text = " ".join(said.split())
    assert "fp32, fp16, bf16, fp16-lean, bf16-lean, fp16-toy (lean:" in text
    assert "headroom (follows the gradients), dynamic (torch's algorithm), toy (a toy), none, or a number" in text


@pytest.mark.parametrize("folder", ["hf_mp", "scripts"])
def test_no_list_of_names_is_spelled_out(folder: str) -> None:
    listed = re.compile(r"""["'](fp16|bf16)-lean["'],\s*["']|["']headroom["'],\s*["']dynamic["']""")
    found = [path.name for path in (ROOT / folder).rglob("*.py") if listed.search(path.read_text())]
    assert found == []

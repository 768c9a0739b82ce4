"""User code passes ``mypy --strict``."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import hf_mp
import torch
from torch import nn

Batches = list[dict[str, torch.Tensor]]


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Batches) -> None:
{loop}


def loop_over_a_class_of_its_own(model: nn.Linear, loader: Batches) -> int:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer = hf_mp.prepare(model, optimizer, precision="bf16-lean")
    for batch in loader:
        model(batch["x"]).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        if not optimizer.step_was_skipped:
            scheduler.step()
    return model.in_features


def loop_of_two_optimizers(model: nn.Module) -> list[bool]:
    precision = hf_mp.MixedPrecision("fp16")
    precision.attach(model)
    optimizers = [precision.attach_optimizer(torch.optim.SGD([one])) for one in model.parameters()]
    precision.refresh()
    return [optimizer.step_was_skipped for optimizer in optimizers]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # mypy reads all of torch
def test_loops_are_typed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if "hf_mp.prepare(" in block]
    loop = "\n".join(line for line in found.splitlines() if not line.startswith("import "))
    loop += "\nassert not optimizer.step_was_skipped"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(loop=textwrap.indent(loop, "    ")), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path),
        script,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

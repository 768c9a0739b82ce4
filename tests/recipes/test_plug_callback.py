"""The recipe at a small size: the script with and without the callback, and the table that compares them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM

import plug_callback
from plug_callback import main

SAMPLE = " ".join(f"The number {number} follows {number - 1} and comes before {number + 1}." for number in range(150))
TINY = [
    "--use_cpu",
    "--max_steps=4",
    "--logging_steps=2",
    "--vocab_size=300",
    "--context=32",
    "--width=32",
    "--layers=1",
]


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.from_dict({"text": [SAMPLE]})
    monkeypatch.setattr(plug_callback, "python_text", lambda: DatasetDict(train=rows, validation=rows))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A new process takes seconds to import everything."""
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        assert check and Path(command[1]).name == "plug_callback.py"
        commands.append(command[2:])
        main(command[2:])

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_plugging_in_takes_ten_lines_at_most() -> None:
    lines = Path(plug_callback.__file__).read_text().splitlines()
    ours = [line for line in lines if line.endswith("# hf_mp")]
    assert 1 <= len(ours) <= 10
    as_it_was = "\n".join(line for line in lines if not line.endswith("# hf_mp"))
    training = as_it_was[as_it_was.index("def train(") : as_it_was.index("def load(")]
    assert "MixedPrecision" not in training and "hf_mp" not in training


def test_both_runs_and_their_table(
    tmp_path: Path, in_this_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*TINY, "--output_dir", str(tmp_path)])
    assert [command[-3] for command in in_this_process] == ["none", "fp16"]
    before, after = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("before", "after"))
    assert before["precision"] == "none" and before["skipped_steps"] is None
    assert after["precision"] == "fp16" and after["skipped_steps"] == 0
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=1e-3)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("before", "after")]
    assert not all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    printed = capsys.readouterr().out
    for words in ("evaluation loss", "seconds a step", "peak memory", "difference", "after (fp16)"):
        assert words in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision", "fp8"], "precision='fp8' is not known"),
        (["--precision", "fp16-lean"], "the Trainer owns it"),
    ],
    ids=["unknown", "lean"],
)
def test_a_precision_that_cannot_be_is_refused_at_once(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str], in_this_process: Any
) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, *flags, "--output_dir", str(tmp_path / "run")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not in_this_process

"""What ``hf-mp memory`` shows, and what every command shows of an error."""

import re
import subprocess
import sys

import pytest
from mixtures import config_of
from typer.testing import CliRunner

import hf_mp
from hf_mp import cli
from hf_mp.memory.largest_batch import LargestBatch
from hf_mp.memory.precisions import SHOWN_PRESETS, TRAINING_PRESETS

STEP = {"batch_size": 2, "seq_len": 32}


@pytest.fixture
def saved(tmp_path, gpt2_config):
    gpt2_config.save_pretrained(tmp_path)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_the_command_shows_five_ways_to_train(saved, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    found = LargestBatch(7, 2**19, 2**23, 2**22)
    monkeypatch.setattr("hf_mp.memory.report.largest_batch", lambda *args: found)
    result = run("memory", saved, "--train", "--seq-len", 16, "--gpu", "4MiB")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert result.stderr == ""  # no terminal
    assert "largest batch 7 7 7 7 7 its peak, KiB 512.00 512.00" in told
    assert "in 4.00 MiB fits fits fits fits fits" in told and "bf16" in SHOWN_PRESETS
    for words in ("Loaded", "INT8", "The peak of a training step on a GPU", "Predicted for a GPU"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert all(TRAINING_PRESETS[name].label.split()[0] in told for name in SHOWN_PRESETS)


def test_a_terminal_shows_progress_in_one_line_that_goes(saved, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    shown = run("memory", saved, "--seq-len", 16, "--precision", "fp32").stderr
    assert "taking a training step in FP32 (1 of 1) ..." in shown and shown.endswith("\x1b[2K")


@pytest.mark.slow
def test_the_command_imports_neither_the_trainer_nor_a_compiler(saved):
    """Each of them takes seconds."""
    code = (
        "import sys; from hf_mp.memory.command import run\n"
        f"run({str(saved)!r}, train=True, gpu=None, precision=['fp16'], as_json=False, seq_len=16, ranks=1, "
        "parallel='fsdp2')\n"
        "print({'transformers.trainer', 'datasets', 'torch._inductor.lowering'} & set(sys.modules))"
    )
    # A process of its own: tests import all of them.
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stdout


def test_all_presets_are_one_word(saved, monkeypatch):
    asked = []
    monkeypatch.setattr("hf_mp.memory.report._training_row", lambda config, preset, *_, **__: asked.append(preset))
    monkeypatch.setattr("hf_mp.memory.command.report_as_json", lambda report: {})
    run("memory", saved, "--json", "--precision", "all")
    run("memory", saved, "--json", "--precision", "FP16", "--precision", "bf16")
    assert asked == [*TRAINING_PRESETS, "fp16", "bf16"]


def test_experts_that_are_chosen_by_value_cannot_be_predicted():
    config = config_of("Mixtral", _experts_implementation="eager")
    asked = r"depend on its data \(in aten.nonzero.default\).*measure it"
    with pytest.raises(ValueError, match=asked):
        hf_mp.estimate_training_memory(config, "fp32", **STEP)


INSIDES = {
    "env": ("hf_mp.environment.report.examine_machine", ["env"]),
    "memory": ("hf_mp.memory.command.gather_report", ["memory", "gpt2"]),
    "report": ("hf_mp.diagnostics.report.report_command", ["report", "."]),
}


@pytest.mark.parametrize("command", INSIDES)
def test_no_command_shows_a_traceback_unless_asked(command, monkeypatch):
    place, arguments = INSIDES[command]

    def break_down(*args, **kwargs):
        raise RuntimeError("expected inputs of BF16\nand more lines")

    monkeypatch.setattr(place, break_down)
    result = run(*arguments)
    assert result.exit_code == 1 and "Traceback" not in result.output
    sentence = r"error: RuntimeError: expected inputs of BF16 \(--traceback shows where it came from\)\n"
    assert re.fullmatch(f"hf-mp {command}: {sentence}", result.stderr)
    assert isinstance(run(*arguments, "--traceback").exception, RuntimeError)


def test_every_command_takes_the_option():
    for command in (one for one in cli.app.registered_commands if not one.hidden):
        assert "--traceback" in run(command.callback.__name__, "--help").stdout

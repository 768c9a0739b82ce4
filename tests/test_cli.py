import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_mp import __version__, cli
from hf_mp.memory.precisions import SHOWN_PRESETS
from hf_mp.memory.training import TrainingSettings


def run(*arguments):
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "shown"),
    [
        (["--version"], 0, f"hf_mp {__version__}\n"),
        (["--help"], 0, "env"),
        ([], 2, "Usage: hf-mp"),
        (["evn"], 2, "evn"),
    ],
)
def test_what_is_shown_without_a_command(arguments, exit_code, shown):
    result = run(*arguments)
    assert result.exit_code == exit_code and shown in result.output


@pytest.mark.parametrize("command", [[], ["env"], ["memory"], ["report"], ["check"]])
def test_flags_are_shown_without_a_type(command):
    shown = run(*command, "--help").output
    flags = [line for line in shown.splitlines() if re.search(r"--(?!help)", line)]  # which is typer's own
    assert "--help" in shown and not any("bool" in line.lower() for line in flags)
    assert ("<int>" in shown) is (command == ["memory"])


def test_the_help_of_memory_names_its_defaults():
    shown = " ".join(run("memory", "--help").output.replace("│", " ").split())
    assert f"Default: {', '.join(SHOWN_PRESETS)}." in shown
    assert f"Default: {TrainingSettings.optimizer} (tp: adamw_torch), or the preset's own." in shown


@pytest.fixture
def machine(monkeypatch):
    planted = {
        "versions": {"torch": "2.13.0"},
        "hardware": {"CPU": "a fast one"},
        "advice": {"preset": "bf16", "reason": "It is fast.", "otherwise": "Use fp16. Or fp32."},
    }
    monkeypatch.setattr("hf_mp.environment.report.examine_machine", lambda: planted)
    return planted


def test_env_prints_what_the_machine_has(machine):
    result = run("env")
    assert result.exit_code == 0
    assert result.stdout.startswith("torch  2.13.0\nCPU    a fast one\n\n")
    assert result.stdout.endswith("\n\nAdvice: precision='bf16'\n  It is fast.\n  Use fp16.\n  Or fp32.\n")
    assert json.loads(run("env", "--json").stdout) == machine


def test_the_command_loads_before_torch_does():
    # `hf-mp --help` in the time of a Python start, not in the seconds that torch and Transformers take
    code = "import sys, hf_mp.cli; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

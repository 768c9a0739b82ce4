import json
import subprocess
import sys

from typer.testing import CliRunner

from hf_mp import cli
from hf_mp._version import __version__

ROWS = {"torch": "2.13.0", "CPU": "a name with [brackets] that rich would take for markup"}


def run(*arguments):
    return CliRunner().invoke(cli.app, arguments)


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hf_mp {__version__}\n")


def test_help_names_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    assert "env" in result.stdout


def test_no_command_shows_the_help():
    assert "Usage: hf-mp" in run().output


def test_an_unknown_command_fails():
    result = run("evn")
    assert result.exit_code == 2
    assert "evn" in result.output


def test_env_prints_each_row_as_gathered(monkeypatch):
    monkeypatch.setattr("hf_mp.environment.gather_environment", lambda: ROWS)
    result = run("env")
    assert result.exit_code == 0
    lines = [line.split("│") for line in result.stdout.splitlines()]
    shown = {cells[0].strip(): cells[1].strip() for cells in lines if len(cells) == 2}
    assert shown == ROWS


def test_env_as_json_is_one_object_with_the_same_rows(monkeypatch):
    monkeypatch.setattr("hf_mp.environment.gather_environment", lambda: ROWS)
    result = run("env", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == ROWS


def test_the_command_loads_before_torch_does():
    # `hf-mp --help` in the time of a Python start, not in the seconds that torch and Transformers take
    code = "import sys, hf_mp.cli; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

"""The run on a borrowed machine: what it runs, and that it keeps to its time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import bench
import run_on_gpu
from _contenders import choose as choose_contenders
from _results import ROOT
from run_on_gpu import PIECES, PYTEST, Piece, choose, gpu_gib, gpu_tests, main, run_piece, table_to_paste

BENCHMARKS = PIECES[1:]


@pytest.mark.parametrize("tiny", [False, True], ids=["full", "tiny"])
@pytest.mark.parametrize("piece", BENCHMARKS, ids=lambda piece: piece.name)
def test_each_command_has_options_that_its_script_knows(piece, tiny, tmp_path):
    _, script, what, *arguments = piece.full_command(tiny=tiny, device="cuda", directory=tmp_path)
    assert script == "scripts/bench.py"
    options = get_command(app_of(bench.command(what))).make_context(script, arguments).params
    assert (options["name"], options["output_dir"], options["device"]) == (piece.name, tmp_path, "cuda")
    if what == "step":
        assert options["seq"] == (16 if tiny else 1024) and options["dropout"] == 0.1
        choose_contenders(options["contenders"].split(","), "cuda")


def test_the_tests_are_those_that_want_a_gpu():
    found = gpu_tests()
    assert "tests/memory/test_training.py" in found
    assert "tests/scripts/test_run_on_gpu.py" not in found
    assert all((ROOT / path).is_file() for path in found)


def test_the_pieces_fit_into_the_time_that_is_taken_by_default():
    (minutes,) = [option.default for option in get_command(app_of(main)).params if option.name == "minutes"]
    assert choose(None) == list(PIECES)
    assert sum(piece.seconds for piece in choose(None)) == 60 * minutes <= 600
    assert [piece.name for piece in PIECES[:3]] == ["tests", "bench_update_gpt2", "bench_step_gpt2"]


# Removes datasets, bitsandbytes and an installed hf_mp from what Python finds, in each process of the run.
BARE = """
import importlib.machinery, sys

class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        is_elsewhere = name == "hf_mp" and found is not None and not found.origin.startswith({root!r})
        return None if name in ("datasets", "bitsandbytes") or is_elsewhere else found

others = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + getattr(f, "__name__", "")]
sys.meta_path[:] = [Bare if finder is importlib.machinery.PathFinder else finder for finder in others]
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that has neither hf_mp nor what the run does without."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE.format(root=str(ROOT)))
    return {**os.environ, "PYTHONPATH": str(tmp_path / "bare"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_everything_runs_from_a_bare_checkout(bare, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "scripts" / "run_on_gpu.py"), "--output-dir", str(out)]
    command += ["--tiny", "--device", "cpu", "--minutes", "30"]  # of a machine that others use as well
    done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=1850)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert re.search(r"== tests: done, \d+ tests passed, \d+ s", done.stdout)
    for piece in choose(None)[1:]:
        assert json.loads((out / f"{piece.name}.json").read_text())["result"], piece.name


def test_tests_that_do_not_run_are_no_success(tmp_path):
    (tmp_path / "test_few.py").write_text("import pytest\n\ndef test_it(): pytest.skip('no GPU')\n")
    tests = Piece("tests", (*PYTEST, str(tmp_path / "test_few.py")), 60)
    found = run_piece(tests, tiny=False, device="cpu", directory=tmp_path, seconds=60)
    assert found.startswith("failed: no test ran")


def app_of(function) -> typer.Typer:
    app = typer.Typer()
    app.command()(function)
    return app


@pytest.fixture
def python(monkeypatch):
    """A piece that runs some code."""
    monkeypatch.setattr(Piece, "full_command", lambda piece, **given: [sys.executable, "-c", *piece.command])
    return lambda name, code: Piece(name, (code,), 30)


def test_a_piece_that_takes_too_long_is_ended_with_its_children(python, tmp_path):
    child = "import pathlib, sys, time; time.sleep(1.5); pathlib.Path(sys.argv[1]).touch()"
    code = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}, {str(tmp_path / "too late")!r}])
"""
    outcome = run_piece(python("slow", code), tiny=False, device="cpu", directory=tmp_path, seconds=0.5)
    assert outcome.startswith("ended after 0 s")
    time.sleep(1.5)
    assert not (tmp_path / "too late").exists()


def test_a_piece_has_its_share_of_the_time_that_is_left(tmp_path, monkeypatch):
    given: dict[str, float] = {}

    def run(piece, *, seconds, directory, **rest):
        given[piece.name] = seconds
        (directory / f"{piece.name}.log").touch()
        return "done, 0 s"

    monkeypatch.setattr(run_on_gpu, "run_piece", run)
    with pytest.raises(SystemExit):
        main(output_dir=tmp_path, minutes=2, only="bench_update_gpt2,bench_step_gpt2")
    assert given == pytest.approx({"bench_update_gpt2": 44, "bench_step_gpt2": 120}, abs=1)


def test_a_small_gpu_has_small_pieces(tmp_path):
    of_a_t4 = [piece.name for piece in choose(None, 15.0)]
    assert of_a_t4 == [piece.name for piece in PIECES if "large" not in piece.name] and len(of_a_t4) < len(PIECES)
    assert choose("bench_update_gpt2_large", 15.0)  # asked for
    step = next(piece for piece in PIECES if piece.name == "bench_step_gpt2")
    for gib, batch in ((15.0, 1), (80.0, 8), (float("inf"), 8)):
        _, _, what, *arguments = step.full_command(tiny=False, device="cuda", directory=tmp_path, gib=gib)
        assert get_command(app_of(bench.command(what))).make_context(what, arguments).params["batch"] == batch


@pytest.mark.parametrize(("said", "gib"), [("15360", 15.0), ("", float("inf")), ("[N/A]", float("inf"))])
def test_the_memory_of_a_gpu_is_that_of_its_driver(said, gib, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, said + "\n"))
    assert gpu_gib() == gib
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert gpu_gib() == float("inf")


def test_the_table_has_each_way_of_a_piece(tmp_path):
    rows = {
        "Trainer fp16=True": {"median_seconds": 0.2, "peak_bytes": 2**31},
        "torch.autocast bf16": {"median_seconds": 0.3, "peak_bytes": None},
        "hf_mp fp16": {"floor_seconds": 0.1, "peak_bytes": 2**30},
    }
    record = {"date": "2026-01-02", "device": {"CPU": "x", "GPU 0": "Tesla T4"}, "versions": {"torch": "2.11.0"}}
    (tmp_path / "step.json").write_text(json.dumps({**record, "result": {"contenders": rows}}))
    text = table_to_paste({"step": "done, 3 s", "loss": "no time was left"}, tmp_path)
    assert text.startswith("Tesla T4, {'torch': '2.11.0'}, 2026-01-02\n")
    assert text.splitlines()[-4:] == [
        "| loss | no time was left | | |",
        "| step | Trainer fp16=True | 200.00 | 2.00 |",
        "| step | torch.autocast bf16 | 300.00 |  |",
        "| step | hf_mp fp16 |  | 1.00 |",
    ]


def test_what_fails_or_finds_no_time_is_named_and_the_others_run(python, tmp_path, monkeypatch, capsys):
    pieces = [python("fails", "raise SystemExit('planted')"), python("works", "print('worked')")]
    monkeypatch.setattr(run_on_gpu, "PIECES", pieces)
    with pytest.raises(SystemExit) as ended:
        main(output_dir=tmp_path, minutes=1, device="cpu")
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "planted" in out and "== fails: failed with exit code 1" in out and "== works: done" in out
    with pytest.raises(SystemExit) as ended:
        main(output_dir=tmp_path, minutes=0.01, device="cpu")
    assert ended.value.code == 1
    assert "== works: no time was left" in capsys.readouterr().out


def test_pieces_are_chosen_by_name():
    assert [piece.name for piece in choose("bench_loss, tests")] == ["bench_loss", "tests"]
    with pytest.raises(ValueError, match=r"--only bench_moon: not known, use some"):
        choose("bench_moon")

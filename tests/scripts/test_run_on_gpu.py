"""The run on a borrowed machine: what it runs, and that it keeps to its time."""

from __future__ import annotations

import ast
import importlib
import time
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import run_on_gpu
from _contenders import find_contender
from _results import ROOT
from run_on_gpu import PIECES, Piece, choose, gpu_tests, main, run_piece

BENCHMARKS = [piece for piece in PIECES if piece.command[0].startswith("scripts/")]


@pytest.mark.parametrize("tiny", [False, True], ids=["full", "tiny"])
@pytest.mark.parametrize("piece", BENCHMARKS, ids=lambda piece: piece.name)
def test_each_command_has_options_that_its_script_knows(piece, tiny, tmp_path):
    _, script, *arguments = piece.full_command(tiny=tiny, device="cuda", directory=tmp_path)
    app = typer.Typer()
    app.command()(importlib.import_module(Path(script).stem).main)
    options = get_command(app).make_context(script, arguments).params
    assert (options["name"], options["output_dir"], options["device"]) == (piece.name, tmp_path, "cuda")
    if script.endswith("bench_step.py"):
        assert options["seq"] == (16 if tiny else 1024) and options["dropout"] == 0.1
        for name in options["contenders"].split(","):
            find_contender(name)


def test_the_tests_are_those_that_want_a_gpu():
    found = gpu_tests()
    assert "tests/memory/test_training.py" in found
    assert "tests/scripts/test_run_on_gpu.py" not in found
    assert all((ROOT / path).is_file() for path in found)


def imported_by(file: Path, seen: set[Path]) -> set[str]:
    """Packages that are imported with ``file``, by it and by what it imports of this checkout."""
    seen.add(file)
    packages = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            packages.add(module.partition(".")[0])
            parts = Path(*module.split("."))
            places = [ROOT / folder / parts for folder in ("scripts", "recipes", ".")]
            for own in (p for place in places for p in (place.with_suffix(".py"), place / "__init__.py")):
                if own.is_file() and own not in seen:
                    packages |= imported_by(own, seen)
    return packages


@pytest.mark.parametrize("piece", BENCHMARKS, ids=lambda piece: piece.name)
def test_neither_datasets_nor_bitsandbytes_is_needed(piece):
    packages = imported_by(ROOT / piece.command[0], set())
    assert {"torch", "transformers", "hf_mp"} <= packages
    assert not packages & {"datasets", "bitsandbytes", "flashoptim"}


def python(name: str, code: str) -> Piece:
    return Piece(name, ("-c", code), ("-c", code), 30)


@pytest.fixture
def no_tests(monkeypatch):
    monkeypatch.setattr(run_on_gpu, "gpu_tests", lambda: [])


def test_a_piece_runs_in_the_checkout_and_leaves_a_log(no_tests, tmp_path):
    piece = python("about", "import os, hf_mp; print(os.getcwd())")
    outcome = run_piece(piece, tiny=False, device="cpu", directory=tmp_path, seconds=60)
    assert outcome.startswith("done")
    assert (tmp_path / "about.log").read_text().strip() == str(ROOT)


def test_a_piece_that_takes_too_long_is_ended_with_its_children(no_tests, tmp_path):
    child = "import pathlib, sys, time; time.sleep(2.5); pathlib.Path(sys.argv[1]).touch()"
    code = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}, {str(tmp_path / "too late")!r}])
"""
    start = time.monotonic()
    outcome = run_piece(python("slow", code), tiny=False, device="cpu", directory=tmp_path, seconds=1)
    assert outcome.startswith("ended after 1 s")
    time.sleep(max(0.0, 4 - (time.monotonic() - start)))
    assert not (tmp_path / "too late").exists()


def test_what_fails_or_finds_no_time_is_named_and_the_others_run(no_tests, tmp_path, monkeypatch, capsys):
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
    with pytest.raises(ValueError, match=r"--only bench_moon: not known, use some of tests, bench_update_gpt2"):
        choose("bench_moon")

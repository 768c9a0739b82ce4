import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import _results
from _results import alternate, command_line, in_turns, median_and_spread, rows_of, save_result

ROOT = Path(_results.__file__).parents[1]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([5.0, 1.0, 3.0, 2.0, 4.0], (3.0, 2.0)),
        ([5000.0, 1.0, 3.0, 2.0, 4.0], (3.0, 2.0)),  # one outlier moves neither
        ([0.25], (0.25, 0.0)),
    ],
)
def test_median_and_spread_are_those_of_the_quartiles(seconds, expected):
    assert median_and_spread(seconds) == expected


def test_contenders_alternate_and_swap_places_every_round():
    calls = []
    alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) == "abbaabba"


def test_untimed_calls_come_before_each_that_is_timed():
    calls = []
    names = {name: lambda name=name: calls.append(name) for name in "ab"}
    alternate(names, rounds=2, untimed=1, before={name: lambda: calls.append("|") for name in names})
    assert "".join(calls) == "a|ab|b" + "b|ba|a" + "a|ab|b"


def test_a_row_has_its_median_and_its_ratios_to_peers_and_floor():
    seconds = {"a": [2.0, 4.0, 3.0], "b": [6.0]}
    rows = rows_of(seconds, {"a": 1.5, "b": 1.5}, ratio_to_b="b", ratio_to_its={"a": "b", "b": "missing"})
    assert rows["a"] == {
        "median_seconds": 3.0, "spread_seconds": 1.0, "rounds": 3, "ratio_to_b": 0.5, "ratio_to_its": 0.5,
        "floor_seconds": 1.5, "ratio_to_floor": 2.0,
    }  # fmt: skip
    assert rows["b"]["ratio_to_its"] is None
    assert rows_of(seconds, 2.0)["b"]["ratio_to_floor"] == 3.0


def test_what_there_is_is_given_after_each_timed_round():
    names = {name: lambda: None for name in "ab"}
    counts = [{name: len(found) for name, found in seconds.items()} for seconds in in_turns(names, rounds=3, warmup=2)]
    assert counts == [{"a": number, "b": number} for number in (1, 2, 3)]


def test_the_gpu_is_waited_for_before_and_after_each_call(monkeypatch):
    events = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: events.append("wait"))
    alternate({"a": lambda: events.append("call")}, rounds=2, warmup=0)
    assert events == ["wait", "call", "wait"] * 2


@pytest.mark.parametrize(
    ("contenders", "rounds", "warmup"), [({}, 1, 0), ({"a": lambda: None}, 0, 0), ({"a": lambda: None}, 1, -1)]
)
def test_nothing_to_time_is_refused(contenders, rounds, warmup):
    with pytest.raises(ValueError, match="nothing to time"):
        alternate(contenders, rounds=rounds, warmup=warmup)


def test_a_result_says_when_how_and_on_what_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "step_time.py"), "--rounds", "5"])
    for name in [name for name in os.environ if name == "OMP_NUM_THREADS" or name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", "3000")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    payload = {"fp16": {"median_seconds": 0.5, "spread_seconds": 0.01}}

    path = save_result("step_time", payload, directory=tmp_path / "results")

    record = json.loads(path.read_text())
    assert path == tmp_path / "results" / "step_time.json"
    assert record["result"] == payload
    assert record["command"] == "GOMP_SPINCOUNT=3000 MALLOC_MMAP_MAX_=0 python scripts/step_time.py --rounds 5"
    assert {"torch", "transformers", "hf_mp"} <= record["versions"].keys()
    assert {"CPU", "CPU threads"} <= record["device"].keys()
    date = datetime.fromisoformat(record["date"])
    assert date.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - date) < timedelta(minutes=5)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_result_that_json_cannot_hold_leaves_the_older_one(tmp_path, number):
    path = save_result("loss", {"final": 2.5}, directory=tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        save_result("loss", {"final": number}, directory=tmp_path)
    assert json.loads(path.read_text())["result"] == {"final": 2.5}
    assert list(tmp_path.iterdir()) == [path]  # and nothing unfinished


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["scripts/a.py"], "python scripts/a.py"),
        (["/repo/scripts/a.py", "--out", "/repo/outputs/x"], "python scripts/a.py --out outputs/x"),
        (["/repo/scripts/a.py", "--out=/repo/outputs/x"], "python scripts/a.py --out=outputs/x"),
        (["scripts/a.py", "/home/somebody/models/gpt2"], "python scripts/a.py gpt2"),
        (["scripts/a.py", "--model=/home/somebody/gpt2"], "python scripts/a.py --model=gpt2"),
        (["scripts/a.py", "/repository/x"], "python scripts/a.py x"),
        (["scripts/a.py", "two words"], "python scripts/a.py 'two words'"),
    ],
)
def test_a_stored_command_names_no_path_of_the_machine(argv, command):
    assert command_line(argv, Path("/repo")) == command

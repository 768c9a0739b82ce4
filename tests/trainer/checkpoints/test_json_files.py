"""JSON from a stranger: how much of it is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hf_mp.trainer.checkpoints.json_files as json_files
from hf_mp.trainer.checkpoints.json_files import JSONProblem, json_problem, read_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": 1, "b": 2, "a": 3}', "says 'a' twice"),
        ('{"a": {"b": 1, "b": 1}}', "says 'b' twice"),
        ("\ufeff{}", "is not JSON"),
    ],
    ids=range(5),
)
def test_what_cannot_be_read_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(JSONProblem, match=message):
        read_json(tmp_path / "x.json")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'"\xff"')
    assert "is not JSON" in str(json_problem(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("limit", "message"), [("MAX_JSON_BYTES", "has 21 bytes"), ("MAX_JSON_VALUES", "has 10 values")]
)
def test_size_and_number_of_values_are_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, message: str
) -> None:
    (tmp_path / "x.json").write_text("[1,1,1,1,1,1,1,1,1,1]")
    assert json_problem(tmp_path / "x.json") is None
    monkeypatch.setattr(json_files, limit, 9)
    assert message in str(json_problem(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_step", -1),
        ("global_step", 1.0),
        ("global_step", True),
        ("max_steps", 2**63),
        ("epoch", float("nan")),
        ("epoch", float("inf")),
        ("total_flos", -1),
        ("log_history", [1]),
        ("stateful_callbacks", []),
        ("best_model_checkpoint", 5),
        ("train_batch_size", "2"),
        ("surprise", 1),
    ],
)
def test_the_state_of_a_trainer_is_checked_by_entry(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "trainer_state.json"
    good = {"global_step": 4, "epoch": 0.5, "log_history": [{"loss": float("nan")}], "best_metric": None}
    path.write_text(json.dumps(good))
    assert json_problem(path) is None
    path.write_text(json.dumps({**good, name: value}))
    assert name in str(json_problem(path))

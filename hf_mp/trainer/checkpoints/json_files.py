"""JSON of untrusted checkpoints: how much of it is read, and what is refused before anything uses it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

MAX_JSON_BYTES = 512 * 2**20  # a trainer_state.json with a million log entries has 200 MiB
# A value takes up to some 300 bytes when it is read, so that a file takes 3 GB at most.
MAX_JSON_VALUES = 10_000_000
_BLOCK_BYTES = 2**20

# What the entries of a trainer_state.json may be; the best ones also null.
_COUNTS = {"global_step", "best_global_step", "max_steps", "num_train_epochs"}
_COUNTS |= {"num_input_tokens_seen", "train_batch_size"}
_AMOUNTS = {"epoch", "total_flos", "logging_steps", "eval_steps", "save_steps"}
_TYPES: dict[str, Any] = {"best_metric": (int, float), "best_model_checkpoint": str, "stateful_callbacks": dict}


class JSONProblem(ValueError):
    """Why a JSON file is not used; without its name."""


def read_json(path: Path) -> Any:
    """The content of a JSON file of bounded size.

    Raises:
        JSONProblem: for a file that is too large, no JSON, nested too deeply, or has a key twice.
    """
    if (size_bytes := path.stat().st_size) > MAX_JSON_BYTES:
        raise JSONProblem(f"has {size_bytes} bytes, more than any Trainer writes")
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(_BLOCK_BYTES), b"")
        values = sum(block.count(b",") + block.count(b"[") + block.count(b"{") for block in blocks)
    if values > MAX_JSON_VALUES:
        raise JSONProblem(f"has {values} values, more than any Trainer writes, which would fill the memory")
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except JSONProblem:
        raise
    except RecursionError:
        raise JSONProblem("is nested too deeply") from None
    except ValueError as error:
        raise JSONProblem(f"is not JSON ({str(error)[:200]})") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise JSONProblem(f"says {next(n for n in names if names.count(n) > 1)[:100]!r} twice")
    return found


def json_problem(path: Path) -> str | None:
    """What keeps a JSON file of a checkpoint from being used; None where nothing does."""
    try:
        content = read_json(path)
    except JSONProblem as problem:
        return str(problem)
    if path.name == TRAINER_STATE_NAME:
        return _problem_of_trainer_state(content)
    if path.name.endswith("config.json") and not isinstance(content, dict):
        return f"is a {type(content).__name__}, not an object"
    return None


def _problem_of_trainer_state(content: Any) -> str | None:
    if not isinstance(content, dict):
        return f"is a {type(content).__name__}, not the state of a Trainer"
    if unknown := sorted(set(content) - {field.name for field in fields(TrainerState)}):
        return f"has {unknown[0][:100]!r}, which no state of a Trainer has"
    wrong = next((name for name, value in content.items() if not _fits(name, value)), None)
    return None if wrong is None else f"says {wrong}={str(content[wrong])[:100]!r}, which no Trainer writes"


def _fits(name: str, value: Any) -> bool:
    if name in _COUNTS or name in _AMOUNTS:
        kinds = (int,) if name in _COUNTS else (int, float)
        return value is None or (type(value) in kinds and 0 <= value < 2**63)
    if name == "log_history":
        return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, _TYPES.get(name, object)) or (value is None and name.startswith("best_"))

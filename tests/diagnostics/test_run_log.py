"""The log of a run: written as it comes, read whatever became of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import Mlp, vectors

import hf_mp
from hf_mp.diagnostics import run_log
from hf_mp.diagnostics.precision_recorder import UNEXPLAINED, PrecisionRecorder, record_precision
from hf_mp.diagnostics.run_log import LOG_NAME, RunLog, read_run

NAN = float("nan")


class Run:
    """A small run; ``factors`` multiply the loss of each step."""

    def __init__(self, path: Path, explain: bool = True, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model, self.optimizer = hf_mp.prepare(net := Mlp(), torch.optim.SGD(net.parameters(), lr=0.01))
        if explain:
            hf_mp.explain_overflows(self.model)
        self.recorder: PrecisionRecorder = record_precision(self.model, path, **{"histogram_steps": 2, **settings})

    def train(self, *factors: float) -> Run:
        for seed, factor in enumerate(factors):
            (self.model(**vectors(seed)).square().mean() * factor).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / LOG_NAME).read_text(encoding="utf-8").strip().splitlines()]


def test_each_step_is_there_as_soon_as_it_was_taken(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for count in range(1, 4):
        run.train(1.0)
        assert [line["step"] for line in lines(tmp_path) if line["record"] == "step"] == list(range(1, count + 1))
    assert [line["step"] for line in lines(tmp_path) if line["record"] == "magnitudes"] == [1, 3]


def test_what_is_read_is_what_happened(tmp_path: Path) -> None:
    run = Run(tmp_path, settings={"learning_rate": 0.01}).train(1.0, 1.0, NAN, 1.0)
    run.recorder.end()
    read = read_run(tmp_path)
    stats = run.model.forward.runtime.stats
    assert list(read.steps) == [1, 2, 3, 4] and read.has_ended and read.missing == []
    assert [step.skipped for step in read.steps.values()] == [False, False, True, False]
    assert read.steps[3].cause.startswith("The loss is computed outside the model")
    raised = math.log2(stats.loss_scale / read.steps[4].loss_scale)  # stats tell the headroom at the next scale
    assert read.steps[3].headroom is None and read.steps[4].headroom == pytest.approx(stats.headroom + raised, abs=0.01)
    assert read.steps[1].loss_scale == stats.loss_scale_first
    assert read.overflows == run.model.forward.runtime.observers[0].reports and read.overflows[0].step == 3
    assert read.magnitudes is not None and read.magnitudes.step == 4  # for the third, which was skipped
    assert read.magnitudes == run.recorder.latest
    start = read.start
    assert start["settings"] == {"learning_rate": 0.01} and start["precision"] == "fp16"
    assert start["versions"]["torch"] == version("torch")


def test_a_skip_that_nobody_explained_says_so(tmp_path: Path) -> None:
    Run(tmp_path, explain=False).train(1e30, 1.0, NAN)
    causes = [step.cause for step in read_run(tmp_path).steps.values()]
    assert causes == [UNEXPLAINED, "", UNEXPLAINED]


def test_a_killed_process_leaves_what_it_wrote(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in (1, 2):
        log.write("step", step=step, loss_scale=2.0, headroom=None, skipped=False, cause="")
    with log.path.open("ab") as file:  # nothing is open between two records
        file.write(b'\n{"record":"step","step":3,"loss')
    read = read_run(tmp_path)
    assert list(read.steps) == [1, 2]
    missing = "\n".join(read.missing)
    assert "line 3 of 3 is half-written or damaged" in missing
    assert "has not ended" in missing and "no record of the run's start" in missing
    # A later start goes on on a line of its own.
    Run(tmp_path).train(1.0).recorder.end()
    read = read_run(tmp_path)
    assert read.steps[1].headroom is not None and read.has_ended
    assert "line 3 of" in read.missing[0] and len(read.missing) == 1


def test_a_resumed_run_goes_on_where_it_was_resumed(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    start = {"version": 1, "model": "M", "precision": "fp16", "loss_scaler": "headroom", "device": "cpu"}
    for begin, end, scale in ((1, 8, 2.0), (4, 6, 4.0)):
        log.write("run", **start)
        for step in range(begin, end):
            log.write("step", step=step, loss_scale=scale, headroom=None, skipped=False, cause="")
    read = read_run(tmp_path)
    assert {step: record.loss_scale for step, record in read.steps.items()} == {1: 2, 2: 2, 3: 2, 4: 4, 5: 4}


def test_a_run_that_is_begun_anew_is_not_resumed_and_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    for steps in ([1.0] * 3, [1.0]):
        run = Run(tmp_path, histogram_steps=0 if len(steps) == 1 else 2).train(*steps)
        run.recorder.end()
    read = read_run(tmp_path)
    assert list(read.steps) == [1]
    assert read.magnitudes is None


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "null", '{"record":"unknown"}', '{"record":"step","step":1}', '{"record":["step"]}', "\xff",
        '{"record":"run","version":2}', '{"record":"overflow","report":{"step":1}}',
        '{"record":"magnitudes","step":1,"loss_scale":1,"skipped":false,"notes":[],"tensors":[["x"]],"bins":[0,1],'
        '"counts":"AAAA"}',
        "[" * 100_000,
        '{"record":"step","step":9,"loss_scale":null,"headroom":null,"skipped":false,"cause":""}',
    ],
    ids=lambda line: line[:40] + str(len(line)),
)  # fmt: skip
def test_damaged_records_are_left_out_and_counted(line: str, tmp_path: Path) -> None:
    good = '{"record":"step","step":7,"loss_scale":2.0,"headroom":1.5,"skipped":false,"cause":""}'
    (tmp_path / LOG_NAME).write_bytes(f"{line}\n{good}\n".encode("latin-1"))
    read = read_run(tmp_path)
    assert list(read.steps) == [7] and read.steps[7].headroom == 1.5
    assert "line 1 of 2 is half-written or damaged, and left out" in read.missing


# What else there may be


def test_no_run_is_an_error_that_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"holds no run: it has no file precision_log.jsonl.*record_precision.* writes one"
    ):
        read_run(tmp_path)


def test_nothing_outside_of_the_run_directory_is_read(tmp_path: Path) -> None:
    Run(tmp_path / "other").train(1.0)
    run = tmp_path / "run"
    run.mkdir()
    (run / LOG_NAME).symlink_to(tmp_path / "other" / LOG_NAME)
    with pytest.raises(ValueError, match=f"holds no run: it has no file {LOG_NAME}"):
        read_run(run)


# Writing


def a_file_in_the_way(run: Path) -> str:
    run.touch()
    return "recording the precision of this run stops"


def a_full_disk(run: Path) -> str:
    run.mkdir()
    (run / LOG_NAME).symlink_to("/dev/full")
    return "No space left on device"


@pytest.mark.parametrize("hinder", [a_file_in_the_way, a_full_disk])
def test_a_log_that_cannot_be_written_is_told_once_and_training_goes_on(
    hinder: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(run_log.logger, "warning", told.append)
    why = hinder(tmp_path / "run")
    run = Run(tmp_path / "run").train(1.0, 1.0)
    run.recorder.end()
    assert run.model.forward.runtime.stats.steps == 2
    assert len(told) == 1 and why in told[0]


def test_the_recorder_of_a_model_is_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert record_precision(run.model, tmp_path, histogram_steps=2) is run.recorder
    with pytest.raises(ValueError, match=r"recorded already, with run_directory=.*histogram_steps=2"):
        record_precision(run.model, tmp_path, histogram_steps=3)


@pytest.mark.parametrize("steps", [-1, 2.5, True, "50"])
def test_wrong_numbers_of_steps_are_named(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"histogram_steps=.* must be a whole number"):
        Run(tmp_path, histogram_steps=steps)


def test_wrong_models_and_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"the model is of type str"):
        record_precision("model", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no mixed precision is attached"):
        record_precision(Mlp(), tmp_path)
    with pytest.raises(ValueError, match="FP32 throughout"):
        record_precision(hf_mp.MixedPrecision("fp32"), tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        Run(tmp_path, settings={"model": Mlp})

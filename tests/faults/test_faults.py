"""A few of the faults that `make faults` brings by the hundred, each from a seed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Cases, Harness


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    with Harness(tmp_path_factory.mktemp("faults")) as harness:
        yield Cases(harness)


@pytest.mark.parametrize(("seed", "ranks"), [(0, 1), (3, 2)])
def test_a_killed_run_goes_on_bit_for_bit(cases: Cases, seed: int, ranks: int) -> None:
    assert cases.kill(seed, ranks=ranks).lost is None


@pytest.mark.parametrize("seed", [2, 4])  # the manifest, the weights
def test_a_damaged_file_is_named_and_the_previous_checkpoint_taken(cases: Cases, seed: int) -> None:
    assert cases.damage(seed).lost is None


def test_a_signal_ends_the_run_in_a_checkpoint(cases: Cases) -> None:
    assert cases.terminate(0).lost is None


def test_a_second_signal_ends_at_once(cases: Cases) -> None:
    run = cases.terminate_twice()
    assert run.exit_codes == [-signal.SIGTERM] and run.steps == 1
    assert "a second signal, ending at once" in run.text


def test_a_full_disk_leaves_the_last_whole_checkpoint(cases: Cases) -> None:
    if not cases.strikes_exactly:
        pytest.skip("needs a C compiler on Linux")
    outcomes = cases.full_disk()
    assert len(outcomes) > 20
    assert [outcome for outcome in outcomes if outcome.lost] == []

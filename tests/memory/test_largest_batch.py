import pytest

import hf_mp
from hf_mp.memory.largest_batch import LargestBatch, search_largest, ways_that_fit
from hf_mp.memory.training import estimate_training_memory

from .conftest import CONFIGS


@pytest.mark.parametrize("limit", [0, 99, 100, 109, 110, 111, 500, 1000, 1009, 123456])
@pytest.mark.parametrize(
    "peak",
    [lambda n: 90 + 10 * n, lambda n: max(100 + n, 10 * n), lambda n: 100 + n * n, lambda n: max(400, 7 * n)],
    ids=["line", "two lines", "parabola", "flat first"],
)
def test_the_largest_that_fits_is_found(peak, limit):
    expected = 0
    while peak(expected + 1) <= limit:
        expected += 1
    assert search_largest(peak, limit) == expected


def test_a_line_needs_few_estimates():
    asked = []

    def peak(batch_size):
        asked.append(batch_size)
        return 10**9 + 10**7 * batch_size

    assert search_largest(peak, 24 * 2**30) == 2476
    assert len(set(asked)) <= 5 and max(asked) == 2477  # three points of the line, the answer, and one that confirms it


@pytest.mark.slow
def test_a_real_batch_fits_and_the_next_one_does_not():
    config = CONFIGS["gpt2-4"]()

    def peak(batch_size):
        return estimate_training_memory(config, "fp16", batch_size=batch_size, seq_len=64).peak_bytes

    limit = peak(7) + 1000
    found = hf_mp.largest_batch_size(config, limit, "fp16", seq_len=64)
    assert (found.batch_size, found.peak_bytes, found.next_peak_bytes) == (7, peak(7), peak(8))
    assert found.next_peak_bytes > limit


def test_not_even_one_sequence():
    found = hf_mp.largest_batch_size(CONFIGS["gpt2-4"](), "1KiB", "fp32")
    assert (found.batch_size, found.peak_bytes) == (0, None)


def test_bad_input():
    with pytest.raises(ValueError, match="'24 pounds' is not a size of memory"):
        hf_mp.largest_batch_size("gpt2", "24 pounds")


# Where nothing fits

PEAKS = {"fp32": 100, "fp16-lean": 80}


def ways(peak, *, batch_size=4, fitting=0, checkpointing=False, memory=50):
    """The options of the ways found, and of those tried."""
    tried = []

    def predict(*way):
        tried.append(way)
        return peak(*way)

    largest = {
        "fp32": LargestBatch(0, None, 60, memory),
        "fp16-lean": LargestBatch(fitting, 45 if fitting else None, 60, memory),
    }
    found = ways_that_fit(PEAKS, largest, predict, batch_size=batch_size, checkpointing=checkpointing)
    return [(way.precision, way.batch_size, way.gradient_checkpointing, way.peak_bytes) for way in found], tried


def test_a_smaller_batch_and_checkpointing_are_named():
    found, tried = ways(lambda *way: 40, fitting=3)
    assert found == [("fp16-lean", 3, False, 45), ("fp16-lean", 4, True, 40)]
    assert tried == [("fp16-lean", 4, True)]


def test_leaner_presets_are_tried_until_one_fits():
    found, tried = ways(lambda preset, size, recomputes: 40 if "adamw8bit" in preset else 70)
    assert found == [("fp16-lean-adamw8bit", 4, True, 40)]
    assert tried == [("fp16-lean", 4, True), ("bf16-lean", 4, False), ("bf16-lean", 4, True), found[0][:3]]


def test_a_batch_of_one_is_tried_last():
    assert ways(lambda preset, size, _: 40 if (preset, size) == ("nf4-lora", 1) else 70)[0] == [
        ("nf4-lora", 1, True, 40)
    ]


def test_where_nothing_fits_the_leanest_is_named():
    found, tried = ways(lambda preset, size, _: {"nf4-lora": 60}.get(preset, 70), batch_size=1)
    assert found == [("nf4-lora", 1, True, 60)] and len(tried) == 5
    # bitsandbytes may be missing
    assert ways(lambda preset, *_: None if "-lora" in preset else 70)[0] == [("fp16-lean", 4, True, 70)]
    assert ways(lambda *_: None)[0] == [("fp16-lean", 4, False, 80)]


def test_what_was_asked_for_is_not_tried_again():
    assert ways(lambda *_: 60, checkpointing=True, batch_size=1)[1] == [
        ("bf16-lean", 1, True), ("fp16-lean-adamw8bit", 1, True), ("nf4-lora", 1, True),
    ]  # fmt: skip

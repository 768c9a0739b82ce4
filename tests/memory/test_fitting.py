import pytest

import hf_mp
from hf_mp.memory.fitting import search_largest
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
    with pytest.raises(ValueError, match="'24 GB' is not a size of memory"):
        hf_mp.largest_batch_size("gpt2", "24 GB")

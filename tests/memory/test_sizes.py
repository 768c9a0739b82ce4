import pytest

from hf_mp.memory.sizes import largest_first, parse_size, readable


@pytest.mark.parametrize(
    "text, size",
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("512KiB", 2**19),
        ("1TiB", 2**40),
        ("24GB", 24 * 2**30),
        ("24 gb", 24 * 2**30),
        ("24g", 24 * 2**30),
        ("24", 24 * 2**30),
        ("1.5", 3 * 2**29),
        (4096, 4096),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text, message",
    [
        ("much", r"'much' is not a size of memory: write a number and KiB, MiB, GiB or TiB, as in '24GiB'"),
        ("25769803776", r"is not a size"),  # bytes: GiB are meant without a unit
        ("24B", r"is not a size"),
        ("-1GiB", r"'-1GiB' is not a size"),
        ("", r"'' is not a size"),
        ("1e3GiB", r"is not a size"),
        ("nanGiB", r"is not a size"),
    ],
)
def test_what_is_not_a_size_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_size(text)


def test_sizes_are_written_in_1024_based_units():
    assert [readable(size) for size in (0, 1023, 1024, 2**20, 3 * 2**29, 2**40)] == [
        "0 B", "1,023 B", "1.00 KiB", "1.00 MiB", "1.50 GiB", "1.00 TiB",
    ]  # fmt: skip


def test_named_sizes_come_in_one_line():
    assert largest_first({"a": 5, "b": 0, "c": 2**21}) == "c 2.00 MiB, a 5 B"
    assert largest_first({}) == ""

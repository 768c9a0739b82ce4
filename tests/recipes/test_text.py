"""The text that the recipes train on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

import _text
from _text import file_text, make_blocks, read_text, train_tokenizer, unigram_perplexity, without_repetition

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python_text() -> DatasetDict:
    return _text.python_text()


def rows(*texts: str) -> Dataset:
    return Dataset.from_dict({"text": list(texts)})


# The documentation of this Python


def test_there_is_enough_text_and_a_tenth_of_it_is_held_out(python_text):
    train, held_out = (sum(map(len, python_text[split]["text"])) for split in ("train", "validation"))
    assert train > 1_000_000
    assert 0.05 < held_out / (train + held_out) < 0.2


def test_no_paragraph_is_in_both_splits(python_text):
    train, held_out = (
        {paragraph.strip() for text in python_text[split]["text"] for paragraph in text.split("\n\n")}
        for split in ("train", "validation")
    )
    assert not train & held_out


def test_a_paragraph_that_stood_before_is_left_out():
    documents = [("a", "one\n\ntwo"), ("b", "two\n\nthree"), ("c", "one")]
    assert list(without_repetition(documents)) == [("a", "one\n\ntwo"), ("b", "three")]


def test_docstrings_are_parsed_and_not_imported(tmp_path):
    source = '"""File."""\nraise SystemExit\nclass A:\n    """Class."""\n    def f(self):\n        """Method \\d."""\n'
    (tmp_path / "module.py").write_text(source)
    assert _text.docstrings(tmp_path / "module.py") == ["File.", "Class.", "Method \\d."]


# Text of one's own


def test_the_last_tenth_of_a_file_is_held_out_at_a_line_end(tmp_path):
    lines = [f"line {number}\n" for number in range(100, 200)]
    (tmp_path / "a.txt").write_text("".join(lines))
    text = file_text(str(tmp_path / "a.txt"))
    assert "".join(text["train"]["text"]) == "".join(lines[:90])
    assert "".join(text["validation"]["text"]) == "".join(lines[90:])


def test_a_validation_file_is_held_out_whole(tmp_path):
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("held out")
    text = file_text(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert (text["train"]["text"][:], text["validation"]["text"][:]) == (["train"], ["held out"])


def test_a_long_file_comes_in_pieces_that_end_at_line_ends():
    text = "".join(f"line {number}\n" for number in range(1000)) + "no newline"
    pieces = list(_text._pieces(text, characters=500))
    assert len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert "".join(pieces) == text


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufefftext".encode())
    assert read_text(str(tmp_path / "a.txt")) == "text"


# Tokens


def test_documents_are_ended_and_pieces_are_not():
    tokenizer = train_tokenizer(["ab"], 257)
    text = DatasetDict(train=rows("a", "", "b\n", "ab"), validation=rows("ab"))
    blocks = make_blocks(text, tokenizer, 2)
    train = [token for block in blocks.train["input_ids"] for token in block]
    assert tokenizer.decode(train) == "a<|endoftext|>b\nab"  # the last token did not fill a block
    assert blocks.train["labels"][:] == blocks.train["input_ids"][:]
    assert (blocks.size, len(blocks.train), len(blocks.validation)) == (2, 3, 1)


@pytest.mark.parametrize("train, validation, which", [("a", "aaaa", "training"), ("aaaa", "a", "held-out")])
def test_a_split_shorter_than_one_block_is_refused(train, validation, which):
    tokenizer = train_tokenizer(["ab"], 257)
    with pytest.raises(ValueError, match=f"the {which} text has 2 tokens, less than one block of 4.*--block_size"):
        make_blocks(DatasetDict(train=rows(train), validation=rows(validation)), tokenizer, 4)


def test_unigram_perplexity_by_hand():
    # with one added to each: 3/6, 2/6 and 1/6
    train, held_out = np.array([0, 0, 1]), np.array([0, 2])
    assert unigram_perplexity(train, held_out, 3) == pytest.approx(math.sqrt(2 * 6))


def test_unigram_perplexity_is_that_of_the_tokens_a_model_predicts():
    tokenizer = train_tokenizer(["ab"], 257)
    text = DatasetDict(train=rows("aaa\n"), validation=rows("ba\n"))
    a, newline = tokenizer("a\n").input_ids
    blocks = make_blocks(text, tokenizer, 3)
    expected = unigram_perplexity(np.array([a, a, a]), np.array([a, newline]), len(tokenizer))
    assert blocks.unigram_perplexity == pytest.approx(expected)

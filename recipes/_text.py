"""The text that the recipes train on: where it comes from, its tokenizer, and the blocks it is cut into.

Each source gives a ``DatasetDict`` with the splits ``train`` and ``validation`` and the column ``text``. A row that
ends in a newline is a piece of a longer text; any other row is a document of its own.
"""

from __future__ import annotations

import ast
import io
import math
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_mp.environment.libraries import first_line

END_OF_TEXT = "<|endoftext|>"


# The documentation of this Python


def python_text() -> DatasetDict:
    """The documentation that came with this Python; about every tenth document is held out."""
    documents = list(without_repetition(python_documents()))
    # By a checksum of the name, so that other versions of Python hold out the same documents.
    held_out = [zlib.crc32(name.encode()) % 10 == 0 for name, _ in documents]
    return _splits(
        (text for (_, text), out in zip(documents, held_out, strict=True) if not out),
        (text for (_, text), out in zip(documents, held_out, strict=True) if out),
    )


def python_documents() -> Iterator[tuple[str, str]]:
    """Name and text of the topics of ``help()``, then of the docstrings of each file of the standard library."""
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield f"help topic {topic}", topics[topic]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in library_sources(library):
        yield path.relative_to(library).as_posix(), "\n\n".join(docstrings(path))


def library_sources(library: Path) -> Iterator[Path]:
    for module in sorted(sys.stdlib_module_names):
        for path in (library / f"{module}.py", *sorted((library / module).rglob("*.py"))):
            if path.is_file() and not {"test", "tests", "idle_test"}.intersection(path.relative_to(library).parts):
                yield path


def docstrings(path: Path) -> list[str]:
    """Of the file, its classes and functions. Parsed and not imported: some modules open a window or a browser."""
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(path.read_bytes())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [docstring for docstring in found if docstring]


def without_repetition(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Leave out paragraphs that stood in an earlier document: held-out text must not have been trained on."""
    seen: set[str] = set()
    for name, text in documents:
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in paragraphs)
        if rest := "\n\n".join(paragraphs).strip():
            yield name, rest


# Text of one's own


def file_text(train_file: str, validation_file: str | None = None) -> DatasetDict:
    """Text files; without ``validation_file``, the last tenth of ``train_file`` is held out.

    Raises:
        ValueError: for a file that is not there, not UTF-8, or empty.
    """
    text = read_text(train_file)
    if validation_file is not None:
        return _splits(_pieces(text), _pieces(read_text(validation_file)))
    nine_tenths = len(text) * 9 // 10
    cut = text.rfind("\n", 0, nine_tenths) + 1 or nine_tenths
    return _splits(_pieces(text[:cut]), _pieces(text[cut:]))


def read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#04x} at position {error.start}): convert it, "
            f"e.g. `iconv -f latin1 -t utf-8 {path} > utf8.txt`"
        ) from error
    if not text.strip():
        raise ValueError(f"{path} is empty: name a file with text in it")
    return text


def _pieces(text: str, characters: int = 2**16) -> Iterator[str]:
    # Cut at line ends, since a tokenizer is slow on one string of hundreds of megabytes.
    lines = io.StringIO(text)
    while piece := "".join(lines.readlines(characters)):
        yield piece


def _splits(train: Iterable[str], validation: Iterable[str]) -> DatasetDict:
    return DatasetDict(
        train=Dataset.from_dict({"text": list(train) or [""]}),
        validation=Dataset.from_dict({"text": list(validation) or [""]}),
    )


def hub_text(name: str, config: str | None, column: str, seed: int) -> DatasetDict:
    """A dataset of the Hub or of a directory; without a split to evaluate on, a tenth of its rows is held out.

    Raises:
        ValueError: if the dataset cannot be had, or has no such column.
    """
    try:
        splits = datasets.load_dataset(name, config)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--dataset_name {name} cannot be loaded ({first_line(error)}). Ways out: a dataset that is in the cache "
            "already or a directory, --train_file with a text file, or neither of them for the built-in text"
        ) from error
    if "train" not in splits or column not in splits["train"].column_names:
        columns = {split: rows.column_names for split, rows in splits.items()}
        raise ValueError(
            f"{name} has no column {column!r} in a split 'train', but {columns}: name one with --text_column"
        )
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    if held_out is not None:
        train, validation = splits["train"], splits[held_out]
    else:
        train, validation = splits["train"].train_test_split(test_size=0.1, seed=seed).values()
    texts = DatasetDict(train=train.select_columns(column), validation=validation.select_columns(column))
    return texts if column == "text" else texts.rename_column(column, "text")


# Tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


@dataclass(frozen=True)
class Blocks:
    """The tokens of both splits, one after the other, cut into examples of ``size`` tokens."""

    train: Dataset
    validation: Dataset
    size: int
    unigram_perplexity: float

    def __str__(self) -> str:
        train, held_out = (f"{len(split) * self.size:,}" for split in (self.train, self.validation))
        return f"{train} tokens to train on, {held_out} held out, in blocks of {self.size}"


def make_blocks(text: DatasetDict, tokenizer: PreTrainedTokenizerBase, size: int) -> Blocks:
    """Tokenize both splits and cut them into blocks; what does not fill a block at the end is left out.

    Raises:
        ValueError: if a split is shorter than one block.
    """
    train = _blocks("training", _tokens(text["train"], tokenizer), size)
    validation = _blocks("held-out", _tokens(text["validation"], tokenizer), size)
    return Blocks(
        train=Dataset.from_dict({"input_ids": train, "labels": train}),
        validation=Dataset.from_dict({"input_ids": validation, "labels": validation}),
        size=size,
        # In each block, a model predicts all tokens but the first.
        unigram_perplexity=unigram_perplexity(train.ravel(), validation[:, 1:].ravel(), len(tokenizer)),
    )


def _tokens(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    end = tokenizer.eos_token or ""

    def tokenize(texts: list[str]) -> dict[str, Any]:
        ended = [text + end if text and not text.endswith("\n") else text or "" for text in texts]
        return {"input_ids": tokenizer(ended, add_special_tokens=False, verbose=False).input_ids}

    tokenized = rows.map(tokenize, input_columns="text", batched=True, remove_columns=rows.column_names)
    return pyarrow.compute.list_flatten(tokenized.with_format("arrow")[:]["input_ids"]).to_numpy()


def _blocks(which: str, tokens: np.ndarray, size: int) -> np.ndarray:
    if len(tokens) < size:
        raise ValueError(
            f"the {which} text has {len(tokens)} tokens, less than one block of {size}: give more text, or a smaller "
            "--block_size"
        )
    return tokens[: len(tokens) // size * size].reshape(-1, size)


def unigram_perplexity(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Perplexity of ``held_out`` under the token frequencies of ``train``, with add-one smoothing.

    A model that learned how often each token comes, and nothing else, reaches this.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1
    return perplexity(-np.log(counts / counts.sum())[held_out].mean().item())


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf

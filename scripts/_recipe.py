"""What the scripts that train share: ``recipes/finetune_gpt2.py``, as its command line makes it."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase, ProgressCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import finetune_gpt2 as recipe_module
from hf_mp import MixedPrecisionTrainer


@contextmanager
def recipe_trainer(flags: Sequence[str]) -> Iterator[MixedPrecisionTrainer]:
    """The trainer of the recipe for its own ``flags``, without its progress bar; what it writes is deleted at the end.

    The recipe's seed gives runs of the same model and data the same weights and the same order of the data.
    """
    with tempfile.TemporaryDirectory() as directory:
        recipe, args = recipe_module.parse_arguments(["--output_dir", str(Path(directory, "run")), *flags])
        recipe_module.quiet_libraries()
        text, tokenizer = load_text_and_tokenizer(recipe, args.seed)
        model = recipe_module.load_model(recipe, args, len(tokenizer))
        blocks = recipe_module.make_blocks(text, tokenizer, recipe_module.choose_block_size(recipe, model))
        trainer = recipe_module.make_trainer(model, args, tokenizer, blocks)
        trainer.remove_callback(ProgressCallback)
        yield trainer


@functools.cache
def load_text_and_tokenizer(recipe: recipe_module.Recipe, seed: int) -> tuple[DatasetDict, PreTrainedTokenizerBase]:
    """Collected once for all runs of a script: it takes longer than a short run."""
    text = recipe_module.load_text(recipe, seed)
    return text, recipe_module.load_tokenizer(recipe, text["train"])

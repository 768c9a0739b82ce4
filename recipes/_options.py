"""The command line of a recipe, from the fields of a dataclass, and the numbers that it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import HfArgumentParser

Options = TypeVar("Options")


def parse_options(kind: type[Options], arguments: Sequence[str] | None) -> Options:
    """The options in ``arguments``, or in those of the program; ends the program where one makes no sense."""
    parser = HfArgumentParser(cast(Any, kind), prog=Path(sys.argv[0]).name, allow_abbrev=False)
    try:
        (options,) = parser.parse_args_into_dataclasses(arguments, look_for_args_file=False)
    except ValueError as error:
        parser.error(str(error))
    return cast(Options, options)


def check_training(seeds: int, learning_rate: float) -> None:
    """Raise a ValueError without a seed, or for a learning rate that is not positive."""
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: use at least 1 seed, and 2 to see their spread")
    if learning_rate <= 0:
        raise ValueError(f"--learning_rate {learning_rate} must be positive")


def save_numbers(found: dict[str, Any], directory: Path) -> None:
    """Write all numbers of a run into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    Path(directory, "numbers.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"All numbers are in {directory}.")

"""Benchmarks: contenders side by side, in turns, on this machine.

    python scripts/bench.py WHAT --help
    python scripts/bench.py step --rounds 9
    python scripts/bench.py architectures --only "BERT,ResNet-50" --output-dir /tmp

WHAT is a file in scripts/benches/, which says what is compared with what. Prints the figures, and stores them in
scripts/results/ as ``bench_WHAT.json``, by the NAME in that file, or under another ``--name``. Where its ``measure``
yields, a run that is ended has stored what it had.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import typer
from rich.pretty import pprint
from transformers.utils import logging

from _results import RESULTS, save_result

WHATS = sorted(file.stem for file in Path(__file__).with_name("benches").glob("[a-z]*.py"))


def command(what: str) -> Callable[..., None]:
    """The function behind ``bench.py WHAT``: ``measure`` of its file, with options of its own and those of all."""
    module = import_module(f"benches.{what}")
    measure, default = module.measure, getattr(module, "NAME", f"bench_{what}")

    def run(*, name: str = default, output_dir: Path = RESULTS, **options: Any) -> None:
        logging.set_verbosity_error()
        found = measure(**options)
        for payload in found if inspect.isgenerator(found) else [found]:  # anew for each that is yielded
            path = save_result(name, payload, directory=output_dir)
        pprint(payload, max_length=20)
        for contender, reason in payload.get("left_out", {}).items():
            print(f"not here: {contender}: {reason}")
        print(f"stored in {path.name}")

    shared = list(inspect.signature(run).parameters.values())[:2]
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in inspect.signature(measure).parameters.values()]
    run.__doc__ = measure.__doc__
    run.__annotations__ = get_type_hints(measure, include_extras=True) | {"name": str, "output_dir": Path}
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run


def main(argv: list[str]) -> None:
    """Run one, with its options."""
    what, *options = argv or [""]
    if what not in WHATS:
        sys.exit(f"{__doc__}\n{what!r} is not known: use one of {', '.join(WHATS)}")
    app = typer.Typer(add_completion=False)
    app.command()(command(what))
    app(options, prog_name=f"bench.py {what}")


if __name__ == "__main__":
    main(sys.argv[1:])

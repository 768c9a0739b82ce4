"""The ``hf-mp`` command. Each command prints what a function of its own module gathered."""

import json
from typing import Annotated

import typer

from hf_mp._version import __version__

app = typer.Typer(
    name="hf-mp",
    help="Mixed precision for the Hugging Face Trainer and plain PyTorch loops.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_mp {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    # a callback, so that `env` stays a command of its own while it is the only one
    pass


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show what mixed precision runs on here: versions, CPU, GPUs. Put it into a bug report."""
    from hf_mp.environment import gather_environment

    rows = gather_environment()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("environment", "value", show_edge=False)
    for label, value in rows.items():
        table.add_row(label, Text(value))
    Console().print(table)

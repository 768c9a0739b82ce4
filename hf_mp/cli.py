"""The ``hf-mp`` command. Each subcommand calls a function of another module and prints the result."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hf_mp._version import __version__

app = typer.Typer(
    name="hf-mp",
    help="Mixed precision for the Hugging Face Trainer and plain PyTorch loops.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

WithTraceback = Annotated[
    bool, typer.Option("--traceback", metavar="", help="Show the traceback of an error, not one sentence.")
]


@contextmanager
def _errors_in_one_line(command: str, with_traceback: bool) -> Iterator[None]:
    """Print an error in one line and exit: with 2 for a ValueError, OSError or ImportError, with 1 for other errors.

    Messages of the former contain advice. Other errors are bugs, and are printed with their type.
    """
    try:
        yield
    except Exception as error:
        if with_traceback:
            raise
        is_expected, sentence = isinstance(error, (ValueError, OSError, ImportError)), str(error)
        if not is_expected:
            first = sentence.strip().partition("\n")[0]
            sentence = f"{type(error).__name__}: {first} (--traceback shows where it came from)"
        typer.echo(f"hf-mp {command}: error: {sentence}", err=True)
        raise typer.Exit(2 if is_expected else 1) from error


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"hf_mp {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    # Typer needs a callback for --version without a subcommand.
    pass


@app.command()
def env(
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object instead of lines.")
    ] = False,
    traceback: WithTraceback = False,
) -> None:
    """Show what this machine supports and which preset suits it. Include it in bug reports."""
    with _errors_in_one_line("env", traceback):
        # Imported in the commands: torch takes seconds to import, which --help does not need.
        from hf_mp.environment.report import examine_machine, screen

        machine = examine_machine()
        typer.echo(json.dumps(machine, indent=2) if as_json else screen(machine))


@app.command()
def memory(
    model: Annotated[
        str, typer.Argument(help="Directory, config.json, model on the Hub, or gpt2, gpt2-medium, gpt2-large, gpt2-xl.")
    ],
    train: Annotated[bool, typer.Option("--train", metavar="", help="Also predict a training step.")] = False,
    batch_size: Annotated[int, typer.Option(help="Sequences or images in one forward.")] = 1,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence. Default: up to 1024.")] = None,
    accumulation_steps: Annotated[int, typer.Option(help="Micro-batches in one update.")] = 1,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", metavar="", help="Recompute blocks.")
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="As TrainingArguments' optim. Default: adamw_torch_fused (tp: adamw_torch), or the preset's own."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Preset to train in. Repeat it for several, or say all. Default: fp32, trainer-fp16, fp16, bf16, "
            "fp16-lean."
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(help="Have in host memory: optimizer, or all (gradients too); of fp16-lean and bf16-lean."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device to predict for: cuda or cpu; needs neither here.")] = "cuda",
    gpu: Annotated[
        str | None, typer.Option(help="Memory of your GPU, such as 24GB (24 GiB): what fits, and the largest batch.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of ranks to plan for, up to 4096.")] = 1,
    parallel: Annotated[str, typer.Option(help="How the ranks train together: fsdp2, hsdp, ddp or tp.")] = "fsdp2",
    node_size: Annotated[int, typer.Option(help="Ranks on one machine.")] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object instead of tables.")
    ] = False,
    traceback: WithTraceback = False,
) -> None:
    """Show the memory that MODEL takes: loaded in six precisions and, with --train, during fine-tuning."""
    options = {name: value for name, value in locals().items() if name != "traceback"}

    with _errors_in_one_line("memory", traceback):
        from hf_mp.memory.command import run

        typer.echo(run(**options), nl=False)


@app.command()
def report(
    run_directory: Annotated[Path, typer.Argument(help="Output directory of a training run.")],
    html: Annotated[
        Path | None, typer.Option(help="Where to write the page. Default: RUN_DIR/precision_report.html.")
    ] = None,
    traceback: WithTraceback = False,
) -> None:
    """Write an HTML page about the precision of a run: loss scale, overflows, and where its values lie."""
    with _errors_in_one_line("report", traceback):
        from hf_mp.diagnostics.report import report_command

        typer.echo(report_command(run_directory, html), nl=False)


@app.command()
def check(
    target: Annotated[Path, typer.Argument(help="Folder of a model, a checkpoint (any Trainer's), or a run.")],
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Learning rate at which to count lost updates. Default: the checkpoint's, else 1e-5."),
    ] = None,
    keeps_bits: Annotated[
        bool, typer.Option("--keeps-bits", metavar="", help="The optimizer rounds stochastically, or keeps Kahan sums.")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="Folder of the model that training began from: shows which weights never moved.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
    traceback: WithTraceback = False,
) -> None:
    """Find what loses bits in TARGET, of any Trainer, and say what to do. Exits with 1 if it finds something."""
    with _errors_in_one_line("check", traceback):
        from hf_mp.diagnostics.contract.check import check_folder

        found = check_folder(target, learning_rate, keeps_bits=keeps_bits, base=base)
        typer.echo(json.dumps(found, default=vars, indent=2) if as_json else str(found))
    if found.risks:
        # A nonzero status stops a pipeline, as a linter's does.
        raise typer.Exit(1)

"""All that is measured on a GPU, for a machine that is borrowed for minutes: tests and benchmarks, within a time limit.

    python scripts/run_on_gpu.py --output-dir scripts/results/h200            # at most 10 minutes
    python scripts/run_on_gpu.py --output-dir OUT --only "tests,bench_update_gpt2" --minutes 3
    python scripts/run_on_gpu.py --output-dir OUT --tiny --device cpu         # tries every piece at tiny sizes

Starts from a bare checkout, hf_mp not installed. Each piece runs in a process of its own, the most important first, and
rewrites its JSON in the given directory as its rows come, so that one that is ended has left what it had. What there
was no time for is named at the end, and the exit code is 1 then. At the end comes a table to paste into an issue; a GPU
of less than 40 GiB gets a batch of 1, and no GPT-2 of 774M. Needs torch, transformers, accelerate, pytest, typer
and rich, and neither datasets nor bitsandbytes; FlashOptim is measured where it is installed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

# Nothing of the checkout is imported: where it is not installed, only the pieces are told where it is.
ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("Trainer fp16=True", "MixedPrecisionTrainer fp16", "MixedPrecisionTrainer fp16-lean")
COMPILED = tuple(f"{name} compiled" for name in TRAINERS)
LOOPS = (
    "torch.autocast fp16",
    "hf_mp.autocast fp16",
    "hf_mp fp16",
    "hf_mp fp16-lean",
    "hf_mp bf16",
    "torch.autocast bf16",
)
PEERS = ("torch.autocast fp16", "hf_mp fp16", "hf_mp fp16-lean")
GPT2 = ("--layers", "12", "--width", "768", "--heads", "12")  # of 124M
GPT2_LARGE = ("--layers", "36", "--width", "1280", "--heads", "20")  # of 774M
LARGE_GIB = 40
# -v: a line for each test as it ends. Without the settings of pyproject.toml, which want plugins.
PYTEST = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
_TINY_MODEL = ("--layers", "1", "--width", "32", "--heads", "2", "--vocab", "200")
# What makes each benchmark small enough for a CPU; of an option that is given twice the last one counts.
TINY = {
    "step": (*_TINY_MODEL, "--batch", "2", "--seq", "16", "--rounds", "1"),
    "update": (*_TINY_MODEL, "--rounds", "2"),
    "loss": ("--rows", "8", "--vocab", "100", "--rounds", "2"),
    "autocast": (*_TINY_MODEL, "--dtype", "bf16", "--seq", "16", "--rounds", "1", "--calls", "100"),
    "architectures": ("--only", "GPT-2 2 x 64", "--rounds", "1"),
}


@dataclass(frozen=True)
class Piece:
    """One process.

    Attributes:
        name: of the result that it stores; of the log alone for the tests.
        command: what Python runs, without the options for device, name and directory that the benchmarks share.
        seconds: its share of the default of 9.5 minutes; what others leave is shared as well.
        gib: memory that a GPU needs for it; one with less leaves it out, unless it is named.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    gib: int = 0

    def full_command(self, *, tiny: bool, device: str, directory: Path, gib: float = math.inf) -> list[str]:
        """What is run, on a GPU of ``gib`` memory."""
        if self.command[0] == "-m":  # no test of a GPU would run on a CPU
            return [sys.executable, *((*PYTEST, "tests/kernels/test_registry.py") if tiny else self.command)]
        what, *options = self.command
        options += TINY[what] if tiny else ("--batch", "1") if what == "step" and gib < LARGE_GIB else ()
        options += ("--device", device, "--name", self.name, "--output-dir", str(directory))
        return [sys.executable, "scripts/bench.py", what, *options]


def gpu_tests() -> list[str]:
    """The test files with tests for a GPU: others may need packages that are not there."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]


def _step(
    name: str,
    model: tuple[str, ...],
    contenders: tuple[str, ...],
    rounds: int,
    seconds: int,
    *options: str,
    gib: int = 0,
) -> Piece:
    shape = ("--batch", "8", "--seq", "1024", "--dropout", "0.1", "--rounds", str(rounds), "--warmup", "4")
    command = ("step", *model, *shape, "--contenders", ",".join(contenders), *options)
    return Piece(name, command, seconds, gib)


_LARGE_UPDATES = "torch.amp,hf_mp fp16,hf_mp fp16-lean,FlashAdamW"  # that fit into 80 GB side by side
# In the order of their weight.
PIECES = (
    Piece("tests", (*PYTEST, "-m", "gpu and not outside", *gpu_tests()), 110),
    Piece("bench_update_gpt2", ("update", *GPT2, "--rounds", "30"), 40),
    _step("bench_step_gpt2", GPT2, (*TRAINERS, *LOOPS), 20, 70),
    _step("bench_step_gpt2_large", GPT2_LARGE, (*TRAINERS, *PEERS), 8, 80, gib=LARGE_GIB),
    Piece(
        "bench_update_gpt2_large",
        ("update", *GPT2_LARGE, "--rounds", "15", "--contenders", _LARGE_UPDATES),
        35,
        LARGE_GIB,
    ),
    _step("bench_step_gpt2_compiled", GPT2, COMPILED, 20, 90, "--no-peak"),
    Piece("bench_loss", ("loss", "--rows", "8192", "--rounds", "20"), 20),
    Piece("bench_architectures", ("architectures", "--rounds", "5"), 90),
    Piece("bench_autocast", ("autocast", "--dtype", "fp16", "--batch", "8", "--seq", "512", "--rounds", "3"), 35),
)


def gpu_gib() -> float:
    """Memory of the first GPU, as its driver's tool says; inf without a GPU."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return math.inf
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    return float(said) / 1024 if said.isdecimal() else math.inf


def run_piece(piece: Piece, *, tiny: bool, device: str, directory: Path, seconds: float, gib: float = math.inf) -> str:
    """Run one piece for at most ``seconds``; its output is shown and kept in ``NAME.log``. Gives what became of it."""
    command = piece.full_command(tiny=tiny, device=device, directory=directory, gib=gib)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(
        path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path
    )}  # fmt: skip
    start = time.monotonic()
    with (directory / f"{piece.name}.log").open("w", encoding="utf-8") as log:
        # a session of its own, so that its processes can be ended with it
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            outcome = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = time.monotonic() - start
    if "pytest" in command:
        ended = re.findall(r"^\S+::.* (PASSED|FAILED|ERROR)\b", log_of(piece, directory), re.MULTILINE)
        outcome = f"{outcome}, {ended.count('PASSED')} tests passed" if ended else "failed: no test ran"
    return f"{outcome}, {took:.0f} s"


def log_of(piece: Piece, directory: Path) -> str:
    """What a piece has printed."""
    return (directory / f"{piece.name}.log").read_text(encoding="utf-8", errors="replace")


def table_to_paste(outcomes: dict[str, str], directory: Path) -> str:
    """What the pieces stored, as Markdown: torch's ways and ours of one piece are of one run, in turns."""
    about, rows = "", [f"| {name} | {outcome} | | |" for name, outcome in outcomes.items()]
    for name in outcomes:
        if not (path := directory / f"{name}.json").is_file():
            continue
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        about = f"{record['device'].get('GPU 0', record['device']['CPU'])}, {record['versions']}, {record['date']}\n\n"
        for way, row in record["result"].get("contenders", {}).items():
            seconds, peak = row.get("median_seconds"), row.get("peak_bytes")
            sizes = "" if seconds is None else f"{1e3 * seconds:.2f}", "" if peak is None else f"{peak / 2**30:.2f}"
            rows.append(f"| {name} | {way} | {' | '.join(sizes)} |")
    return about + "\n".join(
        ["| piece | way, or what became of it | milliseconds | peak, GiB |", "|---|---|---|---|", *rows]
    )


def choose(only: str | None, gib: float = math.inf) -> list[Piece]:
    """The pieces of these names; for None all that fit into ``gib``.

    Raises:
        ValueError: for a name that is not known.
    """
    if only is None:
        return [piece for piece in PIECES if piece.gib <= gib]
    known = {piece.name: piece for piece in PIECES}
    names = [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: not known, use some of {', '.join(known)}")
    return [known[name] for name in names]


def main(
    output_dir: Annotated[Path, typer.Option(help="where the JSON and the logs go")],
    minutes: Annotated[float, typer.Option(help="for all of it")] = 9.5,
    only: Annotated[str | None, typer.Option(help="comma-separated names of pieces")] = None,
    device: str = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="small sizes, to try it on a CPU")] = False,
) -> None:
    """Run the pieces one after the other, for as long as there is time."""
    deadline = time.monotonic() + 60 * minutes
    directory = output_dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    gib = gpu_gib() if device == "cuda" else math.inf
    outcomes, chosen = dict[str, str](), choose(only, gib)
    for place, piece in enumerate(chosen):
        # ended after its share of what is left, so that others get their turn
        share = piece.seconds / sum(later.seconds for later in chosen[place:])
        seconds = share * (deadline - time.monotonic())
        outcome = "no time was left"
        if seconds > 5:
            print(f"{piece.name} ...", flush=True)
            outcome = run_piece(piece, tiny=tiny, device=device, directory=directory, seconds=seconds, gib=gib)
            print("\n".join(log_of(piece, directory).splitlines()[-30:]))
        print(f"== {piece.name}: {outcome}", flush=True)
        outcomes[piece.name] = outcome
    print(f"\nTo paste into an issue:\n\n{table_to_paste(outcomes, directory)}")
    sys.exit(0 if all(outcome.startswith("done") for outcome in outcomes.values()) else 1)


if __name__ == "__main__":
    typer.run(main)

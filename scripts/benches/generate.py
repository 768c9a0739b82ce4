"""Generation token by token: ours in turns with torch.autocast, FP32, and a model that is in 16 bits throughout.

    python scripts/bench.py generate
    python scripts/bench.py generate --only "GPT-2, batch 1" --rounds 3

Greedy ``generate()`` from 8 tokens of small models with random weights: with a cache that grows, with a static one,
and compiled; and from a long prompt, which each token reads in the cache. ``torch.autocast`` is entered once around it.
The floor is the model in BF16 throughout: it casts no weight and no activation. The floor of an autocast that is
written in Python is the same with a function mode that does nothing in each forward. Medians, spreads, ratios to
torch.autocast and the floor, and the calls of Python functions that a token costs, which do not depend on the machine.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn
from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_mp
from _benchmarks import DEFAULT_DEVICE
from _contenders import BareMode
from _results import alternate, ratios_of, rows_of

PEER, WHOLE, FP32 = "torch.autocast bf16", "BF16 throughout", "fp32"
BARE = "BF16 throughout, bare function mode"
OURS = {"hf_mp bf16": "bf16", "hf_mp fp16": "fp16"}
CONTENDERS = (PEER, WHOLE, BARE, FP32, *OURS)
COMPILED_CONTENDERS = (PEER, WHOLE, "hf_mp bf16")
RATIOS = {"ratio_to_torch_autocast": PEER, "ratio_to_floor": WHOLE}
PROMPT = 8


@dataclass(frozen=True)
class Case:
    """What is generated.

    Attributes:
        kind: of the model, ``"GPT-2"`` or ``"Llama"``.
        batch: sequences at once.
        cache: ``"dynamic"``, ``"static"``, or ``"compiled"``: a static one, and a compiled forward.
        prompt: tokens before, of which the time is included.
    """

    kind: str
    batch: int
    cache: str = "dynamic"
    prompt: int = PROMPT

    @property
    def name(self) -> str:
        """For tables."""
        cache = {"dynamic": "", "static": ", static cache", "compiled": ", compiled"}[self.cache]
        prompt = "" if self.prompt == PROMPT else f", {self.prompt} tokens before"
        return f"{self.kind}, batch {self.batch}{cache}{prompt}"

    @property
    def contenders(self) -> tuple[str, ...]:
        """Those that are compared.

        Compiling takes long. And under torch.autocast a Llama leaves FP32 keys and BF16 values, which Transformers'
        static cache refuses.
        """
        found = COMPILED_CONTENDERS if self.cache == "compiled" else CONTENDERS
        return tuple(name for name in found if name != PEER or self.kind == "GPT-2" or self.cache == "dynamic")


CASES = (
    *(Case(kind, batch) for kind in ("GPT-2", "Llama") for batch in (1, 8)),
    *(Case(kind, 1, "static") for kind in ("GPT-2", "Llama")),
    Case("Llama", 8, prompt=512),
    Case("GPT-2", 1, "compiled"),
)


def make_model(kind: str, layers: int, width: int, vocab: int, device: str) -> nn.Module:
    """A model of so many layers and such a width, in evaluation, with the same random weights every time."""
    torch.manual_seed(0)
    with torch.device(device):
        if kind == "GPT-2":
            gpt2 = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=vocab)
            return GPT2LMHeadModel(gpt2).eval()
        llama = LlamaConfig(
            num_hidden_layers=layers, hidden_size=width, intermediate_size=8 * width // 3, vocab_size=vocab,
            num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), max_position_embeddings=1024,
        )  # fmt: skip
        return LlamaForCausalLM(llama).eval()


def make_call(model: nn.Module, contender: str, case: Case, tokens: int, device: str) -> Callable[[], None]:
    """One call of ``generate()`` as the contender does it."""
    if contender in (WHOLE, BARE):
        model.to(torch.bfloat16)
    if contender == BARE:
        model.forward = _in_bare_mode(model.forward)
    elif contender in OURS:
        hf_mp.MixedPrecision(OURS[contender]).attach(model)
    prompt = torch.arange(case.prompt, device=device).repeat(case.batch, 1)
    settings: dict[str, Any] = {} if case.cache == "dynamic" else {"cache_implementation": "static"}
    if case.cache == "compiled":
        settings["compile_config"] = CompileConfig(mode="default", fullgraph=False)
        settings["compile_config"]._compile_all_devices = True  # Transformers leaves CPUs out
    elif case.cache == "static":
        settings["disable_compile"] = True

    def call() -> None:
        around = torch.autocast(device, torch.bfloat16) if contender == PEER else contextlib.nullcontext()
        with around:
            model.generate(  # type: ignore[operator]
                prompt, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **settings
            )

    return call


def _in_bare_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # generate() reads its signature
    def run(*args: Any, **kwargs: Any) -> Any:
        with BareMode():
            return forward(*args, **kwargs)

    return run


def python_calls(call: Callable[[], None], tokens: int) -> float:
    """The calls of Python functions, and of C functions by Python, that a token costs."""
    call()
    call()
    profile = cProfile.Profile()
    profile.runcall(call)
    return float(pstats.Stats(profile).total_calls) / tokens  # type: ignore[attr-defined]


def compare(case: Case, layers: int, width: int, vocab: int, tokens: int, rounds: int, device: str) -> dict[str, Any]:
    """Seconds a token of each contender, in turns, with ratios to ``torch.autocast`` and to the floor."""
    calls = {
        name: make_call(make_model(case.kind, layers, width, vocab, device), name, case, tokens, device)
        for name in case.contenders
    }
    seconds = alternate(calls, rounds=rounds, warmup=2)
    rows = rows_of({name: [one / tokens for one in found] for name, found in seconds.items()})
    for name, row in rows.items():
        row |= ratios_of(seconds, {ratio: (name, other) for ratio, other in RATIOS.items()})
        row["python_calls"] = python_calls(calls[name], tokens)
    return rows


def measure(
    layers: int = 6,
    width: int = 512,
    vocab: int = 16384,
    tokens: Annotated[int, typer.Option(help="generated at a time")] = 48,
    rounds: int = 7,
    only: Annotated[str, typer.Option(help="names of cases, separated by semicolons; default: all")] = "",
    device: str = DEFAULT_DEVICE,
) -> dict[str, Any]:
    """Time a token of each case and contender."""
    known = {case.name: case for case in CASES}
    wanted = [part.strip() for part in only.split(";") if part.strip()] or list(known)
    if unknown := sorted(set(wanted) - known.keys()):
        raise typer.BadParameter(f"--only {', '.join(unknown)} is not known: use some of {'; '.join(known)}")
    found = {}
    for name in wanted:
        print(f"{name} ...", flush=True)
        found[name] = compare(known[name], layers, width, vocab, tokens, rounds, device)
    return {"layers": layers, "width": width, "vocab": vocab, "tokens": tokens, "prompt": PROMPT,
            "threads": torch.get_num_threads(), "cases": found}  # fmt: skip

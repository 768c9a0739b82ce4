"""A fuzzer for everything that reads text or values that a person, a file or a stranger may have written.

Each case begins as something valid and is changed here and there, by what is known of its form; all follows from the
number of the case. Whatever is given, what comes is a result or an error of ours with a message: a ValueError (with
CheckpointError) or a TypeError, for the empty state of a disabled scaler a RuntimeError as from torch.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import HfArgumentParser

from hf_mp import CheckpointError, MasterWeightOptimizer, MixedPrecision, MixedPrecisionArguments, PrecisionPolicy
from hf_mp.casting.mode import TABLES
from hf_mp.casting.rules import match_modules, parse_rules
from hf_mp.scaling.rules import parse_loss_scale
from hf_mp.scaling.scalers import DynamicLossScaler, HeadroomLossScaler, StaticLossScaler, make_loss_scaler
from hf_mp.trainer.checkpoints.inspection import find_problems
from hf_mp.trainer.checkpoints.manifest import finish

SECONDS = 20  # far more than any case takes: one that runs into it hangs

WORDS = (
    *("fp16", "fp32", "bf16", "fp16-lean", "bf16-lean", "params", "compute", "masters", "output", "loss_scale"),
    *("headroom", "dynamic", "none", "static", "scale", "kind", "steps", "init_scale", "half_life", "min_scale"),
    *("max_scale", "enabled", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "files", "versions"),
    *("step", "world_size", "lm_head", "*.mlp.*", "lower_precision", "widest", "unlisted", "softmax", "nan", "inf"),
    *("-inf", "1e400", "0x10", "../x", "/etc", "C:\\x", ".", "..", "a/../b", "NUL", "true", "null", "[", "{", "]"),
    *("}", "[[[", "*", "**", "[!", "?"),
)
CHARACTERS = ("\0", "\t", " ", ",", "=", "\ud7ff", "\U0010ffff")
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1.0, 0.5, 65504.0, 1e-45, 1e38,
    1e39, 1e308, math.inf, -math.inf, math.nan, "", " ", "\0", "\ud800", "é", "\uff11", "1", "1e5", "nan", "x" * 1000,
    b"fp16", [], {}, (), [1], {"a": 1}, {1: 2}, set(), float, torch.float16, torch.float64, torch.int8, torch.softmax,
    len, object(), 1j, torch.tensor(1.0), torch.tensor([1.0, 2.0]), range(3),
)  # fmt: skip


class Mutator:
    """Changes values here and there."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def text(self, text: str) -> str:
        """``text`` with some parts cut out, repeated, or exchanged for words and characters that mean something."""
        for _ in range(self.chance.randrange(4)):
            start = self.chance.randrange(len(text) + 1)
            end = min(len(text), start + self.chance.randrange(9))
            repeated = text[start:end] * self.chance.choice((0, 2, 3, 50))
            others = self.chance.choice(WORDS + CHARACTERS), "," + self.chance.choice(text.split(","))
            text = text[:start] + self.chance.choice((repeated, *others)) + text[end:]
        return text

    def value(self, value: Any, depth: int = 0) -> Any:
        """``value`` or something odd in its place, or in one of its parts."""
        if self.chance.random() < (0.25 if depth else 0.05):
            return self.odd()
        if isinstance(value, dict):
            changed = dict(value)
            for _ in range(self.chance.randrange(1, 3)):
                key = self.chance.choice([*changed, self.chance.choice((*WORDS, None, 1))])
                changed[key] = self.value(changed[key], depth + 1) if key in changed else self.odd()
                if self.chance.random() < 0.2:
                    del changed[key]
            return changed
        if isinstance(value, list):
            return [self.value(each, depth + 1) if self.chance.random() < 0.3 else each for each in value]
        if isinstance(value, str):
            return self.text(value)
        if type(value) in (int, float) and abs(value) < 10**300:
            return value * self.chance.choice((0, -1, 1, 2, 0.5, 1e10, 1e-10))
        return value

    def json_like(self, value: Any) -> Any:
        """As :meth:`value`, of what JSON can say."""
        changed = self.value(value)
        try:
            return json.loads(json.dumps(changed))
        except (TypeError, ValueError, RecursionError):
            return self.json_like(value)

    def odd(self) -> Any:
        return self.chance.choice(ODD)


@dataclass(frozen=True)
class Target:
    """What is fuzzed: how often among all cases, with what it is called, and which errors are its own."""

    share: float
    call: Callable[[Mutator], Any]
    errors: tuple[type[Exception], ...] = (ValueError, TypeError)


POLICIES = ("fp16", "bf16-lean", "params=fp32,compute=fp16,loss_scale=headroom", "compute=bf16,loss_scale=1024")
POLICIES += ("params=fp16,compute=fp16,loss_scale=dynamic",)


def policy_text(mutator: Mutator) -> None:
    given = mutator.text(mutator.chance.choice(POLICIES))
    policy = PrecisionPolicy.parse(given)
    assert PrecisionPolicy.parse(str(policy)) == policy, f"{policy} does not survive being written"


def policy_fields(mutator: Mutator) -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    values = {name: mutator.chance.choice(dtypes) for name in ("params", "compute", "masters", "output")}
    values[mutator.chance.choice([*values, "loss_scale"])] = mutator.odd()
    PrecisionPolicy(**values)


def loss_scale(mutator: Mutator) -> None:
    parse_loss_scale(mutator.odd() if mutator.chance.random() < 0.5 else mutator.text("1024.0"))


SETTINGS: dict[str, dict[str, Any]] = {
    "headroom": {"init_scale": 4096.0, "headroom": 4, "half_life": 10, "backoff_factor": 0.5, "min_scale": 0.1},
    "dynamic": {
        "init_scale": 4096.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 5,
        "hysteresis": 2,
    },
    "1024": {"max_consecutive_skips": 5, "enabled": True},
}


def scale_kwargs(mutator: Mutator) -> None:
    kind = mutator.chance.choice(list(SETTINGS))
    settings = mutator.value(SETTINGS[kind], depth=0)
    if isinstance(settings, dict) and all(isinstance(name, str) for name in settings):
        make_loss_scaler(kind, **settings)


SCALERS = {"headroom": HeadroomLossScaler(), "dynamic": DynamicLossScaler(), "1024": StaticLossScaler(1024.0)}
TORCH_STATE = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 1}


def scaler_state(mutator: Mutator) -> None:
    scaler = SCALERS[mutator.chance.choice(list(SCALERS))].copy()
    state = TORCH_STATE if mutator.chance.random() < 0.2 else scaler.state_dict()
    before = scaler.state_dict()
    try:
        scaler.load_state_dict(mutator.value(state))
    except Exception:
        assert scaler.state_dict() == before, "a state that was refused has changed the scaler"
        raise
    assert 0.0 < scaler.get_scale() < math.inf, f"took over the scale {scaler.get_scale()}"
    json.dumps(scaler.state_dict())


def runtime_state(mutator: Mutator) -> None:
    runtime = MixedPrecision(mutator.chance.choice(("fp16", "bf16")))
    runtime.load_state_dict(mutator.value(runtime.state_dict()))
    assert 0.0 < runtime.stats.loss_scale < math.inf


def optimizer_state(mutator: Mutator) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = MasterWeightOptimizer(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    state["masters"] = mutator.value({0: state["masters"][0], 1: torch.ones(2)})
    optimizer.load_state_dict(state)


RULES: dict[Any, Any] = {"lm_head": "fp32", "*.mlp.*": "fp32", torch.softmax: "fp32", torch.matmul: "widest"}
MODEL = nn.ModuleDict({"lm_head": nn.Linear(1, 1), "mlp": nn.Sequential(nn.Linear(1, 1))})


def rules(mutator: Mutator) -> None:
    given: dict[Any, Any] = dict(mutator.chance.sample(list(RULES.items()), mutator.chance.randrange(4)))
    for key in list(given):
        if mutator.chance.random() < 0.5:
            given[key] = mutator.odd() if mutator.chance.random() < 0.5 else mutator.text(str(given[key]))
    odd = mutator.odd()
    if mutator.chance.random() < 0.5 and type(odd).__hash__ is not None:
        given[odd] = "fp32"
    if mutator.chance.random() < 0.5:
        given[mutator.text("transformer.*.mlp")] = "fp32"
    _, patterns = parse_rules(given, TABLES[mutator.chance.choice(list(TABLES))])
    match_modules(patterns, MODEL)


ARGUMENTS = {"output_dir": "x", "precision": "fp16", "loss_scale": "dynamic", "save_failure": "stop", "max_steps": 3}
ARGUMENTS |= {"loss_scaler_settings": {"init_scale": 16}, "handle_preemption": False, "use_cpu": True, "report_to": []}
OURS = ("precision", "loss_scale", "loss_scaler_settings", "save_failure")


def config(mutator: Mutator) -> None:
    """Our settings in a file; those of Transformers stay."""
    given = {name: mutator.json_like(ARGUMENTS[name]) for name in OURS if mutator.chance.random() < 0.5}
    parser = HfArgumentParser(MixedPrecisionArguments)  # type: ignore[arg-type]
    parser.parse_dict({**ARGUMENTS, **given}, allow_extra_keys=False)


TRAINER_STATE = {
    "best_metric": 1.0, "best_model_checkpoint": "checkpoint-2", "epoch": 0.5, "global_step": 4, "log_history": [{}],
    "max_steps": 9, "num_train_epochs": 1, "stateful_callbacks": {}, "save_steps": 2, "train_batch_size": 2,
}  # fmt: skip


@functools.cache
def checkpoint_folder() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """One small checkpoint on disk, whose files are changed; the folder that holds it goes with this process."""
    held = tempfile.TemporaryDirectory()
    path = Path(held.name) / "checkpoint-4"
    path.mkdir()
    torch.save({"state": {0: torch.ones(3)}}, path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps(TRAINER_STATE))
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    return held, path


def checkpoint_files(mutator: Mutator) -> None:
    """One file changed, with a manifest that fits and without one; nothing but a list of problems may come."""
    _, folder = checkpoint_folder()
    file, manifest = mutator.chance.choice(sorted(folder.iterdir())), folder / "hf_mp_manifest.json"
    original = file.read_bytes()
    content = bytearray(original)
    if file.suffix == ".json":
        changed = mutator.chance.random() < 0.7
        text = json.dumps(mutator.json_like(json.loads(original))) if changed else mutator.text(original.decode())
        content = bytearray(text.encode("utf-8", "surrogatepass"))
    else:
        for _ in range(mutator.chance.randrange(1, 6)):
            content[mutator.chance.randrange(len(content))] = mutator.chance.randrange(256)
        del content[mutator.chance.randrange(len(content) // 2, 4 * len(content)) :]
    file.write_bytes(content)
    if mutator.chance.random() < 0.5:
        finish(folder)
    problems = find_problems(folder)
    manifest.unlink(missing_ok=True)
    file.write_bytes(original)
    if problems:
        raise CheckpointError("; ".join(problems))


TARGETS: dict[str, Target] = {
    "policy strings": Target(0.25, policy_text),
    "policy fields": Target(0.05, policy_fields),
    "loss scales": Target(0.05, loss_scale),
    "scale_kwargs": Target(0.12, scale_kwargs),
    "scaler states": Target(0.12, scaler_state, (ValueError, TypeError, RuntimeError)),
    "runtime states": Target(0.06, runtime_state, (ValueError, TypeError, RuntimeError)),
    "optimizer states": Target(0.01, optimizer_state),
    "rules": Target(0.1, rules),
    "config files": Target(0.003, config),
    "checkpoint files": Target(0.0175, checkpoint_files),
}


def target_of(seed: int) -> str:
    """Which target a case is for."""
    return random.Random(-seed - 1).choices(list(TARGETS), [target.share for target in TARGETS.values()])[0]


def run_case(name: str, seed: int) -> str | None:
    """What is wrong with a case; None where a result came, or an error of ours with a message."""
    target = TARGETS[name]
    try:
        target.call(Mutator(seed))
    except target.errors as error:
        message = str(error)
        kind = type(error)
        if not message.strip():
            return f"{kind.__name__} without a message"
        if kind in (TypeError, KeyError, UnicodeError) and "unhashable" in message:
            return f"{kind.__name__}: {message[:200]}"
    except BaseException as error:  # what must not come
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def main(output_dir: str, settings: dict[str, Any]) -> None:
    """In a process of the harness: prints ``fuzz {...}`` for each case that is wrong, and the counts at its end."""

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, hangs)
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(1000)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for seed in range(settings["seed"], settings["seed"] + settings["cases"]):
        name = target_of(seed)
        counts[name] += 1
        signal.alarm(SECONDS)
        if lost := run_case(name, seed):
            print("fuzz " + json.dumps({"target": name, "seed": seed, "lost": lost}), flush=True)
    signal.alarm(0)
    print("fuzzed " + json.dumps(counts), flush=True)

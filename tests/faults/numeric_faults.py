"""Trains a small model while inf and NaN are planted in its data, activations and gradients, and looks at all state.

A segment is a run of some steps in one precision, with one scaler and optimizer, with a loop drawn from its seed. After
every step: nothing non-finite in parameters, masters, moments and working copies; each working copy is its master's
rounding; the scale is within its bounds; a step is skipped if and only if a gradient is not finite (or its
square is not), on all processes
alike; and a skipped step has changed no bit of parameters and optimizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from hf_mp import LossScaleError, MasterWeightOptimizer, MixedPrecision, PrecisionPolicy
from hf_mp.kernels.gradient_scan import OVERFLOW_LIMIT
from hf_mp.scaling.scalers import make_loss_scaler
from hf_mp.weights.fp32_reads import as_stored

SCALERS: dict[str, dict[str, Any]] = {
    "headroom": {"half_life": 5, "patience": 7, "min_scale": 2.0**-4, "max_scale": 2.0**20},
    "dynamic": {"growth_interval": 3, "min_scale": 2.0**-2, "max_scale": 2.0**18},
    "1024": {},
    "none": {},
}
PRECISIONS = ("fp16", "bf16", "fp16-lean", "bf16-lean")
SHARES_OF_STEPS = (0.001, 0.01, 0.1, 0.5)
KINDS = ("data", "activation", "activation gradient", "parameter hook", "gradient", "loss", "overflow")
WAYS = ("in place", "data", "numpy")  # how a gradient is written; the last two raise no version counter
VALUES = (math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Segment:
    """What one run is made of; all of it follows from ``seed``."""

    seed: int
    precision: str
    loss_scale: str
    optimizer: str
    share_of_steps: float
    accumulation: int
    clips: bool
    as_trainer: bool  # clips by the measured norm, and writes no gradient unseen

    @classmethod
    def draw(cls, seed: int, world_size: int) -> Segment:
        chance = random.Random(seed)
        lean = world_size == 1
        precision = PRECISIONS[seed % (4 if lean else 2)]
        scale = ("headroom", "dynamic", "1024", "none")[(seed // 4) % 4] if precision.startswith("fp16") else "none"
        return cls(
            seed,
            precision,
            scale,
            chance.choice(["adamw", "sgd"]),
            SHARES_OF_STEPS[(seed // 16) % 4],
            chance.choice([1, 1, 3]),
            chance.random() < 0.5,
            "lean" not in precision and chance.random() < 0.3,
        )


class Net(nn.Module):
    """A weight that is used twice, normalization, and a head: (rows, 16) to (rows, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.tied(x)).relu()
        return self.head(linear(x, self.tied.weight))


class Planter:
    """Decides what is planted in a step, and plants it; all processes draw alike, one of them may be the only one."""

    def __init__(self, segment: Segment, rank: int, world_size: int) -> None:
        self._chance = random.Random(segment.seed + 1)
        self._segment, self._rank, self._world_size = segment, rank, world_size
        self.kind: str | None = None
        self.kinds: tuple[str, ...] = KINDS

    def draw(self) -> None:
        """What the next step is struck with; ``kind`` is None for nothing."""
        chance = self._chance
        hit = chance.random() < self._segment.share_of_steps
        kind, self._share = chance.choice(self.kinds), 10.0 ** chance.uniform(-3.0, math.log10(0.5))
        self._value, self._way = chance.choice(VALUES), chance.choice(WAYS)
        self._generator = torch.Generator().manual_seed(chance.randrange(2**31))
        only = chance.randrange(2 * self._world_size)  # in half of the cases, one process
        here = only >= self._world_size or only == self._rank
        self.kind = kind if hit and here else None
        if self._segment.as_trainer:
            self._way = "in place"

    def plant(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` with the value in a share of its elements, one at least."""
        places = torch.rand(tensor.shape, generator=self._generator) < self._share
        places.view(-1)[torch.randint(places.numel(), (1,), generator=self._generator)] = True
        return tensor.masked_fill(places, self._value)

    def write(self, gradient: Tensor) -> None:
        planted = self.plant(gradient)
        if self._way == "data":
            gradient.data.copy_(planted)
        elif self._way == "numpy" and gradient.dtype is not torch.bfloat16:
            gradient.numpy()[...] = planted.numpy()
        else:
            gradient.copy_(planted)

    def hook(self, model: Net) -> Iterator[Any]:
        """Hooks for one forward and backward."""
        if self.kind == "activation":
            yield model.norm.register_forward_hook(lambda module, args, output: self.plant(output))
        elif self.kind == "activation gradient":
            yield model.norm.register_full_backward_hook(lambda module, into, out: (self.plant(into[0]),))
        elif self.kind == "parameter hook":
            yield model.head.weight.register_hook(self.plant)


class Run:
    """One segment: a model, its optimizer, and what must hold after each of their steps."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._random = torch.Generator().manual_seed(segment.seed + 100 * self.rank)
        torch.manual_seed(segment.seed)
        self.net = Net()
        parameters = list(self.net.parameters())
        optimizer: Any = (
            torch.optim.AdamW(parameters, lr=1e-2)
            if segment.optimizer == "adamw"
            else torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        )
        policy = PrecisionPolicy.parse(segment.precision)
        scaler = make_loss_scaler(segment.loss_scale, **SCALERS[segment.loss_scale])
        self.runtime = MixedPrecision(policy, loss_scaler=scaler)
        self.runtime.attach(self.net)
        self.runtime.check.measures_norm = segment.as_trainer
        self.optimizer = self.runtime.attach_optimizer(optimizer)
        self.model = DistributedDataParallel(self.net) if self.world_size > 1 else self.net
        self.planter = Planter(segment, self.rank, self.world_size)
        self.struck = self.skipped = 0

    def step(self, number: int) -> None:
        """Forward, backward, clip, step; raises an AssertionError for what does not hold."""
        self.planter.draw()
        self.struck += self._any(self.planter.kind is not None)
        for micro_batch in range(self.segment.accumulation):
            self._backward(is_last=micro_batch == self.segment.accumulation - 1)
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        if self.planter.kind == "gradient":
            self.planter.write(gradients[number % len(gradients)])
        if self.segment.clips:
            self._clip()
        not_finite = self._any(not all((gradient.float().abs() < OVERFLOW_LIMIT).all() for gradient in gradients))
        before = self._fingerprint()
        self.optimizer.step()
        skipped = bool(self.optimizer.step_was_skipped)  # type: ignore[attr-defined]
        self.skipped += skipped
        assert skipped == not_finite, f"step {number}: skipped={skipped}, and gradients not finite: {not_finite}"
        assert not skipped or self._fingerprint() == before, f"step {number} was skipped and changed the state"
        self._check(number, skipped)
        self.optimizer.zero_grad()

    def _backward(self, is_last: bool) -> None:
        x = torch.randn(4, 16, generator=self._random)
        target = torch.randint(0, 8, (4,), generator=self._random)
        kind = self.planter.kind if is_last else None
        hooks = list(self.planter.hook(self.net)) if is_last else []
        loss = cross_entropy(self.model(self.planter.plant(x) if kind == "data" else x), target)
        if kind in ("loss", "overflow"):
            loss = loss * (math.inf if kind == "loss" else 1e30)
        loss.backward()
        for hook in hooks:
            hook.remove()

    def _clip(self) -> None:
        parameters = list(self.net.parameters())
        if isinstance(self.optimizer, MasterWeightOptimizer):
            self.optimizer.clip_grad_norm_(1.0)
        elif (norm := self.runtime.check.norm(parameters)) is not None:
            clip_grads_with_norm_(parameters, 1.0, norm)
        else:
            clip_grad_norm_(parameters, 1.0)

    def _any(self, here: bool) -> bool:
        if self.world_size == 1:
            return here
        found = torch.tensor([float(here)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def _masters(self) -> dict[str, Tensor]:
        master = getattr(self.optimizer, "master", Tensor.detach)
        return {name: master(parameter) for name, parameter in self.net.named_parameters()}

    def _moments(self) -> dict[str, Tensor]:
        states = self.optimizer.state.values()
        return {f"{i} {k}": v for i, s in enumerate(states) for k, v in s.items() if isinstance(v, Tensor)}

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, value in {**self._masters(), **self._moments()}.items():
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _check(self, number: int, skipped: bool) -> None:
        masters = self._masters()
        copies = self._check_copies(number, masters)
        for what, values in {"master": masters, "moment": self._moments(), "working copy": copies}.items():
            for name, value in values.items():
                assert value.isfinite().all(), f"step {number}: {what} {name} is not finite"
        self._check_scale(number)
        if self.world_size > 1:
            sums = [float(value.double().sum()) for value in masters.values()]
            mine = [float(skipped), self.runtime.scaler.get_scale(), *sums]
            theirs = [torch.zeros(len(mine), dtype=torch.float64) for _ in range(self.world_size)]
            dist.all_gather(theirs, torch.tensor(mine, dtype=torch.float64))
            assert all(torch.equal(theirs[0], other) for other in theirs), f"step {number}: processes differ: {theirs}"

    def _check_copies(self, number: int, masters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The working copies, each of which must be its master's rounding."""
        copies = {}
        lean = PrecisionPolicy.parse(self.segment.precision).is_lean
        for name, parameter in self.net.named_parameters():
            with as_stored():  # the 16 bits of a lean parameter
                copies[name] = parameter.detach() if lean else self.runtime.weights.layout.copies.get(parameter)
            rounded = masters[name].to(copies[name].dtype)
            distance = (copies[name].float() - rounded.float()).abs()
            # the split BF16 rounds ties away from zero: half a unit, and not both ways
            allowed = 0.0 if not lean else rounded.float().abs() * 2.0**-7
            assert (distance <= allowed).all(), f"step {number}: the working copy of {name} is not its master's"
        return copies

    def _check_scale(self, number: int) -> None:
        scale, settings = self.runtime.scaler.get_scale(), SCALERS[self.segment.loss_scale]
        constant = 1024.0 if self.segment.loss_scale == "1024" else 1.0
        low, high = settings.get("min_scale", constant), settings.get("max_scale", constant)
        assert low <= scale <= high, f"step {number}: loss scale {scale} is not within {low} and {high}"
        stats = self.runtime.stats
        assert (stats.steps, stats.skipped_steps) == (number + 1, self.skipped), f"step {number}: {stats}"


def lost_in(run: Run, steps: int) -> str | None:
    """Go the steps; what did not hold, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for number in range(steps):
                run.step(number)
        except (AssertionError, LossScaleError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def run_segment(seed: int, steps: int) -> dict[str, Any]:
    """Run one segment: what it was, how many steps were struck and skipped, and ``lost``, None where all held."""
    run = Run(Segment.draw(seed, dist.get_world_size() if dist.is_initialized() else 1))
    lost = lost_in(run, steps)
    return {**asdict(run.segment), "steps": steps, "struck": run.struck, "skipped": run.skipped, "lost": lost}


def run_until_stuck(precision: str, loss_scale: str) -> tuple[int, str | None]:
    """Every step is struck: gives how many were skipped before training ended, and what it ended with.

    That is to be a LossScaleError, with the state as before the first step.
    """
    run = Run(Segment(7, precision, loss_scale, "adamw", 1.0, 1, True, False))
    run.planter.kinds = ("loss",)
    before = run._fingerprint()
    lost = lost_in(run, 200)
    return run.skipped, lost if run._fingerprint() == before else f"the weights were changed: {lost}"


def main(output_dir: str, settings: dict[str, Any]) -> None:
    """In a process of the harness: prints a line ``numeric {...}`` for each segment."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for seed in range(settings["seed"], settings["seed"] + settings["segments"]):
        result = run_segment(seed, settings["steps"])
        if not dist.is_initialized() or dist.get_rank() == 0 or result["lost"]:
            print("numeric " + json.dumps({**result, "ranks": world_size}), flush=True)
        if result["lost"]:
            break
    if dist.is_initialized():
        dist.destroy_process_group()

"""The scale sequences that the suites of DeepSpeed, Apex, jmp and torch.amp.GradScaler ask for, of our scalers.

Each peer's rule is written down here in its own words, from its documentation and its tests' expectations, and runs
beside ours on the same overflows: the sequences of those suites, and random ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from step_reports import CLEAN, OVERFLOW

from hf_mp import DynamicLossScaler

Rule = Callable[[bool], float]  # from whether a step overflowed to the scale of the next one


@dataclass
class DeepSpeed:
    """FP16 optimizer: one step more than the window passes before the first growth, counted from the last overflow."""

    scale: float
    window: int
    floor: float = 1.0
    step: int = 0
    last_overflow: int = -1

    def __call__(self, overflow: bool) -> float:
        if overflow:
            self.scale, self.last_overflow = max(self.scale / 2, self.floor), self.step
        else:
            stable = self.step - self.last_overflow - 1
            self.scale *= 2 if stable > 0 and stable % self.window == 0 else 1
        self.step += 1
        return self.scale


@dataclass
class DeepSpeedWithHysteresis:
    """ZeRO's scaler: overflows are tolerated until ``hysteresis`` is spent; growth, or a clean step, restores it."""

    scale: float
    window: int
    hysteresis: int
    is_consecutive: bool
    floor: float = 1.0
    step: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def __call__(self, overflow: bool) -> float:
        if overflow:
            if self.left > 1:
                self.left -= 1
            else:
                self.scale = max(self.scale / 2, self.floor)
            self.last_overflow = self.step
        else:
            grows = (self.step - self.last_overflow) % self.window == 0
            if grows or self.is_consecutive:
                self.left = self.hysteresis
            self.scale *= 2 if grows else 1
        self.step += 1
        return self.scale


@dataclass
class Apex:
    """``amp``'s dynamic scale: the count of clean steps starts over with an overflow; bounds may be left out."""

    scale: float = 2.0**16
    window: int = 2000
    factor: float = 2.0
    floor: float | None = None
    ceiling: float = 2.0**24
    unskipped: int = 0

    def __call__(self, overflow: bool) -> float:
        if overflow:
            self.scale = max(self.floor or 0.0, self.scale / self.factor)
            self.unskipped = 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale, self.unskipped = min(self.ceiling, self.scale * self.factor), 0
        return self.scale


@dataclass
class Jmp:
    """``DynamicLossScale``: grows at the step whose count reaches the period; never leaves FP32, has a floor."""

    scale: float
    period: int = 2000
    factor: int = 2
    floor: float = 1.0
    counter: int = 0

    def __call__(self, overflow: bool) -> float:
        if overflow:
            self.scale, self.counter = max(self.floor, self.scale / self.factor), 0
        elif self.counter == self.period - 1:
            self.scale, self.counter = self.scale * self.factor, 0
        else:
            self.counter += 1
        return self.scale


class GradScaler:
    """torch's own, by the kernel that it calls."""

    def __init__(self, scale: float, growth: float, backoff: float, interval: int) -> None:
        self.scale, self.tracker = torch.tensor([scale]), torch.tensor([0], dtype=torch.int32)
        self.settings = growth, backoff, interval

    def __call__(self, overflow: bool) -> float:
        torch._amp_update_scale_(self.scale, self.tracker, torch.tensor([float(overflow)]), *self.settings)
        return self.scale.item()


PAIRS: dict[str, tuple[Callable[[], Rule], Callable[[], DynamicLossScaler]]] = {
    "DeepSpeed": (
        lambda: DeepSpeed(2.0**8, 3),
        lambda: DynamicLossScaler("cpu", 2.0**8, growth_interval=3, growth_delay=1, min_scale=1.0),
    ),
    "DeepSpeed, min_loss_scale 0.25": (
        lambda: DeepSpeed(2.0**4, 2, 0.25),
        lambda: DynamicLossScaler("cpu", 2.0**4, growth_interval=2, growth_delay=1, min_scale=0.25),
    ),
    **{
        f"DeepSpeed, hysteresis {hysteresis}, consecutive {consecutive}": (
            lambda h=hysteresis, c=consecutive: DeepSpeedWithHysteresis(2.0**8, 3, h, c),
            lambda h=hysteresis, c=consecutive: DynamicLossScaler(
                "cpu", 2.0**8, growth_interval=3, hysteresis=h, consecutive_hysteresis=c, min_scale=1.0
            ),
        )
        for hysteresis, consecutive in itertools.product((1, 2, 4), (False, True))
    },
    "Apex": (
        lambda: Apex(2.0**16, 4),
        lambda: DynamicLossScaler("cpu", 2.0**16, growth_interval=4, min_scale=0, max_scale=2.0**24),
    ),
    "Apex, min_loss_scale 128": (
        lambda: Apex(2.0**16, 4, floor=128.0),
        lambda: DynamicLossScaler("cpu", 2.0**16, growth_interval=4, min_scale=128, max_scale=2.0**24),
    ),
    "jmp": (lambda: Jmp(2.0**10, 3), lambda: DynamicLossScaler("cpu", 2.0**10, growth_interval=3, min_scale=1.0)),
    "jmp, factor 4, floor 2": (
        lambda: Jmp(2.0**10, 2, 4, 2.0),
        lambda: DynamicLossScaler("cpu", 2.0**10, 4.0, 0.25, 2, min_scale=2.0),
    ),
    "GradScaler": (
        lambda: GradScaler(2.0**16, 2.0, 0.5, 5),
        lambda: DynamicLossScaler("cpu", 2.0**16, growth_interval=5, min_scale=0),
    ),
    "GradScaler, growth_interval 1": (
        lambda: GradScaler(2.0**3, 2.0, 0.25, 1),
        lambda: DynamicLossScaler("cpu", 2.0**3, 2.0, 0.25, 1, min_scale=0),
    ),
}


def differences(peer: Rule, ours: DynamicLossScaler, overflows: Iterable[bool]) -> Iterator[tuple[int, float, float]]:
    """Steps after which the two scales differ, while both are within FP32's normal numbers."""
    for step, overflow in enumerate(overflows):
        expected = peer(overflow)
        ours.record_step(OVERFLOW if overflow else CLEAN)
        if not 2.0**-126 <= expected < 2.0**127:
            return
        if ours.get_scale() != expected:
            yield step, ours.get_scale(), expected


def check(name: str, overflows: Iterable[bool]) -> None:
    peer, ours = PAIRS[name]
    assert list(differences(peer(), ours(), overflows)) == []


@pytest.mark.parametrize("name", PAIRS)
def test_every_sequence_of_ten_steps(name: str) -> None:
    for bits in range(2**10):
        check(name, [bool(bits >> step & 1) for step in range(10)])


@pytest.mark.outside
@pytest.mark.parametrize("name", PAIRS)
def test_every_sequence_of_sixteen_steps_and_long_random_ones(name: str) -> None:
    for bits in range(2**16):
        check(name, [bool(bits >> step & 1) for step in range(16)])
    for seed in range(200):
        random_of = random.Random(seed)
        share = random_of.choice([0.001, 0.01, 0.1, 0.3])
        check(name, [random_of.random() < share for _ in range(5_000)])


def test_a_pair_that_differs_is_noticed() -> None:
    peer: Any = Apex(2.0**16, 4)
    assert list(differences(peer, DynamicLossScaler("cpu", 2.0**16, growth_interval=5), [False] * 4)) == [
        (3, 2.0**16, 2.0**17)
    ]

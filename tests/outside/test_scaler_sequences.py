"""The scale sequences that the suites of DeepSpeed, Apex, jmp and torch.amp.GradScaler ask for, of our scalers.

Each peer's rule is written down here in its own words, from its documentation and its tests' expectations, and runs
beside ours on the same overflows: the sequences of those suites, and random ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import pytest
import torch
from step_reports import CLEAN, OVERFLOW

from hf_mp import DynamicLossScaler

Rule = Callable[[Iterable[bool]], Iterator[float]]  # from whether each step overflowed to the scale of the next one


def deepspeed(overflows: Iterable[bool], scale: float, window: int, floor: float = 1.0) -> Iterator[float]:
    """FP16 optimizer: one step more than the window passes before the first growth, counted from the last overflow."""
    last_overflow = -1
    for step, overflow in enumerate(overflows):
        if overflow:
            scale, last_overflow = max(scale / 2, floor), step
        elif step - last_overflow > 1 and (step - last_overflow - 1) % window == 0:
            scale *= 2
        yield scale


def deepspeed_with_hysteresis(
    overflows: Iterable[bool], scale: float, window: int, hysteresis: int, is_consecutive: bool
) -> Iterator[float]:
    """ZeRO's scaler: overflows are tolerated until ``hysteresis`` is spent; growth, or a clean step, restores it."""
    left, last_overflow = hysteresis, -1
    for step, overflow in enumerate(overflows):
        grows = not overflow and (step - last_overflow) % window == 0
        if overflow:
            scale, left, last_overflow = (scale, left - 1, step) if left > 1 else (max(scale / 2, 1.0), left, step)
        elif grows or is_consecutive:
            left = hysteresis
        scale *= 2 if grows else 1
        yield scale


def apex(overflows: Iterable[bool], scale: float, window: int, floor: float = 0.0) -> Iterator[float]:
    """``amp``'s dynamic scale: the count of clean steps starts over with an overflow; its ceiling is 2**24."""
    unskipped = 0
    for overflow in overflows:
        unskipped = 0 if overflow else unskipped + 1
        if overflow:
            scale = max(floor, scale / 2)
        elif unskipped == window:
            scale, unskipped = min(2.0**24, scale * 2), 0
        yield scale


def jmp(overflows: Iterable[bool], scale: float, period: int, factor: int = 2, floor: float = 1.0) -> Iterator[float]:
    """``DynamicLossScale``: grows at the step whose count reaches the period; never leaves FP32, has a floor."""
    counter = 0
    for overflow in overflows:
        grows = not overflow and counter == period - 1
        counter = 0 if overflow or grows else counter + 1
        scale = max(floor, scale / factor) if overflow else scale * factor if grows else scale
        yield scale


def grad_scaler(
    overflows: Iterable[bool], scale: float, growth: float, backoff: float, interval: int
) -> Iterator[float]:
    """torch's own, by the kernel that it calls."""
    held, tracker = torch.tensor([scale]), torch.tensor([0], dtype=torch.int32)
    for overflow in overflows:
        torch._amp_update_scale_(held, tracker, torch.tensor([float(overflow)]), growth, backoff, interval)
        yield held.item()


PAIRS: dict[str, tuple[Rule, Callable[[], DynamicLossScaler]]] = {
    "DeepSpeed": (
        partial(deepspeed, scale=2.0**8, window=3),
        lambda: DynamicLossScaler("cpu", 2.0**8, growth_interval=3, growth_delay=1, min_scale=1.0),
    ),
    "DeepSpeed, min_loss_scale 0.25": (
        partial(deepspeed, scale=2.0**4, window=2, floor=0.25),
        lambda: DynamicLossScaler("cpu", 2.0**4, growth_interval=2, growth_delay=1, min_scale=0.25),
    ),
    **{
        f"DeepSpeed, hysteresis {hysteresis}, consecutive {consecutive}": (
            partial(
                deepspeed_with_hysteresis, scale=2.0**8, window=3, hysteresis=hysteresis, is_consecutive=consecutive
            ),
            lambda h=hysteresis, c=consecutive: DynamicLossScaler(
                "cpu", 2.0**8, growth_interval=3, hysteresis=h, consecutive_hysteresis=c, min_scale=1.0
            ),
        )
        for hysteresis, consecutive in itertools.product((1, 2, 4), (False, True))
    },
    "Apex": (
        partial(apex, scale=2.0**16, window=4),
        lambda: DynamicLossScaler("cpu", 2.0**16, growth_interval=4, min_scale=0, max_scale=2.0**24),
    ),
    "Apex, min_loss_scale 128": (
        partial(apex, scale=2.0**16, window=4, floor=128.0),
        lambda: DynamicLossScaler("cpu", 2.0**16, growth_interval=4, min_scale=128, max_scale=2.0**24),
    ),
    "jmp": (
        partial(jmp, scale=2.0**10, period=3),
        lambda: DynamicLossScaler("cpu", 2.0**10, growth_interval=3, min_scale=1.0),
    ),
    "jmp, factor 4, floor 2": (
        partial(jmp, scale=2.0**10, period=2, factor=4, floor=2.0),
        lambda: DynamicLossScaler("cpu", 2.0**10, 4.0, 0.25, 2, min_scale=2.0),
    ),
    "GradScaler": (
        partial(grad_scaler, scale=2.0**16, growth=2.0, backoff=0.5, interval=5),
        lambda: DynamicLossScaler("cpu", 2.0**16, growth_interval=5, min_scale=0),
    ),
    "GradScaler, growth_interval 1": (
        partial(grad_scaler, scale=2.0**3, growth=2.0, backoff=0.25, interval=1),
        lambda: DynamicLossScaler("cpu", 2.0**3, 2.0, 0.25, 1, min_scale=0),
    ),
}


def differences(peer: Rule, ours: DynamicLossScaler, overflows: Sequence[bool]) -> Iterator[tuple[int, float, float]]:
    """Steps after which the two scales differ, while both are within FP32's normal numbers."""
    for step, (overflow, expected) in enumerate(zip(overflows, peer(overflows), strict=True)):
        ours.update_scale(OVERFLOW if overflow else CLEAN)
        if not 2.0**-126 <= expected < 2.0**127:
            return
        if ours.get_scale() != expected:
            yield step, ours.get_scale(), expected


def check(name: str, overflows: Sequence[bool]) -> None:
    peer, ours = PAIRS[name]
    assert list(differences(peer, ours(), overflows)) == []


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
    peer = partial(apex, scale=2.0**16, window=4)
    assert list(differences(peer, DynamicLossScaler("cpu", 2.0**16, growth_interval=5), [False] * 4)) == [
        (3, 2.0**16, 2.0**17)
    ]

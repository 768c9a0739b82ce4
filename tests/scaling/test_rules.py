"""The rules of loss scaling, step by step, through scalers that keep their states."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_reports import CLEAN, OVERFLOW, SMALLEST_FP32, is_power_of_two, magnitudes, record, saw

from hf_mp.scaling.rules import (
    FP16_MAX,
    LEAST_USEFUL_SCALE,
    DynamicRule,
    HeadroomRule,
    ScaleRule,
    StaticRule,
    StepReport,
    headroom_left,
    power_of_two_below,
    scale_text,
    scale_with_headroom,
    to_fp32,
)
from hf_mp.scaling.scalers import DynamicLossScaler, HeadroomLossScaler

# Settings, reports of steps, and the scale, growth tracker and hysteresis after each.
DYNAMIC: dict[str, tuple[dict[str, Any], list[StepReport], list[tuple[float, int, int]]]] = {
    "an overflow at the step of the wrap starts over": (
        {"init_scale": 8.0, "growth_interval": 2},
        [CLEAN, OVERFLOW, CLEAN, CLEAN],
        [(8.0, 1, 1), (4.0, 0, 1), (4.0, 1, 1), (8.0, 0, 1)],
    ),
    "factors other than two": (
        {"init_scale": 16.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1},
        [CLEAN, OVERFLOW, OVERFLOW],
        [(64.0, 0, 1), (16.0, 0, 1), (4.0, 0, 1)],
    ),
    "the floor stops the fall": (
        {"init_scale": 8.0, "backoff_factor": 0.125, "min_scale": 2.0},
        [OVERFLOW, OVERFLOW, OVERFLOW],
        [(2.0, 0, 1)] * 3,
    ),
    "a scale below the floor is not raised": (
        {"init_scale": 0.25, "growth_interval": 1, "min_scale": 1.0},
        [OVERFLOW, CLEAN],
        [(0.25, 0, 1), (0.5, 0, 1)],
    ),
    "max_scale stops the rise": (
        {"init_scale": 4.0, "growth_factor": 4.0, "growth_interval": 2, "max_scale": 32.0},
        [*[CLEAN] * 6, OVERFLOW],
        [(4.0, 1, 1), (16.0, 0, 1), (16.0, 1, 1), (32.0, 0, 1), (32.0, 1, 1), (32.0, 0, 1), (16.0, 0, 1)],
    ),
    "a scale above max_scale does not grow": (
        {"init_scale": 64.0, "growth_interval": 1, "max_scale": 16.0},
        [CLEAN, OVERFLOW, OVERFLOW, CLEAN],
        [(64.0, 0, 1), (32.0, 0, 1), (16.0, 0, 1), (16.0, 0, 1)],
    ),
    "a scale does not grow out of FP32": (
        {"init_scale": 2.0**126, "growth_interval": 1},
        [CLEAN] * 3,
        [(2.0**127, 0, 1)] * 3,
    ),
    "hysteresis tolerates overflows until the scale grows again": (
        {"init_scale": 8.0, "growth_interval": 2, "hysteresis": 3},
        [OVERFLOW, CLEAN, OVERFLOW, OVERFLOW, OVERFLOW, CLEAN, CLEAN, OVERFLOW],
        [(8.0, 0, 2), (8.0, 1, 2), (8.0, 0, 1), (4.0, 0, 1), (2.0, 0, 1), (2.0, 1, 1), (4.0, 0, 3), (4.0, 0, 2)],
    ),
    "consecutive hysteresis is restored by a clean step": (
        {"init_scale": 8.0, "hysteresis": 2, "consecutive_hysteresis": True},
        [OVERFLOW, CLEAN, OVERFLOW, OVERFLOW, OVERFLOW, CLEAN, OVERFLOW],
        [(8.0, 0, 1), (8.0, 1, 2), (8.0, 0, 1), (4.0, 0, 1), (2.0, 0, 1), (2.0, 1, 2), (2.0, 0, 1)],
    ),
    "clean steps of growth_delay do not count": (
        {"init_scale": 8.0, "growth_interval": 2, "growth_delay": 1},
        [CLEAN, CLEAN, CLEAN, OVERFLOW, CLEAN],
        [(8.0, 0, 1), (8.0, 1, 1), (16.0, 0, 1), (8.0, -1, 1), (8.0, 0, 1)],
    ),
}


class TestDynamic:
    def test_scale_and_every_counter_at_every_step(self) -> None:
        scaler = DynamicLossScaler("cpu", 8.0, growth_interval=3)
        # clean to the wrap and the step after it; an overflow; one more; the step after a skip, to the next wrap
        reports = [CLEAN, CLEAN, CLEAN, CLEAN, OVERFLOW, OVERFLOW, CLEAN, CLEAN, CLEAN]
        assert record(scaler, reports) == [
            DynamicRule(8.0, 1, 0, 0, growth_interval=3, growth_tracker=1),
            DynamicRule(8.0, 2, 0, 0, growth_interval=3, growth_tracker=2),
            DynamicRule(16.0, 3, 0, 0, growth_interval=3, growth_tracker=0),
            DynamicRule(16.0, 4, 0, 0, growth_interval=3, growth_tracker=1),
            DynamicRule(8.0, 5, 1, 1, growth_interval=3, growth_tracker=0),
            DynamicRule(4.0, 6, 2, 2, growth_interval=3, growth_tracker=0),
            DynamicRule(4.0, 7, 2, 0, growth_interval=3, growth_tracker=1),
            DynamicRule(4.0, 8, 2, 0, growth_interval=3, growth_tracker=2),
            DynamicRule(8.0, 9, 2, 0, growth_interval=3, growth_tracker=0),
        ]

    def test_defaults_are_torchs(self) -> None:
        assert torch.amp.GradScaler("cpu").state_dict().items() <= DynamicLossScaler().state_dict().items()

    @pytest.mark.parametrize(("rule", "reports", "expected"), DYNAMIC.values(), ids=DYNAMIC)
    def test_scale_tracker_and_hysteresis(
        self, rule: dict[str, Any], reports: list[StepReport], expected: list[tuple[float, int, int]]
    ) -> None:
        scaler = DynamicLossScaler(**rule)
        states = record(scaler, reports)
        assert [(s.scale, s.growth_tracker, s.hysteresis_left) for s in states] == expected
        assert scaler.state.skipped_steps == reports.count(OVERFLOW)

    def test_a_shorter_growth_interval_takes_effect_at_once(self) -> None:
        scaler = DynamicLossScaler("cpu", 8.0, growth_interval=100)
        record(scaler, [CLEAN] * 50)
        scaler.set_growth_interval(10)
        assert [(s.scale, s.growth_tracker) for s in record(scaler, [CLEAN] * 2)] == [(16.0, 0), (16.0, 1)]

    def test_a_backoff_factor_of_zero_ends_at_min_scale(self) -> None:
        scaler = DynamicLossScaler("cpu", 8.0, backoff_factor=0.0, min_scale=0.5, growth_interval=1)
        assert [s.scale for s in record(scaler, [OVERFLOW, OVERFLOW, CLEAN])] == [0.5, 0.5, 1.0]


# Settings, reports of steps, and the scale after each.
HEADROOM: dict[str, tuple[dict[str, Any], list[StepReport], list[float]]] = {
    "gradients that a fall made zero bring the scale back": (
        {},
        [OVERFLOW, saw(0.0), saw(1e-7)],
        [1.0, 2.0**10, 2.0**16],
    ),
    "min_scale": ({"min_scale": 0.25}, [saw(1e30), OVERFLOW, saw(1e30)], [0.25] * 3),
    "max_scale": ({"max_scale": 2.0**12}, [saw(1e-30), OVERFLOW, saw(1e-30)], [2.0**12, 1.0, 2.0**12]),
    "overflows lead to 1 first, and to the floor then": (
        {},
        [OVERFLOW] * 5,
        [1.0, 2.0**-20, 2.0**-40, LEAST_USEFUL_SCALE, LEAST_USEFUL_SCALE],
    ),
    "min_scale=0 is no bound but FP32's": (
        {"min_scale": 0.0},
        [OVERFLOW] * 9,
        [2.0 ** -max(0, min(20 * number, 126)) for number in range(9)],
    ),
    "a scale below the floor is not raised by an overflow": (
        {"init_scale": 0.125, "min_scale": 1.0},
        [OVERFLOW, saw(1e30)],
        [0.125, 1.0],
    ),
    "without max_scale FP32 bounds it": ({"init_scale": 2.0**127, "max_scale": None}, [saw(SMALLEST_FP32)], [2.0**127]),
    "an infinite max_scale is none": ({"max_scale": math.inf}, [saw(1.0)], [1024.0]),
    "max_scale below a power of two": ({"max_scale": 1000.0}, [saw(1e-5)], [512.0]),
    "max_scale at a power of two": ({"max_scale": 1024.0}, [saw(1e-5)], [1024.0]),
    "max_scale above a power of two": ({"max_scale": 1025.0}, [saw(1e-5)], [1024.0]),
    "min_scale below a power of two": ({"min_scale": 3.0}, [saw(1e5)], [4.0]),
    "min_scale at a power of two": ({"min_scale": 4.0}, [saw(1e5)], [4.0]),
    "min_scale above a power of two": ({"min_scale": 5.0}, [saw(1e5)], [8.0]),
    "powers of two whatever the settings": (
        {"headroom": 5, "backoff_factor": 0.4, "min_scale": 3.0},
        [saw(16.0), *[OVERFLOW] * 4],
        [64.0, 16.0, 4.0, 4.0, 4.0],
    ),
    # The first batch holds a NaN; the gradients of the others are small and ask for a large scale.
    "an overflow before anything was measured caps nothing": ({}, [OVERFLOW, saw(1e-5)], [1.0, 2.0**16]),
    "the largest number of another dtype": ({"largest": 448.0}, [saw(1.0), saw(1.0)], [8.0, 8.0]),
}


# Settings, reports of steps, and a field after some of them.
SPIKE = [saw(1.0), saw(16.0), *[saw(1.0)] * 20]
LEARNED: dict[str, tuple[dict[str, Any], list[StepReport], str, dict[int, float]]] = {
    "a lone spike is forgotten with patience": (
        {"headroom": 1, "patience": 4},
        SPIKE,
        "headroom",
        {0: 1.0, **{step + 1: max(1.0, 4.5 - step / 4) for step in range(21)}},
    ),
    "a lone spike lowers the scale at once": (
        {"headroom": 1, "patience": 4},
        SPIKE,
        "scale",
        {0: 2.0**14, 1: 2.0**11, 21: 2.0**14},
    ),
    "the level moves with the half-life": (
        {"half_life": 2},
        [saw(2.0**8), *[saw(1.0)] * 6],
        "level",
        {step: 2.0 ** (8 * 0.5 ** (step / 2)) for step in range(7)},
    ),
    "next to no gradient counts for eight doublings": (
        {"half_life": 1},
        [saw(16.0), saw(2.0**-76)],
        "level",
        {1: 1.0},
    ),
    "headroom that sank for long": (
        {"patience": 1},
        [saw(1.0), OVERFLOW, *[saw(1.0)] * 1200],
        "headroom",
        {1201: 1.0},
    ),
    # Gradients so small that torch's first scale leaves them 12 doublings.
    "the first doublings of headroom sink fast and the last slowly": (
        {},
        [saw(2.0**-12)] * 1001,
        "headroom",
        {0: 12.0, 60: 8.9, 250: 5.1, 1000: 1.9},
    ),
}

MEASURED = HeadroomRule(16.0, level=16.0, headroom=7.0, quiet_steps=5, half_life=1)
# Rules before and after one step, of which it does not matter what was measured.
WHATEVER_WAS_MEASURED: dict[str, tuple[ScaleRule, bool, ScaleRule]] = {
    "dynamic, clean": (DynamicRule(8.0, growth_interval=1), False, DynamicRule(16.0, 1, growth_interval=1)),
    "dynamic, overflow": (DynamicRule(8.0, growth_interval=1), True, DynamicRule(4.0, 1, 1, 1, growth_interval=1)),
    "what was learned is kept": (MEASURED, False, replace(MEASURED, steps=1)),
    "until something was measured the scale stays": (HeadroomRule(2.0**12), False, HeadroomRule(2.0**12, 1)),
    "headroom, overflow": (HeadroomRule(2.0**24, level=16.0), True, HeadroomRule(2.0**4, 1, 1, 1, level=16.0)),
    "headroom, overflow again": (HeadroomRule(2.0, 1, 1, 1, level=16.0), True, HeadroomRule(1.0, 2, 2, 2, level=16.0)),
}


@pytest.mark.parametrize("largest", [0.0, None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("before", "overflow", "after"), WHATEVER_WAS_MEASURED.values(), ids=WHATEVER_WAS_MEASURED)
def test_what_was_measured_does_not_matter(
    before: ScaleRule, overflow: bool, after: ScaleRule, largest: float | None
) -> None:
    assert before.adjust(StepReport(overflow, largest)) == after


def test_of_a_loss_of_nan_a_scale_that_follows_the_gradients_learns_nothing() -> None:
    of_loss = StepReport(overflow=True, may_be_scale=False)
    for before in (MEASURED, HeadroomRule(2.0**10), replace(MEASURED, steps=1, skipped_steps=1, consecutive_skips=1)):
        assert before.adjust(of_loss) == replace(before, steps=before.steps + 1)
    assert DynamicRule(8.0).adjust(of_loss) == DynamicRule(8.0).adjust(OVERFLOW)  # as torch's


def trained(scaler: Any, steps: int, gradient: float, limit: float) -> list[int]:
    """Which of ``steps`` with this gradient are skipped, because their scale is above ``limit``."""
    skipped = []
    for step in range(steps):
        overflows = scaler.get_scale() > limit
        if overflows:
            skipped.append(step)
        scaler.update_scale(OVERFLOW if overflows else saw(gradient))
    return skipped


# A scaler, its steps, their gradient and limit; how many are skipped, and between which scales it ends.
LIMITS: dict[str, tuple[Callable[[], Any], int, float, float, Sequence[int], tuple[float, float]]] = {
    "gradients of 1e12, headroom": (HeadroomLossScaler, 100, 1e12, FP16_MAX / 1e12, [3], (0.0, FP16_MAX / 1e12)),
    "gradients of 1e12, dynamic": (DynamicLossScaler, 100, 1e12, FP16_MAX / 1e12, [40], (0.0, FP16_MAX / 1e12)),
    # Small gradients of weights have much headroom from the beginning: that alone makes no overflow futile.
    **{
        f"activations, {limit} and gradients of {gradient}": (
            HeadroomLossScaler, 3_000, gradient, limit, range(11), (limit / 8, math.inf)
        )
        for gradient, limit in itertools.product([1e-2, 1e-4, 1e-6], [2.0**8, 2.0**14, 2.0**20])
    },
    # Activations overflow 15 doublings below what weight gradients of 1.0 ask for: the overflow returns at once.
    "activations, far below gradients": (
        partial(HeadroomLossScaler, 0.5, headroom=12.0, min_scale=0.0), 200, 1.0, 0.5, range(15), (0.0, 0.5)
    ),
}  # fmt: skip


class TestHeadroom:
    @pytest.mark.parametrize(("rule", "reports", "scales"), HEADROOM.values(), ids=HEADROOM)
    def test_scales(self, rule: dict[str, Any], reports: list[StepReport], scales: list[float]) -> None:
        scaler = HeadroomLossScaler(**rule)
        assert [state.scale for state in record(scaler, reports)] == scales
        assert scaler.smallest_scale <= min(scales) or rule["init_scale"] < rule["min_scale"]

    def test_scale_and_every_field_at_every_step(self) -> None:
        """Powers of two and patience of 1 make every number exact: skips slow the sinking to 1/9, then to 1/17."""
        scaler = HeadroomLossScaler(headroom=4.0, half_life=1, patience=1)
        reports = [OVERFLOW, saw(2.0), saw(2.0), saw(16.0), saw(None), OVERFLOW, saw(16.0), OVERFLOW, saw(2.0**12)]
        first = 4.0 - 1 / 9  # kept after the first measured step that has a level to compare with
        seen = 3.0 + 0.5
        usual = 2.0**2.5 * 2.0**0.75  # the level after 16.0 was seen twice: half the way from 2**2.5
        rule = partial(HeadroomRule, init_headroom=4.0, half_life=1, patience=1)
        assert record(scaler, reports) == [
            rule(1.0, 1, 1, 1, headroom=4.0),
            rule(2.0**10, 2, 1, 0, level=2.0, headroom=4.0),
            rule(2.0**11, 3, 1, 0, level=2.0, headroom=first, quiet_steps=1),
            rule(2.0**9, 4, 1, 0, level=2.0**2.5, headroom=max(first - 1 / 9, seen), quiet_steps=2),
            rule(2.0**9, 5, 1, 0, level=2.0**2.5, headroom=max(first - 1 / 9, seen), quiet_steps=2),
            rule(1.0, 6, 2, 1, level=2.0**2.5, headroom=max(first - 1 / 9, seen), quiet_steps=2),
            rule(2.0**7, 7, 2, 0, level=usual, headroom=first - 1 / 9 + 1.25 - 1 / 17),
            rule(1.0, 8, 3, 1, level=usual, headroom=first - 1 / 9 + 1.25 - 1 / 17),
            rule(0.5, 9, 3, 0, level=2.0**12, headroom=first - 1 / 9 + 1.25 - 1 / 17),
        ]

    @settings(deadline=None, derandomize=True, max_examples=300)
    @given(st.floats(2.0**-100, 2.0**90, width=32), st.integers(0, 30))
    def test_the_first_clean_step_sets_the_scale(self, largest: float, headroom: int) -> None:
        state = HeadroomRule(headroom=headroom, min_scale=2.0**-126, max_scale=2.0**127).adjust(saw(largest))
        assert state.scale == min(scale_with_headroom(largest, headroom), 2.0**16)
        assert state.level == largest

    @settings(deadline=None, derandomize=True, max_examples=200)
    @given(magnitudes, st.integers(0, 30))
    def test_the_scale_of_every_magnitude_that_fp32_has(self, largest: float, headroom: int) -> None:
        scale = scale_with_headroom(largest, headroom)
        assert is_power_of_two(scale)
        assert scale * largest * 2.0**headroom <= 65504 < 2.0 * scale * largest * 2.0**headroom

    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(
        st.lists(
            st.one_of(st.just(OVERFLOW), st.builds(saw, st.one_of(st.none(), st.just(0.0), magnitudes))),
            min_size=1,
            max_size=60,
        ),
        st.integers(0, 12),
        st.integers(1, 5),
    )
    def test_every_scale_is_a_power_of_two_within_its_bounds(
        self, reports: list[StepReport], headroom: int, interval: int
    ) -> None:
        scaler = HeadroomLossScaler(headroom=headroom, half_life=3, patience=interval, min_scale=2.0**-14)
        for report, state in zip(reports, record(scaler, reports), strict=True):
            assert is_power_of_two(state.scale)
            assert 2.0**-14 <= state.scale <= 2.0**40
            if state.level is not None and not report.overflow:
                in_reach = (
                    math.log2(state.scale) + math.log2(state.level) + state.headroom <= math.log2(FP16_MAX) + 1e-9
                )
                assert in_reach or state.scale == 2.0**-14

    @pytest.mark.parametrize(("rule", "reports", "field", "expected"), LEARNED.values(), ids=LEARNED)
    def test_what_is_learned(
        self, rule: dict[str, Any], reports: list[StepReport], field: str, expected: dict[int, float]
    ) -> None:
        states = record(HeadroomLossScaler(**rule), reports)
        found = {step: getattr(states[step], field) for step in expected}
        assert found == pytest.approx(expected, abs=0.0 if field == "scale" else 0.05)
        json.dumps(asdict(states[-1]), allow_nan=False)  # raises for what is no number of JSON

    def test_an_overflow_unannounced_comes_back_less_and_less_often(self) -> None:
        """Activations overflow from scale 1024 on, while weight gradients of 1.0 ask for more."""
        skipped_at = trained(HeadroomLossScaler(512.0), 10_000, 1.0, 512.0)
        waits = [later - earlier for earlier, later in itertools.pairwise(skipped_at)]
        assert waits == sorted(waits) and waits[0] > 250
        assert 2 <= len(skipped_at) <= 4

    @pytest.mark.parametrize(("make", "steps", "gradient", "limit", "skips", "ends"), LIMITS.values(), ids=LIMITS)
    def test_a_limit_is_learned_for_long(
        self, make: Callable[[], Any], steps: int, gradient: float, limit: float, skips: Any, ends: tuple[float, float]
    ) -> None:
        scaler = make()
        assert len(trained(scaler, steps, gradient, limit)) in skips
        assert ends[0] <= scaler.get_scale() <= ends[1]

    def test_one_inf_in_500_steps_does_not_lower_the_scale_for_good(self) -> None:
        """What collapsed to 2**-14 with a rule that took every overflow for the scale's."""
        scaler = HeadroomLossScaler()
        scales = []
        for step in range(1, 20_001):
            scales.append(scaler.get_scale())
            scaler.update_scale(OVERFLOW if step % 500 == 0 else saw(0.01))
        assert scaler.state.skipped_steps == 40 and scaler.state.is_futile
        assert sorted(scales[-5000:])[100] >= 2.0**18

    def test_a_jump_after_a_quiet_phase_costs_at_most_torchs_three_skips(self) -> None:
        for scaler, skips in ((DynamicLossScaler(), 3), (HeadroomLossScaler(), 2)):
            for size, steps in ((1e-2, 100), (1e-8, 4_900), (1.0, 100)):
                skipped = trained(scaler, steps, size, FP16_MAX / size)
            assert len(skipped) == skips
        assert scaler.get_scale() == scale_with_headroom(1.0, scaler.state.headroom) > 2.0**12

    def test_futile_overflows_are_forgiven_until_there_were_none_for_long(self) -> None:
        rule = HeadroomRule(64.0, 1, 1, 1, level=1.0, headroom=12.0, quiet_steps=400, patience=10)
        futile = rule.adjust(saw(1.0))
        assert (futile.is_futile, futile.quiet_steps) == (True, 0) and futile.headroom == 12.0 - 2 * 8 / 10
        again = replace(futile, consecutive_skips=1, quiet_steps=99).adjust(saw(1.0))
        assert again.is_futile and again.headroom < futile.headroom
        after = list(itertools.accumulate([saw(1.0)] * 160, HeadroomRule.adjust, initial=again))
        assert [each.is_futile for each in after] == [True] * 160 + [False]


@pytest.mark.parametrize(
    ("scale", "magnitude", "left"),
    [(1.0, 65504.0, 0.0), (1024.0, 65504.0 / 4096, 2.0), (2.0, 65504.0, -1.0), (1.0, 0.0, math.inf)],
)
def test_headroom_left_counts_doublings(scale: float, magnitude: float, left: float) -> None:
    assert headroom_left(scale, magnitude) == pytest.approx(left)


@pytest.mark.parametrize("make", [StaticRule, DynamicRule, HeadroomRule])
def test_the_scale_is_rounded_to_fp32(make: Callable[[float], ScaleRule]) -> None:
    assert make(0.1).validated().scale == torch.tensor(0.1).item() != 0.1
    assert type(make(8).validated().scale) is float


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.floats(2.0**-1000, 2.0**1000))
def test_powers_of_two_enclose_every_number(value: float) -> None:
    below, above = power_of_two_below(value), -power_of_two_below(-value)
    assert is_power_of_two(below) and is_power_of_two(above)
    assert below <= value < 2.0 * below and above / 2.0 < value <= above


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.floats(-1e40, 1e40))
def test_rounding_to_fp32_is_torchs(value: float) -> None:
    assert to_fp32(value) == torch.tensor(value, dtype=torch.float64).float().item()


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1.0, "1"), (16384.0, "16384"), (65536, "65536"), (524288.0, "524288"), (2.0**20, "2^20"), (2.0**127, "2^127"),
        (0.5, "2^-1"), (2.0**-14, "2^-14"), (1000.0, "1000"), (1e7, "1e+07"), (0.1, "0.1"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_a_scale_is_readable(scale: float, text: str) -> None:
    assert scale_text(scale) == text

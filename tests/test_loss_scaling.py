import json
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mp.loss_scaling import (
    FP16_MAX,
    DynamicLossScaler,
    DynamicSettings,
    DynamicState,
    HeadroomLossScaler,
    HeadroomSettings,
    HeadroomState,
    LossScaleError,
    LossScaler,
    ScalerState,
    StaticLossScaler,
    StepReport,
    adjust_dynamic,
    adjust_headroom,
    headroom_left,
    make_loss_scaler,
    scale_with_headroom,
)

CPU = torch.device("cpu")
CLEAN, OVERFLOW = StepReport(False), StepReport(True)
FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_FP32 = 2.0**-149

magnitudes = st.floats(min_value=SMALLEST_FP32, max_value=FP32_MAX, width=32)


def saw(largest: float | None) -> StepReport:
    return StepReport(False, largest)


def record(scaler: LossScaler[Any], reports: Iterable[StepReport]) -> list[Any]:
    """The state after each of ``reports``."""
    states = []
    for report in reports:
        scaler.record_step(report)
        states.append(scaler.state)
    return states


def is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


class TestDynamic:
    def test_scale_and_every_counter_at_every_step(self) -> None:
        scaler = DynamicLossScaler(8.0, growth_interval=3)
        # clean to the wrap and the step after it; an overflow; one more; the step after a skip, to the next wrap
        reports = [CLEAN, CLEAN, CLEAN, CLEAN, OVERFLOW, OVERFLOW, CLEAN, CLEAN, CLEAN]
        assert record(scaler, reports) == [
            DynamicState(scale=8.0, steps=1, skipped_steps=0, consecutive_skips=0, growth_tracker=1),
            DynamicState(scale=8.0, steps=2, skipped_steps=0, consecutive_skips=0, growth_tracker=2),
            DynamicState(scale=16.0, steps=3, skipped_steps=0, consecutive_skips=0, growth_tracker=0),
            DynamicState(scale=16.0, steps=4, skipped_steps=0, consecutive_skips=0, growth_tracker=1),
            DynamicState(scale=8.0, steps=5, skipped_steps=1, consecutive_skips=1, growth_tracker=0),
            DynamicState(scale=4.0, steps=6, skipped_steps=2, consecutive_skips=2, growth_tracker=0),
            DynamicState(scale=4.0, steps=7, skipped_steps=2, consecutive_skips=0, growth_tracker=1),
            DynamicState(scale=4.0, steps=8, skipped_steps=2, consecutive_skips=0, growth_tracker=2),
            DynamicState(scale=8.0, steps=9, skipped_steps=2, consecutive_skips=0, growth_tracker=0),
        ]

    def test_an_overflow_at_the_step_of_the_wrap_lowers_and_starts_over(self) -> None:
        states = record(DynamicLossScaler(8.0, growth_interval=2), [CLEAN, OVERFLOW, CLEAN, CLEAN])
        assert [(s.scale, s.growth_tracker) for s in states] == [(8.0, 1), (4.0, 0), (4.0, 1), (8.0, 0)]

    def test_factors_other_than_two(self) -> None:
        scaler = DynamicLossScaler(16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1)
        assert [s.scale for s in record(scaler, [CLEAN, OVERFLOW, OVERFLOW])] == [64.0, 16.0, 4.0]

    def test_defaults_are_torchs(self) -> None:
        torchs = torch.amp.GradScaler("cpu")
        ours = DynamicLossScaler()
        assert ours.get_scale() == torchs.get_scale()
        assert ours.settings.growth_factor == torchs.get_growth_factor()
        assert ours.settings.backoff_factor == torchs.get_backoff_factor()
        assert ours.settings.growth_interval == torchs.get_growth_interval()

    def test_the_floor_stops_the_fall(self) -> None:
        states = record(DynamicLossScaler(8.0, backoff_factor=0.125, min_scale=2.0), [OVERFLOW] * 3)
        assert [s.scale for s in states] == [2.0, 2.0, 2.0]
        assert [s.consecutive_skips for s in states] == [1, 2, 3]

    def test_a_scale_below_the_floor_is_not_raised_by_an_overflow(self) -> None:
        states = record(DynamicLossScaler(0.25, growth_interval=1, min_scale=1.0), [OVERFLOW, CLEAN])
        assert [s.scale for s in states] == [0.25, 0.5]

    def test_max_scale_stops_the_rise(self) -> None:
        states = record(DynamicLossScaler(4.0, 4.0, growth_interval=2, max_scale=32.0), [CLEAN] * 6 + [OVERFLOW])
        assert [s.scale for s in states] == [4.0, 16.0, 16.0, 32.0, 32.0, 32.0, 16.0]
        assert [s.growth_tracker for s in states] == [1, 0, 1, 0, 1, 0, 0]

    def test_a_scale_above_max_scale_does_not_grow(self) -> None:
        states = record(DynamicLossScaler(64.0, growth_interval=1, max_scale=16.0), [CLEAN, OVERFLOW, OVERFLOW, CLEAN])
        assert [s.scale for s in states] == [64.0, 32.0, 16.0, 16.0]

    def test_a_scale_does_not_grow_out_of_fp32(self) -> None:
        states = record(DynamicLossScaler(2.0**126, growth_interval=1), [CLEAN] * 3)
        assert [s.scale for s in states] == [2.0**127] * 3
        assert [s.growth_tracker for s in states] == [0] * 3

    def test_hysteresis_tolerates_overflows_until_the_scale_grows_again(self) -> None:
        scaler = DynamicLossScaler(8.0, growth_interval=2, hysteresis=3)
        reports = [OVERFLOW, CLEAN, OVERFLOW, OVERFLOW, OVERFLOW, CLEAN, CLEAN, OVERFLOW]
        assert [(s.scale, s.growth_tracker, s.hysteresis_left) for s in record(scaler, reports)] == [
            (8.0, 0, 2),
            (8.0, 1, 2),
            (8.0, 0, 1),
            (4.0, 0, 1),
            (2.0, 0, 1),
            (2.0, 1, 1),
            (4.0, 0, 3),
            (4.0, 0, 2),
        ]
        assert (scaler.state.steps, scaler.state.skipped_steps) == (8, 5)

    def test_consecutive_hysteresis_is_restored_by_a_clean_step(self) -> None:
        scaler = DynamicLossScaler(8.0, hysteresis=2, consecutive_hysteresis=True)
        reports = [OVERFLOW, CLEAN, OVERFLOW, OVERFLOW, OVERFLOW, CLEAN, OVERFLOW]
        assert [(s.scale, s.hysteresis_left) for s in record(scaler, reports)] == [
            (8.0, 1),
            (8.0, 2),
            (8.0, 1),
            (4.0, 1),
            (2.0, 1),
            (2.0, 2),
            (2.0, 1),
        ]

    def test_a_shorter_growth_interval_takes_effect_at_once(self) -> None:
        scaler = DynamicLossScaler(8.0, growth_interval=100)
        record(scaler, [CLEAN] * 50)
        scaler.set_growth_interval(10)
        assert [(s.scale, s.growth_tracker) for s in record(scaler, [CLEAN] * 2)] == [(16.0, 0), (16.0, 1)]

    @pytest.mark.parametrize("factor", [0.0, -0.5])
    def test_a_backoff_factor_of_zero_or_less_ends_at_min_scale(self, factor: float) -> None:
        message = f"backoff_factor={factor}: the first overflow takes the loss scale down to min_scale"
        with pytest.warns(UserWarning, match=message):
            scaler = DynamicLossScaler(8.0, backoff_factor=factor, min_scale=0.5, growth_interval=1)
        assert [s.scale for s in record(scaler, [OVERFLOW, OVERFLOW, CLEAN])] == [0.5, 0.5, 1.0]

    @pytest.mark.parametrize("largest", [None, 1.0, math.inf, math.nan])
    @pytest.mark.parametrize("overflow", [True, False])
    def test_what_was_measured_does_not_matter(self, overflow: bool, largest: float | None) -> None:
        state, rules = DynamicState(8.0), DynamicSettings(growth_interval=1)
        assert adjust_dynamic(state, rules, StepReport(overflow, largest)).scale == (4.0 if overflow else 16.0)

    def test_the_rule_leaves_its_arguments_alone(self) -> None:
        state = DynamicState(8.0)
        adjust_dynamic(state, DynamicSettings(growth_interval=1), CLEAN)
        assert state == DynamicState(8.0)

    @settings(deadline=None, derandomize=True, max_examples=40)
    @given(
        runs=st.lists(
            st.one_of(
                st.tuples(st.just(True), st.integers(1, 12)),
                st.tuples(st.just(False), st.integers(1, 600)),
            ),
            min_size=8,
            max_size=20,
        ),
        factors=st.sampled_from([(2.0, 0.5), (4.0, 0.5), (2.0, 0.25)]),
        interval=st.sampled_from([1, 2, 3, 10, 47]),
        init_scale=st.integers(0, 30).map(lambda exponent: 2.0**exponent),
    )
    def test_it_is_torchs_update(
        self, runs: list[tuple[bool, int]], factors: tuple[float, float], interval: int, init_scale: float
    ) -> None:
        rules = DynamicSettings(factors[0], factors[1], interval, min_scale=2.0**-126)
        for state, scale, tracker in in_step_with_torch(runs, rules, init_scale):
            assert (state.scale, state.growth_tracker) == (scale, tracker)

    @settings(deadline=None, derandomize=True, max_examples=60)
    @given(
        runs=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), min_size=8, max_size=20),
        init_scale=st.floats(1.0, 1e6),
        growth=st.floats(1.1, 3.0),
        backoff=st.floats(0.3, 0.9),
    )
    def test_with_any_factors_it_is_torchs_to_the_last_bit(
        self, runs: list[tuple[bool, int]], init_scale: float, growth: float, backoff: float
    ) -> None:
        rules = DynamicSettings(growth, backoff, 3, min_scale=2.0**-60, max_scale=2.0**100)
        for state, scale, tracker in in_step_with_torch(runs, rules, init_scale):
            assert (state.scale, state.growth_tracker) == (scale, tracker)


def in_step_with_torch(
    runs: list[tuple[bool, int]], rules: DynamicSettings, init_scale: float
) -> Iterable[tuple[DynamicState, float, int]]:
    """Our state beside torch's scale and tracker, step by step, while torch's is between our bounds."""
    state = DynamicState(init_scale)
    scale, tracker = torch.tensor([init_scale]), torch.tensor([0], dtype=torch.int32)
    highest = FP32_MAX if rules.max_scale is None else rules.max_scale
    for overflow, length in runs:
        found_inf = torch.tensor([float(overflow)])
        for _ in range(length):
            torch._amp_update_scale_(
                scale, tracker, found_inf, rules.growth_factor, rules.backoff_factor, rules.growth_interval
            )
            if not rules.min_scale <= scale.item() <= highest:
                return
            state = adjust_dynamic(state, rules, StepReport(overflow))
            yield state, scale.item(), int(tracker.item())


class TestHeadroom:
    def test_scale_and_every_counter_at_every_step(self) -> None:
        scaler = HeadroomLossScaler(half_life=1, ceiling_interval=2)
        # calibration fails once, succeeds; an overflow that the weights' gradients do not announce; the ceiling rises
        reports = [OVERFLOW, saw(1024.0), saw(128.0), OVERFLOW, saw(None), saw(0.0), saw(256.0), saw(256.0), saw(1.0)]
        assert record(scaler, reports) == [
            HeadroomState(64.0, steps=1, skipped_steps=1, consecutive_skips=1),
            HeadroomState(0.5, 2, 1, 0, peak=1024.0, clean_steps=1),
            HeadroomState(1.0, 3, 1, 0, peak=512.0, clean_steps=2),
            HeadroomState(0.5, 4, 2, 1, peak=512.0, ceiling=0.5, clean_steps=0),
            HeadroomState(0.5, 5, 2, 0, peak=512.0, ceiling=0.5, clean_steps=1),
            HeadroomState(1.0, 6, 2, 0, peak=512.0, ceiling=1.0, clean_steps=0),
            HeadroomState(1.0, 7, 2, 0, peak=256.0, ceiling=1.0, clean_steps=1),
            HeadroomState(2.0, 8, 2, 0, peak=256.0, ceiling=2.0, clean_steps=0),
            HeadroomState(2.0, 9, 2, 0, peak=128.0, ceiling=2.0, clean_steps=1),
        ]

    @settings(deadline=None, derandomize=True, max_examples=300)
    @given(st.floats(2.0**-100, 2.0**90, width=32), st.integers(0, 30))
    def test_the_first_clean_step_sets_the_scale(self, largest: float, headroom: int) -> None:
        rules = HeadroomSettings(headroom=headroom, min_scale=2.0**-126, max_scale=None)
        state = adjust_headroom(HeadroomState(2.0**10), rules, saw(largest))
        # exact in FP64: the factors are powers of two
        assert state.scale * largest * 2.0**headroom <= 65504 < 2.0 * state.scale * largest * 2.0**headroom
        assert is_power_of_two(state.scale)
        assert state.peak == largest

    @settings(deadline=None, derandomize=True, max_examples=200)
    @given(magnitudes, st.integers(0, 30))
    def test_the_scale_of_every_magnitude_that_fp32_has(self, largest: float, headroom: int) -> None:
        scale = scale_with_headroom(largest, headroom)
        assert is_power_of_two(scale)
        assert scale * largest * 2.0**headroom <= 65504 < 2.0 * scale * largest * 2.0**headroom

    @settings(deadline=None, derandomize=True, max_examples=100)
    @given(magnitudes, st.floats(0.0, 30.0))
    def test_headroom_need_not_be_whole(self, largest: float, headroom: float) -> None:
        scale = scale_with_headroom(largest, headroom)
        assert is_power_of_two(scale)
        assert headroom - 1e-9 <= headroom_left(scale, largest) < headroom + 1.0 + 1e-9

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
        scaler = HeadroomLossScaler(headroom=headroom, half_life=3, ceiling_interval=interval)
        for report, state in zip(reports, record(scaler, reports), strict=True):
            assert is_power_of_two(state.scale)
            assert 2.0**-14 <= state.scale <= min(2.0**40, math.inf if state.ceiling is None else state.ceiling)
            if state.peak is not None and not report.overflow:
                in_reach = state.scale * state.peak * 2.0**headroom <= FP16_MAX
                assert in_reach or state.scale == 2.0**-14

    def test_a_lone_spike_lowers_the_scale_at_once_and_fades_with_the_half_life(self) -> None:
        states = record(HeadroomLossScaler(half_life=2), [saw(1.0), saw(16.0), *[saw(1.0)] * 10])
        peaks = [1.0, 16.0, *(max(1.0, 16.0 * 0.5 ** (step / 2)) for step in range(1, 11))]
        assert [s.peak for s in states] == pytest.approx(peaks)
        # 65504 is a little less than 2**16: a peak must fall below the power of two, by half a half-life here
        assert states[0].scale == 512.0 and states[1].scale == 32.0
        assert [s.scale for s in states] == [scale_with_headroom(s.peak, 6.0) for s in states]
        assert states[-1].scale == 512.0

    @pytest.mark.parametrize("largest", [0.0, None, math.inf, math.nan])
    def test_a_step_that_measured_nothing_keeps_peak_and_scale(self, largest: float | None) -> None:
        before = HeadroomState(32.0, peak=16.0)
        after = adjust_headroom(before, HeadroomSettings(half_life=1), saw(largest))
        assert after == replace(before, steps=1, clean_steps=1)

    @pytest.mark.parametrize("largest", [0.0, None, math.inf, math.nan])
    def test_until_something_was_measured_the_scale_stays(self, largest: float | None) -> None:
        states = record(HeadroomLossScaler(2.0**12), [saw(largest)] * 3)
        assert [(s.scale, s.peak) for s in states] == [(2.0**12, None)] * 3

    @pytest.mark.parametrize("largest", [None, math.inf, -math.inf, math.nan, 3.0])
    def test_an_overflow_halves_whatever_was_measured(self, largest: float | None) -> None:
        after = adjust_headroom(HeadroomState(32.0, peak=16.0), HeadroomSettings(), StepReport(True, largest))
        assert after == HeadroomState(16.0, 1, 1, 1, peak=16.0, ceiling=16.0)

    def test_calibration_falls_fast(self) -> None:
        states = record(HeadroomLossScaler(2.0**10), [OVERFLOW] * 3)
        assert [s.scale for s in states] == [2.0**6, 2.0**2, 2.0**-2]

    def test_an_overflow_unannounced_does_not_come_back_at_once(self) -> None:
        """Activations overflow from scale 512 on, while weight gradients of 1.0 ask for 512 at every step."""
        scaler = HeadroomLossScaler(ceiling_interval=5)
        used = []
        for _ in range(24):
            used.append(scaler.get_scale())
            scaler.record_step(OVERFLOW if scaler.get_scale() >= 512.0 and scaler.state.peak else saw(1.0))
        # once in six steps is tried again what overflowed; without a ceiling it would be every other step
        assert used == [1024.0, *([512.0, *[256.0] * 5] * 4)][:24]
        assert scaler.state.skipped_steps == 4

    def test_the_ceiling_rises_as_long_as_steps_are_clean(self) -> None:
        states = record(HeadroomLossScaler(ceiling_interval=2), [saw(1.0), OVERFLOW, OVERFLOW, *[saw(1.0)] * 8])
        assert [s.ceiling for s in states] == [None, 256, 128, 128, 256, 256, 512, 512, 1024, 1024, 2048]
        assert [s.scale for s in states] == [512, 256, 128, 128, 256, 256, 512, 512, 512, 512, 512]
        assert [s.clean_steps for s in states] == [1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0]

    def test_bounds(self) -> None:
        scaler = HeadroomLossScaler(min_scale=0.25, max_scale=2.0**20)
        states = record(scaler, [saw(1e30), OVERFLOW, saw(1e30)])
        assert [s.scale for s in states] == [0.25] * 3
        states = record(HeadroomLossScaler(max_scale=2.0**20), [saw(1e-30), OVERFLOW, saw(1e-30)])
        assert [s.scale for s in states] == [2.0**20, 2.0**19, 2.0**19]

    def test_a_scale_below_the_floor_is_not_raised_by_an_overflow(self) -> None:
        states = record(HeadroomLossScaler(0.125, min_scale=1.0), [OVERFLOW, saw(1e30)])
        assert [s.scale for s in states] == [0.125, 1.0]

    def test_without_max_scale_fp32_bounds_it(self) -> None:
        assert record(HeadroomLossScaler(max_scale=None), [saw(2.0**-90)])[0].scale == 2.0**99
        assert record(HeadroomLossScaler(max_scale=None), [saw(SMALLEST_FP32)])[0].scale == 2.0**127

    def test_an_infinite_max_scale_is_none(self) -> None:
        assert record(HeadroomLossScaler(max_scale=math.inf), [saw(1.0)])[0].scale == 512.0

    def test_a_ceiling_that_rose_for_long_holds_nothing_down(self) -> None:
        states = record(HeadroomLossScaler(ceiling_interval=1), [saw(1.0), OVERFLOW, *[saw(1.0)] * 1200])
        assert [s.scale for s in states[2:]] == [512.0] * 1200
        json.loads(json.dumps(asdict(states[-1]), allow_nan=False))

    @pytest.mark.parametrize(("bound", "scale"), [(1000.0, 512.0), (1024.0, 1024.0), (1025.0, 1024.0)])
    def test_a_max_scale_between_two_powers_of_two(self, bound: float, scale: float) -> None:
        assert record(HeadroomLossScaler(max_scale=bound), [saw(1e-5)])[0].scale == scale

    @pytest.mark.parametrize(("bound", "scale"), [(3.0, 4.0), (4.0, 4.0), (5.0, 8.0)])
    def test_a_min_scale_between_two_powers_of_two(self, bound: float, scale: float) -> None:
        assert record(HeadroomLossScaler(min_scale=bound), [saw(1e5)])[0].scale == scale

    def test_an_overflow_leads_to_a_power_of_two_whatever_the_settings(self) -> None:
        scaler = HeadroomLossScaler(backoff_factor=0.4, min_scale=3.0)
        states = record(scaler, [saw(16.0), OVERFLOW, OVERFLOW, OVERFLOW, OVERFLOW])
        assert [s.scale for s in states] == [32.0, 8.0, 4.0, 4.0, 4.0]

    def test_an_overflow_before_anything_was_measured_does_not_cap_the_scale(self) -> None:
        """The first batch holds a NaN; the gradients of the others are small and ask for a large scale."""
        states = record(HeadroomLossScaler(), [OVERFLOW, saw(1e-5)])
        assert states[-1].scale == scale_with_headroom(1e-5, 6.0)


@pytest.mark.parametrize(
    ("scale", "magnitude", "left"), [(1.0, 65504.0, 0.0), (1024.0, 65504.0 / 4096, 2.0), (2.0, 65504.0, -1.0)]
)
def test_headroom_left_counts_doublings(scale: float, magnitude: float, left: float) -> None:
    assert headroom_left(scale, magnitude) == pytest.approx(left)


def test_zero_gradients_leave_all_headroom() -> None:
    assert headroom_left(1.0, 0.0) == math.inf


def test_a_static_scale_stays_and_counts() -> None:
    states = record(StaticLossScaler(128), [CLEAN, OVERFLOW, OVERFLOW, saw(1.0)])
    assert states == [
        ScalerState(128.0, 1, 0, 0),
        ScalerState(128.0, 2, 1, 1),
        ScalerState(128.0, 3, 2, 2),
        ScalerState(128.0, 4, 2, 0),
    ]


class TestGivingUp:
    @pytest.mark.parametrize(
        ("make", "scale"),
        [
            (lambda: StaticLossScaler(8.0, max_consecutive_skips=3), "8"),
            (lambda: DynamicLossScaler(0.5, min_scale=0.5, max_consecutive_skips=3), "0.5"),
            (lambda: HeadroomLossScaler(2.0**-14, max_consecutive_skips=3), "6.10352e-05"),
        ],
        ids=["static", "dynamic", "headroom"],
    )
    def test_at_the_smallest_scale_it_ends_after_so_many_skips_in_a_row(
        self, make: Callable[[], LossScaler[Any]], scale: str
    ) -> None:
        scaler = make()
        record(scaler, [CLEAN, OVERFLOW, OVERFLOW, CLEAN, OVERFLOW, OVERFLOW])
        message = re.escape(
            "3 optimizer steps in a row were skipped (since step 5): gradients are inf or NaN even at loss scale "
            f"{scale}, the smallest allowed."
        )
        with pytest.raises(LossScaleError, match=message + ".*look for NaN in the inputs, lower the learning rate"):
            scaler.record_step(OVERFLOW)
        assert (scaler.state.steps, scaler.state.skipped_steps, scaler.state.consecutive_skips) == (7, 5, 3)

    @pytest.mark.parametrize("max_skips", [1, 2, 54, 80])
    @pytest.mark.parametrize("make", [DynamicLossScaler, HeadroomLossScaler], ids=["dynamic", "headroom"])
    def test_every_scale_down_to_the_smallest_is_tried_before(
        self, make: Callable[..., LossScaler[Any]], max_skips: int
    ) -> None:
        scaler = make(2.0**20, max_consecutive_skips=max_skips)
        used = []
        with pytest.raises(LossScaleError):
            for _ in range(200):
                used.append(scaler.get_scale())
                scaler.record_step(OVERFLOW)
        at_the_smallest = used.count(scaler._min_scale)
        falling = used[: len(used) - at_the_smallest]
        assert falling == sorted(set(falling), reverse=True) and falling[-1] > scaler._min_scale
        assert at_the_smallest == max(1, max_skips - len(falling))

    def test_a_floor_that_fp32_has_to_round_is_reached(self) -> None:
        with pytest.warns(UserWarning, match=r"min_scale=0\.1 is no power of two"):
            scaler = DynamicLossScaler(1.0, min_scale=0.1, max_consecutive_skips=5)
        with pytest.raises(LossScaleError, match=r"since step 1\): gradients are inf or NaN even at loss scale 0\.1,"):
            record(scaler, [OVERFLOW] * 5)

    def test_an_applied_step_ends_the_row(self) -> None:
        record(DynamicLossScaler(1.0, max_consecutive_skips=2), [OVERFLOW, CLEAN] * 20)

    @pytest.mark.parametrize("make", [DynamicLossScaler, HeadroomLossScaler, lambda **s: StaticLossScaler(1.0, **s)])
    @pytest.mark.parametrize("skips", [0, -1])
    def test_at_least_one_skip_is_allowed(self, make: Callable[..., LossScaler[Any]], skips: int) -> None:
        with pytest.raises(ValueError, match=f"max_consecutive_skips={skips} must be at least 1 step"):
            make(max_consecutive_skips=skips)


# Each scaler, twice: made with what a program would pass, and what it was at after steps that moved every field.
USED: list[tuple[Callable[[], LossScaler[Any]], list[StepReport]]] = [
    (lambda: StaticLossScaler(16.0), [CLEAN, OVERFLOW, OVERFLOW]),
    (
        lambda: DynamicLossScaler(16.0, growth_interval=9, hysteresis=4),
        [OVERFLOW, OVERFLOW, CLEAN, CLEAN],
    ),
    (lambda: HeadroomLossScaler(ceiling_interval=9), [saw(1.0), OVERFLOW, saw(3.0)]),
]
LOADED: list[tuple[Callable[[], LossScaler[Any]], ScalerState]] = [
    (lambda: StaticLossScaler(16.0), ScalerState(4.0, 11, 7, 3)),
    (lambda: DynamicLossScaler(hysteresis=4), DynamicState(4.0, 11, 7, 3, growth_tracker=5, hysteresis_left=2)),
    (HeadroomLossScaler, HeadroomState(4.0, 11, 7, 3, peak=0.1, ceiling=8.0, clean_steps=5)),
]
KINDS = ["static", "dynamic", "headroom"]


class TestSavedState:
    @pytest.mark.parametrize(("make", "state"), LOADED, ids=KINDS)
    def test_every_field_comes_back_through_json(self, make: Callable[[], LossScaler[Any]], state: ScalerState) -> None:
        saved, loaded = make(), make()
        saved.state = state
        assert all(value != asdict(loaded.state)[name] for name, value in asdict(state).items()), "a default is no test"
        loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        assert loaded.state == state
        assert loaded.get_scale() == state.scale and loaded.scale_tensors(CPU)[0].item() == state.scale

    @pytest.mark.parametrize(("make", "reports"), USED, ids=KINDS)
    def test_a_loaded_scaler_goes_on_as_the_saved_one(
        self, make: Callable[[], LossScaler[Any]], reports: list[StepReport]
    ) -> None:
        saved, loaded = make(), make()
        record(saved, reports)
        assert saved.state != loaded.state
        loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        after = [OVERFLOW, saw(2.0), *[saw(0.01)] * 12]
        assert record(loaded, after) == record(saved, after)

    @pytest.mark.parametrize(("make", "state"), LOADED, ids=KINDS)
    def test_the_state_names_its_kind_and_nothing_it_does_not_have(
        self, make: Callable[[], LossScaler[Any]], state: ScalerState
    ) -> None:
        scaler = make()
        saved = scaler.state_dict()
        if isinstance(scaler, DynamicLossScaler):
            torchs = torch.amp.GradScaler("cpu", growth_interval=scaler.get_growth_interval())
            assert torchs.state_dict().items() <= saved.items()
            for name in ("growth_factor", "backoff_factor", "growth_interval"):
                del saved[name]
            saved["growth_tracker"] = saved.pop("_growth_tracker")
        assert saved == {"kind": scaler.kind, **asdict(scaler.state)}

    @pytest.mark.parametrize("key", ["scale", "_growth_tracker", "growth_factor", "steps"])
    def test_a_missing_key_is_named(self, key: str) -> None:
        state = DynamicLossScaler(8.0).state_dict()
        del state[key]
        message = (
            rf"neither .*'dynamic'.* nor of a torch\.amp\.GradScaler: .*missing keys \['{key}'\], unknown keys \[\]"
        )
        self.check_refused(DynamicLossScaler(2.0), state, message)

    def test_an_unknown_key_is_named(self) -> None:
        state = {**DynamicLossScaler(8.0).state_dict(), "surprise": 1}
        self.check_refused(DynamicLossScaler(2.0), state, r"missing keys \[\], unknown keys \['surprise'\]")

    def test_the_state_of_another_kind_is_refused(self) -> None:
        state = StaticLossScaler(8.0).state_dict()
        self.check_refused(HeadroomLossScaler(2.0), state, "neither one of a 'headroom' loss scaler.*kind='static'")
        state = {**DynamicLossScaler(8.0).state_dict(), "kind": None}
        self.check_refused(DynamicLossScaler(2.0), state, "kind=None, missing")

    @pytest.mark.parametrize("scale", [0.0, -8.0, math.nan, math.inf, "8", None, True])
    @pytest.mark.parametrize("make", [lambda: StaticLossScaler(2.0), DynamicLossScaler, HeadroomLossScaler], ids=KINDS)
    def test_a_scale_that_is_none_is_refused(self, make: Callable[[], LossScaler[Any]], scale: Any) -> None:
        message = re.escape(f"positive, finite number, not {scale!r}")
        self.check_refused(make(), {**make().state_dict(), "scale": scale}, message)
        self.check_refused(make(), {**torch.amp.GradScaler("cpu").state_dict(), "scale": scale}, message)

    @pytest.mark.parametrize(
        ("make", "key", "value"),
        [
            (DynamicLossScaler, "steps", None),
            (DynamicLossScaler, "skipped_steps", -1),
            (DynamicLossScaler, "consecutive_skips", 0.5),
            (DynamicLossScaler, "_growth_tracker", "3"),
            (DynamicLossScaler, "hysteresis_left", 0),
            (DynamicLossScaler, "growth_interval", math.nan),
            (DynamicLossScaler, "growth_factor", 0.5),
            (DynamicLossScaler, "backoff_factor", 2.0),
            (HeadroomLossScaler, "peak", math.nan),
            (HeadroomLossScaler, "ceiling", -1.0),
            (HeadroomLossScaler, "ceiling", "64"),
            (HeadroomLossScaler, "clean_steps", True),
        ],
    )
    def test_a_value_out_of_range_is_named_and_nothing_taken_over(
        self, make: Callable[[], LossScaler[Any]], key: str, value: Any
    ) -> None:
        state = {**make().state_dict(), "scale": 8.0, key: value}
        self.check_refused(make(), state, f"{key.removeprefix('_')}={value!r} must be ")

    def test_torchs_state_sets_scale_factors_and_tracker(self) -> None:
        state = {
            "scale": 32.0,
            "growth_factor": 4.0,
            "backoff_factor": 0.25,
            "growth_interval": 7,
            "_growth_tracker": 5,
        }
        scaler = DynamicLossScaler(hysteresis=3)
        record(scaler, [CLEAN, OVERFLOW])
        scaler.load_state_dict(state)
        assert scaler.state == DynamicState(32.0, 2, 1, 0, growth_tracker=5, hysteresis_left=3)
        assert scaler.settings == DynamicSettings(4.0, 0.25, 7, hysteresis=3)

    def test_torchs_state_lets_headroom_measure_anew(self) -> None:
        scaler = HeadroomLossScaler()
        record(scaler, [saw(1.0), OVERFLOW])
        scaler.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": 100.0})
        assert scaler.state == HeadroomState(64.0, 2, 1)

    def test_a_constant_scale_drops_torchs_with_a_warning(self) -> None:
        scaler = StaticLossScaler(8.0)
        with pytest.warns(UserWarning, match="constant loss scale of 8 stays: the saved one of 65536 is dropped") as w:
            scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
        assert w[0].filename == __file__ and scaler.get_scale() == 8.0

    @pytest.mark.parametrize(
        "make", [lambda **s: StaticLossScaler(2.0, **s), DynamicLossScaler, HeadroomLossScaler], ids=KINDS
    )
    def test_an_empty_state_is_that_of_a_disabled_scaler(self, make: Callable[..., LossScaler[Any]]) -> None:
        assert make(enabled=False).state_dict() == {}
        make(enabled=False).load_state_dict({})
        with pytest.raises(RuntimeError, match="the state is empty, as that of a disabled scaler is"):
            make().load_state_dict({})

    @staticmethod
    def check_refused(scaler: LossScaler[Any], state: dict[str, Any], message: str) -> None:
        before = scaler.state, getattr(scaler, "settings", None)
        with pytest.raises(ValueError, match=message):
            scaler.load_state_dict(state)
        assert (scaler.state, getattr(scaler, "settings", None)) == before


class TestWarnings:
    """Of settings that make scaling round: where exactness is lost, and at the line that loses it."""

    @pytest.mark.parametrize(
        ("lose_exactness", "message"),
        [
            (lambda: StaticLossScaler(100.0), "scale=100.0"),
            (lambda: DynamicLossScaler(100.0), "init_scale=100.0"),
            (lambda: DynamicLossScaler(growth_factor=1.5), "growth_factor=1.5"),
            (lambda: DynamicLossScaler(backoff_factor=0.3), "backoff_factor=0.3"),
            (lambda: DynamicLossScaler(min_scale=3.0), "min_scale=3.0"),
            (lambda: DynamicLossScaler(max_scale=1e5), "max_scale=100000.0"),
            (lambda: HeadroomLossScaler(100.0), "init_scale=100.0"),
            (lambda: make_loss_scaler(100.0), "scale=100.0"),
            (lambda: DynamicLossScaler().set_growth_factor(1.5), "growth_factor=1.5"),
            (lambda: DynamicLossScaler().set_backoff_factor(0.3), "backoff_factor=0.3"),
            (lambda: DynamicLossScaler().update(100.0), "new_scale=100.0"),
            (lambda: DynamicLossScaler().load_state_dict(torch_state(scale=100.0)), "scale=100.0"),
            (lambda: DynamicLossScaler().load_state_dict(torch_state(growth_factor=3.0)), "growth_factor=3.0"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_is_no_power_of_two_is_named_at_the_callers_line(
        self, lose_exactness: Callable[[], Any], message: str
    ) -> None:
        with pytest.warns(UserWarning) as caught:
            lose_exactness()
        assert [str(warning.message) for warning in caught] == [
            f"{message} is no power of two: scaling and unscaling then round gradients"
        ]
        assert (caught[0].filename, caught[0].lineno) == (__file__, lose_exactness.__code__.co_firstlineno)

    def test_once_for_each_line(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                StaticLossScaler(100.0)
        assert len(caught) == 1

    def test_powers_of_two_and_disabled_scalers_are_quiet(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DynamicLossScaler(8.0, 4.0, 0.25, min_scale=0.5, max_scale=math.inf).update(2.0**-3)
            HeadroomLossScaler(min_scale=3.0, max_scale=1e5, backoff_factor=0.3)  # it rounds them itself
            DynamicLossScaler(100.0, 3.0, 0.3, enabled=False)
            DynamicLossScaler().load_state_dict(torch_state())


def torch_state(**changed: Any) -> dict[str, Any]:
    return {**torch.amp.GradScaler("cpu").state_dict(), **changed}


class TestScaleTensors:
    def test_values_dtype_and_shape(self) -> None:
        scale, inverse = StaticLossScaler(1024.0).scale_tensors(CPU)
        assert (scale.dtype, inverse.dtype) == (torch.float32, torch.float32)
        assert (scale.tolist(), inverse.tolist()) == ([1024.0], [2.0**-10])

    def test_products_with_fp16_are_fp32(self) -> None:
        scale, _ = StaticLossScaler(2.0**15).scale_tensors(CPU)
        product = torch.tensor(8.0, dtype=torch.float16) * scale
        assert product.dtype is torch.float32 and product.item() == 2.0**18

    def test_they_follow_the_scale_without_being_asked_for_again(self) -> None:
        scaler = DynamicLossScaler(16.0, growth_interval=2)
        held, found = scaler.scale_tensors(CPU), []
        for report in [OVERFLOW, OVERFLOW, CLEAN, CLEAN]:
            scaler.record_step(report)
            found.append(tuple(tensor.item() for tensor in held))
        assert found == [(8.0, 0.125), (4.0, 0.25), (4.0, 0.25), (8.0, 0.125)]
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
        assert [tensor.item() for tensor in held] == [64.0, 1 / 64]
        scaler.update(2.0)
        assert [tensor.item() for tensor in held] == [2.0, 0.5]

    @pytest.mark.parametrize("seed", range(20))
    def test_the_inverse_is_torchs(self, seed: int) -> None:
        number = torch.rand((), generator=torch.Generator().manual_seed(seed)).item() * 1e5 + 1e-3
        with pytest.warns(UserWarning, match="no power of two"):
            scaler = StaticLossScaler(number)
        scale, inverse = scaler.scale_tensors(CPU)
        assert scaler.get_scale() == scale.item() == torch.tensor(number).item()
        assert inverse.item() == scale.double().reciprocal().float().item()

    def test_they_are_made_once_for_each_device(self) -> None:
        scaler = DynamicLossScaler(16.0)
        first = scaler.scale_tensors(CPU)
        assert scaler.scale_tensors(torch.device("meta")).scale.device.type == "meta"
        scaler.record_step(OVERFLOW)
        assert scaler.scale_tensors(CPU).scale is first.scale
        assert scaler.scale_tensors(CPU).inverse is first.inverse

    def test_those_of_a_copy_go_their_own_way(self) -> None:
        scaler = DynamicLossScaler(16.0, growth_interval=7)
        held = scaler.scale_tensors(CPU)
        copied = scaler.copy()
        assert copied.state == scaler.state and copied.settings == scaler.settings
        copied.record_step(OVERFLOW)
        assert (scaler.get_scale(), copied.get_scale()) == (16.0, 8.0)
        assert (held.scale.item(), copied.scale_tensors(CPU).scale.item()) == (16.0, 8.0)

    def test_asked_for_first_in_inference_mode_they_follow_too(self) -> None:
        scaler = DynamicLossScaler(16.0)
        with torch.inference_mode():
            scaler.scale_tensors(CPU)
        scaler.record_step(OVERFLOW)
        assert [tensor.item() for tensor in scaler.scale_tensors(CPU)] == [8.0, 0.125]

    @pytest.mark.parametrize("make", [StaticLossScaler, DynamicLossScaler, HeadroomLossScaler])
    @pytest.mark.parametrize("scale", [1e39, 2.0**-127, 1e-46])
    def test_a_scale_whose_tensors_would_not_be_finite_is_refused(
        self, make: Callable[[float], LossScaler[Any]], scale: float
    ) -> None:
        with pytest.raises(ValueError, match=re.escape(f"between 2**-126 and 3.403e+38, FP32's range, not {scale!r}")):
            make(scale)

    @pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
    def test_at_the_ends_of_fp32s_range_they_are_finite(self, scale: float) -> None:
        tensors = StaticLossScaler(scale).scale_tensors(CPU)
        assert [tensor.item() for tensor in tensors] == [scale, 1.0 / scale]


class TestMaking:
    @pytest.mark.parametrize(
        ("loss_scale", "kind", "scale"),
        [
            ("headroom", HeadroomLossScaler, 2.0**10),
            ("dynamic", DynamicLossScaler, 2.0**16),
            (128.0, StaticLossScaler, 128.0),
            (64, StaticLossScaler, 64.0),
            (None, StaticLossScaler, 1.0),
        ],
    )
    def test_a_policys_loss_scale_names_a_scaler(self, loss_scale: Any, kind: type, scale: float) -> None:
        scaler = make_loss_scaler(loss_scale)
        assert type(scaler) is kind and scaler.get_scale() == scale

    def test_settings_are_passed_on(self) -> None:
        dynamic = make_loss_scaler("dynamic", init_scale=8.0, growth_interval=5, hysteresis=2, max_scale=64.0)
        assert dynamic.get_scale() == 8.0
        assert dynamic.settings == DynamicSettings(growth_interval=5, hysteresis=2, max_scale=64.0)
        assert dynamic.state.hysteresis_left == 2
        headroom = make_loss_scaler("headroom", headroom=3.0, half_life=7, ceiling_interval=9, min_scale=0.5)
        assert headroom.settings == HeadroomSettings(headroom=3.0, half_life=7, ceiling_interval=9, min_scale=0.5)
        static = make_loss_scaler(4.0, max_consecutive_skips=1)
        with pytest.raises(LossScaleError):
            static.record_step(OVERFLOW)

    @pytest.mark.parametrize(
        ("loss_scale", "setting", "has"),
        [
            (
                "headroom",
                "growth_interval",
                "backoff_factor, ceiling_interval, enabled, half_life, headroom, init_scale",
            ),
            ("dynamic", "headroom", "backoff_factor, consecutive_hysteresis, enabled, growth_factor"),
            (8.0, "init_scale", "enabled, max_consecutive_skips"),
            (None, "hysteresis", "enabled, max_consecutive_skips"),
        ],
    )
    def test_a_setting_that_a_scaler_does_not_have_gets_those_it_has(
        self, loss_scale: Any, setting: str, has: str
    ) -> None:
        with pytest.raises(ValueError, match=f"loss scaler has no setting {setting}: it has {has}"):
            make_loss_scaler(loss_scale, **{setting: 1})

    def test_all_unknown_settings_are_named(self) -> None:
        with pytest.raises(ValueError, match="'dynamic' loss scaler has no setting another, one: it has"):
            make_loss_scaler("dynamic", one=1, another=2)

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, True, "16"])
    @pytest.mark.parametrize("make", [StaticLossScaler, DynamicLossScaler, HeadroomLossScaler])
    def test_a_scale_is_positive_and_finite(self, make: Callable[[Any], LossScaler[Any]], scale: Any) -> None:
        with pytest.raises(ValueError, match=f"a loss scale must be a positive, finite number, not {scale!r}"):
            make(scale)

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"growth_factor": 1.0}, "growth_factor=1.0 must be above 1.0"),
            ({"growth_factor": math.nan}, "growth_factor=nan must be above 1.0"),
            ({"growth_factor": math.inf}, "growth_factor=inf must be above 1.0 and finite"),
            ({"backoff_factor": -math.inf}, "backoff_factor=-inf must be below 1.0"),
            ({"backoff_factor": math.nan}, "backoff_factor=nan must be below 1.0"),
            ({"backoff_factor": 1.0}, "backoff_factor=1.0 must be below 1.0"),
            ({"growth_interval": 0}, "growth_interval=0 must be a whole number of steps, at least 1"),
            ({"growth_interval": math.nan}, "growth_interval=nan must be a whole number of steps, at least 1"),
            ({"hysteresis": 0}, "hysteresis=0 must be a whole number of steps, at least 1"),
            ({"min_scale": 0.0}, r"min_scale=0.0 must lie between 2\*\*-126 and 2\*\*127"),
            ({"min_scale": 1e-300}, "min_scale=1e-300 must lie between"),
            ({"min_scale": 1e300}, r"min_scale=1e\+300 must lie between"),
            ({"max_scale": 0.5}, "max_scale=0.5 must be at least min_scale=1.0"),
            ({"max_scale": math.nan}, "max_scale=nan must be at least min_scale=1.0"),
        ],
    )
    def test_dynamic_settings_out_of_range(self, setting: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_loss_scaler("dynamic", **setting)

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"headroom": -0.5}, r"headroom=-0.5 must be 0 to 30 doublings"),
            ({"headroom": 31}, r"headroom=31 must be 0 to 30 doublings"),
            ({"headroom": math.nan}, r"headroom=nan must be 0 to 30 doublings"),
            ({"half_life": 0}, "half_life=0 must be at least 1 step"),
            ({"half_life": math.nan}, "half_life=nan must be at least 1 step and finite"),
            ({"ceiling_interval": 0}, "ceiling_interval=0 must be a whole number of steps, at least 1"),
            ({"min_scale": 3.0, "max_scale": 3.5}, "no power of two lies between min_scale=3.0 and max_scale=3.5"),
            ({"backoff_factor": 1.0}, "backoff_factor=1.0 must lie between 0 and 1"),
            ({"backoff_factor": 0.0}, "backoff_factor=0.0 must lie between 0 and 1"),
            ({"min_scale": -1.0}, "min_scale=-1.0 must lie between"),
            ({"min_scale": 1e300, "max_scale": None}, r"min_scale=1e\+300 must lie between"),
            ({"max_scale": 2.0**-15}, "max_scale=3.0517578125e-05 must be at least min_scale=6.103515625e-05"),
        ],
    )
    def test_headroom_settings_out_of_range(self, setting: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_loss_scaler("headroom", **setting)

    def test_the_factor_of_calibration_is_checked_too(self) -> None:
        with pytest.raises(ValueError, match=r"calibration_backoff_factor=1\.0 must lie between 0 and 1"):
            HeadroomSettings(calibration_backoff_factor=1.0)

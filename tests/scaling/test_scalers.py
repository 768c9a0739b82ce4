import json
import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from step_reports import CLEAN, CPU, OVERFLOW, record, saw

from hf_mp.scaling.rules import (
    DynamicRule,
    HeadroomRule,
    StaticRule,
    StepReport,
)
from hf_mp.scaling.scalers import (
    DynamicLossScaler,
    HeadroomLossScaler,
    LossScaleError,
    LossScaler,
    StaticLossScaler,
    make_loss_scaler,
)


def test_a_static_scale_stays_and_counts() -> None:
    states = record(StaticLossScaler(128), [CLEAN, OVERFLOW, OVERFLOW, saw(1.0)])
    assert states == [
        StaticRule(128.0, 1, 0, 0),
        StaticRule(128.0, 2, 1, 1),
        StaticRule(128.0, 3, 2, 2),
        StaticRule(128.0, 4, 2, 0),
    ]


class TestGivingUp:
    @pytest.mark.parametrize(
        ("make", "scale"),
        [
            (lambda: StaticLossScaler(8.0, max_consecutive_skips=3), "8"),
            (lambda: DynamicLossScaler("cpu", 0.5, min_scale=0.5, max_consecutive_skips=3), "2^-1"),
            (lambda: HeadroomLossScaler(2.0**-14, min_scale=2.0**-14, max_consecutive_skips=3), "2^-14"),
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
            scaler.update_scale(OVERFLOW)
        assert (scaler.state.steps, scaler.state.skipped_steps, scaler.state.consecutive_skips) == (7, 5, 3)

    @pytest.mark.parametrize("make", [DynamicLossScaler, HeadroomLossScaler], ids=["dynamic", "headroom"])
    def test_at_any_scale_it_ends_where_the_loss_is_nan(self, make: Callable[..., LossScaler[Any]]) -> None:
        scaler, of_loss = make(init_scale=8.0, max_consecutive_skips=3), StepReport(overflow=True, may_be_scale=False)
        record(scaler, [of_loss, of_loss, CLEAN, OVERFLOW, of_loss])
        message = r"3 optimizer steps .* \(since step 4\): gradients are inf or NaN, as is the loss, which no scale"
        with pytest.raises(LossScaleError, match=message):
            scaler.update_scale(of_loss)
        assert scaler.get_scale() > scaler.smallest_scale

    @pytest.mark.parametrize("max_skips", [1, 2, 54, 80])
    @pytest.mark.parametrize("make", [DynamicLossScaler, HeadroomLossScaler], ids=["dynamic", "headroom"])
    def test_every_scale_down_to_the_smallest_is_tried_before(
        self, make: Callable[..., LossScaler[Any]], max_skips: int
    ) -> None:
        scaler = make(init_scale=2.0**20, max_consecutive_skips=max_skips)
        used = []
        with pytest.raises(LossScaleError):
            for _ in range(200):
                used.append(scaler.get_scale())
                scaler.update_scale(OVERFLOW)
        at_the_smallest = used.count(scaler.smallest_scale)
        falling = used[: len(used) - at_the_smallest]
        assert falling == sorted(set(falling), reverse=True) and falling[-1] > scaler.smallest_scale
        assert at_the_smallest == max(1, max_skips - len(falling))

    @pytest.mark.filterwarnings("ignore:min_scale=0.1 is no power of two")
    @pytest.mark.parametrize(
        ("make", "floor", "skips"),
        [
            (partial(DynamicLossScaler, min_scale=0.1, max_consecutive_skips=5), "0.1", 21),
            (partial(HeadroomLossScaler, min_scale=3.0, max_consecutive_skips=5), "4", 5),
            (DynamicLossScaler, "2^-48", 65),
            (HeadroomLossScaler, "2^-48", 50),
        ],
    )
    def test_where_no_scale_helps_it_ends_at_the_floor_rounded(
        self, make: Callable[[], LossScaler[Any]], floor: str, skips: int
    ) -> None:
        scaler = make()
        with pytest.raises(LossScaleError, match=re.escape(f"even at loss scale {floor}, the smallest allowed")):
            record(scaler, [OVERFLOW] * 99)
        assert scaler.state.skipped_steps == skips and scaler.get_scale() == scaler.smallest_scale


# What each scaler is made with, and a state in which every field is another one.
LOADED: list[tuple[Callable[[], LossScaler[Any]], dict[str, Any]]] = [
    (lambda: StaticLossScaler(16.0), {}),
    (
        lambda: DynamicLossScaler(hysteresis=4),
        {
            "growth_factor": 4.0,
            "backoff_factor": 0.25,
            "growth_interval": 9,
            "_growth_tracker": -5,
            "hysteresis_left": 2,
        },
    ),
    (HeadroomLossScaler, {"level": 0.1, "headroom": 8.5, "is_futile": True, "quiet_steps": 5}),
]
COUNTED = {"scale": 4.0, "steps": 11, "skipped_steps": 7, "consecutive_skips": 3}
KINDS = ["static", "dynamic", "headroom"]
LEFT_OUT = object()


class TestSavedState:
    @pytest.mark.parametrize(("make", "state"), LOADED, ids=KINDS)
    def test_every_field_comes_back_through_json(
        self, make: Callable[[], LossScaler[Any]], state: dict[str, Any]
    ) -> None:
        loaded, state = make(), {"kind": make().kind, **COUNTED, **state}
        fresh = loaded.state_dict()
        assert fresh.keys() == state.keys()
        assert [key for key in state if fresh[key] == state[key]] == ["kind"], "a default is no test"
        loaded.load_state_dict(json.loads(json.dumps(state)))
        assert loaded.state_dict() == state
        assert loaded.get_scale() == 4.0 and loaded.scale_and_inverse(CPU)[0].item() == 4.0

    @pytest.mark.parametrize(
        ("make", "changed", "message"),
        [
            *(
                (DynamicLossScaler, {key: LEFT_OUT}, rf"missing keys \['{key}'\], unknown keys \[\]")
                for key in ("scale", "_growth_tracker", "growth_factor", "steps")
            ),
            (DynamicLossScaler, {"surprise": 1}, r"missing keys \[\], unknown keys \['surprise'\]"),
            (DynamicLossScaler, {"surprise": 1, 0.5: 1}, r"unknown keys \[0\.5, 'surprise'\]"),
            (DynamicLossScaler, {"kind": None}, r"kind=None, missing keys \[\], unknown keys \[\]"),
            (
                DynamicLossScaler,
                {"kind": "static"},
                r"neither one of a 'dynamic' loss scaler nor of a torch\.amp\.GradScaler: .*kind='static', missing",
            ),
            *(
                (
                    make,
                    {key: value},
                    f"{key.removeprefix('_')}={value!r} must be a whole number of steps, at least {least}",
                )
                for make, key, least in (
                    (DynamicLossScaler, "steps", 0),
                    (DynamicLossScaler, "skipped_steps", 0),
                    (DynamicLossScaler, "consecutive_skips", 0),
                    (DynamicLossScaler, "growth_interval", 1),
                    (DynamicLossScaler, "_growth_tracker", -(2**31)),
                    (DynamicLossScaler, "hysteresis_left", 1),
                    (HeadroomLossScaler, "quiet_steps", 0),
                )
                for value in (least - 1, 1.5, math.nan, None, "1", True)
            ),
            (DynamicLossScaler, {"growth_factor": 0.5}, r"growth_factor=0\.5 must be "),
            (DynamicLossScaler, {"backoff_factor": 2.0}, r"backoff_factor=2\.0 must be "),
            (HeadroomLossScaler, {"level": math.nan}, "level=nan must be "),
            (HeadroomLossScaler, {"headroom": -1.0}, r"headroom=-1\.0 must be "),
            (HeadroomLossScaler, {"headroom": "64"}, "headroom='64' must be "),
            (HeadroomLossScaler, {"is_futile": 1}, "is_futile=1 must be "),
        ],
    )
    def test_what_does_not_fit_is_named_and_nothing_taken_over(
        self, make: Callable[[], LossScaler[Any]], changed: dict[Any, Any], message: str
    ) -> None:
        scaler, state = make(), {**make().state_dict(), "scale": 8.0, **changed}
        before = scaler.state
        with pytest.raises(ValueError, match=message):
            scaler.load_state_dict({key: value for key, value in state.items() if value is not LEFT_OUT})
        assert scaler.state == before

    @pytest.mark.parametrize("make", [lambda: StaticLossScaler(2.0), HeadroomLossScaler])
    def test_torchs_state_is_of_no_use_to_another_rule(self, make: Callable[[], LossScaler[Any]]) -> None:
        scaler = make()
        scaler.load_state_dict(torch_state(scale=100.0))
        assert scaler.state == make().state

    @pytest.mark.parametrize("make", [lambda: StaticLossScaler(2.0), DynamicLossScaler, HeadroomLossScaler], ids=KINDS)
    def test_an_empty_state_is_that_of_a_disabled_scaler(self, make: Callable[[], LossScaler[Any]]) -> None:
        with pytest.raises(RuntimeError, match="the state is empty"):
            make().load_state_dict({})


class TestWarnings:
    """Of settings that make scaling round: where exactness is lost, and at the line that loses it."""

    @pytest.mark.parametrize(
        ("lose_exactness", "message"),
        [
            (lambda: StaticLossScaler(100.0), "scale=100.0"),
            (lambda: DynamicLossScaler("cpu", 100.0), "scale=100.0"),
            (lambda: DynamicLossScaler(growth_factor=1.5), "growth_factor=1.5"),
            (lambda: DynamicLossScaler(backoff_factor=0.3), "backoff_factor=0.3"),
            (lambda: DynamicLossScaler(min_scale=3.0), "min_scale=3.0"),
            (lambda: DynamicLossScaler(max_scale=1e5), "max_scale=100000.0"),
            (lambda: HeadroomLossScaler(100.0), "scale=100.0"),
            (lambda: make_loss_scaler(100.0), "scale=100.0"),
            (lambda: DynamicLossScaler().set_growth_factor(1.5), "growth_factor=1.5"),
            (lambda: DynamicLossScaler().set_backoff_factor(0.3), "backoff_factor=0.3"),
            (lambda: DynamicLossScaler().update(100.0), "scale=100.0"),
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

    def test_powers_of_two_and_disabled_scalers_are_quiet(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DynamicLossScaler("cpu", 8.0, 4.0, 0.25, min_scale=0.5, max_scale=math.inf).update(2.0**-3)
            HeadroomLossScaler(min_scale=3.0, max_scale=1e5, backoff_factor=0.3)  # it rounds them itself
            DynamicLossScaler("cpu", 100.0, 3.0, 0.3, enabled=False)
            DynamicLossScaler().load_state_dict(torch_state())


def torch_state(**changed: Any) -> dict[str, Any]:
    return {**torch.amp.GradScaler("cpu").state_dict(), **changed}


class TestScaleTensors:
    @pytest.mark.parametrize("asked_in", [torch.enable_grad, torch.inference_mode])
    def test_they_are_made_once_for_each_device_and_follow_the_scale(self, asked_in: Callable[[], Any]) -> None:
        scaler, found = DynamicLossScaler("cpu", 16.0, growth_interval=2), []
        with asked_in():
            held = scaler.scale_and_inverse(CPU)
        assert {(tensor.dtype, tensor.shape) for tensor in held} == {(torch.float32, (1,))}
        assert scaler.scale_and_inverse(torch.device("meta")).scale.device.type == "meta"
        for report in [OVERFLOW, OVERFLOW, CLEAN, CLEAN]:
            scaler.update_scale(report)
            found.append(tuple(tensor.item() for tensor in held))
        assert found == [(8.0, 0.125), (4.0, 0.25), (4.0, 0.25), (8.0, 0.125)]
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
        assert [tensor.item() for tensor in held] == [64.0, 1 / 64]
        scaler.update(2.0)
        assert [tensor.item() for tensor in held] == [2.0, 0.5]
        assert all(one is other for one, other in zip(scaler.scale_and_inverse(CPU), held, strict=True))

    @pytest.mark.parametrize("seed", range(20))
    def test_the_inverse_is_torchs(self, seed: int) -> None:
        number = torch.rand((), generator=torch.Generator().manual_seed(seed)).item() * 1e5 + 1e-3
        with pytest.warns(UserWarning, match="no power of two"):
            scaler = StaticLossScaler(number)
        scale, inverse = scaler.scale_and_inverse(CPU)
        assert scaler.get_scale() == scale.item() == torch.tensor(number).item()
        assert inverse.item() == scale.double().reciprocal().float().item()

    @pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
    def test_at_the_ends_of_fp32s_range_they_are_finite(self, scale: float) -> None:
        tensors = StaticLossScaler(scale).scale_and_inverse(CPU)
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
        assert dynamic.state == DynamicRule(8.0, growth_interval=5, hysteresis_left=2, hysteresis=2, max_scale=64.0)
        headroom = make_loss_scaler("headroom", headroom=3.0, half_life=7, patience=9, min_scale=0.5)
        settings = {"half_life": 7, "patience": 9, "min_scale": 0.5}
        assert headroom.state == HeadroomRule(headroom=3.0, init_headroom=3.0, **settings)

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e39, 2.0**-127, 1e-46, True, "16", None])
    @pytest.mark.parametrize("make", [StaticLossScaler, partial(DynamicLossScaler, "cpu"), HeadroomLossScaler])
    def test_a_scale_is_positive_and_finite(self, make: Callable[[Any], LossScaler[Any]], scale: Any) -> None:
        with pytest.raises(ValueError, match=rf"a loss scale .*not {re.escape(repr(scale))}"):
            make(scale)

    @pytest.mark.parametrize(
        ("loss_scale", "setting", "message"),
        [
            ("dynamic", {"growth_factor": 0.9}, "growth_factor=0.9 must be at least 1.0"),
            ("dynamic", {"growth_factor": math.nan}, "growth_factor=nan must be at least 1.0"),
            ("dynamic", {"growth_factor": 10**400}, "growth_factor=10{99} must be at least 1.0 and finite"),
            ("dynamic", {"growth_factor": math.inf}, "growth_factor=inf must be at least 1.0 and finite"),
            ("dynamic", {"backoff_factor": -math.inf}, "backoff_factor=-inf must be below 1.0"),
            ("dynamic", {"backoff_factor": math.nan}, "backoff_factor=nan must be below 1.0"),
            ("dynamic", {"backoff_factor": 1.0}, "backoff_factor=1.0 must be below 1.0"),
            ("dynamic", {"growth_interval": 0}, "growth_interval=0 must be a whole number of steps, at least 1"),
            (
                "dynamic",
                {"growth_interval": math.nan},
                "growth_interval=nan must be a whole number of steps",
            ),
            ("dynamic", {"hysteresis": 0}, "hysteresis=0 must be a whole number of steps, at least 1"),
            ("dynamic", {"growth_delay": -1}, "growth_delay=-1 must be a whole number of steps, at least 0"),
            ("dynamic", {"min_scale": -1.0}, r"min_scale=-1.0 must be 0 or a scale from 2\*\*-126 to 2\*\*127"),
            ("dynamic", {"min_scale": 1e-300}, "min_scale=1e-300 must be 0 or a scale from"),
            ("dynamic", {"min_scale": 1e300}, r"min_scale=1e\+300 must be 0 or a scale from"),
            ("dynamic", {"min_scale": 1.0, "max_scale": 0.5}, "max_scale=0.5 must be at least min_scale=1.0"),
            ("dynamic", {"max_scale": math.nan}, "max_scale=nan must be at least min_scale="),
            ("headroom", {"headroom": -0.5}, r"headroom=-0.5 must be 0 to 30 doublings"),
            ("headroom", {"headroom": 31}, r"headroom=31 must be 0 to 30 doublings"),
            ("headroom", {"headroom": math.nan}, r"headroom=nan must be 0 to 30 doublings"),
            ("headroom", {"half_life": 0}, "half_life=0 must be at least 1 step"),
            ("headroom", {"half_life": math.nan}, "half_life=nan must be at least 1 step and finite"),
            ("headroom", {"patience": 0}, "patience=0 must be a whole number of steps, at least 1"),
            (8.0, {"max_consecutive_skips": 0}, "max_consecutive_skips=0 must be a whole number of steps"),
            (
                "headroom",
                {"min_scale": 3.0, "max_scale": 3.5},
                "no power of two lies between min_scale=3.0 and",
            ),
            ("headroom", {"backoff_factor": 1.0}, "backoff_factor=1.0 must be above 0 and below 1"),
            ("headroom", {"backoff_factor": 0.0}, "backoff_factor=0.0 must be above 0 and below 1"),
            ("headroom", {"min_scale": -1.0}, "min_scale=-1.0 must be 0 or a scale from"),
            ("headroom", {"min_scale": 1e300, "max_scale": None}, r"min_scale=1e\+300 must be 0 or a scale from"),
            ("headroom", {"min_scale": 1.0, "max_scale": 0.5}, "max_scale=0.5 must be at least min_scale=1.0"),
            (
                "headroom",
                {"growth_interval": 1},
                "loss scaler has no setting growth_interval: it has backoff_factor, enabled, half_life, headroom, "
                "init_scale, largest, max_consecutive_skips, max_scale, min_scale, patience",
            ),
            ("dynamic", {"headroom": 1}, "has no setting headroom: it has backoff_factor, consecutive_hysteresis"),
            ("dynamic", {"one": 1}, "has no setting one: it has backoff_factor, consecutive_hysteresis, enabled"),
            (8.0, {"init_scale": 1}, "has no setting init_scale: it has enabled, max_consecutive_skips"),
            (None, {"hysteresis": 1}, "has no setting hysteresis: it has enabled, max_consecutive_skips"),
        ],
    )
    def test_settings_out_of_range_and_unknown(self, loss_scale: Any, setting: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_loss_scaler(loss_scale, **setting)


@pytest.mark.parametrize("enabled", ["no", torch.zeros(2)])
def test_enabled_is_yes_or_no(enabled: Any) -> None:
    with pytest.raises(TypeError, match=r"enabled must be True or False, not "):
        DynamicLossScaler(enabled=enabled)

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_mp.memory.precisions import parse_preset
from hf_mp.policy import PRESETS, PrecisionPolicy
from hf_mp.scaling.rules import parse_loss_scale

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
REPRODUCIBLE = settings(deadline=None, derandomize=True, max_examples=100)

# What each preset says: params, compute, loss_scale, is_mixed, is_lean. Masters and outputs are always FP32.
SAID: dict[str, tuple[torch.dtype, torch.dtype, str | None, bool, bool]] = {
    "fp32": (FP32, FP32, None, False, False),
    "fp16": (FP32, FP16, "headroom", True, False),
    "bf16": (FP32, BF16, None, True, False),
    "fp16-lean": (FP16, FP16, "headroom", True, True),
    "bf16-lean": (BF16, BF16, None, True, True),
}

loss_scales = st.one_of(
    st.none(),
    st.sampled_from(["headroom", "dynamic"]),
    st.floats(min_value=0.0, exclude_min=True, allow_infinity=False, allow_nan=False),
)


@st.composite
def policies(draw: st.DrawFn) -> PrecisionPolicy:
    compute = draw(st.sampled_from(list(NAMES)))
    return PrecisionPolicy(params=draw(st.sampled_from([FP32, compute])), compute=compute, loss_scale=draw(loss_scales))


def test_every_preset_is_tested() -> None:
    assert set(PRESETS) == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_presets(name: str) -> None:
    policy = PrecisionPolicy.parse(name)
    said = (policy.params, policy.compute, policy.loss_scale, policy.is_mixed, policy.is_lean)
    assert said == SAID[name]
    assert str(policy) == name


@pytest.mark.parametrize("name", SAID)
def test_a_preset_spelled_out_is_the_preset(name: str) -> None:
    params, compute, loss_scale, _, _ = SAID[name]
    text = f"params={NAMES[params]},compute={NAMES[compute]},loss_scale={loss_scale or 'none'}"
    assert PrecisionPolicy.parse(text) == PRESETS[name]
    assert str(PrecisionPolicy.parse(text)) == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (FP16, "fp16"), (BF16, "bf16"), (FP32, "fp32"), ("FP16", "fp16"), ("float16", "fp16"), ("half", "fp16"),
        ("torch.bfloat16", "bf16"), ("BFloat16", "bf16"), ("float32", "fp32"), (" float ", "fp32"),
        ("FP16_lean", "fp16-lean"), ("bfloat16-lean", "bf16-lean"),
        ("params=float32,compute=BF16", "bf16"), ("compute=torch.float16", "fp16"),
    ],
)  # fmt: skip
def test_other_spellings_of_a_dtype_are_understood(spelling: Any, name: str) -> None:
    assert PrecisionPolicy.parse(spelling) == PRESETS[name]


@REPRODUCIBLE
@given(policies())
def test_a_policy_survives_being_printed_and_parsed(policy: PrecisionPolicy) -> None:
    assert PrecisionPolicy.parse(str(policy)) == policy


@REPRODUCIBLE
@given(policies(), st.permutations(["params", "compute", "loss_scale"]), st.sampled_from(["", " "]))
def test_the_long_form_takes_its_fields_in_any_order(policy: PrecisionPolicy, order: list[str], space: str) -> None:
    values: dict[str, Any] = {name: getattr(policy, name) for name in order}
    texts = {k: NAMES[v] if isinstance(v, torch.dtype) else "none" if v is None else str(v) for k, v in values.items()}
    text = f"{space},{space}".join(f"{key}{space}={space}{value}" for key, value in texts.items())
    assert PrecisionPolicy.parse(text) == policy


@pytest.mark.parametrize(
    ("text", "loss_scale"),
    [("params=fp32", "headroom"), ("compute=fp16", "headroom"), ("compute=bf16", None), ("compute=fp32", None)],
)
def test_fp16_is_scaled_unless_told_otherwise(text: str, loss_scale: str | None) -> None:
    assert PrecisionPolicy.parse(text).loss_scale == loss_scale
    assert PrecisionPolicy.parse(f"{text},loss_scale=dynamic").loss_scale == "dynamic"
    assert PrecisionPolicy.parse(f"{text},loss_scale=none").loss_scale is None


def test_a_policy_parses_as_itself() -> None:
    policy = PrecisionPolicy(loss_scale=3.0)
    assert PrecisionPolicy.parse(policy) is policy


def test_a_second_name_of_a_preset_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "mine", PRESETS["fp16"])
    assert PrecisionPolicy.parse("mine") == PRESETS["fp16"] and str(PrecisionPolicy.parse("mine")) == "fp16"


def test_a_policy_is_frozen_and_hashable() -> None:
    policy = PrecisionPolicy.parse("fp16")
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, getattr(policy, field.name))
    assert len({policy, PrecisionPolicy.parse("fp16"), PrecisionPolicy.parse("bf16")}) == 2


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, None),
        ("none", None),
        ("headroom", "headroom"),
        ("dynamic", "dynamic"),
        ("1024", 1024.0),
        ("2e3", 2000.0),
        (8, 8.0),
        (0.5, 0.5),
    ],
)
def test_loss_scales_as_people_write_them(value: Any, read: Any) -> None:
    assert parse_loss_scale(value) == read
    assert PrecisionPolicy(loss_scale=value).loss_scale == read


@pytest.mark.parametrize(
    ("precision", "question"),
    [
        (16, "Did you mean 'fp16'?"), ("16-mixed", "Did you mean 'fp16'?"),
        ("bf16-mixed", "Did you mean 'bf16'?"), ("mixed_float16", "Did you mean 'fp16'?"),
        (32, "Did you mean 'fp32'?"), ("bf16lean", "Did you mean 'bf16-lean'?"),
    ],
)  # fmt: skip
def test_what_other_libraries_call_a_precision_is_answered_with_the_nearest(precision: Any, question: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\. {re.escape(question)}$"):
        PrecisionPolicy.parse(precision)
    with pytest.raises(ValueError, match=rf"\. {re.escape(question)}$"):
        parse_preset(precision)


def test_switches_are_said_by_name_and_as_text() -> None:
    policy = PrecisionPolicy.parse("bf16-lean, fp32_head=True, exact_generation=true")
    assert policy == PrecisionPolicy.parse("bf16-lean", fp32_head=True, exact_generation=True)
    assert (policy.fp32_head, policy.exact_generation, policy.is_lean) == (True, True, True)
    assert str(policy) == "bf16-lean,fp32_head=true,exact_generation=true"
    spelled = PrecisionPolicy(loss_scale="dynamic", fp32_head=True)
    assert PrecisionPolicy.parse(str(policy)) == policy and PrecisionPolicy.parse(str(spelled)) == spelled
    assert PrecisionPolicy.parse("fp16,fp32_head=false") == PRESETS["fp16"]
    assert PrecisionPolicy.parse("fp16,loss_scale=dynamic").loss_scale == "dynamic"
    assert PrecisionPolicy.parse("bf16,compute=fp16").loss_scale == "headroom"  # never FP16 unscaled by accident


def fields(**values: Any) -> Callable[[], PrecisionPolicy]:
    return lambda: PrecisionPolicy(**values)


def text(precision: Any, **switches: Any) -> Callable[[], PrecisionPolicy]:
    return lambda: PrecisionPolicy.parse(precision, **switches)


REFUSED: list[tuple[Callable[[], PrecisionPolicy], str]] = [
    *((fields(loss_scale=s), f"loss_scale={s!r} is not known: use 'headroom', 'dynamic'") for s in ("dynamc", "")),
    *(
        (fields(loss_scale=s), f"loss_scale={s!r} must be a positive, finite number")
        for s in (0, 0.0, -1.0, math.inf, -math.inf, math.nan, "0", "-8", "inf", "nan")
    ),
    *(
        (text(p), f"precision={p!r} is not known: use one of {', '.join(PRESETS)}")
        for p in ("fp61", "float61", "", "fp16-fat", torch.float64, torch.int8, torch.float8_e4m3fn, "16-mixed")
    ),
    *(
        (text(f"{before}{part}"), f"'{part}' in precision='{before}{part}': write field=value with one of params,")
        for before, part in (
            ("", "param=fp16"), ("", "compute="), ("", "=fp16"), ("compute=fp16,", ""), ("compute=fp16,", "fp32"),
            ("", "__class__=fp16"), ("compute=fp16,", "reduce_sum=fp16"),
        )
    ),
    *(
        (text(f"{field}=fp8"), f"{field}='fp8' is not a dtype of a precision policy: use one of fp32, fp16")
        for field in ("params", "compute")
    ),
    *(
        (fields(**{field: torch.float64}), f"{field}=torch.float64 is not allowed: use fp32, fp16, bf16")
        for field in ("params", "compute")
    ),
    *(
        (fields(params=p, compute=c), f"params={NAMES[p]} with compute={NAMES[c]} is not allowed: store")
        for p, c in itertools.permutations(NAMES, 2)
        if p is not FP32
    ),
    (text("fp16,fp32_head=yes"), "fp32_head='yes' in a precision policy: write fp32_head=true or fp32_head=f"),
    (text("fp32,exact_generation=true"), "exact_generation=True with compute=fp32 is not allowed"),
    (fields(exact_generation=1), "exact_generation=1 must be True or False"),
    (text("fp16", head=True), "head is no option of mixed precision: see help"),
    *(
        (text("fp16", **{name: dtype}), f"{name} is no option of mixed precision: the dtype is named by the precision, "
         "as in prepare(model, optimizer, precision='bf16')")
        for name, dtype in {"dtype": "bf16", "torch_dtype": torch.bfloat16, "mixed_precision": "bfloat16"}.items()
    ),
    (text("fp16", loss_scale="dynamic"), "as in precision='fp16,loss_scale=dynamic'"),
    (text("fp16", loss_scaler_settings={}), "pass a scaler with these settings, as in loss_scaler=hf_mp.Dyn"),
    (text("bf16", loss_scaler_settings={}), "precision='bf16' has no loss scale, so leave it out"),
    *(
        (text(p), f"a string, a dtype or a PrecisionPolicy, not {type(p).__name__}: use one of fp32, fp16, bf16")
        for p in (None, 16, Tensor)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_no_policy_is_refused_with_what_is_allowed(make: Callable[[], PrecisionPolicy], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


def test_what_is_like_no_precision_is_answered_with_the_list_alone() -> None:
    with pytest.raises(ValueError, match=r"loss_scale=headroom'$"):
        PrecisionPolicy.parse("int8")


def test_parameters_in_fp32_go_with_every_compute_dtype() -> None:
    assert not any(PrecisionPolicy(params=FP32, compute=compute).is_lean for compute in NAMES)

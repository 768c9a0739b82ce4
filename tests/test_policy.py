import dataclasses
import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mp.memory.precisions import parse_preset
from hf_mp.policy import PRESETS, PrecisionPolicy, parse_loss_scale

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
    assert (policy.masters, policy.output) == (FP32, FP32)


@pytest.mark.parametrize("name", SAID)
def test_presets_print_as_their_name(name: str) -> None:
    assert str(PrecisionPolicy.parse(name)) == name


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


@pytest.mark.parametrize("precision", [torch.float64, torch.int8, torch.float8_e4m3fn, "float8", "16-mixed"])
def test_a_dtype_without_a_preset_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=rf"precision={re.escape(repr(precision))} is not known: use one of fp32"):
        PrecisionPolicy.parse(precision)


@REPRODUCIBLE
@given(policies())
def test_a_policy_survives_being_printed_and_parsed(policy: PrecisionPolicy) -> None:
    assert PrecisionPolicy.parse(str(policy)) == policy


@REPRODUCIBLE
@given(
    policies(), st.permutations(["params", "compute", "masters", "output", "loss_scale"]), st.sampled_from(["", " "])
)
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


@pytest.mark.parametrize("value", ["dynamc", "", "2**16", "None"])
def test_an_unknown_loss_scale_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"loss_scale={value!r} is not known: use 'headroom', 'dynamic'")):
        parse_loss_scale(value)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, "0", "-8", "inf", "nan"])
def test_a_loss_scale_is_positive_and_finite(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"loss_scale={value!r} must be a positive, finite number"):
        PrecisionPolicy(loss_scale=value)


@pytest.mark.parametrize("text", ["fp61", "float61", "", "fp16-fat"])
def test_an_unknown_preset_gets_the_list_of_those_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=rf"precision='{text}' is not known: use one of {', '.join(PRESETS)}"):
        PrecisionPolicy.parse(text)


@pytest.mark.parametrize(
    ("precision", "question"),
    [
        ("16", "Did you mean 'fp16' or 'bf16'?"), (16, "Did you mean 'fp16' or 'bf16'?"),
        ("mixed", "Did you mean 'fp16' or 'bf16'?"), ("16-mixed", "Did you mean 'fp16' or 'bf16'?"),
        ("bf16-mixed", "Did you mean 'bf16'?"), ("mixed_float16", "Did you mean 'fp16'?"),
        (32, "Did you mean 'fp32'?"), ("bf16lean", "Did you mean 'bf16-lean'?"),
    ],
)  # fmt: skip
def test_what_other_libraries_call_a_precision_is_answered_with_the_nearest(precision: Any, question: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\. {re.escape(question)}$"):
        PrecisionPolicy.parse(precision)
    with pytest.raises(ValueError, match=rf"\. {re.escape(question)}$"):
        parse_preset(precision)


def test_what_is_like_no_precision_is_answered_with_the_list_alone() -> None:
    with pytest.raises(ValueError, match=r"loss_scale=headroom'$"):
        PrecisionPolicy.parse("int8")


@pytest.mark.parametrize("value", [None, 16, torch.Tensor])
def test_a_precision_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=rf"must be a string, a dtype or a PrecisionPolicy, not {type(value).__name__}"):
        PrecisionPolicy.parse(value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("param=fp16", "param=fp16"),
        ("compute=", "compute="),
        ("=fp16", "=fp16"),
        ("compute=fp16,", ""),
        ("compute=fp16,fp32", "fp32"),
        ("__class__=fp16", "__class__=fp16"),
    ],
)
def test_a_part_that_is_no_field_is_named(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=rf"'{part}' in precision='{text}': write field=value with one of params,"):
        PrecisionPolicy.parse(text)


def test_a_field_that_is_gone_says_so() -> None:
    with pytest.raises(ValueError, match="reduce_sum is no field any more: gradients are summed in fp32; leave it out"):
        PrecisionPolicy.parse("compute=fp16,reduce_sum=fp16")


@pytest.mark.parametrize("field", ["params", "compute", "masters", "output"])
def test_an_unknown_dtype_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}='fp8' is not a dtype of a precision policy: use one of fp32, fp16"):
        PrecisionPolicy.parse(f"{field}=fp8")
    with pytest.raises(ValueError, match=rf"{field}=torch\.float64 is not allowed: use fp32, fp16, bf16"):
        PrecisionPolicy(**{field: torch.float64})


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_masters_and_outputs_are_fp32(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"masters={NAMES[dtype]} loses small updates"):
        PrecisionPolicy(masters=dtype)
    with pytest.raises(ValueError, match=f"output={NAMES[dtype]} is not allowed: outputs leave the model in fp32"):
        PrecisionPolicy(output=dtype)


@pytest.mark.parametrize(("params", "compute"), list(itertools.permutations(NAMES, 2)))
def test_parameters_are_fp32_or_of_the_compute_dtype(params: torch.dtype, compute: torch.dtype) -> None:
    if params is FP32:
        assert not PrecisionPolicy(params=params, compute=compute).is_lean
        return
    with pytest.raises(ValueError, match=f"params={NAMES[params]} with compute={NAMES[compute]} is not allowed: store"):
        PrecisionPolicy(params=params, compute=compute)


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


def test_switches_that_are_none() -> None:
    with pytest.raises(ValueError, match="fp32_head='yes' in a precision policy: write fp32_head=true or fp32_head=f"):
        PrecisionPolicy.parse("fp16,fp32_head=yes")
    with pytest.raises(TypeError, match="exact_generation=1 must be True or False"):
        PrecisionPolicy(exact_generation=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"head is no option of mixed precision: see help.*are fp32_head and exact_gen"):
        PrecisionPolicy.parse("fp16", head=True)
    with pytest.raises(ValueError, match="exact_generation=True with compute=fp32 is not allowed"):
        PrecisionPolicy.parse("fp32,exact_generation=true")

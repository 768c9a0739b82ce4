"""Every op of torch's OpInfo database under our autocast, against torch's own.

``tables="cpu"`` is compared with ``torch.autocast("cpu")``: what is refused, dtypes, bits and gradients.
``tables="cuda"`` with torch's CUDA autocast, on a GPU in the same way, and without one on fake tensors, which have
dtypes, but neither values nor gradients.

``python -m pytest -s -m outside tests/outside/test_opinfo.py`` prints the counts.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from op_cases import Case, Context, Outcome, cases, difference, outcome, tensors
from op_samples import torchs_cuda_autocast
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from hf_mp.casting.mode import autocast

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore")  # many of these ops are deprecated

# Pattern of "tables op variant dtype: difference" -> why it is as it is. All that no pattern fits fails.
DIFFERENCES = {
    r".*: call: ours runs, theirs RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize": (
        "torch's widest-type ops refuse the 16-bit dtype that autocast does not lower to; ours take it"
    ),
    r"\w+ (new_)?empty\w* .*: result: values differ": "memory as it was found",
    r"(cpu|fake) (cov|corrcoef|einsum|inner|tensordot|sparse\.mm\S*|linalg\.(matrix_power|multi_dot|pinv\S*)|"
    r"nn\.functional\.(bilinear|pad\S*)) .*: (result|backward|call: ours runs)": (
        "torch casts what is inside of these; ours casts all of a call, or nothing"
    ),
    r"cpu linalg\.polar .*: result: values differ": (
        "torch 2.15's autocast multiplies in BF16 inside of it and gives FP32; ours leaves it in FP32"
    ),
    r"cpu linalg\.lstsq.*: result: values differ by up to \S+e-": (
        "LAPACK's sums depend on where in memory an operand lies: the same call without autocast differs as well"
    ),
    r"cpu torch\._scaled_mm\w* .* float8\w+: result: values differ": (
        "on a CPU torch makes these products of FP8 of FP32 ones, which its autocast lowers; ours leaves them exact"
    ),
    r"fake nn\.functional\.conv3d.* complex64: result: dtype": (
        "torch's fake tensors make a complex conv3d of real ones, under autocast; on a device it sees only the whole"
    ),
    r"fake linalg\.cross \w+ bfloat16: result: dtype": (
        "torch registers cross alone, which refuses the other 16-bit dtype; ours takes it, for linalg.cross too"
    ),
}


@dataclass
class Counts:
    """What a sweep met."""

    compared: int = 0
    refused_by_both: int = 0
    random: int = 0  # torch's own result is another one each time
    named: Counter[str] = field(default_factory=Counter)  # by pattern
    others: list[str] = field(default_factory=list)

    def add(self, tables: str, case: Case, found: Outcome, expected: Outcome, context: Context) -> None:
        self.compared += 1
        self.refused_by_both += bool(found.error and expected.error)
        words = difference(found, expected)
        if not words:
            return
        if "values differ" in words and difference(outcome(case, context), expected):
            self.random += 1
            return
        words = f"{tables} {case}: {words}".replace("\n", " ")
        pattern = next((pattern for pattern in DIFFERENCES if re.match(pattern, words)), None)
        if pattern is None:
            self.others.append(words)
        else:
            self.named[pattern] += 1


def on_device(device: str, ours: Context, theirs: Context, **which: Any) -> Counts:
    counts = Counts()
    for case in cases(device=device, **which):
        counts.add(device, case, outcome(case, ours), outcome(case, theirs), theirs)
    return counts


def _faked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return torch.device("cuda") if isinstance(value, torch.device) or value == "cpu" else value


def _fake_outcome(case: Case, context: Context) -> Outcome:
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = tree_map(_faked, (case.args, case.kwargs))
        try:
            with context():
                results = tensors(case.function(*args, **kwargs))
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {error}")
    # what they hold is of no meaning: a number of each dtype and shape stands for it
    return Outcome("", tuple(torch.zeros((), dtype=result.dtype).expand(result.shape) for result in results))


TORCHS_CUDA: Context = functools.partial(torchs_cuda_autocast, FP16)


def on_fake_cuda(**which: Any) -> Counts:
    counts = Counts()
    for case in cases(gradients=False, **which):
        if case.variant in ("inplace", "out") or any(
            t.layout is not torch.strided for t in tensors((case.args, case.kwargs))
        ):
            continue  # torch cannot fake them here
        ours, theirs = _fake_outcome(case, autocast), _fake_outcome(case, TORCHS_CUDA)
        counts.add("fake", case, ours, theirs, TORCHS_CUDA)
    return counts


OURS = functools.partial(autocast, BF16, tables="cpu")
THEIRS = functools.partial(torch.autocast, "cpu", BF16)


# FP32 here and not in torch: 16-bit kernels of the first give NaN, and the others compute singular values.
BEYOND_TORCH = ("matrix_exp", "pca_lowrank", "svd_lowrank")


def others_in_torchs_lists(counts: Counts) -> list[str]:
    return [other for other in counts.others if other.split()[1] not in BEYOND_TORCH]


def test_one_call_of_each_op_is_as_under_torchs_cpu_autocast() -> None:
    counts = on_device("cpu", OURS, THEIRS, samples=1, dtypes=(FP32, BF16))
    assert not others_in_torchs_lists(counts) and counts.compared > 2000


def test_one_call_of_each_op_has_the_dtypes_of_torchs_cuda_autocast() -> None:
    counts = on_fake_cuda(samples=1, dtypes=(FP32,), variants=False)
    assert not others_in_torchs_lists(counts) and counts.compared > 500


def show(part: str, counts: Counts, seconds: float) -> None:
    """Print what a sweep met."""
    found = {
        "compared": counts.compared,
        "refused_by_both": counts.refused_by_both,
        "random": counts.random,
        "named_differences": [
            {"calls": number, "pattern": pattern, "reason": DIFFERENCES[pattern]}
            for pattern, number in counts.named.items()
        ],
        "other_differences": len(counts.others),
        "seconds": round(seconds),
    }
    print(part, found)
    print("\n".join(counts.others))


SWEEPS: dict[str, Callable[[], Counts]] = {
    "cpu": lambda: on_device("cpu", OURS, THEIRS, samples=None),
    "fake_cuda": lambda: on_fake_cuda(samples=4),
    "cuda": lambda: on_device("cuda", autocast, functools.partial(torch.autocast, "cuda", FP16), samples=4),
}


@pytest.mark.outside
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", [*list(SWEEPS)[:2], pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_call_is_as_under_torchs_autocast(part: str) -> None:
    """Of fake tensors the dtypes alone."""
    start = time.monotonic()
    counts = SWEEPS[part]()
    show(part, counts, time.monotonic() - start)
    assert not counts.others


def test_each_reason_is_met_once() -> None:
    """A reason that fits nothing any more is to go."""
    on_cpu = ("cat", "cov", "linalg.polar", "torch._scaled_mm_v2")
    counts = [
        on_device("cpu", OURS, THEIRS, samples=2, only=lambda op: op.name in on_cpu),
        on_fake_cuda(samples=2, only=lambda op: op.name in ("linalg.cross", "nn.functional.conv3d")),
    ]
    absent = [] if torch.__version__ >= (2, 12) else ["_scaled_mm"]
    absent += [] if hasattr(torch.linalg, "polar") else ["polar"]  # from 2.15
    there = {pattern for pattern in DIFFERENCES if not any(word in pattern for word in absent)}
    unmet = there.difference(*(found.named for found in counts))
    assert all("memory" in DIFFERENCES[pattern] for pattern in unmet)  # which may be the same by chance


def test_a_difference_is_seen() -> None:
    ones, case = torch.ones(2), Case("x", "function", FP32, torch.neg, (torch.ones(2),), {})
    assert difference(Outcome("", (ones,)), Outcome("", (ones,))) == ""
    for other in (ones.double(), 2 * ones, ones[:1], ones.clone().requires_grad_()):
        assert difference(Outcome("", (other,)), Outcome("", (ones,)))
    assert difference(Outcome("TypeError: no"), Outcome()).startswith("call: ours TypeError: no, theirs runs")
    wrong = replace(outcome(case, OURS), results=(3 * ones,))
    counts = Counts()
    counts.add("cpu", case, wrong, outcome(case, THEIRS), THEIRS)
    assert counts.others == ["cpu x function float32: result: values differ by up to 4"]

"""The profile of a step, ours beside torch's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

import profile_step
from _benchmarks import Workload


def test_the_largest_costs_of_both_are_stored_with_their_traces(tiny_model, tmp_path, capsys):
    profile_step.main(
        **tiny_model, batch=2, seq=16, ours="hf_mp bf16", theirs="torch.autocast bf16", warmup=1, steps=1,
        device="cpu", output_dir=tmp_path, traces=tmp_path / "traces",
    )  # fmt: skip
    profiles = json.loads((tmp_path / "profile_step.json").read_text())["result"]["profiles"]
    assert list(profiles) == ["hf_mp bf16", "torch.autocast bf16"]
    for found in profiles.values():
        times = [cost["milliseconds"] for cost in found["largest"]]
        assert len(times) == 10 and times == sorted(times, reverse=True)
        assert sum(times) <= found["total_milliseconds"]
        assert any(cost["name"] in ("aten::mm", "aten::addmm") for cost in found["largest"])
    trace = json.loads((tmp_path / "traces" / "hf_mp_bf16.json").read_text())
    assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])
    assert "aten::mm" in capsys.readouterr().out


def test_costs_are_those_of_one_step_on_the_device_that_works():
    def event(key: str, device: DeviceType, cpu: float, gpu: float) -> SimpleNamespace:
        return SimpleNamespace(
            key=key, device_type=device, self_cpu_time_total=cpu, self_device_time_total=gpu, count=4
        )

    events = [event("op", DeviceType.CPU, 3000.0, 9000.0), event("kernel", DeviceType.CUDA, 0.0, 9000.0)]
    (on_gpu,) = profile_step.costs(events, on_gpu=True, steps=2)
    (on_cpu,) = profile_step.costs(events, on_gpu=False, steps=2)
    assert (on_gpu.name, on_gpu.milliseconds, on_gpu.calls, on_gpu.share) == ("kernel", 4.5, 2.0, 1.0)
    assert (on_cpu.name, on_cpu.milliseconds) == ("op", 1.5)


def test_a_profile_of_nothing_is_an_error():
    with pytest.raises(RuntimeError, match="saw nothing on the GPU"):
        profile_step.costs([], on_gpu=True, steps=1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Trainer fp32", r"trained by a Trainer: profile one of fp32, "),
        ("hf_mp bf16 compiled", r"cannot be profiled here: torch.compile needs a C\+\+ compiler"),
    ],
)
def test_what_cannot_be_profiled_is_refused(name, reason, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("_contenders.has_cpp_compiler", lambda: False)
    with pytest.raises(ValueError, match=reason):
        profile_step.profile_steps(
            name, Workload(**tiny_model, batch=2, seq=16), warmup=0, steps=1, trace=tmp_path / "trace.json"
        )

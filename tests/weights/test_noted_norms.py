"""A step after ``clip_grad_norm_`` takes its norm for the check, and reads the gradients again wherever it must."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import hf_mp
from hf_mp.weights import noted_norms, seen_gradients

PRECISIONS = ["bf16", "fp16", "bf16-lean", "fp16-lean"]
by_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).float().square().mean()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of gradients of each check that read them."""
    counts: list[int] = []
    original = seen_gradients.magnitude_bound

    def counted(gradients: list[Tensor]) -> Tensor:
        counts.append(len(gradients))
        return original(gradients)

    monkeypatch.setattr(seen_gradients, "magnitude_bound", counted)
    return counts


def after_backward(precision: str = "bf16", factor: float = 1.0) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), precision)
    (model(torch.randn(3, 8)) * factor).backward()
    return model, optimizer


def clip(model: nn.Module, optimizer: Any, max_norm: float = 1e-3) -> Tensor:
    if isinstance(optimizer, hf_mp.MasterWeightOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return clip_grad_norm_(model.parameters(), max_norm)


def clip_by_torch(model: nn.Module, optimizer: Any, max_norm: float = 1e-3) -> Tensor:
    return clip_grad_norm_(model.parameters(), max_norm)


@by_precision
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("by", [clip, clip_by_torch])
def test_the_norm_of_clipping_is_the_check(
    precision: str, max_norm: float, by: Callable[..., Tensor], reads: list[int]
) -> None:
    model, optimizer = after_backward(precision)
    assert by(model, optimizer, max_norm) > 0
    optimizer.step()
    assert not optimizer.step_was_skipped and reads == []


@by_precision
def test_without_clipping_gradients_are_read(precision: str, reads: list[int]) -> None:
    _, optimizer = after_backward(precision)
    optimizer.step()
    assert reads == [4]


@by_precision
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_norm_that_is_not_finite_skips_the_step(precision: str, factor: float) -> None:
    model, optimizer = after_backward(precision, factor)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert not clip(model, optimizer).isfinite()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def test_an_infinite_norm_of_finite_gradients_skips_nothing() -> None:
    model, optimizer = after_backward()
    for parameter in model.parameters():
        parameter.grad.fill_(2.0**63)
    model.first.weight.grad.fill_(2.0**63.9)
    assert clip(model, optimizer).isinf()  # which makes zeros of them
    optimizer.step()
    assert not optimizer.step_was_skipped


def replace_gradient(weight: nn.Parameter) -> None:
    weight.grad = torch.full_like(weight, torch.nan)


@by_precision
@pytest.mark.parametrize("write", [lambda weight: weight.grad.fill_(torch.nan), replace_gradient])
def test_what_is_written_after_clipping_is_seen(precision: str, write: Callable[[nn.Parameter], None]) -> None:
    model, optimizer = after_backward(precision)
    clip_by_torch(model, optimizer)
    write(model.second.weight)
    optimizer.step()
    assert optimizer.step_was_skipped


@by_precision
@pytest.mark.parametrize("by", [clip, clip_by_torch])
def test_another_backward_after_clipping_is_seen(precision: str, by: Callable[..., Tensor]) -> None:
    model, optimizer = after_backward(precision)
    by(model, optimizer)
    (model(torch.randn(3, 8)) * torch.inf).backward()
    optimizer.step()
    assert optimizer.step_was_skipped


def test_a_lean_gradient_that_was_read_and_written_after_clipping_is_seen() -> None:
    model, optimizer = after_backward("fp16-lean")
    clip(model, optimizer)
    model.first.weight.grad[0, 0] = torch.inf
    optimizer.step()
    assert optimizer.step_was_skipped


@by_precision
def test_a_write_through_data_after_clipping_is_not_seen(precision: str) -> None:
    model, optimizer = after_backward(precision)
    clip_by_torch(model, optimizer)
    model.second.weight.grad.data.fill_(torch.nan)
    optimizer.step()
    assert not optimizer.step_was_skipped and model.second.weight.isnan().all()


def scaled_to_nan(model: nn.Module) -> None:
    norm = get_total_norm([parameter.grad for parameter in model.parameters()])
    clip_grads_with_norm_(model.parameters(), 1.0, norm * torch.nan)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: clip_grad_norm_(model.parameters(), torch.nan),
        lambda model: clip_grad_norm_(model.parameters(), -torch.inf),
        scaled_to_nan,
    ],
    ids=["nan", "minus infinity", "norm of one's own"],
)
@by_precision
def test_clipping_that_spoils_gradients_is_seen(precision: str, spoil: Callable[[nn.Module], Any]) -> None:
    model, optimizer = after_backward(precision)
    model.first.bias.grad.zero_()
    spoil(model)
    optimizer.step()
    assert optimizer.step_was_skipped


@by_precision
@pytest.mark.parametrize("norm_type", [0.0, -torch.inf])
def test_norms_that_bound_nothing_are_not_noted(precision: str, norm_type: float) -> None:
    model, optimizer = after_backward(precision)
    model.first.weight.grad[0, 0] = torch.inf
    assert clip_grad_norm_(model.parameters(), 1e9, norm_type=norm_type).isfinite()
    optimizer.step()
    assert optimizer.step_was_skipped


@pytest.mark.parametrize("norm_type", [1.0, 3.0, torch.inf])
def test_gradients_are_multiplied_as_torch_does(norm_type: float) -> None:
    for share in (0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0):
        model, _ = after_backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        norm = get_total_norm(gradients, norm_type)
        factor = (share * float(norm) / (norm + 1e-6)).clamp(max=1.0)
        versions = [parameter.grad._version for parameter in model.parameters()]
        clip_grad_norm_(model.parameters(), share * float(norm), norm_type)
        assert all(torch.equal(p.grad, g * factor) for p, g in zip(model.parameters(), gradients, strict=True))
        were_written = [parameter.grad._version for parameter in model.parameters()] != versions
        assert were_written == (factor < 1)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, torch.inf])
def test_other_norms_are_bounds(norm_type: float, reads: list[int]) -> None:
    model, optimizer = after_backward()
    clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type)
    optimizer.step()
    assert not optimizer.step_was_skipped and reads == []


def test_a_norm_of_some_gradients_or_of_another_model_is_not_the_check(reads: list[int]) -> None:
    model, optimizer = after_backward()
    clip(model.first, optimizer)
    optimizer.step()
    model, optimizer = after_backward()
    other, _ = after_backward()
    clip(model, optimizer)
    clip(other, None)
    optimizer.step()
    assert reads == [4, 4]


def test_a_norm_of_all_serves_the_optimizers_of_parts(reads: list[int]) -> None:
    torch.manual_seed(0)
    model = Model()
    runtime = hf_mp.MixedPrecision("bf16")
    runtime.attach(model)
    parts = [runtime.attach_optimizer(torch.optim.SGD(part.parameters(), lr=0.1)) for part in model.children()]
    model(torch.randn(3, 8)).backward()
    clip(model, None)
    for optimizer in parts:
        optimizer.step()
    assert reads == []


def test_gradients_are_not_kept() -> None:
    model, optimizer = after_backward()
    clip(model, optimizer)
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    assert all(reference() is None for reference in gradients)


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
def test_what_the_caller_does_with_the_norm_changes_nothing(precision: str) -> None:
    model, optimizer = after_backward(precision, torch.inf)
    clip(model, optimizer).unsqueeze_(0).nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    assert optimizer.step_was_skipped


def test_a_norm_is_the_check_of_one_step() -> None:
    model, optimizer = after_backward()
    clip(model, optimizer)
    optimizer.step()
    model.second.weight.grad.data.fill_(torch.nan)  # kept, and written anew without a backward
    optimizer.step()
    assert optimizer.step_was_skipped


def test_a_write_while_the_norm_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = after_backward()
    foreach_norm = torch._foreach_norm

    def norms_and_a_write(*args: Any, **kwargs: Any) -> Any:
        norms = foreach_norm(*args, **kwargs)
        model.first.weight.grad[0, 0] = torch.nan  # of another thread
        return norms

    monkeypatch.setattr(torch, "_foreach_norm", norms_and_a_write)
    assert clip(model, optimizer).isfinite()
    monkeypatch.undo()
    optimizer.step()
    assert optimizer.step_was_skipped


def test_models_that_are_not_attached_are_clipped_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _attached, plain = after_backward(), Model()
    plain(torch.randn(3, 8)).backward()
    with torch.inference_mode():
        plain.first.bias.grad = plain.first.bias.grad * 2  # an inference tensor has no version counter
        assert clip_grad_norm_(plain.parameters(), 1.0) > 0
    for parameter in plain.parameters():
        parameter.grad = parameter.grad.clone()
    clip_grad_norm_(plain.parameters(), 1.0)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert plain.to(torch.float64).first.weight.grad.dtype is torch.float64  # refused for what is weakly referenced


def test_a_fake_model_is_clipped() -> None:
    _attached = after_backward()
    with FakeTensorMode():
        model = Model()
        model(torch.randn(3, 8)).backward()
        assert clip_grad_norm_(model.parameters(), 1.0).shape == ()


def test_compiled_clipping_works() -> None:
    model, optimizer = after_backward()
    norm = torch.compile(lambda: clip_grad_norm_(model.parameters(), 1e-3), backend="eager")()
    expected = get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(expected, torch.tensor(1e-3), rtol=1e-2, atol=0.0)
    assert norm > expected
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_torch_gets_its_functions_back() -> None:
    gc.collect()  # models of other tests, which are attached as long as they live
    users = noted_norms.NORM_PATCHES._users
    before = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    runtime = hf_mp.MixedPrecision("bf16")
    model = runtime.attach(Model())
    assert noted_norms.NORM_PATCHES._users == users + 1 and isinstance(model, Model)
    runtime.detach()
    assert noted_norms.NORM_PATCHES._users == users
    assert before == (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)


@given(
    st.lists(st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(1, 8) | st.just(torch.inf),
)
@example([[0.0, 14310536192.0]], 3.170061389552847)
def test_no_magnitude_exceeds_the_bound(values: list[list[float]], norm_type: float) -> None:
    tensors = [torch.tensor(row, dtype=torch.float32) for row in values]
    noted_norms.note_norm(noted_norms.Seen(tensors), get_total_norm(tensors, norm_type))
    bound, largest = noted_norms.take_noted(tensors), max(abs(value) for row in values for value in row)
    assert bound is not None
    # The rounding of a power grows with its exponent; the powers of what is below 1 may underflow.
    assert bound >= largest * (1 - 1e-5) or largest < 1

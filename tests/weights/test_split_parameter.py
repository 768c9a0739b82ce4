"""Split parameters: writes from outside win, gradients are true for whoever looks."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Using, assert_true, attached
from torch import Tensor, nn

import hf_mp
from hf_mp.kernels.split import split
from hf_mp.weights import split_layout
from hf_mp.weights.fp32_reads import as_stored
from hf_mp.weights.split_parameter import (
    SplitParameter,
    gradient_and_factor,
    make_split,
    master_value,
    multiply_gradients,
    unsplit,
)

DTYPES = [torch.float16, torch.bfloat16]
SCALE = 1024.0


def made(value: Tensor, dtype: torch.dtype = torch.float16) -> SplitParameter:
    parameter = nn.Parameter(value.clone())
    make_split(parameter, dtype)
    assert isinstance(parameter, SplitParameter)
    return parameter


def values(*shape: int) -> Tensor:
    return torch.randn(shape or (4, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_parameter_becomes_its_rounding_and_keeps_its_value(dtype: torch.dtype) -> None:
    value = values()
    parameter = made(value, dtype)
    assert parameter.dtype is dtype and parameter.is_leaf and parameter.requires_grad
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, SplitParameter)
    assert torch.equal(parameter.detach(), split(value, dtype).working)
    assert torch.equal(master_value(parameter), value)
    assert parameter.remainder_bits.dtype is torch.int16
    assert repr(parameter).startswith("Parameter containing:")


@pytest.mark.parametrize("read", [lambda p: p.data, lambda p: p.data.detach(), lambda p: p.detach()])
def test_data_that_is_put_aside_and_back_keeps_all_bits(read: Callable[[nn.Parameter], Tensor]) -> None:
    """As classes for averages of weights do around an evaluation."""
    value, average = values(), values() * 1e-2
    parameter = made(value)
    with torch.no_grad():
        parameter[1] += 1e-5
    before, kept = master_value(parameter), read(parameter)
    parameter.data = average
    assert torch.equal(master_value(parameter), average) and torch.equal(kept.clone(), before)
    parameter.data = kept
    assert torch.equal(master_value(parameter), before) and not torch.equal(before, before.half().float())
    kept[0] = 0.1  # still a view of it
    assert torch.equal(master_value(parameter)[0], torch.full((3,), 0.1))


def test_data_of_another_weight_comes_with_all_bits() -> None:
    one, other = made(values()), made(values(3, 4))
    one.data = other.data.t()
    assert torch.equal(master_value(one), master_value(other).t())


@pytest.mark.parametrize("init", [
    nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_,
    lambda p: nn.init.constant_(p, 0.1001),
])  # fmt: skip
def test_initialized_anew_it_has_the_values_of_fp32(init: Callable[[Tensor], Tensor]) -> None:
    value, parameter = nn.Parameter(values()), made(values())
    for one in (value, parameter):
        torch.manual_seed(3)
        init(one)
    assert torch.equal(master_value(parameter), value)


def test_unsplit_gives_an_ordinary_fp32_parameter_back() -> None:
    value = values()
    parameter: Any = made(value)
    parameter.store_scaled_gradient(torch.full((4, 3), 2.0, dtype=torch.float16))
    unsplit(parameter)
    assert type(parameter) is nn.Parameter and vars(parameter) == {}
    assert torch.equal(parameter.detach(), value) and parameter.dtype is torch.float32
    assert torch.equal(parameter.grad, torch.full((4, 3), 2.0))
    (parameter * 3).sum().backward()
    assert torch.equal(parameter.grad, torch.full((4, 3), 5.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_made_of_a_view_outside_of_a_forward_is_fp32(dtype: torch.dtype) -> None:
    value = values()
    parameter = made(value, dtype)
    view = parameter.data
    assert view.dtype is dtype
    for found in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), view.data + 0, view[1:].data.clone()):
        assert type(found) is Tensor and torch.equal(found, value[-len(found) :])
    assert repr(view) == repr(value)
    view.data.mul_(2)
    assert torch.equal(master_value(parameter), value * 2)


# Writes from outside win, element by element


def own_master(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().float()


WHOLE_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "normal_": lambda p: p.normal_(),
    "fill_": lambda p: p.fill_(0.3),
    "zero_": lambda p: p.zero_(),
    "mul_": lambda p: p.mul_(1.5),
    "add_ an FP32 tensor": lambda p: p.add_(torch.full((4, 3), 0.7)),
    "lerp_": lambda p: p.lerp_(torch.ones(4, 3, dtype=p.dtype), 0.5),
    "copy_ FP16": lambda p: p.copy_(torch.full((4, 3), 0.3).half()),
    "set by slice": lambda p: p.__setitem__(slice(None), 0.3),
    "+=": lambda p: p.__iadd__(0.5),
    "/=": lambda p: p.__itruediv__(3.0),
    "data.copy_": lambda p: p.data.copy_(torch.full((4, 3), 0.3)),
    "data.fill_": lambda p: p.data.fill_(0.3),
    "data.mul_": lambda p: p.data.mul_(1.5),
    "data = ": lambda p: setattr(p, "data", torch.full((4, 3), 0.3, dtype=p.dtype)),
    "detach().fill_": lambda p: p.detach().fill_(0.3),
    "view().fill_": lambda p: p.view(-1).fill_(0.3),
    "torch.add out=": lambda p: torch.add(p.detach() * 2, 1.0, out=p.detach()),
    "foreach": lambda p: torch._foreach_add_([p], 0.5),
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "init.ones_": lambda p: nn.init.ones_(p),
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "numpy of data": lambda p: p.data.view(torch.int16).numpy().fill(14_000),
    "storage of data": lambda p: p.data.untyped_storage().copy_(torch.ones(4, 3, dtype=p.dtype).untyped_storage()),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.full((12,), 0.3, dtype=p.dtype), [p]),
}


@pytest.mark.parametrize("name", WHOLE_WRITES)
def test_a_write_of_all_elements_wins(name: str) -> None:
    parameter = made(values() + 3.0)
    with torch.no_grad():
        WHOLE_WRITES[name](parameter)
    assert not torch.equal(own_master(parameter), torch.zeros(4, 3)) or name == "zero_"
    assert torch.equal(master_value(parameter), own_master(parameter))
    assert torch.equal(parameter.fp32_value(), own_master(parameter))


def row(value: float = 0.3) -> Tensor:
    return torch.full((3,), value)


ROW_WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "set by index": lambda p: p.__setitem__(1, row()),
    "data by index": lambda p: p.data.__setitem__(1, row()),
    "row of data": lambda p: p.data[1].fill_(0.3),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([1]), 0.3),
    "index_copy_": lambda p: p.index_copy_(0, torch.tensor([1]), row().to(p.dtype)[None]),
    "masked_fill_": lambda p: p.masked_fill_(torch.tensor([[False], [True], [False], [False]]), 0.3),
    "row through numpy": lambda p: p.data.view(torch.int16).numpy().__setitem__(1, 14_000),
    "row of data =": lambda p: setattr(p, "data", torch.cat([p.detach()[:1], row().to(p.dtype)[None], p.detach()[2:]])),
}


@pytest.mark.parametrize("name", ROW_WRITES)
def test_a_write_of_a_row_leaves_the_others_their_bits(name: str) -> None:
    value = values()
    parameter = made(value)
    with torch.no_grad():
        ROW_WRITES[name](parameter)
    master = master_value(parameter)
    others = [0, 2, 3]
    assert not torch.equal(parameter.detach()[1].float(), value[1])
    assert torch.equal(master[1], own_master(parameter)[1])
    assert torch.equal(master[others], value[others])


def test_an_alias_that_lives_on_is_tracked_for_as_long_as_it_lives() -> None:
    value = values()
    parameter = made(value)
    alias = parameter.data
    assert torch.equal(master_value(parameter), value)
    alias[0] = 1.0
    assert torch.equal(master_value(parameter)[0], torch.ones(3))
    array = parameter.data.view(torch.int16).numpy()
    del alias
    parameter.write_fp32(value)
    assert torch.equal(master_value(parameter), value)
    array[2] = 0
    assert torch.equal(master_value(parameter)[2], torch.zeros(3)) and torch.equal(
        master_value(parameter)[:2], value[:2]
    )
    del array
    assert torch.equal(master_value(parameter)[3], value[3])
    assert parameter._snapshot is None  # 2 bytes a parameter, while they are needed


def test_reading_does_not_cost_bits() -> None:
    value = values()
    parameter = made(value)
    parameter.data.clone(), parameter.detach().sum(), parameter[0], list(parameter), ~parameter.isnan()
    parameter.requires_grad_(False).requires_grad_(True)
    assert torch.equal(master_value(parameter), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp32_values_copied_in_keep_all_their_bits(dtype: torch.dtype) -> None:
    parameter = made(values(), dtype)
    with torch.no_grad():
        for value in (values(), values().double(), values(3), values(12).view(3, 4).t()):
            parameter.copy_(value)
            expected = value.float().expand(4, 3)
            assert torch.equal(master_value(parameter), expected)
            assert torch.equal(parameter.detach(), split(expected.contiguous(), dtype).working)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.copy_(values())
    assert torch.equal(master_value(parameter), expected)


def split_model(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers) if layers else nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in model.parameters():
        make_split(parameter, torch.float16)
    return model


def test_load_state_dict_in_fp32_and_fp16() -> None:
    model = split_model()
    new = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    model.load_state_dict(new)
    assert all(torch.equal(master_value(p), new[n]) for n, p in model.named_parameters())  # type: ignore[arg-type]
    halves = {name: value.half() for name, value in new.items()}
    model.load_state_dict(halves)  # the same roundings: nothing was said about the other bits
    assert all(torch.equal(master_value(p), new[n]) for n, p in model.named_parameters())  # type: ignore[arg-type]
    halves["0.weight"] = halves["0.weight"] * 2
    model.load_state_dict(halves)
    assert torch.equal(master_value(model[0].weight), halves["0.weight"].float())
    assert torch.equal(master_value(model[1].weight), new["1.weight"])


def test_casts_and_moves_of_a_module() -> None:
    model = split_model()
    before = {name: master_value(p) for name, p in model.named_parameters()}  # type: ignore[arg-type]
    for cast in (torch.float32, torch.float64):  # the layout keeps its dtype, and every bit
        with pytest.warns(UserWarning, match=r"stay torch\.float16.*model\.state_dict\(\), or call hf_mp\.detach"):
            model.to("cpu", cast)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, SplitParameter) and parameter.dtype is torch.float16
            assert torch.equal(master_value(parameter), before[name])
    with pytest.warns(UserWarning, match="stay torch.float16"):
        model.float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.half()
        model.to("cpu")
        model[0].weight.data = model[0].weight.detach().float()  # as averages of weights are put in
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, SplitParameter) and parameter.dtype is torch.float16
            assert torch.equal(master_value(parameter), before[name])
    with pytest.warns(UserWarning, match="rounds the FP32 values"):
        model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(master_value(parameter), before[name], rtol=2**-8, atol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_a_module_that_a_forward_casts_to_fp32_keeps_its_bits(precision: str) -> None:
    class Router(nn.Module):  # as those of Switch Transformers and NLLB-MoE
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(8, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            self.classifier = self.classifier.to(torch.float32)
            return self.classifier(x.float())

    model: Any = Router()
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), precision)
    for _ in range(3):
        before = model.state_dict()["classifier.weight"].clone()
        model(torch.ones(2, 8)).sum().backward()
        assert torch.equal(model.state_dict()["classifier.weight"], before)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(model.state_dict()["classifier.weight"], before - 2e-3, atol=1e-6)


def test_an_element_written_in_a_forward_costs_the_others_no_bit() -> None:
    parameter = made(values())
    before = parameter.fp32_value()
    with hf_mp.autocast(torch.float16), torch.no_grad():
        parameter[0, 0] = 0.25
        parameter.clamp_(-1e4, 1e4)
    after = parameter.fp32_value()
    assert after[0, 0] == 0.25 and torch.equal(after.view(-1)[1:], before.view(-1)[1:])


# Copies and pickles


def test_a_deep_copy_is_fp32_and_goes_its_own_way() -> None:
    model = split_model()
    model.tied = model[0].weight
    copied = copy.deepcopy(model)
    assert copied.tied is copied[0].weight and type(copied.tied) is nn.Parameter
    assert torch.equal(copied.tied.detach(), master_value(model[0].weight))
    before = master_value(model[0].weight).clone()
    copied.tied.data.zero_()
    assert torch.equal(master_value(model[0].weight), before)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickle_holds_an_ordinary_fp32_parameter(how: str) -> None:
    parameter: Any = made(values())
    parameter.sharded_by = "rows"
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps([parameter, parameter]))
    else:
        buffer = io.BytesIO()
        torch.save([parameter, parameter], buffer)
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(loaded[0]) is nn.Parameter and loaded[0] is loaded[1]
    assert torch.equal(loaded[0].detach(), master_value(parameter)) and loaded[0].sharded_by == "rows"


# Masters


def test_writing_the_master_is_seen_by_autograd() -> None:
    parameter = made(values())
    with as_stored():  # as in a forward
        out = (parameter * parameter).sum()
    parameter.write_fp32(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_master_value_is_one_tensor_until_something_changes() -> None:
    parameter = made(values())
    first = master_value(parameter)
    assert master_value(parameter) is first
    value = first.clone()
    first.add_(1.0)  # the reader's own now
    assert torch.equal(master_value(parameter), value)
    second = master_value(parameter)
    with torch.no_grad():
        parameter[0] = 1.0
    assert master_value(parameter) is not second
    alias = parameter.data  # tied weights of a state dict stay one tensor while somebody holds one
    third = master_value(parameter)
    assert master_value(parameter) is third
    alias[0] = 2.0
    assert torch.equal(master_value(parameter)[0], torch.full((3,), 2.0))


# Gradients


def layers() -> Using:
    return Using(lambda m, x: m.second(torch.tanh(m.first(x))), first=nn.Linear(8, 8), second=nn.Linear(8, 8))


@pytest.fixture(params=["fp16-lean", "bf16-lean"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, float]:
    """A model attached in a lean layout, the same in FP32, and the tolerance of their gradients."""
    model = layers()
    reference = copy.deepcopy(model)
    attached(model, request.param, SCALE if request.param == "fp16-lean" else None)
    return model, reference, 4e-3 if request.param == "fp16-lean" else 3e-2


Pair = tuple[nn.Module, nn.Module, float]
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(7))


def assert_gradients_match(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    found = [parameter.grad for parameter in model.parameters()]
    assert {gradient.dtype for gradient in found if gradient is not None} == {torch.float32}
    assert_true(found, [parameter.grad for parameter in reference.parameters()], tolerance)


def test_a_gradient_is_lower_precision_and_scaled_until_it_is_read(pair: Pair) -> None:
    model, reference, tolerance = pair
    for each in (model, reference):
        each(X).square().mean().backward()
    for parameter in model.parameters():
        gradient, factor = gradient_and_factor(parameter)
        assert gradient is not None and gradient.dtype is parameter.dtype
        assert factor is None if parameter.dtype is torch.bfloat16 else factor.item() == 1 / SCALE  # type: ignore
    assert_gradients_match(model, reference, tolerance)
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype is torch.float32
        true = parameter.grad.clone()
        parameter.grad.data.mul_(2)  # unseen by a version counter
        assert gradient_and_factor(parameter)[0] is parameter.grad and torch.equal(parameter.grad, 2 * true)
        assert gradient_and_factor(parameter)[1] is None


def test_a_buffer_that_was_set_gets_all_gradients(pair: Pair) -> None:
    model, reference, tolerance = pair
    buffers = [torch.zeros(parameter.shape) for parameter in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer
    for _ in range(2):
        for each in (model, reference):
            (each(X).square().mean() + sum(parameter.square().mean() for parameter in each.parameters())).backward()
    assert all(parameter.grad is buffer for parameter, buffer in zip(model.parameters(), buffers, strict=True))
    assert_gradients_match(model, reference, tolerance)


def test_zeros_and_a_late_hook_cost_no_gradient(pair: Pair) -> None:
    model, reference, tolerance = pair
    model(X).square().mean().backward()
    model.zero_grad(set_to_none=False)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: None)
    for each in (model, reference):
        each(X).square().mean().backward()
    assert_gradients_match(model, reference, tolerance)


def test_tied_weights_add_up_in_fp32(pair: Pair) -> None:
    model, reference, tolerance = pair
    for each in (model, reference):
        each.second.weight = each.first.weight
        each(X).square().mean().backward()
    assert isinstance(model.first.weight, SplitParameter)
    assert gradient_and_factor(model.first.weight)[0].dtype is torch.float32  # type: ignore[union-attr]
    assert_gradients_match(model, reference, tolerance)


def test_sparse_gradients() -> None:
    model, reference = (nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    attached(model, "fp16-lean")
    ids = torch.tensor([1, 1, 4])
    for micro_batch in range(2):
        for each in (model, reference):
            each(ids).square().mean().backward()
        if micro_batch == 0:
            assert gradient_and_factor(model[0].weight)[0].is_sparse  # type: ignore[union-attr]
    assert model[0].weight.grad.is_sparse and model[0].weight.grad.dtype is torch.float32
    torch.testing.assert_close(
        model[0].weight.grad.to_dense(), reference[0].weight.grad.to_dense(), rtol=5e-3, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4, 4)])
def test_a_true_gradient_lies_in_memory_as_its_parameter(shape: tuple[int, ...]) -> None:
    """torch's fused optimizers read by position, so that a transposed gradient would update the wrong elements."""
    parameter = made(values(*shape))
    gradient = values(*shape).half()
    assert parameter.store_scaled_gradient(gradient.transpose(0, 1).contiguous().transpose(0, 1))
    assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, gradient.float())


@pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
def test_the_first_reader_of_a_gradient_unscales_all_of_its_unscale_node(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU in two launches, bit for bit what one by one gives; what was read or added to stays as it is."""

    def read(takes: bool) -> tuple[list[Tensor], list[Any]]:
        monkeypatch.setattr(split_layout, "supports_foreach", lambda tensor: takes)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))
        model, _ = hf_mp.prepare(model, torch.optim.AdamW(model.parameters()), precision)
        model(torch.randn(2, 4)).square().sum().backward()
        model[0].weight.grad.mul_(2.0)
        model[2].bias.store_scaled_gradient(torch.ones(3, dtype=model[2].bias.dtype))  # added up in FP32
        model[1].bias.grad = None
        states = [model[1].weight.grad.dtype, *[gradient_and_factor(one)[0] for one in model.parameters()]]
        return [one.grad for one in model.parameters() if one.grad is not None], states

    (together, after), (one_by_one, before) = read(True), read(False)
    assert all(map(torch.equal, together, one_by_one)) and len(together) == 5
    dtypes = [None if one is None else one.dtype for one in after[1:]]
    assert dtypes == [torch.float32] * 3 + [None] + [torch.float32] * 2
    low = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    assert [one.dtype for one in before[1:] if one is not None] == [
        torch.float32,
        low,
        torch.float32,
        low,
        torch.float32,
    ]


def test_setting_and_deleting_gradients(pair: Pair) -> None:
    model, _, _ = pair
    for drop in (
        model.zero_grad,
        lambda: [setattr(p, "grad", None) for p in model.parameters()],
        lambda: [delattr(p, "grad") for p in model.parameters()],
    ):
        model(X).square().mean().backward()
        drop()
        assert all(p.grad is None and gradient_and_factor(p)[0] is None for p in model.parameters())
    model(X).square().mean().backward()
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.first.weight.grad = torch.ones(8, 8)
    assert torch.equal(gradient_and_factor(model.first.weight)[0], torch.ones(8, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["scaled", "read", "ordinary FP16", "none"])
def test_multiply_gradients(kind: str) -> None:
    factor = torch.tensor(0.3)
    parameter: Any = nn.Parameter(values(4, 3).half()) if kind == "ordinary FP16" else made(values(4, 3))
    gradient = values(4, 3).half()
    if kind == "ordinary FP16":
        parameter.grad = gradient.clone()
    elif kind != "none":
        parameter.store_scaled_gradient(gradient)
    if kind == "read":
        assert parameter.grad is not None
    multiply_gradients([parameter], factor)
    multiply_gradients([parameter], factor)
    if kind == "none":
        assert parameter.grad is None
        return
    if kind == "scaled":
        assert gradient_and_factor(parameter)[0] is gradient  # nothing was written
    assert parameter.grad.dtype is torch.float32
    torch.testing.assert_close(parameter.grad, gradient.float() * 0.3 * 0.3, rtol=1e-6, atol=0)
    parameter.grad = None
    if kind != "ordinary FP16":
        parameter.store_scaled_gradient(gradient)
        assert torch.equal(parameter.grad, gradient.float())  # the factor went with the gradient

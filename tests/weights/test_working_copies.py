import copy
import gc
import io
import math
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer

import hf_mp
from hf_mp.casting.cpu import handlers, products
from hf_mp.weights import working_copies
from hf_mp.weights.working_copies import WatchedParameter, WorkingCopies, unwatch, watch

FP16, BF16 = torch.float16, torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def watched(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(random(*shape))
    watch(parameter)
    return parameter


def check_current(copies: WorkingCopies, parameter: nn.Parameter) -> None:
    """The copy is the parameter, rounded to nearest now."""
    found = copies.get(parameter)
    assert found.dtype is copies.dtype and not found.requires_grad
    torch.testing.assert_close(found, parameter.detach().to(copies.dtype), rtol=0, atol=0, equal_nan=True)
    assert found.numel() == 0 or found.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()


def nudge(parameter: nn.Parameter) -> Tensor:
    """Another value for ``parameter``, whose rounding differs everywhere."""
    return parameter.detach().clone() * 1.5 + 1.0


@torch.no_grad()
def write_in_place(parameter: nn.Parameter) -> None:
    parameter.copy_(nudge(parameter))


def write_in_inference_mode(parameter: nn.Parameter) -> None:
    value = nudge(parameter)
    with torch.inference_mode():
        parameter.copy_(value)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = nudge(parameter)


def in_a_module(parameter: nn.Parameter, change: Callable[[nn.Module], Any]) -> None:
    module = nn.Module()
    module.weight = parameter
    change(module)
    assert module.weight is parameter


def move_and_back(module: nn.Module) -> None:
    module.double()
    module.weight.data += 1.0
    module.float()


def step(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Parameter], None]:
    def write(parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones_like(parameter)
        make([parameter], lr=0.5, **settings).step()

    return write


WRITERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": write_in_place,
    "in place, in inference mode": write_in_inference_mode,
    "through .data": lambda p: p.data.copy_(nudge(p)),
    "through a part of .data": lambda p: p.data.view(-1)[1:].add_(1.0),
    "to .data": replace_data,
    "to .data, twice": lambda p: (replace_data(p), replace_data(p)),
    "to .data, transposed": lambda p: setattr(p, "data", p.data.t().contiguous().t() + 1.0),
    "through .detach()": lambda p: p.detach().copy_(nudge(p)),
    "load_state_dict": lambda p: in_a_module(p, lambda m: m.load_state_dict({"weight": nudge(p)})),
    "Module.double and back": lambda p: in_a_module(p, move_and_back),
    "EMA": lambda p: p.data.lerp_(nudge(p), 0.5),
    "an optimizer that writes to .data": lambda p: p.data.addcmul_(torch.ones(()), nudge(p), value=-0.5),
    "SGD": step(torch.optim.SGD, foreach=False),
    "SGD, foreach": step(torch.optim.SGD, foreach=True, momentum=0.9),
    "AdamW, foreach": step(torch.optim.AdamW, foreach=True),
    "Adagrad": step(torch.optim.Adagrad),
}


def older(parameter: nn.Parameter) -> Tensor:
    """An alias that is not the last one."""
    alias = parameter.data
    _ = parameter.data.shape
    return alias


ALIASES: dict[str, Callable[[nn.Parameter], Any]] = {
    "kept": lambda p: p.data,
    "view": lambda p: p.data.view(-1),
    "[1:]": lambda p: p.data[1:],
    "t": lambda p: p.data.t(),
    "older": older,
    "detach": lambda p: p.data.detach(),
    "numpy": lambda p: p.data.numpy(),
}


def test_a_graph_that_saved_a_copy_notices_that_a_kernel_wrote_it() -> None:
    weight, copies = watched(4, 4), WorkingCopies(BF16)
    y = random(2, 4).bfloat16().requires_grad_() @ copies.get(weight)
    copies.note_written([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class TestTheCopyIsTheParameterRounded:
    @every_dtype
    @pytest.mark.parametrize("writer", WRITERS)
    def test_after_every_way_of_writing(self, writer: str, dtype: torch.dtype) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(dtype)
        check_current(copies, parameter)
        for _ in range(3):
            before = copies.get(parameter).clone()
            WRITERS[writer](parameter)
            check_current(copies, parameter)
            assert not torch.equal(copies.get(parameter), before), "the test wrote nothing"

    @pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda make: make.__name__)
    def test_after_a_fused_step_and_refresh_all(self, make: type[torch.optim.Optimizer]) -> None:
        """torch's fused optimizers raise no version counter: that is what refresh_all is for."""
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        for _ in range(3):
            before = copies.get(parameter).clone()
            step(make, fused=True)(parameter)
            copies.refresh_all([parameter])
            check_current(copies, parameter)
            assert not torch.equal(copies.get(parameter), before)

    @pytest.mark.parametrize("alias", ALIASES)
    def test_through_an_alias(self, alias: str) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        made = ALIASES[alias](parameter)
        for _ in range(4):
            check_current(copies, parameter)
            check_current(copies, parameter)
            made += 1.0
            check_current(copies, parameter)

    @every_dtype
    def test_of_every_kind_of_number(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        step = info.tiny * info.eps
        numbers = [
            0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, step, 0.5 * step, 0.75 * step,
            1.5 * step, 1.0 + info.eps / 2, 1.0 + 1.5 * info.eps, 1.0 + info.eps * 0.51, 2.0**-149, 1e30,
            65519.0, 65520.0,
        ]  # fmt: skip
        parameter, copies = nn.Parameter(torch.tensor(numbers)), WorkingCopies(dtype)
        watch(parameter)
        made = copies.get(parameter).clone()
        check_current(copies, parameter)
        parameter.data = parameter.data.clone()
        check_current(copies, parameter)
        torch.testing.assert_close(copies.get(parameter), made, rtol=0, atol=0, equal_nan=True)
        assert copies.get(parameter)[9] == 0.0 and copies.get(parameter)[12] == 1.0, "ties go to even"
        assert torch.equal(torch.signbit(copies.get(parameter)[:2]), torch.tensor([False, True]))

    @pytest.mark.parametrize("shape", [(7,), (5, 3), (15,), (2, 3, 5), (0,)], ids=str)
    def test_of_a_parameter_of_another_shape_since(self, shape: tuple[int, ...]) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        copies.get(parameter)
        parameter.data = random(*shape, seed=1)
        copies.refresh_all([parameter])
        check_current(copies, parameter)
        assert copies.get(parameter).shape == shape and len(copies) == 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("writer", ["in place", "to .data", "through .data", "load_state_dict", "AdamW, foreach"])
    def test_of_parameters_that_nobody_watches(self, writer: str, dtype: torch.dtype) -> None:
        """As ``load_state_dict(assign=True)`` and new layers bring them."""
        parameter, copies = nn.Parameter(random(3, 5).to(dtype)), WorkingCopies(FP16)
        check_current(copies, parameter)
        WRITERS[writer](parameter)
        check_current(copies, parameter)

    def test_of_a_parameter_made_in_inference_mode(self) -> None:
        copies = WorkingCopies(FP16)
        with torch.inference_mode():
            parameter = nn.Parameter(random(3, 5))
            for _ in range(3):
                check_current(copies, parameter)
                parameter.add_(1.0)
        check_current(copies, parameter)

    def test_made_first_in_inference_mode(self) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        with torch.inference_mode():
            check_current(copies, parameter)
        assert not copies.get(parameter).is_inference()
        for refresh in (lambda: copies.refresh_all([parameter]), lambda: None):
            write_in_place(parameter)
            refresh()
            check_current(copies, parameter)


class TestOneCopy:
    def test_is_made_once_and_kept(self) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        first = copies.get(parameter)
        assert copies.get(parameter) is first
        write_in_place(parameter)
        assert copies.get(parameter) is first, "refreshed in its own memory"
        assert len(copies) == 1 and first.nbytes == 2 * 15

    @pytest.mark.parametrize("writer", ["in place", "to .data"])
    def test_is_written_once_for_each_change(self, writer: str) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        for _ in range(2):
            version = copies.get(parameter)._version
            for _ in range(3):
                copies.get(parameter)
            assert copies.get(parameter)._version == version
            WRITERS[writer](parameter)
            assert copies.get(parameter)._version == version + 1

    @pytest.mark.parametrize("kept", [True, False], ids=["alias kept", "alias dropped"])
    def test_that_backward_needs_stays_valid_when_data_was_only_read(self, kept: bool) -> None:
        """An average of the weights holds aliases for ever, and a layer may be used twice before its backward."""
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        x = random(3, 5).half().requires_grad_()
        results = [(x * copies.get(parameter)).sum()]
        alias = parameter.data if kept else parameter.data.norm()
        results += [(x * copies.get(parameter)).sum() for _ in range(2)]
        sum(results).backward()
        assert x.grad is not None and alias is not None
        torch.testing.assert_close(x.grad, 3 * copies.get(parameter))

    def test_serves_tied_weights(self) -> None:
        embedding, head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        head.weight = embedding.weight
        copies = WorkingCopies(FP16)
        assert copies.get(embedding.weight) is copies.get(head.weight)
        assert len(copies) == 1

    def test_is_released_with_its_parameter_which_it_does_not_keep_alive(self) -> None:
        module, other, copies = nn.Linear(3, 5, bias=False), watched(2), WorkingCopies(FP16)
        watch(module.weight)
        alive = [weakref.ref(module.weight), weakref.ref(copies.get(module.weight))]
        copies.get(other)
        del module
        gc.collect()
        assert [reference() for reference in alive] == [None, None]
        assert len(copies) == 1 and copies.get(other).nbytes == 4

    def test_of_many_that_come_and_go_is_never_anothers(self) -> None:
        """A new parameter may have the id of one that is gone."""
        copies = WorkingCopies(FP16)
        for value in range(50):
            parameter = nn.Parameter(torch.full((3,), float(value)))
            check_current(copies, parameter)
            del parameter
        assert len(copies) == 0

    def test_is_released_by_clear(self) -> None:
        parameter, copies = watched(3, 5), WorkingCopies(FP16)
        copies.get(parameter)
        copies.clear()
        assert len(copies) == 0
        check_current(copies, parameter)


class TestRefresh:
    @pytest.fixture
    def parameters(self) -> list[nn.Parameter]:
        return [watched(3, 5), watched(4), nn.Parameter(random(2, 2)), watched(1)]

    @pytest.fixture
    def copies(self, parameters: list[nn.Parameter]) -> WorkingCopies:
        copies = WorkingCopies(FP16)
        for parameter in parameters:
            copies.get(parameter)
        return copies

    def test_rounds_what_has_changed_into_the_copies_there_are(
        self, parameters: list[nn.Parameter], copies: WorkingCopies
    ) -> None:
        held = [copies.get(parameter) for parameter in parameters]
        versions = [copied._version for copied in held]
        for writer, parameter in zip(("in place", "through .data", "to .data"), parameters, strict=False):
            WRITERS[writer](parameter)
        assert all(map(operator.is_, map(copies.get, parameters), held))
        assert all(torch.equal(c, p.detach().half()) for p, c in zip(parameters, held, strict=True))
        assert [c._version > version for c, version in zip(held, versions, strict=True)] == [True] * 3 + [False]

    def test_all_rounds_also_what_seems_unchanged(self, parameters: list[nn.Parameter], copies: WorkingCopies) -> None:
        for parameter in parameters:
            parameter.detach().numpy()[...] += 1.0  # as a fused optimizer: no version counter rises
        assert not any(torch.equal(copies.get(p), p.detach().half()) for p in parameters)
        with torch.enable_grad():
            copies.refresh_all(parameters)
        assert all(torch.equal(copies.get(p), p.detach().half()) for p in parameters)
        assert not any(copies.get(p).requires_grad or not p.is_leaf for p in parameters)

    def test_makes_no_copies(self) -> None:
        copies = WorkingCopies(FP16)
        copies.refresh_all([watched(3)])
        assert len(copies) == 0

    def test_of_a_parameter_that_is_gone(self, parameters: list[nn.Parameter], copies: WorkingCopies) -> None:
        del parameters[1]
        gc.collect()
        copies.refresh_all(parameters)
        assert len(copies) == 3


class TestWatching:
    def test_a_watched_parameter_is_a_parameter(self) -> None:
        parameter = watched(3, 5)
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, Tensor)
        assert parameter.is_leaf and parameter.requires_grad
        assert type(parameter * 1) is Tensor
        assert nn.Linear(5, 3).register_parameter("bias", nn.Parameter(torch.zeros(3))) is None
        module = nn.Module()
        module.weight = parameter
        assert dict(module.named_parameters()) == {"weight": parameter}
        assert "Parameter containing" in repr(parameter)

    def test_unwatched_it_is_as_before(self) -> None:
        parameter = nn.Parameter(random(3))
        attributes = dict(parameter.__dict__)
        watch(parameter)
        parameter.data.add_(1.0)
        parameter.data = random(3, seed=1)
        unwatch(parameter)
        assert type(parameter) is nn.Parameter
        assert parameter.__dict__ == attributes
        assert torch.equal(parameter.data, random(3, seed=1))

    def test_twice_is_as_once_and_other_classes_are_left_as_they_are(self) -> None:
        class Special(nn.Parameter):
            pass

        for made, inside in ((nn.Parameter(random(3)), WatchedParameter), (Special(random(3)), Special)):
            kind = type(made)
            watch(made)
            watch(made)
            assert type(made) is inside
            unwatch(made)
            unwatch(made)
            assert type(made) is kind

    def test_gradients_hooks_and_attributes_stay(self) -> None:
        parameter = nn.Parameter(random(3))
        parameter.note = "mine"  # type: ignore[attr-defined]
        seen: list[Tensor] = []
        parameter.register_hook(seen.append)
        watch(parameter)
        parameter.sum().backward()
        assert torch.equal(parameter.grad, torch.ones(3)) and len(seen) == 1
        unwatch(parameter)
        assert parameter.note == "mine" and torch.equal(parameter.grad, torch.ones(3))  # type: ignore[attr-defined]

    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("read", [True, False], ids=["data was read", "data was not read"])
    def test_a_deep_copy_is_an_ordinary_parameter(self, read: bool, requires_grad: bool) -> None:
        parameter = watched(3, 5).requires_grad_(requires_grad)
        if read:
            _ = parameter.data
        module = nn.Module()
        module.one, module.other = parameter, parameter
        copied = copy.deepcopy(module)
        assert type(copied.one) is nn.Parameter and copied.one is copied.other and copied.one is not parameter
        assert torch.equal(copied.one, parameter) and copied.one.requires_grad is requires_grad
        assert copied.one.data_ptr() != parameter.data_ptr()
        assert type(parameter) is WatchedParameter

    def test_a_deep_copy_keeps_its_layout(self) -> None:
        parameter = nn.Parameter(random(3, 5).t())
        watch(parameter)
        assert copy.deepcopy(parameter).stride() == parameter.stride()

    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("read", [True, False], ids=["data was read", "data was not read"])
    @pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
    def test_pickled_it_is_an_ordinary_parameter(
        self, save: Callable[[Any, Any], None], read: bool, requires_grad: bool
    ) -> None:
        parameter = watched(3, 5).requires_grad_(requires_grad)
        parameter.note = "mine"  # type: ignore[attr-defined]
        if read:
            _ = parameter.data
        for _ in range(2):
            file = io.BytesIO()
            save(parameter, file)
            file.seek(0)
            loaded = pickle.load(file) if save is pickle.dump else torch.load(file, weights_only=False)
            assert type(loaded) is nn.Parameter and torch.equal(loaded, parameter)
            assert loaded.requires_grad is requires_grad and loaded.__dict__ == {"note": "mine"}
        assert type(parameter) is WatchedParameter

    def test_a_state_dict_holds_ordinary_tensors(self) -> None:
        module = nn.Linear(3, 5)
        for parameter in module.parameters():
            watch(parameter)
            _ = parameter.data
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert {name: type(value) for name, value in loaded.items()} == {"weight": Tensor, "bias": Tensor}

    def test_torchs_optimizers_take_it_for_a_parameter_of_their_fast_paths(self) -> None:
        assert type(watched(3)) in optimizer._foreach_supported_types


def test_frozen_parameters_are_not_rounded_at_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    copies = WorkingCopies(torch.float16)
    copies.get(frozen), copies.get(trained)
    with torch.no_grad():
        frozen.add_(1.0)
        trained.add_(1.0)
    refreshed: list[int] = []
    original = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (refreshed.append(len(to)), original(to, of)))
    copies.refresh_all([frozen, trained])
    assert refreshed == [1]
    assert torch.equal(copies.get(frozen), frozen.half())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_product_of_ours_does_not_compare_its_weight_with_the_copy_at_every_step(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The alias inside shares the weight's memory, which must not look as if somebody could write it unseen.
    monkeypatch.setattr(products, "OWN_ELEMENTS", 0)
    monkeypatch.setattr(handlers, "OWN_ELEMENTS", 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    compared: list[nn.Parameter] = []
    refresh = working_copies._refresh_if_changed
    monkeypatch.setattr(working_copies, "_refresh_if_changed", lambda entry, p: (compared.append(p), refresh(entry, p)))
    for step in range(4):
        if step == 2:  # the first that reads it may have to look
            compared.clear()
        model(random(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not compared
    model[0].weight.data.mul_(2.0)
    model(random(3, 4))
    assert [id(parameter) for parameter in compared] == [id(model[0].weight)]

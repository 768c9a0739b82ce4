import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Using
from torch import Tensor, nn
from torch.optim import optimizer

from hf_mp.casting.data_tracking import DataTrackedParameter, track_data_writes, untrack_data_writes
from hf_mp.weights.working_copies import WorkingCopies

FP16, BF16 = torch.float16, torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tracked(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(random(*shape))
    track_data_writes(parameter)
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


def write(parameter: nn.Parameter, context: Callable[[], Any] = torch.no_grad) -> None:
    value = nudge(parameter)
    with context():
        parameter.copy_(value)


def in_a_module(parameter: nn.Parameter) -> nn.Module:
    return Using(lambda m: None, weight=parameter)


def step(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Parameter], None]:
    def stepped(parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones_like(parameter)
        make([parameter], lr=0.5, **settings).step()

    return stepped


WRITERS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": write,
    "in place, in inference mode": lambda p: write(p, torch.inference_mode),
    "through .data": lambda p: p.data.copy_(nudge(p)),
    "through a part of .data": lambda p: p.data.view(-1)[1:].add_(1.0),
    "to .data": lambda p: setattr(p, "data", nudge(p)),
    "to .data, twice": lambda p: [setattr(p, "data", nudge(p)) for _ in range(2)],
    "to .data, transposed": lambda p: setattr(p, "data", p.data.t().contiguous().t() + 1.0),
    "through .detach()": lambda p: p.detach().copy_(nudge(p)),
    "load_state_dict": lambda p: in_a_module(p).load_state_dict({"weight": nudge(p)}),
    "Module.double and back": lambda p: in_a_module(p).double().apply(lambda m: m.weight.data.add_(1.0)).float(),
    "SGD": step(torch.optim.SGD, foreach=False),
    "SGD, foreach": step(torch.optim.SGD, foreach=True, momentum=0.9),
    "AdamW, foreach": step(torch.optim.AdamW, foreach=True),
    "Adagrad": step(torch.optim.Adagrad),
}


ALIASES: dict[str, Callable[[nn.Parameter], Any]] = {
    "kept": lambda p: p.data,
    "view": lambda p: p.data.view(-1),
    "[1:]": lambda p: p.data[1:],
    "t": lambda p: p.data.t(),
    "not the last one": lambda p: (p.data, p.data.shape)[0],
    "detach": lambda p: p.data.detach(),
    "numpy": lambda p: p.data.numpy(),
}


def test_a_graph_that_saved_a_copy_notices_that_a_kernel_wrote_it() -> None:
    weight, copies = tracked(4, 4), WorkingCopies(BF16)
    y = random(2, 4).bfloat16().requires_grad_() @ copies.get(weight)
    copies.note_written([weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class TestTheCopyIsTheParameterRounded:
    @every_dtype
    @pytest.mark.parametrize("writer", WRITERS)
    def test_after_every_way_of_writing(self, writer: str, dtype: torch.dtype) -> None:
        parameter, copies = tracked(3, 5), WorkingCopies(dtype)
        check_current(copies, parameter)
        for _ in range(3):
            before = copies.get(parameter).clone()
            WRITERS[writer](parameter)
            check_current(copies, parameter)
            assert not torch.equal(copies.get(parameter), before), "the test wrote nothing"

    @pytest.mark.parametrize("alias", ALIASES)
    def test_through_an_alias(self, alias: str) -> None:
        parameter, copies = tracked(3, 5), WorkingCopies(FP16)
        made = ALIASES[alias](parameter)
        for _ in range(4):
            check_current(copies, parameter)
            check_current(copies, parameter)
            made += 1.0
            check_current(copies, parameter)

    @pytest.mark.parametrize("shape", [(7,), (5, 3), (15,), (2, 3, 5), (0,)], ids=str)
    def test_of_a_parameter_of_another_shape_since(self, shape: tuple[int, ...]) -> None:
        parameter, copies = tracked(3, 5), WorkingCopies(FP16)
        copies.get(parameter)
        parameter.data = random(*shape, seed=1)
        copies.refresh_all([parameter])
        check_current(copies, parameter)
        assert copies.get(parameter).shape == shape and len(copies) == 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("writer", ["in place", "to .data", "through .data", "load_state_dict", "AdamW, foreach"])
    def test_of_parameters_that_are_not_tracked(self, writer: str, dtype: torch.dtype) -> None:
        """As ``load_state_dict(assign=True)`` and new layers bring them."""
        parameter, copies = nn.Parameter(random(3, 5).to(dtype)), WorkingCopies(FP16)
        check_current(copies, parameter)
        assert type(parameter) is DataTrackedParameter  # from now on
        WRITERS[writer](parameter)
        check_current(copies, parameter)

    def test_made_first_in_inference_mode(self) -> None:
        parameter, copies = tracked(3, 5), WorkingCopies(FP16)
        with torch.inference_mode():
            check_current(copies, parameter)
        assert not copies.get(parameter).is_inference()
        for refreshed in ([parameter], []):
            write(parameter)
            copies.refresh_all(refreshed)
            check_current(copies, parameter)


class TestOneCopy:
    @pytest.mark.parametrize("writer", ["in place", "to .data"])
    def test_is_made_once_and_written_once_for_each_change(self, writer: str) -> None:
        parameter, copies = tracked(3, 5), WorkingCopies(FP16)
        first = copies.get(parameter)
        for _ in range(2):
            version = first._version
            assert all(copies.get(parameter) is first for _ in range(3)) and first._version == version
            WRITERS[writer](parameter)
            assert copies.get(parameter) is first and first._version == version + 1
        copies.clear()
        assert len(copies) == 0 and type(parameter) is nn.Parameter

    @pytest.mark.parametrize("kept", [True, False], ids=["alias kept", "alias dropped"])
    def test_that_backward_needs_stays_valid_when_data_was_only_read(self, kept: bool) -> None:
        """An average of the weights holds aliases for ever, and a layer may be used twice before its backward."""
        parameter, copies = tracked(3, 5), WorkingCopies(FP16)
        x = random(3, 5).half().requires_grad_()
        results = [(x * copies.get(parameter)).sum()]
        alias = parameter.data if kept else parameter.data.norm()
        results += [(x * copies.get(parameter)).sum() for _ in range(2)]
        sum(results).backward()
        assert x.grad is not None and alias is not None
        torch.testing.assert_close(x.grad, 3 * copies.get(parameter))

    def test_is_released_with_its_parameter_which_it_does_not_keep_alive(self) -> None:
        module, other, copies = nn.Linear(3, 5, bias=False), tracked(2), WorkingCopies(FP16)
        track_data_writes(module.weight)
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


def test_refresh_all_rounds_what_is_trained_also_where_it_seems_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fused optimizer leaves it, which raises no version counter."""
    frozen, trained, gone, without_copy = tracked(3).requires_grad_(False), tracked(3, 5), tracked(4), tracked(2)
    copies, refreshed, original = WorkingCopies(FP16), list[int](), torch._foreach_copy_
    for parameter in (frozen, trained, gone):
        copies.get(parameter)
        parameter.detach().numpy()[...] += 1.0
    del gone, parameter
    gc.collect()
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (refreshed.append(len(to)), original(to, of)))
    assert not torch.equal(copies.get(trained), trained.half())
    copies.refresh_all([frozen, trained, without_copy])
    assert refreshed == [1] and len(copies) == 2
    check_current(copies, trained)


class TestWatching:
    def test_a_torch_that_lists_no_classes_of_fast_parameters_costs_one_warning(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(optimizer, "_foreach_supported_types")
        with pytest.warns(UserWarning, match="optimizers update tensor by tensor"):
            check_current(WorkingCopies(FP16), nn.Parameter(torch.ones(3)))

    def test_a_tracked_parameter_is_a_parameter(self) -> None:
        parameter = tracked(3, 5)
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, Tensor)
        assert parameter.is_leaf and parameter.requires_grad
        assert type(parameter * 1) is Tensor
        assert dict(in_a_module(parameter).named_parameters()) == {"weight": parameter}
        assert "Parameter containing" in repr(parameter)
        assert type(parameter) in optimizer._foreach_supported_types  # torch's optimizers keep their fast paths

    def test_untracked_it_is_as_before(self) -> None:
        parameter = nn.Parameter(random(3))
        parameter.note = "mine"  # type: ignore[attr-defined]
        track_data_writes(parameter)
        parameter.sum().backward()
        parameter.data = random(3, seed=1)
        untrack_data_writes(parameter)
        assert type(parameter) is nn.Parameter and parameter.__dict__ == {"note": "mine"}
        assert torch.equal(parameter.data, random(3, seed=1)) and torch.equal(parameter.grad, torch.ones(3))

    def test_twice_is_as_once_and_other_classes_are_left_as_they_are(self) -> None:
        class Special(nn.Parameter):
            pass

        for made, inside in ((nn.Parameter(random(3)), DataTrackedParameter), (Special(random(3)), Special)):
            kind = type(made)
            track_data_writes(made)
            track_data_writes(made)
            assert type(made) is inside
            untrack_data_writes(made)
            untrack_data_writes(made)
            assert type(made) is kind

    def test_an_untracked_weight_is_not_compared_with_its_copy_at_each_use(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Special(nn.Parameter):
            pass

        parameter, copies = Special(random(3, 5)), WorkingCopies(torch.float16)
        copies.get(parameter)
        monkeypatch.setattr(torch, "equal", lambda *tensors: pytest.fail("the host would wait for the device"))
        assert copies.get(parameter) is copies.get_all([parameter])[id(parameter)]

    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("read", [True, False], ids=["data was read", "data was not read"])
    @pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
    def test_pickled_it_is_an_ordinary_parameter(
        self, save: Callable[[Any, Any], None], read: bool, requires_grad: bool
    ) -> None:
        parameter = tracked(3, 5).requires_grad_(requires_grad)
        parameter.note = "mine"  # type: ignore[attr-defined]
        if read:
            _ = parameter.data
        file = io.BytesIO()
        save(parameter, file)
        file.seek(0)
        loaded = pickle.load(file) if save is pickle.dump else torch.load(file, weights_only=False)
        assert type(loaded) is nn.Parameter and torch.equal(loaded, parameter)
        assert loaded.requires_grad is requires_grad and loaded.__dict__ == {"note": "mine"}
        assert type(parameter) is DataTrackedParameter

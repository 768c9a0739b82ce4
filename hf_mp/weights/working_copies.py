"""Working copies: the FP16/BF16 roundings of the master weights that lower-precision ops read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from hf_mp._warnings import warn_caller
from hf_mp.casting.active import state
from hf_mp.kernels.tensors import is_shared, version_of

_DATA: Any = Tensor.data  # the property itself, which the class below overrides


class WatchedParameter(nn.Parameter):
    """A parameter that notices writes through ``.data``.

    In-place writes raise a tensor's version counter, but not those through ``parameter.data`` (EMA libraries, manual
    surgery). Each read of ``.data`` hands out an alias; from then on, and for as long as anything shares the memory
    (the alias, a view or a NumPy array made of it), the value may change unseen.
    """

    _data_was_out: bool = False

    @property
    def data(self) -> Tensor:
        self._expose_data()
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._expose_data()  # memory that is freed may come back at the address of the old value
        _DATA.__set__(self, value)

    def _expose_data(self) -> None:
        self._data_was_out = True
        if (forward := state.forward) is not None and forward.weights is not None:
            forward.weights.slots.invalidate(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if key != "_data_was_out"})
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def may_have_changed_unseen(self) -> bool:
        """Whether ``.data`` was read or set since the last call, or what was made of it still lives."""
        changed = self._data_was_out
        if changed:
            self._data_was_out = is_shared(self)
        return changed


def is_master(weight: Tensor) -> TypeGuard[nn.Parameter]:
    """Whether ``weight`` is one of which there are working copies: an FP32 parameter."""
    return weight.dtype is torch.float32 and isinstance(weight, nn.Parameter)


def let_optimizers_be_fast(kind: type[nn.Parameter]) -> None:
    """Have torch's optimizers use their multi-tensor implementations for parameters of ``kind`` as well."""
    types = getattr(optimizers, "_foreach_supported_types", None)
    if types is None:
        warn_caller("torch.optim has no _foreach_supported_types: optimizers update tensor by tensor, which is slower")
    elif kind not in types:
        types.append(kind)


def watch(parameter: nn.Parameter) -> None:
    """Notice writes through ``parameter.data`` from now on. Subclasses of ``nn.Parameter`` are left as they are."""
    if type(parameter) is nn.Parameter:
        # torch.optim looks up the exact class of parameters before it takes a multi-tensor path.
        let_optimizers_be_fast(WatchedParameter)
        parameter.__class__ = WatchedParameter
        # A parameter within a larger buffer is written through that, as FSDP does.
        parameter._data_was_out = is_shared(parameter)  # type: ignore[attr-defined]


def unwatch(parameter: nn.Parameter) -> None:
    """Make a watched parameter an ordinary ``nn.Parameter`` again."""
    if type(parameter) is WatchedParameter:
        parameter.__dict__.pop("_data_was_out", None)
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def seen(parameter: Tensor) -> tuple[int, int]:
    """Version and address, by which a later look tells most writes."""
    return version_of(parameter), parameter.data_ptr()


@dataclass
class _Entry:
    parameter: weakref.ref[nn.Parameter]
    copy: Tensor
    seen: tuple[int, int]  # of the parameter, when the copy was made


class WorkingCopies:
    """One FP16/BF16 copy per parameter, made when a forward first asks for it and refreshed when the parameter changed.

    Outside of ``optimizer.step()``, a copy that :meth:`get` returns equals its parameter rounded to nearest, whatever
    wrote the parameter. Tied weights have one copy. A copy is released with its parameter.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._entries

    def get_all(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        """By the identity of FP32 masters among ``weights``, their working copies, as of :meth:`get`."""
        found = {}
        for weight in weights:
            entry = self._entries.get(id(weight))
            if (  # as nearly always, nobody has written it
                entry is not None
                and type(weight) is WatchedParameter
                and not weight._data_was_out  # shape and device change by way of .data, or of the version
                and entry.seen[0] != -1
                and entry.seen == (weight._version, weight.data_ptr())
            ):
                found[id(weight)] = entry.copy
            elif is_master(weight):
                found[id(weight)] = self.get(weight)
        return found

    def get(self, parameter: nn.Parameter) -> Tensor:
        """The working copy of ``parameter``, a tensor of its shape without grad; do not write to it."""
        entry = self._entries.get(id(parameter))
        if entry is None or entry.copy.shape != parameter.shape or entry.copy.device != parameter.device:
            return self._make(parameter).copy
        if entry.seen[0] == -1 or entry.seen != seen(parameter):
            _refresh([(entry, parameter)])
        elif type(parameter) is nn.Parameter or getattr(parameter, "may_have_changed_unseen", bool)():
            watch(parameter)  # again, where another model that has it was detached
            _refresh_if_changed(entry, parameter)
        return entry.copy

    def is_stale(self, weight: Tensor) -> bool:
        """Whether ``weight`` was written in place since its copy was made; False if it has none."""
        entry = self._entries.get(id(weight))
        return entry is not None and entry.seen[0] != -1 and entry.seen != (weight._version, weight.data_ptr())

    def refresh_all(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round ``parameters``, which an optimizer had gradients of, into their copies, in one fused pass.

        Stale or not: optimizers that write through ``.data`` or in a kernel of their own raise no version counter.
        Other parameters wait until :meth:`get` finds them changed: the base under an adapter is not read at every step,
        and a graph may have saved their copies (a generator's, while its discriminator is updated).
        """
        found = []
        for parameter in parameters:
            entry = self._entries.get(id(parameter))
            if entry is not None and parameter.requires_grad and entry.copy.shape == parameter.shape:
                found.append((entry, parameter))
        _refresh(found)

    def copies_of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """The copies that ``parameters`` have, whether or not they are fresh, for a kernel that writes both."""
        entries = [self._entries.get(id(parameter)) for parameter in parameters]
        return [None if entry is None else entry.copy for entry in entries]

    def note_written(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take in that ``parameters`` and their copies were written by a kernel, which raises no version counter."""
        parameters = list(parameters)
        found = [(entry, p) for p in parameters if (entry := self._entries.get(id(p))) is not None]
        torch.autograd.graph.increment_version([*parameters, *[entry.copy for entry, _ in found]])
        for entry, parameter in found:
            entry.seen = parameter._version, parameter.data_ptr()  # seen(), inlined

    def clear(self) -> None:
        """Release all copies, and leave the parameters as ordinary ones."""
        for entry in list(self._entries.values()):
            if (parameter := entry.parameter()) is not None:
                unwatch(parameter)
        self._entries.clear()

    def _make(self, parameter: nn.Parameter) -> _Entry:
        """Make the copy of ``parameter``, to be kept as long as the parameter lives."""
        watch(parameter)
        key = id(parameter)
        entries = self._entries

        def release(reference: weakref.ref[nn.Parameter]) -> None:
            # The address may belong to another parameter by now.
            if key in entries and entries[key].parameter is reference:
                del entries[key]

        # A new tensor even where nothing needs rounding: a copy never shares memory with its master. And one that can
        # be written and differentiated later, also if generate() is the first to ask.
        with torch.inference_mode(False):
            copy = parameter.detach().to(self.dtype, copy=True)
        entry = _Entry(weakref.ref(parameter, release), copy, seen(parameter))
        entries[key] = entry
        return entry


@torch.no_grad()
def _refresh_if_changed(entry: _Entry, parameter: nn.Parameter) -> None:
    # A graph may have saved the copy: writing the same value again would only spoil its backward. Bits are compared,
    # because NaN does not equal itself.
    rounded = parameter.detach().to(entry.copy.dtype)
    if not torch.equal(rounded.view(torch.int16), entry.copy.view(torch.int16)):
        entry.copy.copy_(rounded)


@torch.no_grad()
def _refresh(pairs: list[tuple[_Entry, nn.Parameter]]) -> None:
    if pairs:
        torch._foreach_copy_([entry.copy for entry, _ in pairs], [parameter for _, parameter in pairs])
    for entry, parameter in pairs:
        entry.seen = (-1 if parameter.is_inference() else parameter._version), parameter.data_ptr()  # seen(), inlined

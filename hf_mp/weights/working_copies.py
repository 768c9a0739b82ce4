"""Working copies: the FP16/BF16 roundings of the master weights that lower-precision ops read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from hf_mp.casting.watched import DataTrackedParameter, track_data_writes, untrack_data_writes, version_and_address


def is_master(weight: Tensor) -> TypeGuard[nn.Parameter]:
    """Whether ``weight`` is one of which there are working copies: an FP32 parameter."""
    return weight.dtype is torch.float32 and isinstance(weight, nn.Parameter)


@dataclass
class _Entry:
    parameter: weakref.ref[nn.Parameter]
    copy: Tensor
    seen: tuple[int, int, int]  # of the parameter, when the copy was made


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
                and type(weight) is DataTrackedParameter
                and not weight._data_was_exposed  # shape and device change by way of .data, or of the version
                and entry.seen[0] != -1
                and entry.seen == (weight._version, weight.data_ptr(), weight._unseen_writes)
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
        is_unwatched = type(parameter) is nn.Parameter  # again: another model that has it was detached
        track_data_writes(parameter)
        if entry.seen == (now := version_and_address(parameter)) and now[0] != -1 and not is_unwatched:
            return entry.copy
        if entry.seen[:2] == now[:2] and now[0] != -1:
            _refresh_if_changed(entry, parameter)
            entry.seen = now
        else:
            _refresh([(entry, parameter)])
        return entry.copy

    def is_stale(self, weight: Tensor) -> bool:
        """Whether ``weight`` was written in place since its copy was made; False if it has none."""
        entry = self._entries.get(id(weight))
        return entry is not None and entry.seen[0] != -1 and entry.seen[:2] != (weight._version, weight.data_ptr())

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

    def refresh(self) -> None:
        """Round all parameters that have copies into them again, also those that no counter shows to be written."""
        for entry in list(self._entries.values()):
            if (parameter := entry.parameter()) is not None and self.get(parameter) is entry.copy:
                _refresh_if_changed(entry, parameter)

    def note_unseen_writes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take in that ``parameters`` may have been written without a trace: :meth:`get` compares their copies."""
        for parameter in parameters:
            if (entry := self._entries.get(id(parameter))) is None:
                continue
            if isinstance(parameter, DataTrackedParameter):
                parameter.note_unseen_write()
            else:
                entry.seen = -1, 0, 0

    def differ(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a copy is not its parameter rounded to nearest; True if none of ``parameters`` has a copy."""
        found = [(entry, one) for one in parameters if (entry := self._entries.get(id(one))) is not None]
        return not found or any(_has_changed(entry, parameter) for entry, parameter in found)

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
            unseen = parameter._unseen_writes if type(parameter) is DataTrackedParameter else 0
            entry.seen = parameter._version, parameter.data_ptr(), unseen  # version_and_address(), inlined

    def clear(self) -> None:
        """Release all copies, and leave the parameters as ordinary ones."""
        for entry in list(self._entries.values()):
            if (parameter := entry.parameter()) is not None:
                untrack_data_writes(parameter)
        self._entries.clear()

    def _make(self, parameter: nn.Parameter) -> _Entry:
        """Make the copy of ``parameter``, to be kept as long as the parameter lives."""
        track_data_writes(parameter)
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
        entry = _Entry(weakref.ref(parameter, release), copy, version_and_address(parameter))
        entries[key] = entry
        return entry


def _refresh_if_changed(entry: _Entry, parameter: nn.Parameter) -> None:
    # A graph may have saved the copy: writing the same value again would only spoil its backward.
    if _has_changed(entry, parameter):
        _refresh([(entry, parameter)])


@torch.no_grad()
def _has_changed(entry: _Entry, parameter: nn.Parameter) -> bool:
    # Bits are compared, because NaN does not equal itself.
    rounded = parameter.detach().to(entry.copy.dtype)
    if rounded.shape != entry.copy.shape or rounded.device != entry.copy.device:
        return True
    return not torch.equal(rounded.view(torch.int16), entry.copy.view(torch.int16))


@torch.no_grad()
def _refresh(pairs: list[tuple[_Entry, nn.Parameter]]) -> None:
    if pairs:
        torch._foreach_copy_([entry.copy for entry, _ in pairs], [parameter for _, parameter in pairs])
    for entry, parameter in pairs:
        entry.seen = version_and_address(parameter)

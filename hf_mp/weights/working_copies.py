"""``WorkingCopies``: one for each master weight."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from hf_mp.casting.data_tracking import (
    DataTrackedParameter,
    track_data_writes,
    untrack_data_writes,
    version_and_address,
)


def is_master(weight: Tensor) -> TypeGuard[nn.Parameter]:
    """Whether ``weight`` is an FP32 parameter, so that it may have a working copy."""
    return weight.dtype is torch.float32 and isinstance(weight, nn.Parameter)


@dataclass
class _Entry:
    parameter: weakref.ref[nn.Parameter]
    copy: Tensor
    source: tuple[int, int, int]  # version_and_address() of the parameter when the copy was made


class WorkingCopies:
    """One FP16/BF16 copy for each parameter, released with it.

    Outside of ``optimizer.step()``, the result of :meth:`get` is the parameter rounded to nearest, whatever code wrote
    the parameter.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._entries

    def get_all(self, weights: Iterable[Tensor]) -> dict[int, Tensor]:
        """Return the working copies of FP32 masters among ``weights``, by the identity of the master."""
        found = {}
        for weight in weights:
            entry = self._entries.get(id(weight))
            if (  # unchanged: the test of get(), inlined
                entry is not None
                and type(weight) is DataTrackedParameter
                and not weight._data_was_exposed  # shape and device change only through .data, or with the version
                and entry.source[0] != -1
                and entry.source == (weight._version, weight.data_ptr(), weight._unseen_writes)
            ):
                found[id(weight)] = entry.copy
            elif is_master(weight):
                found[id(weight)] = self.get(weight)
        return found

    def get(self, parameter: nn.Parameter) -> Tensor:
        """Return the current copy of ``parameter``, of its shape and without grad; do not write to it."""
        entry = self._entries.get(id(parameter))
        if entry is None or entry.copy.shape != parameter.shape or entry.copy.device != parameter.device:
            return self._make(parameter).copy
        was_untracked = type(parameter) is nn.Parameter  # another model with this parameter was detached
        track_data_writes(parameter)
        now = version_and_address(parameter)  # version -1: an inference tensor, of which writes are not counted
        may_be_unchanged = now[0] != -1 and entry.source[:2] == now[:2]
        if not may_be_unchanged:
            _refresh([(entry, parameter)])
        elif was_untracked or entry.source != now:  # the third item counts writes through .data: compare the values
            _refresh_if_changed(entry, parameter)
            entry.source = now
        return entry.copy

    def is_stale(self, weight: Tensor) -> bool:
        """Whether ``weight`` has a copy, and was written in place since."""
        entry = self._entries.get(id(weight))
        return entry is not None and entry.source[0] != -1 and entry.source[:2] != (weight._version, weight.data_ptr())

    def refresh_all(self, parameters: Iterable[nn.Parameter]) -> None:
        """Round ``parameters``, which an optimizer has updated (maybe undetectably), into their copies.

        :meth:`get` refreshes others, which a graph may have saved (of a generator, in a step of its discriminator).
        """
        found = self._entries_of(parameters)
        _refresh([(entry, p) for entry, p in found if p.requires_grad and entry.copy.shape == p.shape])

    def refresh(self) -> None:
        """Round all parameters into their copies, also after undetectable writes."""
        for entry in list(self._entries.values()):
            if (parameter := entry.parameter()) is not None and self.get(parameter) is entry.copy:
                _refresh_if_changed(entry, parameter)

    def note_unseen_writes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have :meth:`get` compare the copies of ``parameters``, which may have been written undetectably."""
        for entry, parameter in self._entries_of(parameters):
            if isinstance(parameter, DataTrackedParameter):
                parameter.note_unseen_write()
            else:
                entry.source = -1, 0, 0

    def differ(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a copy is not its parameter rounded to nearest; True if none of ``parameters`` has a copy."""
        found = self._entries_of(parameters)
        return not found or any(_has_changed(entry, parameter) for entry, parameter in found)

    def copies_of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """Return the copies of ``parameters``, stale or not; None for those without."""
        entries = [self._entries.get(id(parameter)) for parameter in parameters]
        return [None if entry is None else entry.copy for entry in entries]

    def note_written(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record that a kernel, which raises no version counter, wrote ``parameters`` and their copies."""
        parameters = list(parameters)
        found = self._entries_of(parameters)
        torch.autograd.graph.increment_version([*parameters, *[entry.copy for entry, _ in found]])
        for entry, parameter in found:
            unseen = parameter._unseen_writes if type(parameter) is DataTrackedParameter else 0
            entry.source = parameter._version, parameter.data_ptr(), unseen  # version_and_address(), inlined

    def _entries_of(self, parameters: Iterable[nn.Parameter]) -> list[tuple[_Entry, nn.Parameter]]:
        return [(entry, p) for p in parameters if (entry := self._entries.get(id(p))) is not None]

    def clear(self) -> None:
        """Release all copies, and stop tracking writes to the parameters."""
        for entry in list(self._entries.values()):
            if (parameter := entry.parameter()) is not None:
                untrack_data_writes(parameter)
        self._entries.clear()

    def _make(self, parameter: nn.Parameter) -> _Entry:
        track_data_writes(parameter)
        key, entries = id(parameter), self._entries

        def release(reference: weakref.ref[nn.Parameter]) -> None:
            # A new parameter may have the same id.
            if key in entries and entries[key].parameter is reference:
                del entries[key]

        # Not an inference tensor, even if generate() is the first use.
        with torch.inference_mode(False):
            copy = parameter.detach().to(self.dtype, copy=True)
        entry = entries[key] = _Entry(weakref.ref(parameter, release), copy, version_and_address(parameter))
        return entry


def _refresh_if_changed(entry: _Entry, parameter: nn.Parameter) -> None:
    # A graph may have saved the copy, and raises even if equal values were written.
    if _has_changed(entry, parameter):
        _refresh([(entry, parameter)])


@torch.no_grad()
def _has_changed(entry: _Entry, parameter: nn.Parameter) -> bool:
    rounded = parameter.detach().to(entry.copy.dtype)
    if rounded.shape != entry.copy.shape or rounded.device != entry.copy.device:
        return True
    return not torch.equal(rounded.view(torch.int16), entry.copy.view(torch.int16))  # NaN does not equal itself


@torch.no_grad()
def _refresh(pairs: list[tuple[_Entry, nn.Parameter]]) -> None:
    if pairs:
        torch._foreach_copy_([entry.copy for entry, _ in pairs], [parameter for _, parameter in pairs])
    for entry, parameter in pairs:
        entry.source = version_and_address(parameter)

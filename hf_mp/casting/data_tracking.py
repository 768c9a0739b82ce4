"""``DataTrackedParameter``: a parameter that counts writes through ``.data``, which its version counter does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from hf_mp._warnings import warn_caller
from hf_mp.casting.autocast_stack import state
from hf_mp.kernels.tensors import is_shared

_DATA: Any = Tensor.data


class DataTrackedParameter(nn.Parameter):
    """A parameter that counts accesses to ``.data`` (by EMA libraries, manual surgery).

    Writes through ``.data`` do not raise the version counter. They are possible as long as a result of ``.data``, or a
    view or NumPy array of one, shares the memory.
    """

    _data_was_exposed: bool = False
    _unseen_writes: int = 0

    @property
    def data(self) -> Tensor:
        self._data_was_exposed = True
        self.note_unseen_write()
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self._data_was_exposed = True
        self.note_unseen_write()  # the new value may have the address of the old one
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if key not in _OWN})
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def note_unseen_write(self) -> None:
        """Count a possible write. A running forward no longer uses the working copy."""
        self._unseen_writes += 1
        if (forward := state.forward) is not None and forward.weights is not None:
            forward.weights.slots.invalidate(self)


_OWN = ("_data_was_exposed", "_unseen_writes")


def allow_foreach_optimizers(kind: type[nn.Parameter]) -> None:
    """Make torch's optimizers use multi-tensor kernels for parameters of ``kind``."""
    types = getattr(optimizers, "_foreach_supported_types", None)
    if types is None:
        warn_caller("torch.optim has no _foreach_supported_types: optimizers update tensor by tensor, which is slower")
    elif kind not in types:
        types.append(kind)


def track_data_writes(parameter: nn.Parameter) -> None:
    """Count accesses to ``parameter.data``, unless it is of a subclass of ``nn.Parameter``."""
    if type(parameter) is nn.Parameter:
        allow_foreach_optimizers(DataTrackedParameter)
        parameter.__class__ = DataTrackedParameter
        # A parameter in a larger buffer is written through the buffer, as in FSDP.
        parameter._data_was_exposed = is_shared(parameter)  # type: ignore[attr-defined]


def untrack_data_writes(parameter: nn.Parameter) -> None:
    if type(parameter) is DataTrackedParameter:
        for name in _OWN:
            parameter.__dict__.pop(name, None)
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def version_and_address(tensor: Tensor) -> tuple[int, int, int]:
    """Return the version (-1 for none), address and count of unseen writes. Most writes change one."""
    unseen = 0
    if type(tensor) is DataTrackedParameter:
        if tensor._data_was_exposed:  # an alias may have been written, and may be again
            tensor._data_was_exposed = is_shared(tensor)
            tensor._unseen_writes += 1
        unseen = tensor._unseen_writes
    version = -1 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), unseen

"""What other code asks torch about autocast, answered for ours.

Models carve FP32 islands out of autocast (``with torch.autocast(device, enabled=False)``: rotary embeddings, routers)
and choose dtypes by ``torch.is_autocast_enabled`` and ``torch.get_autocast_dtype``. Inside our autocast all these speak
of ours; outside of it they are torch's own. Installed once, when autocast is first imported, because torch.compile
traces code that enters autocast and cannot trace the patching of a module.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch._dynamo  # first: the compiler must know the functions that are replaced here as torch has them

from hf_mp.casting.active import BOTH_ACTIVE
from hf_mp.casting.tables import TableName


class ActiveAutocast(Protocol):
    """What is asked of the innermost autocast."""

    dtype: torch.dtype
    enabled: bool
    tables: TableName

    def island(self) -> AbstractContextManager[Any]:
        """An autocast inside this one that is switched off."""


is_torch_autocast_enabled = torch.is_autocast_enabled  # torch's own answer, whatever is patched below

# Of torch's own code only these ask on behalf of a model; the compiler and checkpointing keep torch's own state.
_ASK_FOR_MODELS = ("torch.amp.autocast_mode", "torch.nn.modules.")


def install(active: Callable[[], ActiveAutocast | None]) -> None:
    """Let torch's questions about autocast be answered for ours.

    Args:
        active: the innermost autocast of the calling thread, or None.
    """
    torch_dtype = torch.get_autocast_dtype
    make, enter, leave = torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__

    @functools.wraps(is_torch_autocast_enabled)
    def is_autocast_enabled(*args: Any, **kwargs: Any) -> bool:
        ours = _answering(active)
        if ours is None:
            return is_torch_autocast_enabled(*args, **kwargs)
        # torch's attention and encoder layers leave their fast path where CUDA's autocast is enabled, not the CPU's.
        asks_for_cuda = not args and not kwargs and _asker(1).startswith("torch.nn.modules.")
        return ours.enabled and not (asks_for_cuda and ours.tables == "cpu")

    # A mode alone is no tensor argument with a torch function, which is what they ask for.
    has_torch_function = torch.overrides.has_torch_function

    @functools.wraps(has_torch_function)
    def has_other_torch_function(args: Any) -> bool:
        if torch.compiler.is_dynamo_compiling() or not _asker(1).startswith("torch.nn.modules."):
            return has_torch_function(args)
        ours = active()
        if ours is None or ours.tables != "cpu":
            return has_torch_function(args)
        with torch.overrides._pop_mode_temporarily():
            return has_torch_function(args)

    @functools.wraps(torch_dtype)
    def get_autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
        ours = _answering(active)
        return torch_dtype(*args, **kwargs) if ours is None else ours.dtype

    @functools.wraps(make)
    def make_autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        make(self, device_type, dtype, enabled, *args, **kwargs)
        self._hf_mp_wanted = enabled  # torch switches it off where the device is missing

    @functools.wraps(enter)
    def enter_autocast(self: Any) -> Any:
        ours = active()
        if ours is None:
            return enter(self)
        if self.__dict__.get("_hf_mp_wanted", self._enabled):
            raise RuntimeError(BOTH_ACTIVE)
        island = ours.island()
        self.__dict__.setdefault("_hf_mp_islands", []).append(island)
        return island.__enter__()

    @functools.wraps(leave)
    def leave_autocast(self: Any, *exc_info: Any) -> Any:
        islands = self.__dict__.get("_hf_mp_islands")
        return islands.pop().__exit__(*exc_info) if islands else leave(self, *exc_info)

    # nn.LSTM and its kin ask this before they complain of mixed dtypes.
    is_any_enabled = torch._C._is_any_autocast_enabled

    @functools.wraps(is_any_enabled)
    def is_any_autocast_enabled() -> bool:
        ours = _answering(active)
        return is_any_enabled() if ours is None else ours.enabled

    for asked, answered in (
        (is_torch_autocast_enabled, is_autocast_enabled),
        (torch_dtype, get_autocast_dtype),
    ):  # torch.jit.script compiles torch.autocast, and looks its questions up in a table by identity
        if (op := torch.jit._builtins._find_builtin(asked)) is not None:
            torch.jit._builtins._register_builtin(answered, op)
    torch.overrides.has_torch_function = has_other_torch_function
    torch._C._is_any_autocast_enabled = is_any_autocast_enabled
    torch.is_autocast_enabled = is_autocast_enabled
    torch.get_autocast_dtype = get_autocast_dtype
    torch.autocast.__init__ = make_autocast  # type: ignore[method-assign]
    torch.autocast.__enter__ = enter_autocast  # type: ignore[method-assign]
    torch.autocast.__exit__ = leave_autocast  # type: ignore[method-assign]


def _asker(depth: int) -> str:
    """The module of the function so many calls above the caller of this one."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__", ""))


def _answering(active: Callable[[], ActiveAutocast | None]) -> ActiveAutocast | None:
    """The autocast that answers a question, for the function that it was put to; None where torch itself answers."""
    ours = active()
    if ours is None or torch.compiler.is_dynamo_compiling():  # a compiler traces models only
        return ours
    asking = _asker(2)
    for_a_model = not asking.startswith("torch.") or asking.startswith(_ASK_FOR_MODELS)
    return ours if for_a_model else None


def install_in_transformers(active: Callable[[], ActiveAutocast | None]) -> None:
    """Let Transformers' ``maybe_autocast`` make islands in ours, also in compiled code.

    torch.compile replaces ``torch.autocast`` by a variable of its own, which never runs ``__enter__``. Model files hold
    ``maybe_autocast`` by name, so its code is replaced, not its name. Does nothing where Transformers is not imported
    yet, or done already.
    """
    generic = sys.modules.get("transformers.utils.generic")
    if generic is None or hasattr(generic, "_hf_mp_maybe_autocast") or not hasattr(generic, "maybe_autocast"):
        return
    function = generic.maybe_autocast
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )

    def maybe_island(device_type: str, dtype: Any, enabled: bool, cache_enabled: Any) -> Any:
        ours = active()
        if ours is None or device_type == "meta":
            return original(device_type, dtype, enabled, cache_enabled)
        if enabled:
            raise RuntimeError(BOTH_ACTIVE)
        return ours.island()

    generic._hf_mp_maybe_autocast = maybe_island  # type: ignore[attr-defined]
    function.__code__ = _call_maybe_island.__code__


def _call_maybe_island(device_type, dtype=None, enabled=True, cache_enabled=None):  # type: ignore[no-untyped-def]
    return _hf_mp_maybe_autocast(device_type, dtype, enabled, cache_enabled)  # type: ignore[name-defined] # noqa: F821

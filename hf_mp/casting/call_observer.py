"""``observe_calls``: callbacks around modules, and for the calls that an autocast intercepts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from hf_mp.casting.plan_entry import Mode, PlanEntry
from hf_mp.casting.tables import CastRule, called_name


class ObservedCall(NamedTuple):
    """An intercepted torch call, to be made."""

    module: str  # innermost observed module; empty outside modules
    mode: Mode
    entry: PlanEntry
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str | None:
        """Name of the op or function; None for attributes (``.shape``)."""
        return called_name(self.func) if self.entry.rule is CastRule.UNLISTED else self.entry.name

    def make(self, func: Callable[..., Any] | None = None) -> Any:
        """Make the call as the autocast would, of ``func`` if given."""
        return self.mode.apply(self.entry, func or self.func, self.args, self.kwargs)


@contextmanager
def observe_calls(
    modules: Mapping[str, nn.Module],
    mode: Mode | None = None,
    called: Callable[[ObservedCall], Any] | None = None,
    *,
    entered: Callable[[str, Any, Any], None] | None = None,
    left: Callable[[str, Any], None] | None = None,
) -> Iterator[None]:
    """Call ``entered`` and ``left`` around each module, and ``called`` in place of each torch call in ``mode``.

    Args:
        modules: by name.
        mode: None (default) intercepts no torch calls.
        called: ``called(call)`` must make the call and return its result.
        entered: ``entered(name, args, kwargs)``.
        left: ``left(name, output)``; ``output`` is None if the forward raised.
    """
    running: list[str] = []  # innermost last

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(name)
        if entered is not None:
            entered(name, args, kwargs)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if running:  # empty if the module was called before its hooks were registered
            running.pop()
        if left is not None:
            left(name, output)

    def observe(entry: PlanEntry, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return called(ObservedCall(running[-1] if running else "", mode, entry, func, args, kwargs))  # type: ignore[misc, arg-type]

    with ExitStack() as exits:
        for name, module in modules.items():
            before = functools.partial(enter, name)
            # prepend: calls of other hooks belong to the module.
            exits.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            exits.enter_context(module.register_forward_hook(functools.partial(leave, name), always_call=True))
        if mode is not None:
            # An inner observer replaces the outer one until it ends.
            exits.callback(setattr, mode, "call_override", mode.call_override)
            mode.call_override = observe
        yield

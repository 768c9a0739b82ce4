"""``watching``: follows modules and the calls that an autocast sees, and tells functions of its caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from hf_mp.casting.calls import Mode, PlannedCall
from hf_mp.casting.tables import CastRule, called_name


class WatchedCall(NamedTuple):
    """A torch call that an autocast sees and has not made yet."""

    module: str  # name of the innermost watched module that makes it; empty outside of any
    mode: Mode
    entry: PlannedCall  # of the tables, or a rule
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str | None:
        """The op's name in the tables, else what it is called; None for attributes such as ``.shape``."""
        return called_name(self.func) if self.entry.rule is CastRule.UNLISTED else self.entry.name

    def make(self, func: Callable[..., Any] | None = None) -> Any:
        """Make it as the autocast would; ``func`` in the place of the function."""
        return self.mode.apply(self.entry, func or self.func, self.args, self.kwargs)


@contextmanager
def watching(
    modules: Mapping[str, nn.Module],
    mode: Mode | None = None,
    called: Callable[[WatchedCall], Any] | None = None,
    *,
    entered: Callable[[str, Any, Any], None] | None = None,
    left: Callable[[str, Any], None] | None = None,
) -> Iterator[None]:
    """Watch ``modules``, and the calls that ``mode`` sees, which ``called`` has to make.

    Args:
        modules: by the names that are told.
        mode, called: an autocast, and what makes each call in its place; default None: no call is watched.
        entered: is told the name, the arguments and the keyword arguments of a module that is called.
        left: is told the name and the result of a module that returns; None where it raised.
    """
    running: list[str] = []  # innermost last

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(name)
        if entered is not None:
            entered(name, args, kwargs)

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if running:  # else the module ran already when it came to be watched
            running.pop()
        if left is not None:
            left(name, output)

    def observe(entry: PlannedCall, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return called(WatchedCall(running[-1] if running else "", mode, entry, func, args, kwargs))  # type: ignore[misc, arg-type]

    with ExitStack() as watches:
        for name, module in modules.items():
            before = functools.partial(enter, name)
            # First of all hooks, so that what they compute belongs to the module.
            watches.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            watches.enter_context(module.register_forward_hook(functools.partial(leave, name), always_call=True))
        if mode is not None:
            # Two may watch at once: the inner one makes the calls, and the outer one has them back at the end.
            watches.callback(setattr, mode, "observer", mode.observer)
            mode.observer = observe
        yield

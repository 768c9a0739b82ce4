"""Kept of a step in case it fails: references to the model's inputs, and random states."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_mp.casting.nested import named_tensors


@dataclass(frozen=True)
class RandomStates:
    """Generator states."""

    python: Any  # None if not kept
    numpy: Any  # None if not kept
    cpu: Tensor
    cuda: Mapping[int, Tensor]  # by device

    @classmethod
    def now(cls, *, torch_only: bool = False) -> RandomStates:
        """The current states, without a synchronization: a GPU generator's state is on the host."""
        cuda = {}
        has_context = torch.cuda.is_available() and torch.cuda.is_initialized()
        if has_context and not torch.cuda.is_current_stream_capturing():
            cuda = {index: torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
        # Few models use Python's and NumPy's, which are slow to copy.
        python, numpy = (None, None) if torch_only else (random.getstate(), np.random.get_state())
        return cls(python, numpy, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Restore the generators."""
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)


@dataclass
class KeptCall:
    """One call of an attached forward."""

    forward: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_states: RandomStates  # at its start
    is_training: bool
    versions: tuple[int, ...]  # version counters of the tensors in `args` and `kwargs`
    losses: dict[str, Tensor] = field(default_factory=dict)  # scalar outputs by name, detached

    @classmethod
    def of(cls, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, torch_only: bool = True) -> KeptCall:
        """Keep a call before it is made; ``torch_only`` as for :meth:`RandomStates.now`."""
        call = cls(forward, args, kwargs, RandomStates.now(torch_only=torch_only), forward.module().training, ())
        call.versions = call.versions_now()
        return call

    def inputs(self) -> list[tuple[str, Tensor]]:
        """The input tensors by name; positional arguments by index."""
        return named_tensors(self.args) + named_tensors(self.kwargs)

    def versions_now(self) -> tuple[int, ...]:
        """Version counters of the inputs; -1 for those without one."""
        return tuple(-1 if tensor.is_inference() else tensor._version for _, tensor in self.inputs())


@dataclass
class IncomingGradient:
    """A gradient that entered the model through an output in a backward; None if too large to keep."""

    call: KeptCall
    output: str
    gradient: Tensor | None
    version: int = 0


@dataclass
class KeptBackward:
    """One micro-batch: a backward through the outputs of one or more calls."""

    task: int  # autograd's ID of the backward
    incoming: list[IncomingGradient] = field(default_factory=list)  # the gradients that entered
    largest: Tensor | None = None  # the largest magnitude in the parameters' gradients, unread; None if not measured

    @property
    def calls(self) -> list[KeptCall]:
        """The calls that this backward went through, in the order of their gradients."""
        return list({id(entry.call): entry.call for entry in reversed(self.incoming)}.values())

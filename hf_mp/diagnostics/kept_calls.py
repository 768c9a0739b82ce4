"""What is kept of a step in case that it fails: references to what the model was called with, and random states."""

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
    """The states of the generators that a model may draw from.

    Attributes:
        cpu, cuda: torch's, by device.
        python, numpy: those of Python and NumPy; None where they were not asked for.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: Mapping[int, Tensor]

    @classmethod
    def now(cls, *, torch_only: bool = False) -> RandomStates:
        """The states at this moment; no GPU is waited for, since its generator's state lies on the host.

        Args:
            torch_only: leave out Python's and NumPy's, which few models use and which take much longer to copy.
        """
        cuda = {}
        has_context = torch.cuda.is_available() and torch.cuda.is_initialized()
        if has_context and not torch.cuda.is_current_stream_capturing():
            cuda = {index: torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
        python, numpy = (None, None) if torch_only else (random.getstate(), np.random.get_state())
        return cls(python, numpy, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Set the generators back."""
        if self.python is not None:
            random.setstate(self.python)
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)


@dataclass
class KeptCall:
    """One call of an attached forward.

    Attributes:
        forward: the attached forward that was called.
        args, kwargs: what it was called with: the objects themselves.
        random_states: as they were when it began.
        is_training: the module's mode then.
        versions: version counters of the tensors in ``args`` and ``kwargs``.
        losses: scalar outputs by name, outside of the graph.
    """

    forward: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_states: RandomStates
    is_training: bool
    versions: tuple[int, ...]
    losses: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, torch_only: bool = True) -> KeptCall:
        """Keep a call that is about to be made; ``torch_only`` as for :meth:`RandomStates.now`."""
        call = cls(forward, args, kwargs, RandomStates.now(torch_only=torch_only), forward.module().training, ())
        call.versions = call.versions_now()
        return call

    def inputs(self) -> list[tuple[str, Tensor]]:
        """The tensors that go in, by name; positional arguments by their place."""
        return named_tensors(self.args) + named_tensors(self.kwargs)

    def versions_now(self) -> tuple[int, ...]:
        """Version counters of the inputs, which in-place operations raise; -1 where there is none."""
        return tuple(-1 if tensor.is_inference() else tensor._version for _, tensor in self.inputs())


@dataclass
class IncomingGradient:
    """A gradient that entered the model through an output in a backward; None where it was too large to keep."""

    call: KeptCall
    output: str
    gradient: Tensor | None
    version: int = 0


@dataclass
class KeptBackward:
    """One micro-batch: a backward through the outputs of one or more calls.

    Attributes:
        task: autograd's number of the backward.
        incoming: the gradients that entered.
        largest: the largest magnitude in the parameters' gradients afterwards, not read yet; None if not measured.
    """

    task: int
    incoming: list[IncomingGradient] = field(default_factory=list)
    largest: Tensor | None = None

    @property
    def calls(self) -> list[KeptCall]:
        """The calls whose outputs this backward came through, in the order of the calls' gradients."""
        return list({id(entry.call): entry.call for entry in reversed(self.incoming)}.values())

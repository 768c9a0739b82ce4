"""``OffloadedOptimizer``: steps an optimizer on a device, with its state and the remainders in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_
from hf_mp.kernels.registry import kernel_for
from hf_mp.model_index import optimizer_parameters
from hf_mp.weights import master_weight_optimizer as base
from hf_mp.weights.fp32_reads import DATA, as_stored
from hf_mp.weights.fused_adamw import UpdateCache, fused_groups, is_torchs_adam, launch_key, make_kernel
from hf_mp.weights.offload import transfers as limits
from hf_mp.weights.offload.chunks import REMAINDER, Chunk, Piece, Rooms, bundle, cut
from hf_mp.weights.offload.host_memory import Room, reserve
from hf_mp.weights.offload.parameter import OffloadedParameter, clip_grad_norm_
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor, has_gradient

_SMALL_ELEMENTS = 1024  # a state tensor of up to so many, and of another shape than its parameter, stays on the device


class OffloadedOptimizer(base.MasterWeightOptimizer):
    """A :class:`MasterWeightOptimizer` whose state is in host memory, but for the short time of a step.

    State and remainders pass through two windows on the device, a chunk at a time, and are written back before
    :meth:`step` returns; ``state`` holds views of host memory. torch's fused Adam and AdamW are updated by hf_mp's
    kernel, in parts of parameters; other optimizers step whole parameters, a bucket at a time.

    Args:
        optimizer: as for the base class, of ``torch.optim``, ``bitsandbytes.optim`` or ``transformers.optimization``.
        transfers: to and from the device.

    Attributes:
        rooms: the places of the state in host memory, by parameter and key of its state.
        transfers: as given.

    Raises:
        ValueError: for other optimizers, and those that page their state themselves.
        MemoryError: if the host does not have the memory.
    """

    skips_on_device = False  # nothing may be moved for a step that is skipped

    def __init__(self, optimizer: Optimizer, transfers: limits.Transfers) -> None:
        _check_streamable(optimizer)
        self.rooms: dict[nn.Parameter, Rooms] = {}
        self._chunks: list[Chunk] = []
        self._planned: Any = None  # what the chunks were cut from
        super().__init__(optimizer)
        self.use(transfers)

    @torch.no_grad()
    def use(self, transfers: limits.Transfers) -> None:
        """Use ``transfers``, of a model that was attached; state that is there moves to host memory."""
        self.transfers = transfers
        self._plan()
        for parameter in self.rooms:
            self._take_over(parameter)

    def release(self, device: torch.device) -> None:
        """Have the state on ``device`` again."""
        for parameter, rooms in self.rooms.items():
            state = self.optimizer.state.get(parameter, {})
            state.update({key: room.view.to(device) for key, room in rooms.items() if state.get(key) is room.view})
        self.rooms, self._planned = {}, None
        self._chunks.clear()  # they hold the windows

    # Where the state is

    def _plan(self) -> None:
        """Reserve rooms for parameters that have none, and cut chunks."""
        own = [p for p in optimizer_parameters(self) if isinstance(p, OffloadedParameter)]
        self._settings = self._kernel_settings(own)
        # Other parameters, other ones that the kernel updates, or new rooms (of sums of gradients) need new chunks.
        planned = list(map(id, own)), list(self._settings), sum([len(p.place.rooms) for p in own])
        if planned != self._planned:
            # In the order of host memory: neighbours are copied together.
            self._cut(sorted(own, key=lambda p: p.place.rooms[REMAINDER].flat.data_ptr()))
            self._planned = planned

    def _cut(self, own: Sequence[OffloadedParameter]) -> None:
        """Reserve rooms for new ones of the parameters ``own``, and cut the chunks of all."""
        if new := [p for p in own if p not in self.rooms]:
            self._reserve(new)
        pairs = [(p, {**p.place.rooms, **self.rooms[p]}) for p in own]
        sliced = [pair for pair in pairs if id(pair[0]) in self._settings]
        whole = [pair for pair in pairs if id(pair[0]) not in self._settings]
        size = limits.window_bytes_for(sum(room.view.nbytes for _, rooms in pairs for room in rooms.values()))
        self._chunks = [*cut(sliced, size), *bundle(whole, size, base._BUCKET_ELEMENTS)]
        self.transfers.grow(max([chunk.bytes for chunk in self._chunks], default=0))
        # The kernel counts a step for each piece, so that all but the first of each parameter count beside its state.
        later = [piece for chunk in self._chunks for piece in chunk.pieces if piece.begin]
        counts = torch.zeros(len(later), dtype=torch.float32, device=self.transfers.device).unbind()
        self._counts = dict(zip(later, counts, strict=True))
        self._updates = UpdateCache()  # those of earlier chunks

    def _kernel_settings(self, own: Sequence[OffloadedParameter]) -> dict[int, AdamWSettings]:
        """The settings of parameters that the kernel updates, in parts."""
        is_adam = bool(own) and is_torchs_adam(self.optimizer, vars(self.optimizer).get("step"))
        # A CPU has hf_mp.kernels.adamw.adamw_.
        if not is_adam or not (own[0].is_cpu or kernel_for("adamw", [DATA.__get__(own[0])])):
            return {}
        return {id(p): its for its, group in fused_groups(self.optimizer) for p in group if p.is_contiguous()}

    def _reserve(self, parameters: Sequence[OffloadedParameter]) -> None:
        """Reserve host memory for the state tensors of ``parameters`` that belong there."""
        wanted = [
            (key, parameter, (value.dtype, value.shape))
            for parameter in parameters
            for key, value in (self.optimizer.state.get(parameter) or self._probe(parameter)).items()
            if type(value) is Tensor
            and (value.numel() > _SMALL_ELEMENTS or (value.shape == parameter.shape and key != "step"))
        ]
        # One key after the other, each in the order of the parameters: neighbours are then copied together.
        wanted.sort(key=lambda entry: entry[0])
        self.rooms |= {parameter: {} for parameter in parameters}
        rooms = reserve([tensor for _, _, tensor in wanted], self.transfers.device)
        for (key, parameter, _), room in zip(wanted, rooms, strict=True):
            self.rooms[parameter][key] = room

    def _probe(self, parameter: OffloadedParameter) -> dict[str, Any]:
        """The state that the wrapped optimizer makes for ``parameter``, from a step on zeros in its place."""
        zeros = nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device))
        zeros.grad = torch.zeros_like(zeros)
        with self._in_place_of_parameters({parameter: zeros}):  # which at its end moves the state of zeros to parameter
            self._step_wrapped()
        self.optimizer._opt_called = False  # type: ignore[attr-defined]  # LR schedulers warn by it
        return self.optimizer.state.pop(parameter, {})

    def _take_over(self, parameter: nn.Parameter) -> None:
        """Move state that other code has put into ``state`` to its rooms."""
        state = self.optimizer.state.get(parameter, {})
        for key, room in self.rooms[parameter].items():
            if (value := state.get(key)) is not room.view and _fits(value, room):
                state[key], room.was_used = room.view.copy_(value), True

    def _device_of_state(self, parameter: nn.Parameter) -> torch.device:
        # Loaded state of a whole model need not fit the device.
        return torch.device("cpu") if parameter in self.rooms else parameter.device

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the base class; state goes to its place in host memory."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            key_left_on_cpu = None if group.get("fused") or group.get("capturable") else "step"  # as torch has it
            for parameter in filter(self.rooms.__contains__, group["params"]):
                self._take_over(parameter)
                state = self.optimizer.state.get(parameter, {})
                for key in [key for key, value in state.items() if isinstance(value, Tensor)]:
                    if key not in self.rooms[parameter] and key != key_left_on_cpu:
                        state[key] = state[key].to(parameter.device)

    # Steps

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As the base class."""
        return clip_grad_norm_(optimizer_parameters(self), max_norm)

    @torch.no_grad()
    def step_on(self, parameters: list[nn.Parameter], found_inf: Tensor | None = None) -> None:
        """As the base class. The host reads ``found_inf``: a step that is skipped moves nothing."""
        if found_inf is not None and found_inf.item():
            return
        with as_stored():
            own = [p for p in parameters if isinstance(p, OffloadedParameter) and has_gradient(p)]
            self._stepping = set(map(id, own))
            if own:
                self._step_own(own)
        others = [p for p in parameters if id(p) not in self._stepping]
        if not own or any(map(has_gradient, others)):
            super().step_on(others)

    def _step_own(self, own: Sequence[OffloadedParameter]) -> None:
        """Update the parameters ``own``, all with a gradient, a chunk at a time; then they have none."""
        if strangers := {p.device for p in own} - {self.transfers.device}:
            raise RuntimeError(
                f"the model was moved to {strangers.pop()} after it was attached on {self.transfers.device}, and its "
                "host memory is that of the first device: move the model, then attach it"
            )
        for parameter in own:
            parameter.reset_written_remainders()
        self._plan()
        for parameter in own:
            self._prepare_state(parameter)
        # The kernel counts this step for each piece: those after the first begin from the count in the state too.
        if later := [piece for piece in self._counts if id(piece.parameter) in self._stepping]:
            steps = [self.optimizer.state[piece.parameter]["step"] for piece in later]
            torch._foreach_copy_([self._counts[piece] for piece in later], steps)
        for chunk in self._chunks:
            chunk.stepping = [piece for piece in chunk.pieces if id(piece.parameter) in self._stepping]
            held = [piece.parameter.place.held for piece in chunk.stepping]
            chunk.reads = {key for its in held if its is not None for key in its.keys}
        self.transfers.stream(
            self._chunks,
            lambda chunk: (self._update_sliced if chunk.is_sliced else self._update_whole)(chunk.stepping),
        )
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for LR schedulers made before
        SplitParameter.note_written(*own)

    def _prepare_state(self, parameter: OffloadedParameter) -> None:
        """Have the state of ``parameter`` in its rooms, and make the state that the kernel takes, if there is none."""
        state, rooms = self.optimizer.state[parameter], self.rooms[parameter]
        is_sliced = id(parameter) in self._settings
        if is_sliced and not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for key, room in rooms.items():
                state[key] = room.view.zero_() if room.was_used else room.view
                room.was_used = True
        self._take_over(parameter)
        if is_sliced and any([state.get(key) is not room.view for key, room in rooms.items()]):
            raise ValueError(
                f"the moments of a parameter of shape {tuple(parameter.shape)} are not FP32 tensors of that shape: the "
                "state of this optimizer is that of another model"
            )

    def _update_sliced(self, pieces: Sequence[Piece]) -> None:
        """Update ``pieces`` in a window with hf_mp's kernel, and free the gradients of parameters that end in it.

        One launch is for the pieces with the same settings and the same factor of gradients.
        """
        batches: dict[tuple[int, int], tuple[AdamWSettings, Tensor | None, _Batch]] = {}
        for piece in pieces:
            parameter = piece.parameter
            held, settings = parameter.place.held, self._settings[id(parameter)]
            gradient, factor = _dense_gradient(piece) if held is None else held.on_device(piece.inside)
            count = self._counts[piece] if piece.begin else self.optimizer.state[parameter]["step"]
            *_, batch = batches.setdefault((id(settings), id(factor)), (settings, factor, _Batch([], [], [])))
            batch.parameters.append(piece)
            batch.gradients.append(gradient)
            batch.counts.append(count)
        for settings, factor, batch in batches.values():
            if (update := self._updates.get(batch)) is not None:
                update(batch.gradients, [settings], factor)
            else:
                adamw_(batch.tensors(), settings, factor, room=self._updates.room)
        for piece in pieces:
            is_last_piece = piece.end == piece.parameter.numel()
            if is_last_piece:
                piece.parameter.grad = None

    def _update_whole(self, pieces: Sequence[Piece]) -> None:
        """Step the wrapped optimizer on whole parameters, while their state and remainders are parts of a window.

        New state is copied to the window too, and afterwards ``state`` holds the views of host memory again.
        """
        for piece in pieces:
            state = self.optimizer.state.get(piece.parameter, {})
            piece.parameter.place.inside = piece.inside
            rooms = self.rooms[piece.parameter].items()
            in_window = {key: piece.inside[key].view(room.view.shape) for key, room in rooms}
            state.update({key: in_window[key] for key, room in rooms if state.get(key) is room.view})
        try:
            self._step_on([piece.parameter for piece in pieces], keeps_gradients=False)
        finally:  # an optimizer that raises leaves no state in a window
            for piece in pieces:
                state = self.optimizer.state[piece.parameter]
                piece.parameter.place.inside = {}
                for key, room in self.rooms[piece.parameter].items():
                    if _fits(value := state.get(key), room):
                        if value.data_ptr() != piece.inside[key].data_ptr():  # made in this step
                            piece.inside[key].copy_(value.view(-1))
                        state[key] = room.view


class _Batch(NamedTuple):
    """Pieces of one chunk that one launch updates: a :class:`~hf_mp.weights.fused_adamw.LaunchBatch`."""

    parameters: list[Piece]
    gradients: list[Tensor]
    counts: list[Tensor]

    def launch_key(self) -> Any:
        """As :class:`~hf_mp.weights.fused_adamw.LaunchBatch`."""
        window = self.parameters[0].inside[REMAINDER].data_ptr()  # the distances of all other parts from it are fixed
        written = [*[piece.parameter for piece in self.parameters], *self.counts]
        return launch_key(written, self.gradients, window)

    def tensors(self) -> list[AdamWTensors]:
        """Return the tensors of each piece: its parts of the window, and of the parameter."""
        found = []
        for piece, gradient, count in zip(*self, strict=True):
            inside, working = piece.inside, DATA.__get__(piece.parameter).view(-1)[piece.begin : piece.end]
            moments = inside["exp_avg"], inside["exp_avg_sq"], count
            found.append(AdamWTensors(gradient.view(-1), *moments, None, working, inside[REMAINDER]))
        return found

    def make_update(self) -> Any:
        """As :class:`~hf_mp.weights.fused_adamw.LaunchBatch`."""
        return make_kernel(self.tensors(), [len(self.parameters)])


def _dense_gradient(piece: Piece) -> tuple[Tensor, Tensor | None]:
    """The gradient of ``piece`` on the device, contiguous, and the factor that unscales it."""
    gradient, factor = gradient_and_factor(piece.parameter)
    if gradient is None or gradient.is_sparse:
        raise RuntimeError(
            f"a parameter of shape {tuple(piece.parameter.shape)} has a sparse gradient, and torch's Adam takes none: "
            "use sparse=False in the embedding"
        )
    gradient, is_whole = gradient.contiguous(), piece.end - piece.begin == gradient.numel()
    return gradient if is_whole else gradient.view(-1)[piece.begin : piece.end], factor


def _fits(value: Any, room: Room) -> bool:
    return isinstance(value, Tensor) and value.dtype is room.view.dtype and value.shape == room.view.shape


def _check_streamable(optimizer: Any) -> None:
    """Raise a ValueError for an optimizer whose state cannot be streamed; the base class refuses others."""
    name = type(optimizer).__name__
    is_bare = isinstance(optimizer, Optimizer) and not isinstance(optimizer, base.MasterWeightOptimizer)
    if is_bare and not base.steps_by_parameter(optimizer):
        raise ValueError(
            f"offload steps a few parameters at a time, and hf_mp does not know whether {name} allows that: use an "
            "optimizer of torch.optim or bitsandbytes (in the Trainer: optim='adamw_torch_fused')"
        )
    if getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"this {name} pages its state between GPU and host itself: use the one without pages (in the Trainer: an "
            "optim= without 'paged_')"
        )

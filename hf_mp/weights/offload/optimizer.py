"""``OffloadedOptimizer``: steps on a device, with state in host memory."""

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

_SMALL_ELEMENTS = 1024  # a state tensor with no more, and another shape than its parameter, is on the device


class OffloadedOptimizer(base.MasterWeightOptimizer):
    """A :class:`MasterWeightOptimizer` with its state in host memory.

    A step copies state and remainders through two windows on the device, a chunk at a time; ``state`` holds views of
    host memory. hf_mp's kernel updates parts of parameters for torch's fused Adam and AdamW; other optimizers step
    whole ones.

    Args:
        optimizer: as for the base class, of ``torch.optim``, ``bitsandbytes.optim`` or ``transformers.optimization``.
        transfers: to and from the device.

    Attributes:
        rooms: of the state in host memory, by parameter and key.

    Raises:
        ValueError: for other optimizers, and those that page their state themselves.
        MemoryError: if the host does not have the memory.
    """

    skips_on_device = False  # a skipped step moves nothing

    def __init__(self, optimizer: Optimizer, transfers: limits.Transfers) -> None:
        _check_streamable(optimizer)
        self.rooms: dict[nn.Parameter, Rooms] = {}
        self._chunks: list[Chunk] = []
        self._planned: Any = None  # see _plan()
        super().__init__(optimizer)
        self.use(transfers)

    @torch.no_grad()
    def use(self, transfers: limits.Transfers) -> None:
        """Use ``transfers``, and move existing state to host memory."""
        self.transfers = transfers
        self._plan()
        for parameter in self.rooms:
            self._take_over(parameter)

    def release(self, device: torch.device) -> None:
        """Move the state to ``device``."""
        for parameter, rooms in self.rooms.items():
            state = self.optimizer.state.get(parameter, {})
            state.update({key: room.view.to(device) for key, room in rooms.items() if state.get(key) is room.view})
        self.rooms, self._planned = {}, None
        self._chunks.clear()  # they reference the windows

    # Where the state is

    def _plan(self) -> None:
        """Cut chunks again if parameters, their rooms, or those that the kernel updates have changed."""
        own = [p for p in optimizer_parameters(self) if isinstance(p, OffloadedParameter)]
        self._settings = self._kernel_settings(own)
        planned = list(map(id, own)), list(self._settings), sum([len(p.place.rooms) for p in own])
        if planned != self._planned:
            # In the order of host memory: neighbours are copied together.
            self._cut(sorted(own, key=lambda p: p.place.rooms[REMAINDER].flat.data_ptr()))
            self._planned = planned

    def _cut(self, own: Sequence[OffloadedParameter]) -> None:
        """Reserve rooms for new parameters, and cut the chunks of all."""
        if new := [p for p in own if p not in self.rooms]:
            self._reserve(new)
        pairs = [(p, {**p.place.rooms, **self.rooms[p]}) for p in own]
        sliced = [pair for pair in pairs if id(pair[0]) in self._settings]
        whole = [pair for pair in pairs if id(pair[0]) not in self._settings]
        size = limits.window_bytes_for(sum(room.view.nbytes for _, rooms in pairs for room in rooms.values()))
        self._chunks = [*cut(sliced, size), *bundle(whole, size, base._BUCKET_ELEMENTS)]
        self.transfers.grow(max([chunk.bytes for chunk in self._chunks], default=0))
        # The kernel counts steps for each piece: for the first of a parameter in its state.
        later = [piece for chunk in self._chunks for piece in chunk.pieces if piece.begin]
        counts = torch.zeros(len(later), dtype=torch.float32, device=self.transfers.device).unbind()
        self._counts = dict(zip(later, counts, strict=True))
        self._updates = UpdateCache()  # without kernels for earlier chunks

    def _kernel_settings(self, own: Sequence[OffloadedParameter]) -> dict[int, AdamWSettings]:
        """Return the settings of parameters that the kernel updates, by their identity."""
        is_adam = bool(own) and is_torchs_adam(self.optimizer, vars(self.optimizer).get("step"))
        # A CPU has hf_mp.kernels.adamw.adamw_.
        if not is_adam or not (own[0].is_cpu or kernel_for("adamw", [DATA.__get__(own[0])])):
            return {}
        return {id(p): its for its, group in fused_groups(self.optimizer) for p in group if p.is_contiguous()}

    def _reserve(self, parameters: Sequence[OffloadedParameter]) -> None:
        """Reserve host memory for the state of ``parameters``, except small tensors."""
        wanted = [
            (key, parameter, (value.dtype, value.shape))
            for parameter in parameters
            for key, value in (self.optimizer.state.get(parameter) or self._probe(parameter)).items()
            if type(value) is Tensor
            if value.numel() > _SMALL_ELEMENTS or (key != "step" and value.shape == parameter.shape)
        ]
        # One key after the other, each in the order of the parameters: neighbours are copied together.
        wanted.sort(key=lambda entry: entry[0])
        self.rooms |= {parameter: {} for parameter in parameters}
        rooms = reserve([dtype_and_shape for _, _, dtype_and_shape in wanted], self.transfers.device)
        for (key, parameter, _), room in zip(wanted, rooms, strict=True):
            self.rooms[parameter][key] = room

    def _probe(self, parameter: OffloadedParameter) -> dict[str, Any]:
        """Return the state that a step on zeros makes for ``parameter``."""
        zeros = nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device))
        zeros.grad = torch.zeros_like(zeros)
        with self._in_place_of_parameters({parameter: zeros}):  # at exit, the state of `zeros` is that of `parameter`
            self._step_wrapped()
        self.optimizer._opt_called = False  # type: ignore[attr-defined]  # LR schedulers warn by it
        return self.optimizer.state.pop(parameter, {})

    def _take_over(self, parameter: nn.Parameter) -> None:
        """Move state of ``parameter`` that other code has set to its rooms."""
        state = self.optimizer.state.get(parameter, {})
        for key, room in self.rooms[parameter].items():
            value = state.get(key)
            if value is not room.view and _fits(value, room):
                state[key], room.was_used = room.view.copy_(value), True

    def _device_of_state(self, parameter: nn.Parameter) -> torch.device:
        # Loaded state of a whole model need not fit the device.
        return torch.device("cpu") if parameter in self.rooms else parameter.device

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the base class, to host memory."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            has_step_on_cpu = not (group.get("fused") or group.get("capturable"))  # as torch has it
            for parameter in filter(self.rooms.__contains__, group["params"]):
                self._take_over(parameter)
                state = self.optimizer.state.get(parameter, {})
                for key, value in list(state.items()):
                    stays = key in self.rooms[parameter] or (key == "step" and has_step_on_cpu)
                    if isinstance(value, Tensor) and not stays:
                        state[key] = value.to(parameter.device)

    # Steps

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(optimizer_parameters(self), max_norm)

    @torch.no_grad()
    def step_on(self, parameters: list[nn.Parameter], found_inf: Tensor | None = None) -> None:
        """As the base class. The host reads ``found_inf``."""
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
        """Update ``own``, which all have a gradient, and free their gradients."""
        if elsewhere := {p.device for p in own} - {self.transfers.device}:
            raise RuntimeError(
                f"the model was moved to {elsewhere.pop()} after it was attached on {self.transfers.device}, and its "
                "host memory is that of the first device: move the model, then attach it"
            )
        for parameter in own:
            parameter.reset_written_remainders()
        self._plan()
        for parameter in own:
            self._prepare_state(parameter)
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
        """Move state of ``parameter`` to its rooms, or make it there for the kernel."""
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
        """Update ``pieces`` in one launch for each settings and factor; free the gradients of complete parameters."""
        batches: dict[tuple[int, int], _Batch] = {}
        for piece in pieces:
            parameter = piece.parameter
            held, settings = parameter.place.held, self._settings[id(parameter)]
            gradient, factor = _dense_gradient(piece) if held is None else held.on_device(piece.inside)
            batch = batches.setdefault((id(settings), id(factor)), _Batch(settings, factor, [], [], []))
            batch.parameters.append(piece)
            batch.gradients.append(gradient)
            batch.counts.append(self._counts[piece] if piece.begin else self.optimizer.state[parameter]["step"])
        for batch in batches.values():
            if (update := self._updates.get(batch)) is not None:
                update(batch.gradients, [batch.settings], batch.factor)
            else:
                adamw_(batch.tensors(), batch.settings, batch.factor, room=self._updates.room)
        for piece in pieces:
            is_last_piece = piece.end == piece.parameter.numel()
            if is_last_piece:
                piece.parameter.grad = None

    def _update_whole(self, pieces: Sequence[Piece]) -> None:
        """Step the wrapped optimizer on whole parameters, while their state and remainders are in a window."""
        for piece in pieces:
            state = self.optimizer.state.get(piece.parameter, {})
            piece.parameter.place.inside = piece.inside
            for key, room in self.rooms[piece.parameter].items():
                if state.get(key) is room.view:
                    state[key] = piece.inside[key].view(room.view.shape)
        try:
            self._step_on([piece.parameter for piece in pieces], keeps_gradients=False)
        finally:  # an optimizer that raises leaves no state in a window
            for piece in pieces:
                state = self.optimizer.state[piece.parameter]
                piece.parameter.place.inside = {}
                for key, room in self.rooms[piece.parameter].items():
                    value = state.get(key)
                    if _fits(value, room):
                        if value.data_ptr() != piece.inside[key].data_ptr():  # made in this step
                            piece.inside[key].copy_(value.view(-1))
                        state[key] = room.view


class _Batch(NamedTuple):
    """A :class:`~hf_mp.weights.fused_adamw.LaunchBatch` of pieces of one chunk."""

    settings: AdamWSettings
    factor: Tensor | None  # unscales the gradients
    parameters: list[Piece]
    gradients: list[Tensor]
    counts: list[Tensor]  # of steps

    def launch_key(self) -> Any:
        window = self.parameters[0].inside[REMAINDER].data_ptr()  # all other parts are at fixed distances from it
        written = [*[piece.parameter for piece in self.parameters], *self.counts]
        return launch_key(written, self.gradients, window)

    def tensors(self) -> list[AdamWTensors]:
        found = []
        for piece, gradient, count in zip(self.parameters, self.gradients, self.counts, strict=True):
            inside, working = piece.inside, DATA.__get__(piece.parameter).view(-1)[piece.begin : piece.end]
            moments = inside["exp_avg"], inside["exp_avg_sq"], count
            found.append(AdamWTensors(gradient.view(-1), *moments, None, working, inside[REMAINDER]))
        return found

    def make_update(self) -> Any:
        return make_kernel(self.tensors(), [len(self.parameters)])


def _dense_gradient(piece: Piece) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of ``piece`` on the device, contiguous, and its unscale factor."""
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
    name = type(optimizer).__name__
    # The base class raises for others.
    is_wrappable = isinstance(optimizer, Optimizer) and not isinstance(optimizer, base.MasterWeightOptimizer)
    if is_wrappable and not base.steps_by_parameter(optimizer):
        raise ValueError(
            f"offload steps a few parameters at a time, and hf_mp does not know whether {name} allows that: use an "
            "optimizer of torch.optim or bitsandbytes (in the Trainer: optim='adamw_torch_fused')"
        )
    if getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"this {name} pages its state between GPU and host itself: use the one without pages (in the Trainer: an "
            "optim= without 'paged_')"
        )
